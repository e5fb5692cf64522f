/*
 * gather.cu - the selected slices, scaled and rounded for Newton-Schulz.
 *
 *   out <- m[selected] * scale, scale = (float)(1 / max(norm, eps)).
 *   momentum (batch, rows, cols); out (batch, k, cols) or (batch, rows, k); any dtypes and strides.
 * Rows: a copy of rows, geometry.cuh. Columns (columns.cuh): a block owns 32 vectors of columns of m by a strip
 * of 64 rows, a warp eight rows, all of them under way; it finds the indices of its columns in two steps of
 * 256-fold search. m is read in whole vectors. Those without a selected column are left alone, except in the
 * first half of the rows of 16-bit m, whose loads do not wait for the search: (1 - s) / 2 more of m, 0.7% at
 * f = 1/8, 6% at f = 1/16.
 * Unaligned, few (k < n / 16) or nesterov columns: a block owns 64 selected columns by 128 rows, each lane two
 * columns, four rows under way.
 * Constraint: indices ascend, as those of dion3_select do.
 * Bytes an element of m, f = k / n: rows f (|m| + |out|); columns s |m| + f |out|, where
 * s = 1 - (1 - f)^(64 / |m|) of the pieces of 64 bytes, by which the memory of an H200 is read, hold a selected
 * column.
 * Source: Algorithm 4 line 3. No arithmetic to speak of: the copy bandwidth is the roof.
 */
#include "../rows.h"
#include "columns.cuh"
#include "element.cuh"
#include "geometry.cuh"
#include "table.cuh"

#define TILE_ROWS 64   /* of a block, m in whole vectors */
#define STRIP_ROWS 128 /* of a block, m an element at a time */
#define TILE_COLUMNS 64
#define ROWS_AHEAD 4
#define ROW_BLOCKS 4 /* resident blocks of the row kernel on a multiprocessor */

struct gather_entry {
    const char* momentum;
    const char* grad;
    char* out;
    const int32_t* indices;
    const double* norm;
    const float* hyper;
    d3_strides m, g, o;
    d3_rows rows;     /* of the selected part; columns: rows and cols (= k) of it */
    uint32_t columns; /* of momentum */
    uint8_t momentum_dtype, grad_dtype, out_dtype;
};

typedef d3_table<gather_entry> gather_table;

struct gather_numbers {
    float scale, gain, nesterov;
    bool looks_ahead;
};

__device__ __forceinline__ double norm_of(const gather_entry& e, uint32_t batch) {
    return e.norm ? e.norm[batch] : 0.0;
}

/* norm is that of norm_of, eps that of hyper, both loaded early: they are on their way together with the first
 * indices. Every thread divides for itself, so that no barrier stands before the first load of m. */
__device__ __forceinline__ gather_numbers numbers_of(const gather_entry& e, double norm, float eps) {
    gather_numbers s;
    s.scale = e.norm ? d3_norm_scale(norm, eps) : 1.0f;
    s.gain = e.hyper[DION3_HYPER_GAIN];
    s.nesterov = e.hyper[DION3_HYPER_NESTEROV];
    s.looks_ahead = s.nesterov != 1.0f;
    return s;
}

/* ---- rows ------------------------------------------------------------------------------------- */

template <int MD, int OD, int N, bool LOOKS>
__device__ __forceinline__ void row_piece(const gather_entry& e, const gather_numbers& s, const char* m,
                                          const char* g, char* out, bool vector_out) {
    float x[N], y[N];
    d3_widen<MD, N>(d3_fetch_aligned<MD, N>(m, e.momentum_dtype), e.momentum_dtype, x);
    if (LOOKS && s.looks_ahead) {
        d3_read<N>(g, e.grad_dtype, y);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            y[i] = d3_mul(d3_nesterov(s.nesterov, x[i], s.gain, y[i]), s.scale);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = d3_mul(x[i], s.scale);
    }
    const d3_vector<OD, N> gathered = d3_round<OD, N>(y, e.out_dtype);
    if (vector_out) {
        d3_put_aligned<OD, N>(out, e.out_dtype, gathered);
    } else {
        d3_put_each<OD, N>(out, 1, e.out_dtype, gathered);
    }
}

#define NO_GRAD (-2) /* in place of the gradient's dtype: it is not read */

