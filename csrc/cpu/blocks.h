/*
 * blocks.h - a piece of a row as fp32 in the first-level cache: load and widen, compute, round and store.
 *
 * The operations of this directory walk a matrix row by row in pieces of at most D3_BLOCK elements. A
 * piece with stride 1 runs through loops that the compiler vectorises; any other stride through the
 * same loops with a multiplication in the address. Functions marked D3_CLONES are compiled for AVX2
 * and AVX-512 besides the baseline, and the loader picks one; no operation here may be fused or
 * reordered (-ffp-contract=off), so all give the same bits.
 */
#ifndef DION3_CPU_BLOCKS_H
#define DION3_CPU_BLOCKS_H

#include "../dion3_round.h"
#include "../rows.h"

#define D3_INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define D3_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define D3_CLONES __attribute__((target_clones("avx2", "default")))
#endif
#else
#define D3_CLONES
#endif

/* D3_PARALLEL(elements) begins a parallel region where there is OpenMP and the call is worth more than one
 * thread; D3_FOR shares the loop after it, with no wait at its end, and D3_FOR_BY hands out that many turns at
 * a time: to fetch a turn costs as much as a matrix of a few elements. */
#ifdef _OPENMP
#define D3_PRAGMA(text) _Pragma(#text)
#define D3_PARALLEL(elements) D3_PRAGMA(omp parallel if ((elements) > D3_TASK_ELEMENTS))
#define D3_FOR D3_PRAGMA(omp for schedule(dynamic) nowait)
#define D3_FOR_BY(turns) D3_PRAGMA(omp for schedule(dynamic, turns) nowait)
#define D3_BARRIER D3_PRAGMA(omp barrier)
#else
#define D3_PARALLEL(elements) (void)(elements);
#define D3_FOR
#define D3_FOR_BY(turns) (void)(turns);
#define D3_BARRIER
#endif

enum {
    D3_BLOCK = 512,           /* elements of a piece */
    D3_TASK_ELEMENTS = 32768, /* elements of a matrix that one thread takes at a time */
    D3_LANES = 16             /* partial sums of a row */
};

D3_INLINE int64_t d3_min(int64_t a, int64_t b) { return a < b ? a : b; }

/* Rows of one task, at least one. */
D3_INLINE int64_t d3_task_rows(int64_t cols) {
    return cols >= D3_TASK_ELEMENTS ? 1 : D3_TASK_ELEMENTS / (cols > 0 ? cols : 1);
}

D3_INLINE int64_t d3_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Asks for the lines of p + ahead .. p + ahead + bytes - 1, to be written soon; they need not exist. */
D3_INLINE void d3_prefetch(const void* p, int64_t ahead, int64_t bytes) {
#ifdef __GNUC__
    const uintptr_t first = (uintptr_t)p + (uintptr_t)ahead;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const void*)(first + (uintptr_t)i), 1);
#else
    (void)p, (void)ahead, (void)bytes;
#endif
}

/* Where element (b, i, j) of a tensor stands. */
D3_INLINE int64_t d3_offset(const dion3_tensor* t, int64_t b, int64_t i, int64_t j) {
    return b * t->batch_stride + i * t->row_stride + j * t->col_stride;
}

/* x[0 .. n) <- data[offset + j * stride] */
D3_INLINE void d3_block_load(float* restrict x, const void* data, int32_t dtype, int64_t offset,
                             int64_t stride, int64_t n) {
    if (dtype == DION3_F32) {
        const float* restrict p = (const float*)data + offset;
        if (stride == 1) {
            memcpy(x, p, (size_t)n * sizeof *x);
        } else {
            for (int64_t j = 0; j < n; ++j) x[j] = p[j * stride];
        }
    } else if (dtype == DION3_BF16) {
        const uint16_t* restrict p = (const uint16_t*)data + offset;
        if (stride == 1) {
            for (int64_t j = 0; j < n; ++j) x[j] = d3_from_bf16(p[j]);
        } else {
            for (int64_t j = 0; j < n; ++j) x[j] = d3_from_bf16(p[j * stride]);
        }
    } else {
        const uint16_t* restrict p = (const uint16_t*)data + offset;
        if (stride == 1) {
            for (int64_t j = 0; j < n; ++j) x[j] = d3_from_fp16(p[j]);
        } else {
            for (int64_t j = 0; j < n; ++j) x[j] = d3_from_fp16(p[j * stride]);
        }
    }
}

