/*
 * update.cu - weight decay of every slice and the orthogonal update of the selected ones, one rounding.
 *
 *   w <- round(a w - g o) selected, w <- round(a w) otherwise; g = (b scale) factor_i.
 *   weight (batch, rows, cols), update (batch, k, cols) or (batch, rows, k), any dtypes and strides.
 * Rows: geometry.cuh; a row finds its update through slots. Columns (columns.cuh): a block owns 32 vectors of
 * columns by a strip of 120 rows, a warp a row, three rows under way, five times. Slots ascend, as those of
 * dion3_select do.
 * Stochastic rounding: eight 16-bit elements take one Philox call when their global index is a multiple of 8,
 * eight otherwise; the bits are those of dion3_round.h wherever an element stands.
 * Bytes an element, f = k / n: 2 |w| + f |o| (bf16 weights: 4 + 2 f). About 15 instructions an element,
 * 25 with stochastic rounding, of some 30 that the bandwidth of an H200 leaves room for.
 *
 * Exact skip. Where nothing is selected and decay would change no bit, the weight is neither read nor
 * written. That is so when a == 1 (a w = w exactly, and neither rounding moves a representable value), and
 * under nearest rounding when |1 - a| <= 2^-(p + 2), p the bits of the significand (bf16 8, fp16 11):
 * the neighbours of a normal w are at least 2^-p |w| away (that near only below a power of two), those of a
 * subnormal no nearer, so w keeps all that lies within 2^-(p+1) |w|; and
 * |fl(a w) - w| <= |1 - a| |w| + 2^-24 |a w| < 2^-(p+1) |w|. Where a w is a subnormal fp32 (bf16 only) its
 * error is at most 2^-150 and |1 - a| |w| <= 2^-10 2^-126, together less than the half spacing 2^-134. Zero
 * keeps its sign and Inf stays, as a > 0. fp32 weights skip when a == 1 only. A NaN keeps its payload.
 * Source: Algorithm 4 lines 7-8.
 */
#include "../rows.h"
#include "columns.cuh"
#include "element.cuh"
#include "geometry.cuh"
#include "table.cuh"

#define ROWS_AHEAD 3 /* columns: rows that a warp has under way */
#define STRIP_ROWS (5 * ROWS_AHEAD * D3_WARPS)

struct update_entry {
    char* weight;
    const char* update;
    const int32_t* slots;
    const float* factor;
    const float* hyper;
    const float* step;
    uint64_t seed;
    int64_t index_base, index_batch, index_row, index_col;
    d3_strides w, o;
    d3_rows rows;
    uint32_t factors; /* rows of the update: stride of factor between matrices */
    uint32_t param_id;
    float scale;
    uint8_t weight_dtype, update_dtype;
};

typedef d3_table<update_entry> update_table;

struct update_numbers {
    float decay, step_size;
    uint32_t step;
    bool stochastic, skips;
};

__device__ __forceinline__ update_numbers numbers_of(const update_entry& e) {
    update_numbers s;
    s.decay = e.hyper[DION3_HYPER_DECAY];
    s.step_size = e.hyper[DION3_HYPER_STEP];
    s.stochastic = e.step && e.weight_dtype != DION3_F32;
    s.step = s.stochastic ? d3_step_number(*e.step) : 0;
    const float change = fabsf(1.0f - s.decay); /* exact near 1 */
    s.skips = change == 0.0f;
    if (!s.stochastic && e.weight_dtype == DION3_BF16) s.skips = change <= 0x1p-10f;
    if (!s.stochastic && e.weight_dtype == DION3_F16) s.skips = change <= 0x1p-13f;
    return s;
}

/* Rounds x to the weight's dtype; index is the global index of its first element. */
template <int WD, int N>
__device__ __forceinline__ d3_vector<WD, N> round_weight(const update_entry& e, const update_numbers& s,
                                                         int64_t index, const float (&x)[N]) {
    if constexpr (WD != DION3_F32) {
        if (s.stochastic) {
            uint32_t u[(N + 1) / 2];
            d3_random_words<N>(e.seed, s.step, e.param_id, index, e.index_col, u);
            return d3_round_stochastic<WD, N>(x, e.weight_dtype, u);
        }
    }
    return d3_round<WD, N>(x, e.weight_dtype);
}

/* ---- rows ------------------------------------------------------------------------------------- */