/* V vectors of a row, `apart` vectors from each to the next, everything aligned: the loads of all first. */
template <int MD, int OD, int GD, int V>
__device__ __forceinline__ void row_vectors(const gather_entry& e, const gather_numbers& s, const char* m,
                                            const char* g, char* out, uint32_t apart) {
    constexpr int N = d3_width(MD);
    constexpr int G = GD == NO_GRAD ? DION3_F32 : GD;
    d3_vector<MD, N> old[V];
    d3_vector<G, N> grad[V];
#pragma unroll
    for (int v = 0; v < V; ++v) old[v] = d3_fetch<MD, N, false>(m + v * apart * old[v].BYTES);
    if constexpr (GD != NO_GRAD) {
#pragma unroll
        for (int v = 0; v < V; ++v) grad[v] = d3_fetch<G, N, true>(g + v * apart * grad[v].BYTES);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
        float x[N], y[N];
        d3_widen<MD, N>(old[v], e.momentum_dtype, x);
        if constexpr (GD != NO_GRAD) d3_widen<G, N>(grad[v], e.grad_dtype, y);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (GD != NO_GRAD) {
                y[i] = d3_nesterov(s.nesterov, x[i], s.gain, y[i]);
            } else {
                y[i] = x[i];
            }
            y[i] = d3_mul(y[i], s.scale);
        }
        const d3_vector<OD, N> gathered = d3_round<OD, N>(y, e.out_dtype);
        d3_put<OD, N>(out + v * apart * gathered.BYTES, gathered);
    }
}

/* The aligned vectors of a row; out and, if it is read, the gradient are aligned with them. */
template <int MD, int OD, int GD>
__device__ __forceinline__ void row_body(const gather_entry& e, const gather_numbers& s, const char* m,
                                         const char* g, char* out, uint32_t lane, uint32_t lanes,
                                         uint32_t vectors) {
    constexpr int N = d3_width(MD);
    constexpr uint32_t M = d3_vector<MD, N>::BYTES, O = d3_vector<OD, N>::BYTES;
    constexpr int GRAD = GD == NO_GRAD ? DION3_F32 : GD;
    constexpr uint32_t G = d3_vector<GRAD, N>::BYTES;
    uint32_t v = lane;
    m += (uint64_t)lane * M;
    out += (uint64_t)lane * O;
    g += (uint64_t)lane * G;
#pragma unroll 1
    for (; v + lanes < vectors; v += 2 * lanes) {
        row_vectors<MD, OD, GD, 2>(e, s, m, g, out, lanes);
        m += 2 * lanes * M;
        out += 2 * lanes * O;
        g += 2 * lanes * G;
    }
    if (v < vectors) row_vectors<MD, OD, GD, 1>(e, s, m, g, out, lanes);
}

