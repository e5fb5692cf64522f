/*
 * select.cu - the k slices with the largest score of every matrix: indices, inverse map, norm.
 *
 *   score, sumsq (batch, n) fp64; indices (batch, k) int32 ascending; slots (batch, n) int32; norm (batch).
 * One block of 1024 threads a matrix. A score becomes a 64-bit key in the order of the scores, NaN above
 * all. Radix select: 11 bits a pass from the highest bit in which the keys differ, a histogram in shared
 * memory, until the bin of the k-th key is wanted whole (two or three passes on real scores, six at
 * most). Then one ordered pass: ballots give each key its rank among the larger and among the equal ones, so
 * that ties go to the lower index and indices come out ascending. The first 8192 keys stay in registers;
 * beyond that every pass reads the scores again. Nothing depends on the order of threads.
 * Bytes: n scores and n sumsq, from L2 behind the momentum kernel. Latency is the roof: 5-10 us for all
 * matrices with n up to 8192 together.
 * Source: Algorithm 4 line 2.
 */
#include "geometry.cuh"
#include "table.cuh"

#define SELECT_THREADS 1024
#define HELD 8 /* keys of a thread in registers */
#define DIGIT_BITS 11
#define BINS (1 << DIGIT_BITS)
#define SWEEP 32768 /* keys ranked at a time: one warp of them to a thread */
#define ALL 0xffffffffu

struct select_entry {
    const double *score, *sumsq;
    int32_t *indices, *slots;
    double* norm;
    uint32_t n, k;
};

typedef d3_table<select_entry> select_table;

struct select_shared {
    uint32_t histogram[BINS];
    uint32_t warp[32];
    uint64_t all_ones[32], any_ones[32];
    uint32_t digit, above, count;
    double part[32];
};

