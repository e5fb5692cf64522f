/*
 * momentum.cu - in one pass m <- feedback * m in the slices that the last step selected, m <- keep * m + gain * g,
 * and the sums of |m| and m^2 over every slice.
 *
 *   momentum, grad (batch, rows, cols), any dtype and strides; score, sumsq (batch, rows or cols) fp64; slots
 *   (batch, rows or cols).
 * Rows: geometry.cuh; a row's sums are finished where the row is. Columns: a block owns 32 vectors of columns by a
 * strip of 1024 rows (more where a matrix would have over 128 strips), a warp a row, four rows under way, the sums
 * of a lane's columns in its registers: so many that two blocks are resident with 16-bit momentum, three with fp32.
 * The strips' sums go to the workspace and a second, small launch adds them in order. A transposed matrix (row
 * stride 1) is read as its transpose with the axis turned.
 * Bytes: 2 |m| + |g| an element (bf16: 6); columns and 16-bit: 1% more for the strips. Sums: one
 * fp64 addition and one fp64 multiply-add an element (m^2 is exact in fp64), far below the roof where
 * fp64 runs at half rate; where it runs at 1/64 (compute capability 8.6, 8.9, 12.0) these two are the
 * roof, about half of the bandwidth's.
 * Source: Algorithm 4 line 1, and line 9 of the step before; scores: line 2.
 */
#include "../rows.h"
#include "element.cuh"
#include "geometry.cuh"
#include "table.cuh"

#define STRIP_ROWS 1024
#define ROW_BLOCKS 4 /* resident blocks of the row kernel on a multiprocessor, as registers allow */
#define ROWS_AHEAD 4
#define MAX_STRIPS 128

struct momentum_entry {
    char* momentum;
    const char* grad;
    const int32_t* slots; /* NULL: all slices were selected */
    const float *feedback, *hyper;
    double *score, *sumsq;               /* where the kernel writes; NULL: not wanted */
    double *score_strips, *sumsq_strips; /* columns: (batch, strips, cols); NULL with one strip */
    d3_strides m, g;
    d3_rows rows; /* columns use rows and cols of it */
    uint32_t strip_rows, strips;
    uint8_t momentum_dtype, grad_dtype;
};

typedef d3_table<momentum_entry> momentum_table;

/* The numbers of an item's group, in registers. */
struct momentum_numbers {
    float keep, gain, nesterov, feedback;
    bool scored, squared, looks_ahead, feeds_back;
};

__device__ __forceinline__ momentum_numbers numbers_of(const momentum_entry& e) {
    momentum_numbers s;
    s.keep = e.hyper[DION3_HYPER_KEEP];
    s.gain = e.hyper[DION3_HYPER_GAIN];
    s.nesterov = e.hyper[DION3_HYPER_NESTEROV];
    s.scored = e.score != NULL;
    s.squared = e.sumsq != NULL;
    s.looks_ahead = s.nesterov != 1.0f;
    s.feedback = e.feedback ? *e.feedback : 1.0f;
    s.feeds_back = s.feedback != 1.0f;
    return s;
}

/* The vector after its feedback, as it would be stored. */
template <int MD, int N>
__device__ __forceinline__ d3_vector<MD, N> damped(const momentum_entry& e, const momentum_numbers& s,
                                                   const d3_vector<MD, N>& m) {
    float x[N];
    d3_widen<MD, N>(m, e.momentum_dtype, x);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = d3_mul(s.feedback, x[i]);
    return d3_round<MD, N>(x, e.momentum_dtype);
}

/* N elements: x becomes the new m as stored, g the gradient. Returns the vector to store. */
template <int MD, int GD, int N>
__device__ __forceinline__ d3_vector<MD, N> advance(const momentum_entry& e, const momentum_numbers& s,
                                                    const d3_vector<MD, N>& m, const d3_vector<GD, N>& grad,
                                                    float (&x)[N], float (&g)[N]) {
    d3_widen<MD, N>(m, e.momentum_dtype, x);
    d3_widen<GD, N>(grad, e.grad_dtype, g);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = d3_momentum(s.keep, x[i], s.gain, g[i]);
    const d3_vector<MD, N> stored = d3_round<MD, N>(x, e.momentum_dtype);
    d3_widen<MD, N>(stored, e.momentum_dtype, x);
    return stored;
}

