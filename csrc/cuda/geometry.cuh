/*
 * geometry.cuh - how rows are dealt to blocks, and the sums over them.
 *
 * A block of 256 threads takes a few consecutive rows of one matrix. Short rows are shared by 1 to 32
 * lanes of a warp, so that several rows are under way at once; long ones by two warps, four or the whole
 * block. What a block takes depends on the item alone, never on the other items, so neither do its sums.
 *
 * A row begins with up to N - 1 elements before its first aligned vector and ends with a rest; both
 * are done an element at a time, so rows of odd length keep their vectors.
 */
#ifndef DION3_GEOMETRY_CUH
#define DION3_GEOMETRY_CUH

#include "../dion3.h"

#define D3_THREADS 256
#define D3_WARPS (D3_THREADS / 32)
#define D3_WARP_VECTORS 512                    /* a row of up to this many vectors belongs to one warp */
#define D3_BLOCK_VECTORS (2 * D3_WARP_VECTORS) /* what a block takes at least */

struct d3_strides {
    int64_t batch, row, col;
};

/* The rows of an item. */
struct d3_rows {
    uint32_t rows, cols;
    uint32_t rows_per_block;
    uint32_t blocks_per_matrix;
    uint32_t log_lanes; /* 2^log_lanes threads share a row */
};

/* What a thread has of it. */
struct d3_place {
    uint32_t batch;         /* the matrix */
    uint32_t first;         /* the block's first row */
    uint32_t rows;          /* how many rows the block has */
    uint32_t group, groups; /* rows group, group + groups, ... of them are this thread's */
    uint32_t lane, lanes;   /* vectors lane, lane + lanes, ... of each */
};

/* ---- host ------------------------------------------------------------------------------------- */

static inline d3_strides d3_strides_of(const dion3_tensor* t) {
    d3_strides s = {t->batch_stride, t->row_stride, t->col_stride};
    return s;
}

static inline void d3_swap(int64_t* a, int64_t* b) {
    const int64_t c = *a;
    *a = *b;
    *b = c;
}

/* By how many vectors the last turn at a row falls short of the two that each of its threads could take. */
static inline uint32_t d3_short_of_turn(uint32_t vectors, uint32_t log_lanes) {
    const uint32_t turn = 2u << log_lanes, rest = vectors % turn;
    return rest ? turn - rest : 0;
}

/* Deals rows x cols in vectors of `width` elements. Threads that share a row get `each` rows (whole warps:
 * `each_long`), more if their block would have too few vectors: the numbers are measured, an operation likes one
 * row or several. Returns the number of blocks of `batch` matrices, ~0 if they are too many for 32-bit sizes. */
static inline uint64_t d3_deal_rows(d3_rows* g, int64_t batch, int64_t rows, int64_t cols, int width,
                                    uint32_t each, uint32_t each_long) {
    if (batch == 0 || rows == 0 || cols == 0) return 0;
    if (rows >= 1ll << 31 || cols >= 1ll << 31 || batch >= 1ll << 31) return ~0ull;
    const uint32_t vectors = (uint32_t)((cols + width - 1) / width);
    g->log_lanes = 8;
    if (vectors <= D3_WARP_VECTORS) {
        g->log_lanes = 0;
        while (g->log_lanes < 5 && (1u << g->log_lanes) < vectors) ++g->log_lanes;
    }
    while (g->log_lanes > 6 && d3_short_of_turn(vectors, g->log_lanes) > vectors / 8) --g->log_lanes;
    const uint32_t groups = D3_THREADS >> g->log_lanes, least = D3_BLOCK_VECTORS / vectors / groups;
    if (g->log_lanes > 5) each = each_long;
    g->rows_per_block = (least > each ? least : each) * groups;
    g->rows = (uint32_t)rows;
    g->cols = (uint32_t)cols;
    g->blocks_per_matrix = (uint32_t)((rows + g->rows_per_block - 1) / g->rows_per_block);
    return (uint64_t)g->blocks_per_matrix * (uint64_t)batch;
}

/* ---- device ----------------------------------------------------------------------------------- */

__device__ __forceinline__ d3_place d3_place_of(const d3_rows& g, uint32_t block) {
    d3_place p;
    p.batch = block / g.blocks_per_matrix;
    p.first = (block - p.batch * g.blocks_per_matrix) * g.rows_per_block;
    p.rows = min(g.rows_per_block, g.rows - p.first);
    p.lanes = 1u << g.log_lanes;
    p.groups = D3_THREADS >> g.log_lanes;
    p.lane = threadIdx.x & (p.lanes - 1);
    p.group = threadIdx.x >> g.log_lanes;
    return p;
}

/* Elements of a contiguous row before its first aligned vector of N. */
template <int N>
__device__ __forceinline__ uint32_t d3_head(const void* row, int size, uint32_t cols) {
    if (N == 1) return 0;
    const uint32_t past = (uint32_t)((uintptr_t)row / (uint32_t)size) & (N - 1);
    return min((N - past) & (N - 1), cols);
}

/* Sum over the (at most 32) neighbouring lanes that share a row; all of them get it. Whole warps call it. */
__device__ __forceinline__ double d3_sum_lanes(double x, uint32_t lanes) {
    for (uint32_t offset = min(lanes, 32u) >> 1; offset; offset >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, (int)offset);
    }
    return x;
}

/* Sum over a block of up to 1024 threads in a fixed order; every thread gets it. part holds 32. */
__device__ __forceinline__ double d3_sum_block(double x, double* part) {
    x = d3_sum_lanes(x, 32);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0.0;
    return d3_sum_lanes(x, 32);
}

#endif