/* Order-preserving: NaN last, -0 as 0. */
__device__ __forceinline__ uint64_t key_of(double score) {
    const uint64_t bits = (uint64_t)__double_as_longlong(score + 0.0);
    if (score != score) return ~0ull;
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

/* visit(i, key) for this thread's keys of begin .. end - 1, ascending; in the last round key is 0 and
 * i >= end where a thread has none: whole warps make every call. begin is 0 or beyond the held keys. */
template <typename Visit>
__device__ __forceinline__ void for_keys(const uint64_t (&held)[HELD], const double* score, uint32_t begin,
                                         uint32_t end, Visit visit) {
    if (begin == 0) {
#pragma unroll
        for (int c = 0; c < HELD; ++c) {
            if ((uint32_t)c * SELECT_THREADS < end) visit(c * SELECT_THREADS + threadIdx.x, held[c]);
        }
        begin = HELD * SELECT_THREADS;
    }
    for (uint32_t base = begin; base < end; base += SELECT_THREADS) {
        const uint32_t i = base + threadIdx.x;
        visit(i, i < end ? key_of(score[i]) : 0);
    }
}

/* Inclusive prefix sum over the block. */
__device__ __forceinline__ uint32_t scan_block(uint32_t x, uint32_t* warp) {
    const uint32_t lane = threadIdx.x % 32;
    for (int offset = 1; offset < 32; offset <<= 1) {
        const uint32_t y = __shfl_up_sync(ALL, x, offset);
        if (lane >= (uint32_t)offset) x += y;
    }
    __syncthreads();
    if (lane == 31) warp[threadIdx.x / 32] = x;
    __syncthreads();
    uint32_t before = lane < threadIdx.x / 32 ? warp[lane] : 0;
    for (int offset = 16; offset; offset >>= 1) before += __shfl_xor_sync(ALL, before, offset);
    return x + before;
}

__device__ __forceinline__ uint64_t and_warp(uint64_t x) {
    const uint32_t low = __reduce_and_sync(ALL, (uint32_t)x);
    return (uint64_t)__reduce_and_sync(ALL, (uint32_t)(x >> 32)) << 32 | low;
}

/* Finds the threshold: keys whose bits from `shift` on exceed those of prefix are selected, and of those
 * that equal them the first `wanted`. */
__device__ __forceinline__ void find_threshold(select_shared& sh, const uint64_t (&held)[HELD],
                                               const double* score, uint32_t n, uint64_t& prefix, int& shift,
                                               uint32_t& wanted) {
    uint64_t ones = ~0ull, any = 0;
    for_keys(held, score, 0, n, [&](uint32_t i, uint64_t key) {
        if (i < n) {
            ones &= key;
            any |= key;
        }
    });
    ones = and_warp(ones);
    any = ~and_warp(~any);
    if (threadIdx.x % 32 == 0) {
        sh.all_ones[threadIdx.x / 32] = ones;
        sh.any_ones[threadIdx.x / 32] = any;
    }
    __syncthreads();
    const uint64_t common = and_warp(sh.all_ones[threadIdx.x % 32]);
    const uint64_t differing = common ^ ~and_warp(~sh.any_ones[threadIdx.x % 32]);
    shift = 64 - __clzll((long long)differing); /* the bits above are common to all keys */
    prefix = common;
    while (shift > 0) {
        const int low = max(shift - DIGIT_BITS, 0);
        const uint32_t digit_mask = (1u << (shift - low)) - 1;
        const uint64_t above_mask = shift < 64 ? ~0ull << shift : 0;
        for (uint32_t b = threadIdx.x; b < BINS; b += SELECT_THREADS) sh.histogram[b] = 0;
        __syncthreads();
        for_keys(held, score, 0, n, [&](uint32_t i, uint64_t key) {
            if (i < n && ((key ^ prefix) & above_mask) == 0) {
                atomicAdd(&sh.histogram[(uint32_t)(key >> low) & digit_mask], 1u);
            }
        });
        __syncthreads();
        /* From the largest digit down: two bins a thread. */
        const uint32_t high_bin = BINS - 1 - 2 * threadIdx.x;
        const uint32_t first = sh.histogram[high_bin], second = sh.histogram[high_bin - 1];
        const uint32_t through = scan_block(first + second, sh.warp), before = through - first - second;
        if (before < wanted && wanted <= through) {
            const bool in_first = wanted <= before + first;
            sh.digit = in_first ? high_bin : high_bin - 1;
            sh.above = in_first ? before : before + first;
            sh.count = in_first ? first : second;
        }
        __syncthreads();
        prefix = (prefix & above_mask) | (uint64_t)sh.digit << low;
        wanted -= sh.above;
        shift = low;
        if (wanted == sh.count) break;
    }
}

__global__ void __launch_bounds__(SELECT_THREADS) select_kernel(const __grid_constant__ select_table table) {
    __shared__ select_shared sh;
    __shared__ uint32_t ranks[SWEEP / 32];
    const uint32_t index = d3_find(table, blockIdx.x);
    const select_entry& e = table.entries[index];
    const int64_t batch = blockIdx.x - table.first[index];
    const uint32_t n = e.n, k = e.k, lane = threadIdx.x % 32;
    const double* const score = e.score + batch * n;
    const double* const sumsq = e.sumsq ? e.sumsq + batch * n : NULL;
    int32_t* const indices = e.indices ? e.indices + batch * k : NULL;
    int32_t* const slots = e.slots ? e.slots + batch * n : NULL;
    double squares = 0.0;

    if (k == n) {
        for (uint32_t i = threadIdx.x; i < n; i += SELECT_THREADS) {
            if (indices) indices[i] = (int32_t)i;
            if (slots) slots[i] = (int32_t)i;
            if (e.norm) squares += sumsq[i];
        }
    } else {
        uint64_t held[HELD], prefix;
        uint32_t wanted = k, larger = 0, equal = 0; /* counts of the sweeps before */
        int shift;
#pragma unroll
        for (int c = 0; c < HELD; ++c) {
            const uint32_t i = c * SELECT_THREADS + threadIdx.x;
            held[c] = i < n ? key_of(score[i]) : 0;
        }
        find_threshold(sh, held, score, n, prefix, shift, wanted);
        const uint64_t threshold = prefix >> shift;
        for (uint32_t base = 0; base < n; base += SWEEP) {
            const uint32_t end = min(base + SWEEP, n);
            ranks[threadIdx.x] = 0;
            __syncthreads();
            for_keys(held, score, base, end, [&](uint32_t i, uint64_t key) {
                const uint32_t above = __ballot_sync(ALL, i < end && key >> shift > threshold);
                const uint32_t ties = __ballot_sync(ALL, i < end && key >> shift == threshold);
                if (lane == 0) ranks[(i - base) / 32] = __popc(above) | __popc(ties) << 16;
            });
            __syncthreads();
            /* Both counts in one sum: neither exceeds 32768 in a sweep. */
            const uint32_t own = ranks[threadIdx.x], through = scan_block(own, sh.warp);
            ranks[threadIdx.x] = through - own;
            if (threadIdx.x == SELECT_THREADS - 1) sh.count = through;
            __syncthreads();
            for_keys(held, score, base, end, [&](uint32_t i, uint64_t key) {
                const bool is_above = i < end && key >> shift > threshold;
                const bool is_tie = i < end && key >> shift == threshold;
                const uint32_t above = __ballot_sync(ALL, is_above), ties = __ballot_sync(ALL, is_tie);
                const uint32_t before = (1u << lane) - 1, rank = ranks[(i - base) / 32];
                const uint32_t tie_rank = equal + (rank >> 16) + __popc(ties & before);
                const uint32_t slot =
                    larger + (rank & 0xffffu) + __popc(above & before) + min(tie_rank, wanted);
                const bool selected = is_above || (is_tie && tie_rank < wanted);
                if (selected && indices) indices[slot] = (int32_t)i;
                if (i < end && slots) slots[i] = selected ? (int32_t)slot : -1;
                if (selected && e.norm) squares += sumsq[i];
            });
            larger += sh.count & 0xffffu;
            equal += sh.count >> 16;
            __syncthreads();
        }
    }
    if (!e.norm) return;
    squares = d3_sum_block(squares, sh.part);
    if (threadIdx.x == 0) e.norm[batch] = sqrt(squares);
}

/* ---- host ------------------------------------------------------------------------------------- */

static d3_work prepare(const dion3_select_item* it, select_entry* e, char** workspace) {
    d3_work work = {0, 0};
    (void)workspace;
    if (it->batch == 0 || it->n == 0) return work;
    e->score = it->score;
    e->sumsq = it->sumsq;
    e->indices = it->indices;
    e->slots = it->slots;
    e->norm = it->norm;
    e->n = (uint32_t)it->n;
    e->k = (uint32_t)it->k;
    work.blocks = (uint64_t)it->batch;
    return work;
}

size_t dion3_select_workspace_size(const dion3_select_item* items, int64_t count) {
    (void)items;
    (void)count;
    return 0; /* everything is in registers and shared memory */
}

dion3_status dion3_select_cuda(const dion3_select_item* items, int64_t count, void* workspace,
                               size_t workspace_bytes, dion3_stream stream) {
    static const void* const kernels[] = {(const void*)select_kernel};
    (void)workspace_bytes;
    D3_TRY(d3_check_select(items, count));
    return d3_launch("dion3_select", items, count, prepare, kernels, SELECT_THREADS, workspace, stream);
}

/* All files are compiled for the same architectures, so any kernel answers for all. Only what says that there is
 * no code for this GPU counts: a lack of memory, or an error of an earlier launch, is for the launch to report. */
int32_t dion3_cuda_runs_on(int32_t device) {
    int before;
    cudaFuncAttributes attributes;
    if (cudaGetDevice(&before) != cudaSuccess) return 0;
    cudaError_t error = before == device ? cudaSuccess : cudaSetDevice(device);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, (const void*)select_kernel);
    if (before != device) (void)cudaSetDevice(before);
    if (error != cudaSuccess) (void)cudaGetLastError();
    switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorInvalidDevice:
    case cudaErrorNoDevice:
        return 0;
    default:
        return 1;
    }
}
