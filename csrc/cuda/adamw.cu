/*
 * adamw.cu - decoupled AdamW on flat arrays, for everything that is not a hidden matrix.
 *
 *   g = sign grad; m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g g;
 *   w <- round(decay w - step_size (m / (sqrt(v) / root + eps))), m and v unrounded there.
 *   param, grad, exp_avg, exp_avg_sq (count), any dtypes.
 * A block of 256 threads takes 4 x 256 vectors; its first loads are under way while one thread computes the
 * bias corrections from the step's number in device memory. Arrays whose bases differ in their alignment
 * go an element at a time.
 * Bytes an element: 2 |w| + |g| + 4 |state| (all bf16: 14, fp32: 28). About 40 instructions, 50 with stochastic
 * rounding, of some 95 that the bandwidth of an H200 leaves room for in bf16.
 */
#include "../rows.h"
#include "element.cuh"
#include "geometry.cuh"
#include "ptx_sm80.cuh"
#include "table.cuh"

#define VECTORS_PER_THREAD 4
#define BLOCK_VECTORS (VECTORS_PER_THREAD * D3_THREADS)

struct adamw_entry {
    char* param;
    const char* grad;
    char *exp_avg, *exp_avg_sq;
    const float* step;
    const float* hyper;
    uint64_t seed;
    int64_t count, index_base;
    uint32_t param_id;
    uint8_t param_dtype, grad_dtype, state_dtype, stochastic;
    uint32_t head; /* elements before the first vector */
};

typedef d3_table<adamw_entry> adamw_table;

/* Elements of a vector: 16 bytes of the widest array. */
__host__ __device__ constexpr int adamw_width(int param, int grad, int state) {
    return param == D3_ANY ? 1 : param == DION3_F32 || grad == DION3_F32 || state == DION3_F32 ? 4 : 8;
}

template <int PD, int GD, int SD, int N>
struct adamw_piece {
    d3_vector<PD, N> w;
    d3_vector<GD, N> g;
    d3_vector<SD, N> m, v;
};

template <int PD, int GD, int SD, int N>
__device__ __forceinline__ adamw_piece<PD, GD, SD, N> fetch(const adamw_entry& e, int64_t j) {
    adamw_piece<PD, GD, SD, N> p;
    p.w = d3_fetch_aligned<PD, N>(e.param + j * d3_size<PD>(e.param_dtype), e.param_dtype);
    p.g = d3_fetch_aligned<GD, N, true>(e.grad + j * d3_size<GD>(e.grad_dtype), e.grad_dtype);
    p.m = d3_fetch_aligned<SD, N>(e.exp_avg + j * d3_size<SD>(e.state_dtype), e.state_dtype);
    p.v = d3_fetch_aligned<SD, N>(e.exp_avg_sq + j * d3_size<SD>(e.state_dtype), e.state_dtype);
    return p;
}

/* The compiler's own exact division and square root, without the branch to a slow path that it puts behind each:
 * 24 branches a vector, between which nothing overlaps. All are exact while no step of theirs overflows or
 * loses bits to subnormals. */
__device__ __forceinline__ float reciprocal(float b) {
    const float r = ptx80_rcp_approx(b);
    return __fmaf_rn(r, __fmaf_rn(-b, r, 1.0f), r);
}

__device__ __forceinline__ float quotient(float a, float b, float reciprocal_b) {
    const float q = __fmul_rn(a, reciprocal_b);
    return __fmaf_rn(reciprocal_b, __fmaf_rn(-b, q, a), q);
}

__device__ __forceinline__ float square_root(float x) {
    const float y = ptx80_rsqrt_approx(x), root = __fmul_rn(x, y);
    return __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(0.5f, y), root);
}

/* x becomes the direction of the step, bit for bit d3_adamw_direction. With |m| and v from 2^-90 to 2^30,
 * root from 2^-20 to 1 and eps from 0 to 2^20 the denominator lies between 2^-45 and 2^36, the quotient above
 * 2^-126, and no remainder has bits below 2^-149. */