template <int WD, int OD, int N>
__device__ __forceinline__ void row_piece(const update_entry& e, const update_numbers& s, char* w,
                                          const char* o, bool selected, bool vector_update, float gain,
                                          int64_t index) {
    const d3_vector<WD, N> old = d3_fetch_aligned<WD, N>(w, e.weight_dtype);
    float x[N];
    if (selected) {
        const d3_vector<OD, N> direction = vector_update ? d3_fetch_aligned<OD, N, true>(o, e.update_dtype)
                                                         : d3_fetch_each<OD, N>(o, 1, e.update_dtype);
        float y[N];
        d3_widen<WD, N>(old, e.weight_dtype, x);
        d3_widen<OD, N>(direction, e.update_dtype, y);
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = d3_update(s.decay, x[i], gain, y[i]);
    } else {
        d3_widen<WD, N>(old, e.weight_dtype, x);
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = d3_decay(s.decay, x[i]);
    }
    d3_put_aligned<WD, N>(w, e.weight_dtype, round_weight<WD, N>(e, s, index, x));
}

/* V vectors of a row, `apart` vectors from each to the next: the loads of all, then (while they are under way)
 * the random bits, then the rest. block: global index / 8 of the first. */
template <int WD, int OD, int V, bool SELECTED, bool STOCHASTIC>
__device__ __forceinline__ void row_vectors(const update_entry& e, const update_numbers& s, char* w,
                                            const char* o, uint32_t apart, float gain, uint64_t block) {
    constexpr int N = d3_width(WD);
    d3_vector<WD, N> old[V];
    d3_vector<OD, N> direction[V];
    uint32_t u[V][4];
#pragma unroll
    for (int v = 0; v < V; ++v) old[v] = d3_fetch<WD, N, false>(w + v * apart * old[v].BYTES);
    if constexpr (SELECTED) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            direction[v] = d3_fetch<OD, N, true>(o + v * apart * direction[v].BYTES);
        }
    }
    if constexpr (STOCHASTIC) {
        uint64_t blocks[V];
#pragma unroll
        for (int v = 0; v < V; ++v) blocks[v] = block + v * apart;
        d3_random_vectors<V>(e.seed, s.step, e.param_id, blocks, u);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
        float x[N], y[N];
        d3_widen<WD, N>(old[v], e.weight_dtype, x);
        if constexpr (SELECTED) d3_widen<OD, N>(direction[v], e.update_dtype, y);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            x[i] = SELECTED ? d3_update(s.decay, x[i], gain, y[i]) : d3_decay(s.decay, x[i]);
        }
        if constexpr (STOCHASTIC) {
            old[v] = d3_round_stochastic<WD, N>(x, e.weight_dtype, u[v]);
        } else {
            old[v] = d3_round<WD, N>(x, e.weight_dtype);
        }
        d3_put<WD, N>(w + v * apart * old[v].BYTES, old[v]);
    }
}

/* The aligned vectors of a row whose update is aligned too and whose random bits come eight to a vector. */
template <int WD, int OD, bool SELECTED, bool STOCHASTIC>
__device__ __forceinline__ void row_body(const update_entry& e, const update_numbers& s, char* w,
                                         const char* o, uint32_t lane, uint32_t lanes, uint32_t vectors,
                                         float gain, uint64_t block) {
    constexpr int N = d3_width(WD);
    constexpr uint32_t W = d3_vector<WD, N>::BYTES, O = d3_vector<OD, N>::BYTES;
    uint32_t v = lane;
    w += (uint64_t)lane * W;
    o += (uint64_t)lane * O;
    block += lane;
#pragma unroll 1
    for (; v + lanes < vectors; v += 2 * lanes) {
        row_vectors<WD, OD, 2, SELECTED, STOCHASTIC>(e, s, w, o, lanes, gain, block);
        w += 2 * lanes * W;
        o += 2 * lanes * O;
        block += 2 * lanes;
    }
    if (v < vectors) row_vectors<WD, OD, 1, SELECTED, STOCHASTIC>(e, s, w, o, lanes, gain, block);
}