template <int MD, int OD, bool LOOKS>
__global__ void __launch_bounds__(D3_THREADS, ROW_BLOCKS)
    gather_rows_kernel(const __grid_constant__ gather_table table) {
    constexpr int N = d3_width(MD);
    const uint32_t index = d3_find(table, blockIdx.x);
    const gather_entry& e = table.entries[index];
    const d3_place p = d3_place_of(e.rows, blockIdx.x - table.first[index]);
    const int32_t* const indices = e.indices ? e.indices + (int64_t)p.batch * e.rows.rows + p.first : NULL;
    const double norm = norm_of(e, p.batch);
    const float eps = e.hyper[DION3_HYPER_EPS];
    int32_t ahead = indices && p.group < p.rows ? indices[p.group] : 0; /* the next row's */
    const gather_numbers s = numbers_of(e, norm, eps);
    const int m_size = d3_size<MD>(e.momentum_dtype), o_size = d3_size<OD>(e.out_dtype);
    const int g_size = d3_size<D3_ANY>(e.grad_dtype);
    const int64_t m_step = (N > 1 ? 1 : e.m.col) * m_size, o_step = (N > 1 ? 1 : e.o.col) * o_size;
    const int64_t g_step = LOOKS ? (N > 1 ? 1 : e.g.col) * g_size : 0;
    const uint32_t cols = e.rows.cols;

    for (uint32_t r = p.group; r < p.rows; r += p.groups) {
        const uint32_t slot = p.first + r;
        const int64_t row = indices ? (int64_t)ahead : (int64_t)slot;
        if (indices && r + p.groups < p.rows) ahead = indices[r + p.groups];
        const char* const m = e.momentum + (p.batch * e.m.batch + row * e.m.row) * m_size;
        char* const out = e.out + (p.batch * e.o.batch + slot * e.o.row) * o_size;
        const char* const g = LOOKS ? e.grad + (p.batch * e.g.batch + row * e.g.row) * g_size : NULL;
        const uint32_t head = d3_head<N>(m, m_size, cols), vectors = (cols - head) / N;
        const uint32_t body = vectors * N;
        const bool vector_out = d3_aligned<OD, N>(out + head * o_step);
        uint32_t j = head + p.lane * N; /* below 2^32 */
        bool done = false;
        if constexpr (N > 1) {
            const char* const mv = m + head * m_step;
            char* const ov = out + head * o_step;
            const char* const gv = g + head * g_step;
            if (vector_out && !(LOOKS && s.looks_ahead)) {
                row_body<MD, OD, NO_GRAD>(e, s, mv, gv, ov, p.lane, p.lanes, vectors);
                done = true;
            } else if (LOOKS && vector_out && ((uintptr_t)gv & (min(N * g_size, 16) - 1)) == 0) {
                if constexpr (LOOKS) {
                    if (e.grad_dtype == DION3_BF16) {
                        row_body<MD, OD, DION3_BF16>(e, s, mv, gv, ov, p.lane, p.lanes, vectors);
                    } else if (e.grad_dtype == DION3_F16) {
                        row_body<MD, OD, DION3_F16>(e, s, mv, gv, ov, p.lane, p.lanes, vectors);
                    } else {
                        row_body<MD, OD, DION3_F32>(e, s, mv, gv, ov, p.lane, p.lanes, vectors);
                    }
                    done = true;
                }
            }
        }
        if (!done) {
#pragma unroll 1
            for (uint32_t v = p.lane; v < vectors; v += p.lanes) {
                row_piece<MD, OD, N, LOOKS>(e, s, m + j * m_step, g + j * g_step, out + j * o_step,
                                            vector_out);
                j += p.lanes * N;
            }
        }
        if constexpr (N > 1) {
#pragma unroll 1
            for (uint32_t i = p.lane; i < cols - body; i += p.lanes) {
                j = i < head ? i : i + body;
                row_piece<MD, OD, 1, LOOKS>(e, s, m + j * m_step, g + j * g_step, out + j * o_step, false);
            }
        }
    }
}

/* ---- columns, in whole vectors of m ------------------------------------------------------------- */

/* slot_of[c] becomes the place of column first + c among the k ascending indices, -1 if it is not selected.
 * The whole block calls. */
template <int TILE>
__device__ __forceinline__ void find_slots(const int32_t* indices, uint32_t k, uint32_t first,
                                           int32_t (&slot_of)[TILE]) {
    const uint32_t stride = (k + D3_THREADS - 1) / D3_THREADS, sample = threadIdx.x * stride;
    if (threadIdx.x < TILE) slot_of[threadIdx.x] = -1;
    const uint32_t below = (uint32_t)__syncthreads_count(sample < k && (uint32_t)indices[sample] < first);
    const uint32_t begin = below ? (below - 1) * stride : 0, end = begin + min(k - begin, stride + TILE);
    for (uint32_t i = begin + threadIdx.x; i < end; i += D3_THREADS) {
        const uint32_t c = (uint32_t)indices[i] - first;
        if (c < TILE) slot_of[c] = (int32_t)i;
    }
    __syncthreads();
}

/* A warp's shared memory. */
template <int V, int TILE>
struct __align__(16) tile_stage {
    uint16_t out[V][TILE]; /* what V rows give to out, each element at its column */
    uint8_t column_of[TILE];
};

/* The vectors of V rows, D3_WARPS apart; the matrix or the strip ends `rows` rows after the first of them. */
template <int MD, int V>
__device__ __forceinline__ void fetch_rows(d3_vector<MD, d3_width(MD)> (&old)[V], const char* m, int64_t jump,
                                           int32_t rows) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
        if (v * D3_WARPS < rows) old[v] = d3_fetch<MD, d3_width(MD), false>(m + v * jump);
    }
}