template <int N>
__device__ __forceinline__ void directions(const d3_adamw& s, const float (&m)[N], const float (&v)[N],
                                           float (&x)[N]) {
    float low = 0x1p30f, high = 0x1p-90f; /* a NaN passes, and stays one either way */
#pragma unroll
    for (int i = 0; i < N; ++i) {
        low = fminf(low, fminf(fabsf(m[i]), v[i]));
        high = fmaxf(high, fmaxf(fabsf(m[i]), v[i]));
    }
    const bool tame = s.root >= 0x1p-20f && s.root <= 1.0f && s.eps >= 0.0f && s.eps <= 0x1p20f;
    if (tame && low >= 0x1p-90f && high <= 0x1p30f) {
        const float inverse_root = reciprocal(s.root);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float d = d3_add(quotient(square_root(v[i]), s.root, inverse_root), s.eps);
            x[i] = quotient(m[i], d, reciprocal(d));
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = d3_adamw_direction(&s, m[i], v[i]);
    }
}

template <int PD, int GD, int SD, int N>
__device__ __forceinline__ void advance(const adamw_entry& e, const d3_adamw& s, uint32_t step, int64_t j,
                                        const adamw_piece<PD, GD, SD, N>& p) {
    float w[N], g[N], m[N], v[N], x[N];
    d3_widen<PD, N>(p.w, e.param_dtype, w);
    d3_widen<GD, N>(p.g, e.grad_dtype, g);
    d3_widen<SD, N>(p.m, e.state_dtype, m);
    d3_widen<SD, N>(p.v, e.state_dtype, v);
#pragma unroll
    for (int i = 0; i < N; ++i) d3_adamw_moments(&s, g[i], &m[i], &v[i]);
    directions<N>(s, m, v, x);
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] = d3_adamw_weight(&s, w[i], x[i]);
    d3_put_aligned<SD, N>(e.exp_avg + j * d3_size<SD>(e.state_dtype), e.state_dtype,
                          d3_round<SD, N>(m, e.state_dtype));
    d3_put_aligned<SD, N>(e.exp_avg_sq + j * d3_size<SD>(e.state_dtype), e.state_dtype,
                          d3_round<SD, N>(v, e.state_dtype));
    d3_vector<PD, N> rounded;
    if (PD != DION3_F32 && e.stochastic) {
        uint32_t u[(N + 1) / 2];
        d3_random_words<N>(e.seed, step, e.param_id, e.index_base + j, 1, u);
        rounded = d3_round_stochastic<PD, N>(w, e.param_dtype, u);
    } else {
        rounded = d3_round<PD, N>(w, e.param_dtype);
    }
    d3_put_aligned<PD, N>(e.param + j * d3_size<PD>(e.param_dtype), e.param_dtype, rounded);
}

template <int PD, int GD, int SD>
__global__ void __launch_bounds__(D3_THREADS, 4) adamw_kernel(const __grid_constant__ adamw_table table) {
    constexpr int N = adamw_width(PD, GD, SD);
    __shared__ d3_adamw shared_scalars;
    const uint32_t index = d3_find(table, blockIdx.x);
    const adamw_entry& e = table.entries[index];
    const uint32_t block = blockIdx.x - table.first[index];
    const int64_t vectors = (e.count - e.head) / N;
    const int64_t end = min(vectors, (int64_t)(block + 1) * BLOCK_VECTORS);
    int64_t vector = (int64_t)block * BLOCK_VECTORS + threadIdx.x;
    adamw_piece<PD, GD, SD, N> piece;
    if (vector < end) piece = fetch<PD, GD, SD, N>(e, e.head + vector * N);
    const float step = *e.step;
    if (threadIdx.x == 0) shared_scalars = d3_adamw_scalars(e.hyper, step);
    __syncthreads();
    const d3_adamw s = shared_scalars;
    const uint32_t number = d3_step_number(step);
    while (vector < end) {
        advance<PD, GD, SD, N>(e, s, number, e.head + vector * N, piece);
        vector += D3_THREADS;
        if (vector < end) piece = fetch<PD, GD, SD, N>(e, e.head + vector * N);
    }
    if constexpr (N > 1) {
        const uint32_t body = (uint32_t)(e.count - vectors * N); /* what no vector holds: the two ends */
        if (block == 0 && threadIdx.x < body) {
            const int64_t j = threadIdx.x < e.head ? threadIdx.x : threadIdx.x + vectors * N;
            advance<PD, GD, SD, 1>(e, s, number, j, fetch<PD, GD, SD, 1>(e, j));
        }
    }
}