template <int WD, int OD>
__global__ void __launch_bounds__(D3_THREADS, WD == D3_ANY ? 5 : 4)
    update_rows_kernel(const __grid_constant__ update_table table) {
    constexpr int N = d3_width(WD);
    const uint32_t index = d3_find(table, blockIdx.x);
    const update_entry& e = table.entries[index];
    const d3_place p = d3_place_of(e.rows, blockIdx.x - table.first[index]);
    const update_numbers s = numbers_of(e);
    const int w_size = d3_size<WD>(e.weight_dtype), o_size = d3_size<OD>(e.update_dtype);
    const int64_t w_step = (N > 1 ? 1 : e.w.col) * w_size, o_step = (N > 1 ? 1 : e.o.col) * o_size;
    const uint32_t cols = e.rows.cols;

    for (uint32_t r = p.group; r < p.rows; r += p.groups) {
        const uint32_t row = p.first + r;
        const int64_t slot = e.slots ? e.slots[(int64_t)p.batch * e.rows.rows + row] : (int64_t)row;
        const bool selected = slot >= 0;
        float gain = 0.0f;
        if (!selected && s.skips) continue;
        if (selected) {
            const float factor = e.factor ? e.factor[(int64_t)p.batch * e.factors + slot] : 1.0f;
            gain = d3_update_gain(s.step_size, e.scale, factor);
        }
        char* const w = e.weight + (p.batch * e.w.batch + row * e.w.row) * w_size;
        const char* const o = e.update + (p.batch * e.o.batch + slot * e.o.row) * o_size;
        const int64_t at = e.index_base + p.batch * e.index_batch + row * e.index_row;
        const uint32_t head = d3_head<N>(w, w_size, cols), vectors = (cols - head) / N;
        const uint32_t body = vectors * N;
        const bool vector_update = d3_aligned<OD, N>(o + head * o_step);
        uint32_t j = head + p.lane * N; /* below 2^32 */
        bool fast = false;
        if constexpr (N > 1) {
            char* const wv = w + head * w_step;
            const char* const ov = o + head * o_step;
            const uint64_t block = (uint64_t)(at + head) >> 3;
            if (WD != DION3_F32 && s.stochastic) {
                if constexpr (WD != DION3_F32) {
                    const bool whole = e.index_col == 1 && ((at + head) & 7) == 0;
                    fast = whole && (!selected || vector_update);
                    if (whole && !selected) {
                        row_body<WD, OD, false, true>(e, s, wv, ov, p.lane, p.lanes, vectors, gain, block);
                    } else if (fast) {
                        row_body<WD, OD, true, true>(e, s, wv, ov, p.lane, p.lanes, vectors, gain, block);
                    }
                }
            } else {
                fast = !selected || vector_update;
                if (!selected) {
                    row_body<WD, OD, false, false>(e, s, wv, ov, p.lane, p.lanes, vectors, gain, 0);
                } else if (fast) {
                    row_body<WD, OD, true, false>(e, s, wv, ov, p.lane, p.lanes, vectors, gain, 0);
                }
            }
        }
        if (!fast) {
#pragma unroll 1
            for (uint32_t v = p.lane; v < vectors; v += p.lanes) {
                row_piece<WD, OD, N>(e, s, w + j * w_step, o + j * o_step, selected, vector_update, gain,
                                     at + j * e.index_col);
                j += p.lanes * N;
            }
        }
        if constexpr (N > 1) {
#pragma unroll 1
            for (uint32_t i = p.lane; i < cols - body; i += p.lanes) {
                j = i < head ? i : i + body;
                row_piece<WD, OD, 1>(e, s, w + j * w_step, o + j * o_step, selected, false, gain,
                                     at + j * e.index_col);
            }
        }
    }
}

/* ---- columns ---------------------------------------------------------------------------------- */

#define RUN_AHEAD 3 /* elements of a run that a lane moves at a time: enough for a quarter of the columns */

/* A lane's part of a tile: its columns in row 0 of the matrix. */
struct column_share {
    d3_columns columns;
    bool mine; /* whether it has a whole vector to write */
    char* w;
    const char* o;       /* the tile's run of the update, from this lane on */
    const float* factor; /* or NULL */
    float gain;          /* without factor */
    int64_t at;          /* global index of its first element */
};

/* A warp's shared memory. */
template <int TILE>
struct __align__(16) column_stage {
    uint16_t update[ROWS_AHEAD][TILE]; /* rows of the update, each element at its column */
    uint8_t column_of[TILE];
};