/* Adds |m| and the square of the Newton-Schulz input to element i's sums, sum(i) and square(i). A
 * conversion to fp64 costs four fp64 additions: without nesterov the two share one. */
template <int N, typename Sum>
__device__ __forceinline__ void add_up(const momentum_numbers& s, const float (&x)[N], const float (&g)[N],
                                       Sum sum) {
    if (!s.looks_ahead) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const double wide = (double)x[i];
            sum(i, wide, wide);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            sum(i, (double)x[i], (double)d3_nesterov(s.nesterov, x[i], s.gain, g[i]));
        }
    }
}

/* ---- rows ------------------------------------------------------------------------------------- */

template <int MD, int GD, int N>
__device__ __forceinline__ void row_piece(const momentum_entry& e, const momentum_numbers& s, char* m,
                                          const char* g, bool vector_grad, bool due, double& l1,
                                          double& squares) {
    d3_vector<MD, N> old = d3_fetch_aligned<MD, N>(m, e.momentum_dtype);
    const d3_vector<GD, N> grad = vector_grad ? d3_fetch_aligned<GD, N, true>(g, e.grad_dtype)
                                              : d3_fetch_each<GD, N>(g, 1, e.grad_dtype);
    float x[N], y[N];
    if (due) old = damped<MD, N>(e, s, old);
    d3_put_aligned<MD, N>(m, e.momentum_dtype, advance<MD, GD, N>(e, s, old, grad, x, y));
    add_up<N>(s, x, y, [&](int, double value, double input) {
        l1 += fabs(value);
        squares = fma(input, input, squares);
    });
}

/* V vectors of a row and of its aligned gradient, `apart` vectors from each to the next: the loads of
 * all first. */
template <int MD, int GD, int V>
__device__ __forceinline__ void row_vectors(const momentum_entry& e, const momentum_numbers& s, char* m,
                                            const char* g, uint32_t apart, bool due, double& l1,
                                            double& squares) {
    constexpr int N = d3_width(MD);
    d3_vector<MD, N> old[V];
    d3_vector<GD, N> grad[V];
#pragma unroll
    for (int v = 0; v < V; ++v) old[v] = d3_fetch<MD, N, false>(m + v * apart * old[v].BYTES);
#pragma unroll
    for (int v = 0; v < V; ++v) grad[v] = d3_fetch<GD, N, true>(g + v * apart * grad[v].BYTES);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        float x[N], y[N];
        if (due) old[v] = damped<MD, N>(e, s, old[v]);
        old[v] = advance<MD, GD, N>(e, s, old[v], grad[v], x, y);
        d3_put<MD, N>(m + v * apart * old[v].BYTES, old[v]);
        add_up<N>(s, x, y, [&](int, double value, double input) {
            l1 += fabs(value);
            squares = fma(input, input, squares);
        });
    }
}