/* Writes what was selected of `COUNT` of those rows, from `from` on; the whole warp calls. */
template <int MD, int OD, int COUNT, int V>
__device__ __forceinline__ void
write_rows(const d3_vector<MD, d3_width(MD)> (&old)[V], int from, const gather_entry& e,
           const gather_numbers& s, const d3_columns& p, char* out, tile_stage<V, 32 * d3_width(MD)>& stage) {
    constexpr int N = d3_width(MD);
    const uint32_t lane = threadIdx.x % 32;
    const int64_t out_jump = e.o.row * (2 * D3_WARPS);
    out += from * out_jump;
    if (p.mask) {
#pragma unroll
        for (int v = 0; v < COUNT; ++v) {
            float x[N];
            d3_widen<MD, N>(old[from + v], e.momentum_dtype, x);
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = d3_mul(x[i], s.scale);
            d3_put<OD, N>(&stage.out[v][lane * N], d3_round<OD, N>(x, e.out_dtype));
        }
    }
    __syncwarp();
#pragma unroll 2
    for (uint32_t j = lane; j < p.count; j += 32) {
        const uint32_t column = stage.column_of[j];
#pragma unroll
        for (int v = 0; v < COUNT; ++v) {
            ((uint16_t*)(out + v * out_jump))[j * e.o.col] = stage.out[v][column];
        }
    }
    __syncwarp(); /* the stage is written anew */
}

/* The same of all of the V rows that are there; `rows` as in fetch_rows. */
template <int MD, int OD, int V>
__device__ __forceinline__ void write_half(const d3_vector<MD, d3_width(MD)> (&old)[V], const gather_entry& e,
                                           const gather_numbers& s, const d3_columns& p, char* out,
                                           int32_t rows, tile_stage<V, 32 * d3_width(MD)>& stage) {
    if (rows > (V - 1) * D3_WARPS) {
        write_rows<MD, OD, V>(old, 0, e, s, p, out, stage);
    } else {
#pragma unroll
        for (int v = 0; v < V - 1; ++v) {
            if (v * D3_WARPS < rows) write_rows<MD, OD, 1>(old, v, e, s, p, out, stage);
        }
    }
}

template <int MD, int OD>
__global__ void __launch_bounds__(D3_THREADS, MD == DION3_F32 ? 3 : 4)
    gather_tiles_kernel(const __grid_constant__ gather_table table) {
    constexpr int N = d3_width(MD), TILE = 32 * N, V = ROWS_AHEAD, M = MD == DION3_F32 ? 4 : 2;
    static_assert(TILE_ROWS == 2 * V * D3_WARPS, "a warp takes its rows in two halves");
    __shared__ int32_t slot_of[TILE];
    __shared__ tile_stage<V, TILE> stages[D3_WARPS];
    const uint32_t index = d3_find(table, blockIdx.x);
    const gather_entry& e = table.entries[index];
    const uint32_t k = e.rows.cols, tiles = (e.columns + TILE - 1) / TILE;
    const uint32_t strips = (e.rows.rows + TILE_ROWS - 1) / TILE_ROWS;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t rest = blockIdx.x - table.first[index];
    const uint32_t tile = rest % tiles;
    rest /= tiles;
    const uint32_t strip = rest % strips, batch = rest / strips;
    const uint32_t begin = strip * TILE_ROWS + warp, end = min((strip + 1) * TILE_ROWS, e.rows.rows);
    /* How far the strip reaches beyond this warp's first row, and beyond the first row of its second half. */
    const int32_t first = (int32_t)(end - begin), second = first - V * D3_WARPS;
    const uint32_t column = tile * TILE + lane * N;
    const bool vector = column + N <= e.columns;
    const char* const m = e.momentum + (batch * e.m.batch + begin * e.m.row + column) * M;
    const int64_t m_jump = e.m.row * (M * D3_WARPS), out_jump = e.o.row * (2 * D3_WARPS);
    char* const out = e.out + batch * e.o.batch * 2;
    d3_vector<MD, N> old[2][V];
    /* 16-bit momentum: few pieces of 64 bytes hold no selected column, so the first rows need not wait until it
     * is known which. */
    if (M == 2 && vector) fetch_rows<MD, V>(old[0], m, m_jump, first);
    const double norm = norm_of(e, batch);
    const float eps = e.hyper[DION3_HYPER_EPS];
    int32_t slots[N];
    find_slots<TILE>(e.indices + (int64_t)batch * k, k, tile * TILE, slot_of);
#pragma unroll
    for (int i = 0; i < N; ++i) slots[i] = vector ? slot_of[lane * N + i] : -1;
    const d3_columns p = d3_columns_of<N>(slots, stages[warp].column_of);
    if (p.mask) {
        if (M != 2) fetch_rows<MD, V>(old[0], m, m_jump, first);
        fetch_rows<MD, V>(old[1], m + V * m_jump, m_jump, second);
    }
    const gather_numbers s = numbers_of(e, norm, eps);
    if (p.count) {
        char* const to = out + (begin * e.o.row + p.slot * e.o.col) * 2;
        write_half<MD, OD, V>(old[0], e, s, p, to, first, stages[warp]);
        write_half<MD, OD, V>(old[1], e, s, p, to + V * out_jump, second, stages[warp]);
    }
    if (vector) return;
#pragma unroll 1
    for (uint32_t i = 0; column + i < e.columns; ++i) { /* the last columns, fewer than a vector */
        const int32_t slot = slot_of[lane * N + i];
#pragma unroll 1
        for (uint32_t row = begin; row < end && slot >= 0; row += D3_WARPS) {
            row_piece<MD, OD, 1, false>(e, s, m + ((row - begin) * e.m.row + i) * M, NULL,
                                        out + (row * e.o.row + slot * e.o.col) * 2, false);
        }
    }
}