/* What a lane moves from runs to shared memory at a time: elements 32 apart of V rows. */
template <int V>
struct run_part {
    uint16_t element[V][RUN_AHEAD];
};

template <int V>
__device__ __forceinline__ run_part<V> fetch_run(const char* o, int64_t o_jump, uint32_t begin,
                                                 uint32_t count) {
    run_part<V> part;
#pragma unroll
    for (int c = 0; c < RUN_AHEAD; ++c) {
        const uint32_t j = begin + c * 32;
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const uint16_t* const run = (const uint16_t*)(o + v * o_jump);
            part.element[v][c] = j + threadIdx.x % 32 < count ? run[j] : (uint16_t)0;
        }
    }
    return part;
}

template <int V, int TILE>
__device__ __forceinline__ void stage_run(const run_part<V>& part, column_stage<TILE>& stage, uint32_t begin,
                                          uint32_t count) {
    const uint32_t first = begin + threadIdx.x % 32;
    uint32_t column[RUN_AHEAD];
#pragma unroll
    for (int c = 0; c < RUN_AHEAD; ++c) column[c] = stage.column_of[(first + c * 32) % TILE];
#pragma unroll
    for (int c = 0; c < RUN_AHEAD; ++c) {
        if (first + c * 32 < count) {
#pragma unroll
            for (int v = 0; v < V; ++v) stage.update[v][column[c]] = part.element[v][c];
        }
    }
}

/* How a vector is rounded: to nearest, with one Philox call, or as round_weight does. */
enum { NEAREST, WHOLE, GENERAL };

/* V rows from row on, D3_WARPS apart; the whole warp calls. */
template <int WD, int OD, int V, int ROUNDING>
__device__ __forceinline__ void column_piece(const update_entry& e, const update_numbers& s,
                                             const column_share& p, uint32_t row,
                                             column_stage<32 * d3_width(WD)>& stage) {
    constexpr int N = d3_width(WD), TILE = 32 * N, W = WD == DION3_F32 ? 4 : 2;
    char* const w = p.w + row * e.w.row * W;
    const char* const o = p.o + row * e.o.row * 2;
    const int64_t w_jump = e.w.row * (D3_WARPS * W), o_jump = e.o.row * (D3_WARPS * 2);
    const int64_t at = p.at + row * e.index_row, at_jump = e.index_row * D3_WARPS;
    d3_vector<WD, N> old[V];
    float gain[V];
    uint32_t u[V][4];
    const run_part<V> part = fetch_run<V>(o, o_jump, 0, p.columns.count);
    if (p.mine) {
#pragma unroll
        for (int v = 0; v < V; ++v) old[v] = d3_fetch<WD, N, false>(w + v * w_jump);
    }
    if constexpr (ROUNDING == WHOLE) { /* while the loads are under way */
        uint64_t blocks[V];
#pragma unroll
        for (int v = 0; v < V; ++v) blocks[v] = (uint64_t)(at + v * at_jump) >> 3;
        d3_random_vectors<V>(e.seed, s.step, e.param_id, blocks, u);
    }
    stage_run<V, TILE>(part, stage, 0, p.columns.count);
#pragma unroll 1
    for (uint32_t j = RUN_AHEAD * 32; j < p.columns.count; j += RUN_AHEAD * 32) {
        stage_run<V, TILE>(fetch_run<V>(o, o_jump, j, p.columns.count), stage, j, p.columns.count);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
        gain[v] = p.factor ? d3_mul(p.gain, p.factor[row + v * D3_WARPS]) : p.gain;
    }
    __syncwarp();
    if (p.mine) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const d3_vector<OD, N> direction = d3_fetch<OD, N, false>(&stage.update[v][threadIdx.x % 32 * N]);
            float x[N], y[N];
            d3_widen<WD, N>(old[v], e.weight_dtype, x);
            d3_widen<OD, N>(direction, e.update_dtype, y);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                x[i] = d3_decay(s.decay, x[i]);
                if (p.columns.mask >> i & 1u) {
                    x[i] = d3_sub(x[i], d3_mul(gain[v], y[i])); /* d3_update with its product at hand */
                }
            }
            if constexpr (ROUNDING == WHOLE) {
                old[v] = d3_round_stochastic<WD, N>(x, e.weight_dtype, u[v]);
            } else if constexpr (ROUNDING == NEAREST) {
                old[v] = d3_round<WD, N>(x, e.weight_dtype);
            } else {
                old[v] = round_weight<WD, N>(e, s, at + v * at_jump, x);
            }
            d3_put<WD, N>(w + v * w_jump, old[v]);
        }
    }
    __syncwarp(); /* the stage is written anew */
}