template <int MD, int GD>
__global__ void __launch_bounds__(D3_THREADS, ROW_BLOCKS)
    momentum_rows_kernel(const __grid_constant__ momentum_table table) {
    constexpr int N = d3_width(MD);
    __shared__ double part[2][D3_WARPS];
    const uint32_t index = d3_find(table, blockIdx.x);
    const momentum_entry& e = table.entries[index];
    const d3_place p = d3_place_of(e.rows, blockIdx.x - table.first[index]);
    const momentum_numbers s = numbers_of(e);
    const int m_size = d3_size<MD>(e.momentum_dtype), g_size = d3_size<GD>(e.grad_dtype);
    const int64_t m_step = (N > 1 ? 1 : e.m.col) * m_size, g_step = (N > 1 ? 1 : e.g.col) * g_size;

    for (uint32_t base = 0; base < p.rows; base += p.groups) {
        const uint32_t r = base + p.group;
        const int64_t row = (int64_t)p.batch * e.rows.rows + p.first + r;
        double l1 = 0.0, squares = 0.0;
        if (r < p.rows) {
            char* m = e.momentum + (p.batch * e.m.batch + (p.first + r) * e.m.row) * m_size;
            const char* g = e.grad + (p.batch * e.g.batch + (p.first + r) * e.g.row) * g_size;
            const int32_t slot = e.slots ? e.slots[row] : 0;
            const bool due = s.feeds_back & (slot >= 0);
            const uint32_t cols = e.rows.cols, head = d3_head<N>(m, m_size, cols);
            const uint32_t vectors = (cols - head) / N, body = vectors * N;
            const bool vector_grad = d3_aligned<GD, N>(g + head * g_step);
            char* mv = m + (head + (int64_t)p.lane * N) * m_step;
            const char* gv = g + (head + (int64_t)p.lane * N) * g_step;
            uint32_t v = p.lane;
            if constexpr (N > 1) {
                if (vector_grad) {
#pragma unroll 1
                    for (; v + p.lanes < vectors; v += 2 * p.lanes) {
                        row_vectors<MD, GD, 2>(e, s, mv, gv, p.lanes, due, l1, squares);
                        mv += 2 * p.lanes * N * m_step;
                        gv += 2 * p.lanes * N * g_step;
                    }
                    if (v < vectors) row_vectors<MD, GD, 1>(e, s, mv, gv, p.lanes, due, l1, squares);
                    v = vectors;
                }
            }
#pragma unroll 1
            for (; v < vectors; v += p.lanes) {
                row_piece<MD, GD, N>(e, s, mv, gv, vector_grad, due, l1, squares);
                mv += p.lanes * N * m_step;
                gv += p.lanes * N * g_step;
            }
            if constexpr (N > 1) {
#pragma unroll 1
                for (uint32_t i = p.lane; i < cols - body; i += p.lanes) {
                    const int64_t j = i < head ? i : i + body;
                    row_piece<MD, GD, 1>(e, s, m + j * m_step, g + j * g_step, false, due, l1, squares);
                }
            }
        }
        if (!s.scored && !s.squared) continue;
        l1 = d3_sum_lanes(l1, p.lanes);
        squares = d3_sum_lanes(squares, p.lanes);
        if (p.lanes > 32) {
            if (threadIdx.x % 32 == 0) {
                part[0][threadIdx.x / 32] = l1;
                part[1][threadIdx.x / 32] = squares;
            }
        } else if (p.lane == 0 && r < p.rows) {
            if (s.scored) e.score[row] = l1;
            if (s.squared) e.sumsq[row] = squares;
        }
    }
    if (p.lanes <= 32 || (!s.scored && !s.squared)) return;
    /* Whole warps take one row (prepare_sums), so part has a place for each, a row's next to one another. */
    __syncthreads();
    if (threadIdx.x < 2 * p.rows) {
        const uint32_t r = threadIdx.x / 2, which = threadIdx.x % 2;
        double* out = which ? e.sumsq : e.score;
        double sum = 0.0;
        for (uint32_t w = 0; w < p.lanes / 32; ++w) sum += part[which][r * (p.lanes / 32) + w];
        if (out) out[(int64_t)p.batch * e.rows.rows + p.first + r] = sum;
    }
}

/* ---- columns ---------------------------------------------------------------------------------- */

/* V rows of N columns, D3_WARPS apart: the loads of all first. due: the bits of the columns whose feedback is. */
template <int MD, int GD, int N, int V>
__device__ __forceinline__ void column_piece(const momentum_entry& e, const momentum_numbers& s,
                                             const d3_vector<MD, N>& due, char* m, const char* g,
                                             double (&l1)[N], double (&squares)[N]) {
    const int64_t m_jump = e.m.row * (d3_size<MD>(e.momentum_dtype) * D3_WARPS);
    const int64_t g_jump = e.g.row * (d3_size<GD>(e.grad_dtype) * D3_WARPS);
    d3_vector<MD, N> old[V];
    d3_vector<GD, N> grad[V];
#pragma unroll
    for (int v = 0; v < V; ++v) old[v] = d3_fetch_aligned<MD, N>(m + v * m_jump, e.momentum_dtype);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        grad[v] = d3_fetch_aligned<GD, N, true>(g + v * g_jump, e.grad_dtype);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
        float x[N], y[N];
        if (s.feeds_back) {
            const d3_vector<MD, N> low = damped<MD, N>(e, s, old[v]);
#pragma unroll
            for (int i = 0; i < low.WORDS; ++i) {
                old[v].word[i] = (old[v].word[i] & ~due.word[i]) | (low.word[i] & due.word[i]);
            }
        }
        old[v] = advance<MD, GD, N>(e, s, old[v], grad[v], x, y);
        d3_put_aligned<MD, N>(m + v * m_jump, e.momentum_dtype, old[v]);
        add_up<N>(s, x, y, [&](int i, double value, double input) {
            l1[i] += fabs(value);
            squares[i] = fma(input, input, squares[i]);
        });
    }
}