/* The n elements as fp32: where they lie if they are contiguous fp32, else loaded into `buffer`. */
D3_INLINE const float* d3_block_view(float* restrict buffer, const void* data, int32_t dtype, int64_t offset,
                                     int64_t stride, int64_t n) {
    if (dtype == DION3_F32 && stride == 1) return (const float*)data + offset;
    d3_block_load(buffer, data, dtype, offset, stride, n);
    return buffer;
}

/* data[offset + j * stride] <- nearest(x[j]) */
D3_INLINE void d3_block_store(const float* restrict x, void* data, int32_t dtype, int64_t offset,
                              int64_t stride, int64_t n) {
    if (dtype == DION3_F32) {
        float* restrict p = (float*)data + offset;
        if (stride == 1) {
            memcpy(p, x, (size_t)n * sizeof *x);
        } else {
            for (int64_t j = 0; j < n; ++j) p[j * stride] = x[j];
        }
    } else if (dtype == DION3_BF16) {
        uint16_t* restrict p = (uint16_t*)data + offset;
        if (stride == 1) {
            for (int64_t j = 0; j < n; ++j) p[j] = d3_to_bf16(x[j]);
        } else {
            for (int64_t j = 0; j < n; ++j) p[j * stride] = d3_to_bf16(x[j]);
        }
    } else {
        uint16_t* restrict p = (uint16_t*)data + offset;
        if (stride == 1) {
            for (int64_t j = 0; j < n; ++j) p[j] = d3_to_fp16(x[j]);
        } else {
            for (int64_t j = 0; j < n; ++j) p[j * stride] = d3_to_fp16(x[j]);
        }
    }
}

/* x[j] <- x[j] as it will read back from dtype */
D3_INLINE void d3_block_round(float* restrict x, int32_t dtype, int64_t n) {
    if (dtype == DION3_BF16) {
        for (int64_t j = 0; j < n; ++j) x[j] = d3_from_bf16(d3_to_bf16(x[j]));
    } else if (dtype == DION3_F16) {
        for (int64_t j = 0; j < n; ++j) x[j] = d3_from_fp16(d3_to_fp16(x[j]));
    }
}

/* data[offset + j * stride] <- stochastic(x[j]) with the bits of global elements index .. index + n - 1 */
D3_INLINE void d3_block_store_stochastic(const float* restrict x, void* data, int32_t dtype, int64_t offset,
                                         int64_t stride, int64_t n, uint64_t seed, uint32_t step,
                                         uint32_t param_id, int64_t index) {
    uint32_t words[D3_BLOCK / 2 + 4];
    uint16_t bits[D3_BLOCK + 8];
    const uint64_t first = (uint64_t)index >> 3;
    const int64_t lane = index & 7;
    const int64_t blocks = (lane + n + 7) >> 3;
    if (dtype == DION3_F32) {
        d3_block_store(x, data, dtype, offset, stride, n);
        return;
    }
    for (int64_t j = 0; j < blocks; ++j) {
        const d3_random r = d3_random_block(seed, step, param_id, (int64_t)((first + (uint64_t)j) << 3));
        words[4 * j] = r.x;
        words[4 * j + 1] = r.y;
        words[4 * j + 2] = r.z;
        words[4 * j + 3] = r.w;
    }
    for (int64_t j = 0; j < 4 * blocks; ++j) {
        bits[2 * j] = (uint16_t)words[j];
        bits[2 * j + 1] = (uint16_t)(words[j] >> 16);
    }
    const uint16_t* restrict u = bits + lane;
    uint16_t* restrict p = (uint16_t*)data + offset;
    if (dtype == DION3_BF16) {
        if (stride == 1) {
            for (int64_t j = 0; j < n; ++j) p[j] = d3_to_bf16_stochastic(x[j], u[j]);
        } else {
            for (int64_t j = 0; j < n; ++j) p[j * stride] = d3_to_bf16_stochastic(x[j], u[j]);
        }
    } else {
        if (stride == 1) {
            for (int64_t j = 0; j < n; ++j) p[j] = d3_to_fp16_stochastic(x[j], u[j]);
        } else {
            for (int64_t j = 0; j < n; ++j) p[j * stride] = d3_to_fp16_stochastic(x[j], u[j]);
        }
    }
}

D3_INLINE double d3_lane_total(const double* lanes) {
    double total = 0.0;
    for (int l = 0; l < D3_LANES; ++l) total += lanes[l];
    return total;
}

#endif