template <int WD, int OD, int V, int ROUNDING>
__device__ __forceinline__ void column_rows(const update_entry& e, const update_numbers& s,
                                            const column_share& p, uint32_t row, uint32_t end,
                                            column_stage<32 * d3_width(WD)>& stage) {
#pragma unroll 1
    for (; row + (V - 1) * D3_WARPS < end; row += V * D3_WARPS) {
        column_piece<WD, OD, V, ROUNDING>(e, s, p, row, stage);
    }
    if constexpr (V > 1) {
#pragma unroll 1
        for (; row < end; row += D3_WARPS) column_piece<WD, OD, 1, ROUNDING>(e, s, p, row, stage);
    }
}

template <int WD, int OD>
__global__ void __launch_bounds__(D3_THREADS, 3)
    update_columns_kernel(const __grid_constant__ update_table table) {
    constexpr int N = d3_width(WD), TILE = 32 * N;
    const uint32_t index = d3_find(table, blockIdx.x);
    const update_entry& e = table.entries[index];
    const update_numbers s = numbers_of(e);
    const uint32_t cols = e.rows.cols, tiles = (cols + TILE - 1) / TILE;
    const uint32_t strips = (e.rows.rows + STRIP_ROWS - 1) / STRIP_ROWS;
    uint32_t rest = blockIdx.x - table.first[index];
    const uint32_t tile = rest % tiles;
    rest /= tiles;
    const uint32_t strip = rest % strips, batch = rest / strips;
    const uint32_t column = tile * TILE + threadIdx.x % 32 * N;
    const uint32_t held = column < cols ? min(cols - column, (uint32_t)N) : 0;
    const uint32_t begin = strip * STRIP_ROWS + threadIdx.x / 32;
    const uint32_t end = min((strip + 1) * STRIP_ROWS, e.rows.rows);
    const int w_size = d3_size<WD>(e.weight_dtype), o_size = d3_size<OD>(e.update_dtype);
    const int64_t w_step = (N > 1 ? 1 : e.w.col) * w_size, o_step = (N > 1 ? 1 : e.o.col) * o_size;
    const int64_t at = e.index_base + batch * e.index_batch + column * e.index_col;
    const int32_t* const slots = e.slots + (int64_t)batch * cols + column;
    const float* const factor = e.factor ? e.factor + (int64_t)batch * e.factors : NULL;
    const float gain = d3_mul(s.step_size, e.scale); /* d3_update_gain without its factor */
    char* const w = e.weight + batch * e.w.batch * w_size + column * w_step;
    const char* const o = e.update + batch * e.o.batch * o_size;
    if constexpr (N > 1) {
        __shared__ column_stage<TILE> stages[D3_WARPS];
        column_stage<TILE>& stage = stages[threadIdx.x / 32];
        int32_t found[N];
#pragma unroll
        for (int i = 0; i < N; ++i) found[i] = i < held ? slots[i] : -1;
        column_share p = {d3_columns_of<N>(found, stage.column_of), false, w, o, factor, gain, at};
        if (s.skips && p.columns.count == 0) return;
        p.mine = held == N && !(s.skips && p.columns.mask == 0);
        p.o += ((int64_t)p.columns.slot + threadIdx.x % 32) * o_size;
        if (!s.stochastic) {
            column_rows<WD, OD, ROWS_AHEAD, NEAREST>(e, s, p, begin, end, stage);
        } else if constexpr (N == 8) {
            if (e.index_col == 1 && ((at | e.index_row) & 7) == 0) {
                column_rows<WD, OD, ROWS_AHEAD, WHOLE>(e, s, p, begin, end, stage);
            } else {
                column_rows<WD, OD, 1, GENERAL>(e, s, p, begin, end, stage);
            }
        }
        if (held == N) return;
    }
#pragma unroll 1
    for (uint32_t i = 0; i < held; ++i) { /* the last columns, fewer than a vector; any, without vectors */
        const int32_t slot = slots[i];
        if (slot < 0 && s.skips) continue;
#pragma unroll 1
        for (uint32_t row = begin; row < end; row += D3_WARPS) {
            row_piece<WD, OD, 1>(e, s, w + row * e.w.row * w_size + i * w_step,
                                 o + row * e.o.row * o_size + slot * o_step, slot >= 0, false,
                                 factor ? d3_mul(gain, factor[row]) : gain,
                                 at + row * e.index_row + i * e.index_col);
        }
    }
}