/* ---- columns, any ------------------------------------------------------------------------------- */

template <int MD, int OD, bool LOOKS>
__global__ void __launch_bounds__(D3_THREADS, 4)
    gather_columns_kernel(const __grid_constant__ gather_table table) {
    const uint32_t index = d3_find(table, blockIdx.x);
    const gather_entry& e = table.entries[index];
    const uint32_t k = e.rows.cols, tiles = (k + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const uint32_t strips = (e.rows.rows + STRIP_ROWS - 1) / STRIP_ROWS;
    uint32_t rest = blockIdx.x - table.first[index];
    const uint32_t tile = rest % tiles;
    rest /= tiles;
    const uint32_t strip = rest % strips, batch = rest / strips;
    const uint32_t end = min((strip + 1) * STRIP_ROWS, e.rows.rows);
    const gather_numbers s = numbers_of(e, norm_of(e, batch), e.hyper[DION3_HYPER_EPS]);
    const int m_size = d3_size<MD>(e.momentum_dtype), o_size = d3_size<OD>(e.out_dtype);
    const char* const g = e.grad;
    int64_t from[2];
    const char* m[2];
    char* out[2];
    bool mine[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const uint32_t slot = tile * TILE_COLUMNS + c * 32 + threadIdx.x % 32;
        mine[c] = slot < k;
        from[c] = !mine[c] ? 0 : e.indices ? e.indices[(int64_t)batch * k + slot] : slot;
        m[c] = e.momentum + (batch * e.m.batch + from[c] * e.m.col) * m_size;
        out[c] = e.out + (batch * e.o.batch + slot * e.o.col) * o_size;
    }
    for (uint32_t row = strip * STRIP_ROWS + threadIdx.x / 32; row < end; row += ROWS_AHEAD * D3_WARPS) {
        d3_vector<MD, 1> old[ROWS_AHEAD][2];
#pragma unroll
        for (int u = 0; u < ROWS_AHEAD; ++u) {
            const int64_t r = row + u * D3_WARPS;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                if (mine[c] && r < end) {
                    old[u][c] = d3_fetch_each<MD, 1>(m[c] + r * e.m.row * m_size, 0, e.momentum_dtype);
                }
            }
        }
#pragma unroll
        for (int u = 0; u < ROWS_AHEAD; ++u) {
            const int64_t r = row + u * D3_WARPS;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float x[1];
                if (!mine[c] || r >= end) continue;
                d3_widen<MD, 1>(old[u][c], e.momentum_dtype, x);
                if (LOOKS && s.looks_ahead) {
                    const int64_t at = batch * e.g.batch + r * e.g.row + from[c] * e.g.col;
                    x[0] = d3_nesterov(s.nesterov, x[0], s.gain, d3_load(g, at, e.grad_dtype));
                }
                x[0] = d3_mul(x[0], s.scale);
                d3_put_each<OD, 1>(out[c] + r * e.o.row * o_size, 0, e.out_dtype,
                                   d3_round<OD, 1>(x, e.out_dtype));
            }
        }
    }
}

/* ---- host ------------------------------------------------------------------------------------- */

enum { ANY_ANY = 6, DTYPE_PAIRS };

#define TILE_KERNELS(name)                                                                                   \
    (const void*)name<DION3_F32, DION3_F16>, (const void*)name<DION3_F32, DION3_BF16>,                       \
        (const void*)name<DION3_F16, DION3_F16>, (const void*)name<DION3_F16, DION3_BF16>,                   \
        (const void*)name<DION3_BF16, DION3_F16>, (const void*)name<DION3_BF16, DION3_BF16>

