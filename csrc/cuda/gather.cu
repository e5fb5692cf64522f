/*
 * gather.cu - the selected slices, scaled and rounded for Newton-Schulz, and their error feedback.
 *
 *   out <- m[selected] * scale, scale = (float)(1 / max(norm, eps)); m[selected] <- feedback * m[selected].
 *   momentum (batch, rows, cols); out (batch, k, cols) or (batch, rows, k); any dtypes and strides.
 * Rows: a copy of rows, geometry.cuh. Columns: a block owns 64 selected columns by a strip of 128 rows; a
 * warp takes a row, each lane two columns, four rows under way; the columns are ascending, so a warp's
 * accesses fall into few sectors and every sector of m is fetched once.
 * Bytes an element of m, f = k / n: rows f (2 |m| + |out|), without feedback f (|m| + |out|); columns
 * 2 |m| + f |out| for f above 1/16 (every sector holds a selected column), without feedback |m| + f |out|.
 * Source: Algorithm 4 lines 3 and 9. No arithmetic to speak of: the copy bandwidth is the roof.
 */
#include "../rows.h"
#include "element.cuh"
#include "geometry.cuh"
#include "table.cuh"

#define TARGET_VECTORS 1024
#define STRIP_ROWS 128
#define TILE_COLUMNS 64
#define ROWS_AHEAD 4
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define LOOKING_BLOCKS 3 /* resident blocks of the nesterov row kernel, as registers allow */
#else
#define LOOKING_BLOCKS 4
#endif

struct gather_entry {
    char* momentum;
    const char* grad;
    char* out;
    const int32_t* indices;
    const double* norm;
    const float* hyper;
    d3_strides m, g, o;
    d3_rows rows; /* of the selected part; columns: rows and cols (= k) of it */
    uint8_t momentum_dtype, grad_dtype, out_dtype;
};

typedef d3_table<gather_entry> gather_table;

struct gather_numbers {
    float scale, gain, feedback, nesterov;
    bool looks_ahead, feeds_back;
};

/* scale costs an fp64 division: one thread does it. Every thread of the block calls. */
__device__ __forceinline__ gather_numbers numbers_of(const gather_entry& e, uint32_t batch) {
    __shared__ float scale;
    gather_numbers s;
    if (threadIdx.x == 0) {
        scale = e.norm ? d3_norm_scale(e.norm[batch], e.hyper[DION3_HYPER_EPS]) : 1.0f;
    }
    s.gain = e.hyper[DION3_HYPER_GAIN];
    s.feedback = e.hyper[DION3_HYPER_FEEDBACK];
    s.nesterov = e.hyper[DION3_HYPER_NESTEROV];
    s.looks_ahead = s.nesterov != 1.0f;
    s.feeds_back = s.feedback != 1.0f;
    __syncthreads();
    s.scale = scale;
    return s;
}

/* ---- rows ------------------------------------------------------------------------------------- */

template <int MD, int OD, int N, bool LOOKS>
__device__ __forceinline__ void row_piece(const gather_entry& e, const gather_numbers& s, char* m,
                                          const char* g, char* out, bool vector_out) {
    float x[N], y[N];
    d3_vector<MD, N> old;
    if constexpr (N > 1) {
        old = d3_fetch<MD, N, false>(m);
    } else {
        old = d3_fetch_each<MD, 1>(m, 0, e.momentum_dtype);
    }
    d3_widen<MD, N>(old, e.momentum_dtype, x);
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
    if constexpr (N > 1) {
        if (vector_out) {
            d3_put<OD, N>(out, gathered);
        } else {
            d3_put_each<OD, N>(out, 1, e.out_dtype, gathered);
        }
    } else {
        d3_put_each<OD, 1>(out, 0, e.out_dtype, gathered);
    }
    if (s.feeds_back) {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = d3_mul(s.feedback, x[i]);
        const d3_vector<MD, N> kept = d3_round<MD, N>(x, e.momentum_dtype);
        if constexpr (N > 1) {
            d3_put<MD, N>(m, kept);
        } else {
            d3_put_each<MD, 1>(m, 0, e.momentum_dtype, kept);
        }
    }
}