template <int MD, int GD>
__global__ void __launch_bounds__(D3_THREADS, MD == DION3_F32 ? 3 : 2)
    momentum_columns_kernel(const __grid_constant__ momentum_table table) {
    constexpr int N = d3_width(MD), TILE = 32 * N, V = ROWS_AHEAD, PACKED = N / d3_vector<MD, N>::WORDS;
    __shared__ double part[D3_WARPS][TILE];
    const uint32_t index = d3_find(table, blockIdx.x);
    const momentum_entry& e = table.entries[index];
    const momentum_numbers s = numbers_of(e);
    const uint32_t cols = e.rows.cols, tiles = (cols + TILE - 1) / TILE;
    uint32_t rest = blockIdx.x - table.first[index];
    const uint32_t tile = rest % tiles;
    rest /= tiles;
    const uint32_t strip = rest % e.strips, batch = rest / e.strips;
    const uint32_t end = min((strip + 1) * e.strip_rows, e.rows.rows);
    const uint32_t lane = threadIdx.x % 32, group = threadIdx.x / 32;
    const uint32_t column = tile * TILE + lane * N;
    const int m_size = d3_size<MD>(e.momentum_dtype), g_size = d3_size<GD>(e.grad_dtype);
    const int64_t m_step = (N > 1 ? 1 : e.m.col) * m_size, g_step = (N > 1 ? 1 : e.g.col) * g_size;
    uint32_t row = strip * e.strip_rows + group;
    char* m = e.momentum + (batch * e.m.batch + row * e.m.row) * m_size + column * m_step;
    const char* g = e.grad + (batch * e.g.batch + row * e.g.row) * g_size + column * g_step;
    double l1[N], squares[N];
#pragma unroll
    for (int i = 0; i < N; ++i) l1[i] = squares[i] = 0.0;
    const auto is_due = [&](uint32_t i) {
        return s.feeds_back && column + i < cols &&
               (!e.slots || e.slots[(int64_t)batch * cols + column + i] >= 0);
    };
    d3_vector<MD, N> due = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (is_due(i)) due.word[i / PACKED] |= PACKED == 1 ? ~0u : 0xffffu << 16 * (i % 2);
    }

    if (column + N <= cols) {
#pragma unroll 1
        for (; row + (V - 1) * D3_WARPS < end; row += V * D3_WARPS) {
            column_piece<MD, GD, N, V>(e, s, due, m, g, l1, squares);
            m += e.m.row * (m_size * V * D3_WARPS);
            g += e.g.row * (g_size * V * D3_WARPS);
        }
    }
#pragma unroll 1
    for (; row < end; row += D3_WARPS) {
        if (column + N <= cols) {
            column_piece<MD, GD, N, 1>(e, s, due, m, g, l1, squares);
        } else if constexpr (N > 1) { /* the last columns, fewer than a vector */
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (column + i < cols) {
                    row_piece<MD, GD, 1>(e, s, m + i * m_step, g + i * g_step, false, is_due(i), l1[i],
                                         squares[i]);
                }
            }
        }
        m += e.m.row * (m_size * D3_WARPS);
        g += e.g.row * (g_size * D3_WARPS);
    }

    /* Over the warps of the block, in order. */
    for (int which = 0; which < 2; ++which) {
        double* direct = which ? e.sumsq : e.score;
        double* strips = which ? e.sumsq_strips : e.score_strips;
        if (!direct) continue;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; ++i) {
            part[group][lane * N + i] = which ? squares[i] : l1[i];
        }
        __syncthreads();
        if (threadIdx.x < TILE && tile * TILE + threadIdx.x < cols) {
            const uint32_t j = tile * TILE + threadIdx.x;
            double sum = 0.0;
            for (int w = 0; w < D3_WARPS; ++w) sum += part[w][threadIdx.x];
            if (strips) {
                strips[((int64_t)batch * e.strips + strip) * cols + j] = sum;
            } else {
                direct[(int64_t)batch * cols + j] = sum;
            }
        }
    }
}