/* ---- host ------------------------------------------------------------------------------------- */

enum { DTYPE_PAIRS = 7, ANY_ANY = 6 };

#define UPDATE_KERNELS(name)                                                                                 \
    (const void*)name<DION3_F32, DION3_F16>, (const void*)name<DION3_F32, DION3_BF16>,                       \
        (const void*)name<DION3_F16, DION3_F16>, (const void*)name<DION3_F16, DION3_BF16>,                   \
        (const void*)name<DION3_BF16, DION3_F16>, (const void*)name<DION3_BF16, DION3_BF16>,                 \
        (const void*)name<D3_ANY, D3_ANY>

/* The entry of a matrix as it lies in memory: a transposed one turns its axis, unless neuron factors,
 * which belong to rows of the weight, would become factors of columns. */
static bool fill_entry(const dion3_update_item* it, update_entry* e) {
    const bool turned = it->weight.col_stride != 1 && it->weight.row_stride == 1 && !it->factor;
    e->weight = (char*)it->weight.data;
    e->update = (const char*)it->update.data;
    e->slots = it->slots;
    e->factor = it->factor;
    e->factors = (uint32_t)(it->axis == DION3_ROWS ? it->k : it->rows);
    e->hyper = it->hyper;
    e->step = it->step;
    e->seed = it->seed;
    e->index_base = it->index_base;
    e->index_batch = it->index_batch_stride;
    e->index_row = it->index_row_stride;
    e->index_col = 1;
    e->w = d3_strides_of(&it->weight);
    e->o = d3_strides_of(&it->update);
    e->param_id = it->param_id;
    e->scale = it->scale;
    e->weight_dtype = (uint8_t)it->weight.dtype;
    e->update_dtype = (uint8_t)it->update.dtype;
    if (turned) {
        d3_swap(&e->w.row, &e->w.col);
        d3_swap(&e->o.row, &e->o.col);
        d3_swap(&e->index_row, &e->index_col);
    }
    return turned;
}

static d3_work prepare(const dion3_update_item* it, update_entry* e, char** workspace) {
    d3_work work = {ANY_ANY, 0};
    (void)workspace;
    if (it->batch == 0 || it->rows == 0 || it->cols == 0) return work;
    const bool turned = fill_entry(it, e);
    const bool columns = it->slots && (it->axis == DION3_COLS) != turned;
    const int64_t rows = turned ? it->cols : it->rows, cols = turned ? it->rows : it->cols;
    const int lead = d3_width(it->weight.dtype);
    bool vectors = e->w.col == 1 && e->o.col == 1 && it->update.dtype != DION3_F32;
    if (columns) {
        vectors = vectors && e->w.row % lead == 0 && (it->batch == 1 || e->w.batch % lead == 0) &&
                  (uintptr_t)e->weight % 16 == 0;
    }
    if (vectors) work.kernel = 2 * it->weight.dtype + (it->update.dtype == DION3_BF16);
    const int width = vectors ? lead : 1;
    work.blocks = d3_deal_rows(&e->rows, it->batch, rows, cols, width, 2, 1);
    if (columns && work.blocks != D3_TOO_LARGE) {
        const uint64_t strips = ((uint64_t)rows + STRIP_ROWS - 1) / STRIP_ROWS;
        const uint64_t tile = (uint64_t)(32 * width);
        work.kernel += DTYPE_PAIRS;
        work.blocks = ((uint64_t)cols + tile - 1) / tile * strips * (uint64_t)it->batch;
    }
    return work;
}

dion3_status dion3_update_cuda(const dion3_update_item* items, int64_t count, dion3_stream stream) {
    static const void* const kernels[] = {UPDATE_KERNELS(update_rows_kernel),
                                          UPDATE_KERNELS(update_columns_kernel)};
    D3_TRY(d3_check_update(items, count));
    return d3_launch("dion3_update", items, count, prepare, kernels, D3_THREADS, NULL, stream);
}