template <int MD, int OD, bool LOOKS>
__global__ void __launch_bounds__(D3_THREADS, LOOKS ? LOOKING_BLOCKS : 5)
    gather_rows_kernel(const __grid_constant__ gather_table table) {
    constexpr int N = d3_width(MD);
    const uint32_t index = d3_find(table, blockIdx.x);
    const gather_entry& e = table.entries[index];
    const d3_place p = d3_place_of(e.rows, blockIdx.x - table.first[index]);
    const gather_numbers s = numbers_of(e, p.batch);
    const int m_size = d3_size<MD>(e.momentum_dtype), o_size = d3_size<OD>(e.out_dtype);
    const int g_size = d3_size<D3_ANY>(e.grad_dtype);
    const int64_t m_step = (N > 1 ? 1 : e.m.col) * m_size, o_step = (N > 1 ? 1 : e.o.col) * o_size;
    const int64_t g_step = LOOKS ? (N > 1 ? 1 : e.g.col) * g_size : 0;
    const uint32_t cols = e.rows.cols;

    for (uint32_t r = p.group; r < p.rows; r += p.groups) {
        const uint32_t slot = p.first + r;
        const int64_t row = e.indices ? e.indices[(int64_t)p.batch * e.rows.rows + slot] : (int64_t)slot;
        char* const m = e.momentum + (p.batch * e.m.batch + row * e.m.row) * m_size;
        char* const out = e.out + (p.batch * e.o.batch + slot * e.o.row) * o_size;
        const char* const g = LOOKS ? e.grad + (p.batch * e.g.batch + row * e.g.row) * g_size : NULL;
        const uint32_t head = d3_head<N>(m, m_size, cols), vectors = (cols - head) / N;
        const uint32_t body = vectors * N;
        const bool vector_out = d3_aligned<OD, N>(out + head * o_step);
        uint32_t j = head + p.lane * N; /* below 2^32 */
#pragma unroll 1
        for (uint32_t v = p.lane; v < vectors; v += p.lanes) {
            row_piece<MD, OD, N, LOOKS>(e, s, m + j * m_step, g + j * g_step, out + j * o_step, vector_out);
            j += p.lanes * N;
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

/* ---- columns ---------------------------------------------------------------------------------- */

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
    const gather_numbers s = numbers_of(e, batch);
    const int m_size = d3_size<MD>(e.momentum_dtype), o_size = d3_size<OD>(e.out_dtype);
    const char* const g = e.grad;
    int64_t from[2];
    char *m[2], *out[2];
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
                float x[1], y[1];
                if (!mine[c] || r >= end) continue;
                d3_widen<MD, 1>(old[u][c], e.momentum_dtype, x);
                y[0] = x[0];
                if (LOOKS && s.looks_ahead) {
                    const int64_t at = batch * e.g.batch + r * e.g.row + from[c] * e.g.col;
                    y[0] = d3_nesterov(s.nesterov, x[0], s.gain, d3_load(g, at, e.grad_dtype));
                }
                y[0] = d3_mul(y[0], s.scale);
                d3_put_each<OD, 1>(out[c] + r * e.o.row * o_size, 0, e.out_dtype,
                                   d3_round<OD, 1>(y, e.out_dtype));
                if (s.feeds_back) {
                    x[0] = d3_mul(s.feedback, x[0]);
                    d3_put_each<MD, 1>(m[c] + r * e.m.row * m_size, 0, e.momentum_dtype,
                                       d3_round<MD, 1>(x, e.momentum_dtype));
                }
            }
        }
    }
}

/* ---- host ------------------------------------------------------------------------------------- */

enum { ANY_ANY = 6, DTYPE_PAIRS };

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
    e->momentum = (char*)it->momentum.data;
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
    e->momentum_dtype = (uint8_t)it->momentum.dtype;
    e->grad_dtype = (uint8_t)it->grad.dtype;
    e->out_dtype = (uint8_t)it->out.dtype;
    if (it->out.dtype != DION3_F32 &&
        (columns || (e->m.col == 1 && e->o.col == 1 && (!e->grad || e->g.col == 1)))) {
        work.kernel = 2 * it->momentum.dtype + (it->out.dtype == DION3_BF16);
    }
    const int width = work.kernel == ANY_ANY ? 1 : d3_width(it->momentum.dtype);
    work.blocks = d3_deal_rows(&e->rows, it->batch, rows, cols, width, TARGET_VECTORS);
    if (columns && work.blocks != D3_TOO_LARGE) {
        const uint64_t strips = ((uint64_t)rows + STRIP_ROWS - 1) / STRIP_ROWS;
        work.kernel += 2 * DTYPE_PAIRS;
        work.blocks = ((uint64_t)cols + TILE_COLUMNS - 1) / TILE_COLUMNS * strips * (uint64_t)it->batch;
    }
    if (e->grad) work.kernel += DTYPE_PAIRS;
    return work;
}

dion3_status dion3_gather_cuda(const dion3_gather_item* items, int64_t count, dion3_stream stream) {
    static const void* const kernels[] = {
        GATHER_KERNELS(gather_rows_kernel, false), GATHER_KERNELS(gather_rows_kernel, true),
        GATHER_KERNELS(gather_columns_kernel, false), GATHER_KERNELS(gather_columns_kernel, true)};
    D3_TRY(d3_check_gather(items, count));
    return d3_launch("dion3_gather", items, count, prepare, kernels, D3_THREADS, NULL, stream);
}