/* The sums of the strips, in order: a block takes 32 columns, 8 threads each. */
__global__ void __launch_bounds__(D3_THREADS)
    momentum_strips_kernel(const __grid_constant__ momentum_table table) {
    __shared__ double part[D3_WARPS][32];
    const uint32_t index = d3_find(table, blockIdx.x);
    const momentum_entry& e = table.entries[index];
    const uint32_t cols = e.rows.cols, tiles = (cols + 31) / 32;
    const uint32_t block = blockIdx.x - table.first[index], batch = block / tiles;
    const uint32_t j = (block - batch * tiles) * 32 + threadIdx.x % 32;
    for (int which = 0; which < 2; ++which) {
        double* out = which ? e.sumsq : e.score;
        const double* strips = which ? e.sumsq_strips : e.score_strips;
        double sum = 0.0;
        if (!out) continue;
        if (j < cols) {
#pragma unroll 4
            for (uint32_t strip = threadIdx.x / 32; strip < e.strips; strip += D3_WARPS) {
                sum += strips[((int64_t)batch * e.strips + strip) * cols + j];
            }
        }
        __syncthreads();
        part[threadIdx.x / 32][threadIdx.x % 32] = sum;
        __syncthreads();
        if (threadIdx.x < 32 && j < cols) {
            sum = 0.0;
            for (int w = 0; w < D3_WARPS; ++w) sum += part[w][threadIdx.x];
            out[(int64_t)batch * cols + j] = sum;
        }
    }
}

/* ---- host ------------------------------------------------------------------------------------- */

enum { BF16_BF16, F32_BF16, F32_F32, F16_F16, F32_F16, ANY_ANY, DTYPE_PAIRS };

#define MOMENTUM_KERNELS(name)                                                                               \
    (const void*)name<DION3_BF16, DION3_BF16>, (const void*)name<DION3_F32, DION3_BF16>,                     \
        (const void*)name<DION3_F32, DION3_F32>, (const void*)name<DION3_F16, DION3_F16>,                    \
        (const void*)name<DION3_F32, DION3_F16>, (const void*)name<D3_ANY, D3_ANY>

static int dtype_pair(int32_t momentum, int32_t grad) {
    if (momentum == DION3_BF16 && grad == DION3_BF16) return BF16_BF16;
    if (momentum == DION3_F16 && grad == DION3_F16) return F16_F16;
    if (momentum != DION3_F32) return ANY_ANY;
    return grad == DION3_BF16 ? F32_BF16 : grad == DION3_F16 ? F32_F16 : F32_F32;
}

/* Rows or columns of the matrix as it lies in memory. */
static int by_columns(const dion3_momentum_item* it, int* turned) {
    *turned = it->momentum.col_stride != 1 && it->momentum.row_stride == 1;
    return (it->axis == DION3_COLS) != (*turned != 0) && (it->score || it->sumsq || it->slots);
}

static void strips_of(int64_t rows, uint32_t* strip_rows, uint32_t* strips) {
    int64_t height = (rows + MAX_STRIPS - 1) / MAX_STRIPS;
    height = height < STRIP_ROWS ? STRIP_ROWS : height;
    *strip_rows = (uint32_t)height;
    *strips = (uint32_t)((rows + height - 1) / height);
}

/* Everything but the number of blocks; returns the kernel. */
static int fill_entry(const dion3_momentum_item* it, momentum_entry* e, char** workspace) {
    int turned, pair = dtype_pair(it->momentum.dtype, it->grad.dtype);
    const int columns = by_columns(it, &turned), width = d3_width(it->momentum.dtype);
    const int64_t rows = turned ? it->cols : it->rows, cols = turned ? it->rows : it->cols;
    e->momentum = (char*)it->momentum.data;
    e->grad = (const char*)it->grad.data;
    e->slots = it->slots;
    e->feedback = it->feedback;
    e->hyper = it->hyper;
    e->score = it->score;
    e->sumsq = it->sumsq;
    e->score_strips = e->sumsq_strips = NULL;
    e->m = d3_strides_of(&it->momentum);
    e->g = d3_strides_of(&it->grad);
    if (turned) {
        d3_swap(&e->m.row, &e->m.col);
        d3_swap(&e->g.row, &e->g.col);
    }
    e->momentum_dtype = (uint8_t)it->momentum.dtype;
    e->grad_dtype = (uint8_t)it->grad.dtype;
    e->rows.rows = (uint32_t)rows;
    e->rows.cols = (uint32_t)cols;
    if (e->m.col != 1 || e->g.col != 1) pair = ANY_ANY;
    if (!columns) return pair;
    if (e->m.row % width || e->g.row % width || (uintptr_t)e->momentum % 16 || (uintptr_t)e->grad % 16 ||
        (it->batch > 1 && (e->m.batch % width || e->g.batch % width))) {
        pair = ANY_ANY;
    }
    strips_of(rows, &e->strip_rows, &e->strips);
    if (e->strips > 1) {
        const size_t bytes = (size_t)it->batch * e->strips * (size_t)cols * sizeof(double);
        if (e->score) {
            e->score_strips = (double*)*workspace;
            *workspace += bytes;
        }
        if (e->sumsq) {
            e->sumsq_strips = (double*)*workspace;
            *workspace += bytes;
        }
    }
    return DTYPE_PAIRS + pair;
}