#define GATHER_KERNELS(name, looks)                                                                          \
    (const void*)name<DION3_F32, DION3_F16, looks>, (const void*)name<DION3_F32, DION3_BF16, looks>,         \
        (const void*)name<DION3_F16, DION3_F16, looks>, (const void*)name<DION3_F16, DION3_BF16, looks>,     \
        (const void*)name<DION3_BF16, DION3_F16, looks>, (const void*)name<DION3_BF16, DION3_BF16, looks>,   \
        (const void*)name<D3_ANY, D3_ANY, looks>

static d3_work prepare(const dion3_gather_item* it, gather_entry* e, char** workspace) {
    const int turned = it->momentum.col_stride != 1 && it->momentum.row_stride == 1;
    const int columns = (it->axis == DION3_COLS && it->indices) != (turned && it->indices);
    const int64_t out_rows = it->axis == DION3_ROWS ? it->k : it->rows;
    const int64_t out_cols = it->axis == DION3_ROWS ? it->cols : it->k;
    const int64_t rows = turned ? out_cols : out_rows, cols = turned ? out_rows : out_cols;
    d3_work work = {ANY_ANY, 0};
    (void)workspace;
    if (it->batch == 0 || rows == 0 || cols == 0) return work;
    e->momentum = (const char*)it->momentum.data;
    e->grad = (const char*)it->grad.data;
    e->out = (char*)it->out.data;
    e->indices = it->indices;
    e->norm = it->norm;
    e->hyper = it->hyper;
    e->m = d3_strides_of(&it->momentum);
    e->g = d3_strides_of(&it->grad);
    e->o = d3_strides_of(&it->out);
    if (turned) {
        d3_swap(&e->m.row, &e->m.col);
        d3_swap(&e->g.row, &e->g.col);
        d3_swap(&e->o.row, &e->o.col);
    }
    e->columns = (uint32_t)(turned ? it->rows : it->cols);
    e->momentum_dtype = (uint8_t)it->momentum.dtype;
    e->grad_dtype = (uint8_t)it->grad.dtype;
    e->out_dtype = (uint8_t)it->out.dtype;
    if (it->out.dtype != DION3_F32 &&
        (columns || (e->m.col == 1 && e->o.col == 1 && (!e->grad || e->g.col == 1)))) {
        work.kernel = 2 * it->momentum.dtype + (it->out.dtype == DION3_BF16);
    }
    const int width = work.kernel == ANY_ANY ? 1 : d3_width(it->momentum.dtype);
    work.blocks = d3_deal_rows(&e->rows, it->batch, rows, cols, width, 1, 1);
    if (columns && work.blocks != D3_TOO_LARGE) {
        const int64_t lead = d3_width(it->momentum.dtype);
        const bool in_vectors = work.kernel != ANY_ANY && !e->grad && e->m.col == 1 &&
                                cols >= e->columns / 16 && e->m.row % lead == 0 &&
                                (it->batch == 1 || e->m.batch % lead == 0) &&
                                (uintptr_t)e->momentum % 16 == 0;
        const uint64_t items = in_vectors ? e->columns : (uint64_t)cols;
        const uint64_t tile = in_vectors ? 32 * (uint64_t)lead : TILE_COLUMNS;
        const uint64_t height = in_vectors ? TILE_ROWS : STRIP_ROWS;
        const uint64_t strips = ((uint64_t)rows + height - 1) / height;
        work.kernel += (in_vectors ? 4 : 2) * DTYPE_PAIRS;
        work.blocks = (items + tile - 1) / tile * strips * (uint64_t)it->batch;
    }
    if (e->grad) work.kernel += DTYPE_PAIRS;
    return work;
}

dion3_status dion3_gather_cuda(const dion3_gather_item* items, int64_t count, dion3_stream stream) {
    static const void* const kernels[] = {
        GATHER_KERNELS(gather_rows_kernel, false), GATHER_KERNELS(gather_rows_kernel, true),
        GATHER_KERNELS(gather_columns_kernel, false), GATHER_KERNELS(gather_columns_kernel, true),
        TILE_KERNELS(gather_tiles_kernel)};
    D3_TRY(d3_check_gather(items, count));
    return d3_launch("dion3_gather", items, count, prepare, kernels, D3_THREADS, NULL, stream);
}