/* ---- host ------------------------------------------------------------------------------------- */

enum { ANY_ANY = 6 };

/* The combinations with a kernel of their own: param, grad, state. */
static const int32_t combinations[ANY_ANY][3] = {
    {DION3_BF16, DION3_BF16, DION3_BF16}, {DION3_BF16, DION3_BF16, DION3_F32},
    {DION3_F32, DION3_F32, DION3_F32},    {DION3_F32, DION3_BF16, DION3_F32},
    {DION3_F16, DION3_F16, DION3_F32},    {DION3_F16, DION3_F16, DION3_F16},
};

static int64_t past_boundary(const void* p, int32_t dtype, int width) {
    return (int64_t)((uintptr_t)p / (dtype == DION3_F32 ? 4 : 2) % (uintptr_t)width);
}

static d3_work prepare(const dion3_adamw_item* it, adamw_entry* e, char** workspace) {
    d3_work work = {ANY_ANY, 0};
    int width = 1;
    (void)workspace;
    if (it->count == 0) return work;
    e->param = (char*)it->param;
    e->grad = (const char*)it->grad;
    e->exp_avg = (char*)it->exp_avg;
    e->exp_avg_sq = (char*)it->exp_avg_sq;
    e->step = it->step;
    e->hyper = it->hyper;
    e->seed = it->seed;
    e->count = it->count;
    e->index_base = it->index_base;
    e->param_id = it->param_id;
    e->param_dtype = (uint8_t)it->param_dtype;
    e->grad_dtype = (uint8_t)it->grad_dtype;
    e->state_dtype = (uint8_t)it->state_dtype;
    e->stochastic = it->stochastic != 0;
    e->head = 0;
    for (int i = 0; i < ANY_ANY; ++i) {
        const int32_t* c = combinations[i];
        if (it->param_dtype != c[0] || it->grad_dtype != c[1] || it->state_dtype != c[2]) continue;
        const int lead = adamw_width(c[0], c[1], c[2]);
        const int64_t past = past_boundary(it->param, c[0], lead);
        if (past_boundary(it->grad, c[1], lead) != past || past_boundary(it->exp_avg, c[2], lead) != past ||
            past_boundary(it->exp_avg_sq, c[2], lead) != past) {
            break;
        }
        const int64_t head = (lead - past) % lead;
        e->head = (uint32_t)(head < it->count ? head : it->count);
        work.kernel = i;
        width = lead;
    }
    const int64_t vectors = (it->count - e->head) / width;
    work.blocks = vectors ? (uint64_t)((vectors + BLOCK_VECTORS - 1) / BLOCK_VECTORS) : 1;
    return work;
}

dion3_status dion3_adamw_cuda(const dion3_adamw_item* items, int64_t count, dion3_stream stream) {
    static const void* const kernels[] = {(const void*)adamw_kernel<DION3_BF16, DION3_BF16, DION3_BF16>,
                                          (const void*)adamw_kernel<DION3_BF16, DION3_BF16, DION3_F32>,
                                          (const void*)adamw_kernel<DION3_F32, DION3_F32, DION3_F32>,
                                          (const void*)adamw_kernel<DION3_F32, DION3_BF16, DION3_F32>,
                                          (const void*)adamw_kernel<DION3_F16, DION3_F16, DION3_F32>,
                                          (const void*)adamw_kernel<DION3_F16, DION3_F16, DION3_F16>,
                                          (const void*)adamw_kernel<D3_ANY, D3_ANY, D3_ANY>};
    D3_TRY(d3_check_adamw(items, count));
    return d3_launch("dion3_adamw", items, count, prepare, kernels, D3_THREADS, NULL, stream);
}