static bool is_empty(const dion3_momentum_item* it) {
    return it->batch == 0 || it->rows == 0 || it->cols == 0;
}

static bool is_huge(const dion3_momentum_item* it) {
    return it->batch >= 1ll << 31 || it->rows >= 1ll << 31 || it->cols >= 1ll << 31;
}

/* An item without elements still has sums: of nothing, 0. */
static dion3_status clear_sums(const dion3_momentum_item* it, cudaStream_t stream) {
    const int64_t n = it->batch * (it->axis == DION3_ROWS ? it->rows : it->cols);
    if (n == 0 || !is_empty(it)) return DION3_OK;
    if (it->score) D3_CUDA(cudaMemsetAsync(it->score, 0, (size_t)n * sizeof(double), stream));
    if (it->sumsq) D3_CUDA(cudaMemsetAsync(it->sumsq, 0, (size_t)n * sizeof(double), stream));
    return DION3_OK;
}

static d3_work prepare_sums(const dion3_momentum_item* it, momentum_entry* e, char** workspace) {
    d3_work work = {0, 0};
    if (is_empty(it)) return work;
    work.blocks = D3_TOO_LARGE;
    if (is_huge(it)) return work;
    work.kernel = fill_entry(it, e, workspace);
    const int pair = work.kernel % DTYPE_PAIRS;
    const int width = pair == ANY_ANY ? 1 : d3_width(it->momentum.dtype);
    if (work.kernel < DTYPE_PAIRS) {
        work.blocks = d3_deal_rows(&e->rows, it->batch, e->rows.rows, e->rows.cols, width, 1, 1);
    } else {
        const uint64_t tile = 32 * (uint64_t)width;
        work.blocks = (e->rows.cols + tile - 1) / tile * e->strips * (uint64_t)it->batch;
    }
    return work;
}

static d3_work prepare_strips(const dion3_momentum_item* it, momentum_entry* e, char** workspace) {
    d3_work work = {0, 0};
    if (is_empty(it) || is_huge(it)) return work;
    if (fill_entry(it, e, workspace) < DTYPE_PAIRS || e->strips == 1) return work;
    work.blocks = (uint64_t)((e->rows.cols + 31) / 32) * (uint64_t)it->batch;
    return work;
}

static size_t workspace_bytes_of(const dion3_momentum_item* items, int64_t count) {
    momentum_entry entry;
    char* base = (char*)256;
    char* left = base;
    for (int64_t i = 0; i < count; ++i) {
        if (!is_empty(&items[i]) && !is_huge(&items[i])) fill_entry(&items[i], &entry, &left);
    }
    return (size_t)(left - base);
}

size_t dion3_momentum_workspace_size(const dion3_momentum_item* items, int64_t count) {
    if (d3_check_momentum(items, count) != DION3_OK) return 0;
    return workspace_bytes_of(items, count);
}

dion3_status dion3_momentum_cuda(const dion3_momentum_item* items, int64_t count, void* workspace,
                                 size_t workspace_bytes, dion3_stream stream) {
    static const void* const kernels[] = {MOMENTUM_KERNELS(momentum_rows_kernel),
                                          MOMENTUM_KERNELS(momentum_columns_kernel)};
    static const void* const strips[] = {(const void*)momentum_strips_kernel};
    D3_TRY(d3_check_momentum(items, count));
    D3_TRY(
        d3_check_workspace("dion3_momentum", workspace, workspace_bytes, workspace_bytes_of(items, count)));
    D3_TRY(d3_launch("dion3_momentum", items, count, prepare_sums, kernels, D3_THREADS, workspace, stream));
    D3_TRY(d3_launch("dion3_momentum", items, count, prepare_strips, strips, D3_THREADS, workspace, stream));
    for (int64_t i = 0; i < count; ++i) D3_TRY(clear_sums(&items[i], (cudaStream_t)stream));
    return DION3_OK;
}
