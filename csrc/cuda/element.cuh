/*
 * element.cuh - N consecutive elements of any dtype: fetch, widen, round, put.
 *
 * A d3_vector<DTYPE, N> holds N elements as they lie in memory, 16 bytes where the dtype leads the
 * kernel. Nearest rounding uses the hardware conversions, which give the bits of dion3_round.h for all
 * but the payload of a NaN. DTYPE = D3_ANY is known only at run time and then N is 1: every operation has
 * a kernel of that kind for the combinations and strides that are not worth a kernel of their own.
 */
#ifndef DION3_ELEMENT_CUH
#define DION3_ELEMENT_CUH

#include "../dion3_round.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define D3_ANY (-1)

/* Elements of a 16-byte vector; 1 where the dtype is not known. */
__host__ __device__ constexpr int d3_width(int dtype) {
    return dtype == D3_ANY ? 1 : dtype == DION3_F32 ? 4 : 8;
}

template <int DTYPE>
__host__ __device__ __forceinline__ int d3_size(int dtype) {
    return (DTYPE == D3_ANY ? dtype : DTYPE) == DION3_F32 ? 4 : 2;
}

template <int DTYPE, int N>
struct d3_vector {
    static constexpr int BYTES = N * (DTYPE == DION3_BF16 || DTYPE == DION3_F16 ? 2 : 4);
    static constexpr int WORDS = BYTES < 4 ? 1 : BYTES / 4;
    uint32_t word[WORDS];
};

/* ---- memory ----------------------------------------------------------------------------------- */

/* Whether a vector access is possible at p. */
template <int DTYPE, int N>
__device__ __forceinline__ bool d3_aligned(const void* p) {
    constexpr int BYTES = d3_vector<DTYPE, N>::BYTES;
    return ((uintptr_t)p & (BYTES >= 16 ? 15 : BYTES - 1)) == 0;
}

/* An aligned vector. STREAM: the data is not needed again soon. */
template <int DTYPE, int N, bool STREAM>
__device__ __forceinline__ d3_vector<DTYPE, N> d3_fetch(const void* p) {
    d3_vector<DTYPE, N> v;
    if constexpr (v.BYTES == 8) {
        const uint2 x = STREAM ? __ldcs((const uint2*)p) : *(const uint2*)p;
        v.word[0] = x.x;
        v.word[1] = x.y;
    } else {
        static_assert(v.BYTES % 16 == 0, "a vector is 8 bytes or a multiple of 16");
#pragma unroll
        for (int i = 0; i < v.BYTES / 16; ++i) {
            const uint4 x = STREAM ? __ldcs((const uint4*)p + i) : ((const uint4*)p)[i];
            v.word[4 * i] = x.x;
            v.word[4 * i + 1] = x.y;
            v.word[4 * i + 2] = x.z;
            v.word[4 * i + 3] = x.w;
        }
    }
    return v;
}

/* The same at any alignment, an element at a time, `stride` elements apart. */
template <int DTYPE, int N>
__device__ __forceinline__ d3_vector<DTYPE, N> d3_fetch_each(const void* p, int64_t stride, int dtype) {
    d3_vector<DTYPE, N> v;
    static_assert(DTYPE != D3_ANY || N == 1, "vectors have a known dtype");
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (d3_size<DTYPE>(dtype) == 4) {
            v.word[i % v.WORDS] = ((const uint32_t*)p)[i * stride];
        } else {
            const uint32_t half = ((const uint16_t*)p)[i * stride];
            v.word[i / 2] = i % 2 ? v.word[i / 2] | half << 16 : half;
        }
    }
    return v;
}

template <int DTYPE, int N>
__device__ __forceinline__ void d3_put(void* p, const d3_vector<DTYPE, N>& v) {
    if constexpr (v.BYTES == 8) {
        *(uint2*)p = make_uint2(v.word[0], v.word[1]);
    } else {
        static_assert(v.BYTES % 16 == 0, "a vector is 8 bytes or a multiple of 16");
#pragma unroll
        for (int i = 0; i < v.BYTES / 16; ++i) {
            ((uint4*)p)[i] =
                make_uint4(v.word[4 * i], v.word[4 * i + 1], v.word[4 * i + 2], v.word[4 * i + 3]);
        }
    }
}

template <int DTYPE, int N>
__device__ __forceinline__ void d3_put_each(void* p, int64_t stride, int dtype,
                                            const d3_vector<DTYPE, N>& v) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (d3_size<DTYPE>(dtype) == 4) {
            ((uint32_t*)p)[i * stride] = v.word[i % v.WORDS];
        } else {
            ((uint16_t*)p)[i * stride] = (uint16_t)(v.word[i / 2] >> 16 * (i % 2));
        }
    }
}

/* A vector or, where N is 1, an element. */
template <int DTYPE, int N, bool STREAM = false>
__device__ __forceinline__ d3_vector<DTYPE, N> d3_fetch_aligned(const void* p, int dtype) {
    if constexpr (N == 1) {
        return d3_fetch_each<DTYPE, 1>(p, 0, dtype);
    } else {
        return d3_fetch<DTYPE, N, STREAM>(p);
    }
}

template <int DTYPE, int N>
__device__ __forceinline__ void d3_put_aligned(void* p, int dtype, const d3_vector<DTYPE, N>& v) {
    if constexpr (N == 1) {
        d3_put_each<DTYPE, 1>(p, 0, dtype, v);
    } else {
        d3_put<DTYPE, N>(p, v);
    }
}

/* ---- arithmetic ------------------------------------------------------------------------------- */

__device__ __forceinline__ float d3_half_to_float(uint32_t half) {
    return __half2float(__ushort_as_half((unsigned short)half));
}

template <int DTYPE, int N>
__device__ __forceinline__ void d3_widen(const d3_vector<DTYPE, N>& v, int dtype, float (&x)[N]) {
    const int type = DTYPE == D3_ANY ? dtype : DTYPE;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (type == DION3_F32) {
            x[i] = __uint_as_float(v.word[i % v.WORDS]);
        } else if (type == DION3_BF16) {
            x[i] = __uint_as_float(i % 2 ? v.word[i / 2] & 0xffff0000u : v.word[i / 2] << 16);
        } else {
            x[i] = d3_half_to_float(v.word[i / 2] >> 16 * (i % 2) & 0xffffu);
        }
    }
}

/* To nearest even. */
template <int DTYPE, int N>
__device__ __forceinline__ d3_vector<DTYPE, N> d3_round(const float (&x)[N], int dtype) {
    d3_vector<DTYPE, N> v;
    const int type = DTYPE == D3_ANY ? dtype : DTYPE;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (type == DION3_F32) {
            v.word[i % v.WORDS] = __float_as_uint(x[i]);
        } else if (i % 2 == 0) {
            const float low = x[i], high = i + 1 < N ? x[(i + 1) % N] : 0.0f;
            if (type == DION3_BF16) {
                const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
                memcpy(&v.word[i / 2], &pair, 4);
            } else {
                const __half2 pair = __floats2half2_rn(low, high);
                memcpy(&v.word[i / 2], &pair, 4);
            }
        }
    }
    return v;
}

/* N neighbours of a dtype that is known only at run time, at any alignment. */
template <int N>
__device__ __forceinline__ void d3_read(const void* p, int dtype, float (&x)[N]) {
    if constexpr (N == 1) {
        d3_widen<D3_ANY, 1>(d3_fetch_each<D3_ANY, 1>(p, 0, dtype), dtype, x);
    } else if (dtype == DION3_F32) {
        d3_widen<DION3_F32, N>(d3_aligned<DION3_F32, N>(p) ? d3_fetch<DION3_F32, N, true>(p)
                                                           : d3_fetch_each<DION3_F32, N>(p, 1, dtype),
                               dtype, x);
    } else {
        const d3_vector<DION3_BF16, N> v = d3_aligned<DION3_BF16, N>(p)
                                               ? d3_fetch<DION3_BF16, N, true>(p)
                                               : d3_fetch_each<DION3_BF16, N>(p, 1, dtype);
        d3_vector<DION3_F16, N> half;
#pragma unroll
        for (int i = 0; i < v.WORDS; ++i) half.word[i] = v.word[i];
        if (dtype == DION3_BF16) {
            d3_widen<DION3_BF16, N>(v, dtype, x);
        } else {
            d3_widen<DION3_F16, N>(half, dtype, x);
        }
    }
}

/* The random words of V vectors of eight neighbours whose global indices are multiples of 8, given as
 * index >> 3; the bits of d3_random_block. Written as one: V independent chains of multiplications hide each
 * other's latency and share the key schedule, and mul.wide keeps a round to two products and two
 * three-way xors a chain. */
template <int V>
__device__ __forceinline__ void d3_random_vectors(uint64_t seed, uint32_t step, uint32_t param_id,
                                                  const uint64_t (&block)[V], uint32_t (&u)[V][4]) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t x[V], y[V], z[V], w[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
        x[v] = (uint32_t)block[v];
        y[v] = (uint32_t)(block[v] >> 32);
        z[v] = step;
        w[v] = param_id;
    }
#pragma unroll
    for (int round = 0; round < 10; ++round) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            uint32_t low0, high0, low1, high1;
            asm("{.reg .b64 p;\n mul.wide.u32 p, %2, %3;\n mov.b64 {%0, %1}, p;}"
                : "=r"(low0), "=r"(high0)
                : "r"(x[v]), "r"(D3_PHILOX_M0));
            asm("{.reg .b64 p;\n mul.wide.u32 p, %2, %3;\n mov.b64 {%0, %1}, p;}"
                : "=r"(low1), "=r"(high1)
                : "r"(z[v]), "r"(D3_PHILOX_M1));
            x[v] = high1 ^ y[v] ^ k0;
            z[v] = high0 ^ w[v] ^ k1;
            y[v] = low1;
            w[v] = low0;
        }
        k0 += D3_PHILOX_W0;
        k1 += D3_PHILOX_W1;
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
        u[v][0] = x[v];
        u[v][1] = y[v];
        u[v][2] = z[v];
        u[v][3] = w[v];
    }
}

/* The 16 random bits of N elements from a global index on, `stride` apart, two to a word as
 * d3_vector holds 16-bit elements. One Philox call for neighbours that lie in one group of eight, from a multiple
 * of N on; otherwise one an element, in a loop that turns the words so that they stay in registers. */
template <int N>
__device__ __forceinline__ void d3_random_words(uint64_t seed, uint32_t step, uint32_t param_id,
                                                int64_t index, int64_t stride, uint32_t (&u)[(N + 1) / 2]) {
    if constexpr (N == 1) {
        u[0] = d3_random_piece(d3_random_block(seed, step, param_id, index), (uint32_t)index & 7u);
    } else {
        static_assert(N == 4 || N == 8, "a vector of 16-bit elements lies in one group of eight");
        if (stride == 1 && (index & (N - 1)) == 0) {
            const uint64_t block[1] = {(uint64_t)index >> 3};
            uint32_t words[1][4];
            d3_random_vectors<1>(seed, step, param_id, block, words);
            const bool second = N == 4 && (index & 4);
            u[0] = second ? words[0][2] : words[0][0];
            u[1] = second ? words[0][3] : words[0][1];
            if constexpr (N == 8) {
                u[2] = words[0][2];
                u[3] = words[0][3];
            }
            return;
        }
#pragma unroll
        for (int w = 0; w < N / 2; ++w) u[w] = 0;
#pragma unroll 1
        for (int i = 0; i < N; ++i) {
            const d3_random r = d3_random_block(seed, step, param_id, index);
            const uint32_t piece = d3_random_piece(r, (uint32_t)index & 7u);
#pragma unroll
            for (int w = 0; w < N / 2 - 1; ++w) u[w] = __funnelshift_r(u[w], u[w + 1], 16);
            u[N / 2 - 1] = u[N / 2 - 1] >> 16 | piece << 16;
            index += stride;
        }
    }
}

/* Stochastically, u as d3_random_words gives it; fp32 stays as it is. The short way through bf16: below
 * the largest finite bf16 neither the saturation nor the special values of dion3_round.h can occur, and
 * adding to the magnitude is adding to the bits. */
template <int DTYPE, int N>
__device__ __forceinline__ d3_vector<DTYPE, N> d3_round_stochastic(const float (&x)[N], int dtype,
                                                                   const uint32_t (&u)[(N + 1) / 2]) {
    d3_vector<DTYPE, N> v;
    const int type = DTYPE == D3_ANY ? dtype : DTYPE;
    if constexpr (DTYPE == DION3_BF16 && N % 2 == 0) {
        float total = fabsf(x[0]); /* no less than any of them, NaN if one is */
#pragma unroll
        for (int i = 1; i < N; ++i) total = __fadd_rn(total, fabsf(x[i]));
        if (total < 3.3895313892515355e38f) {
#pragma unroll
            for (int i = 0; i < N; i += 2) {
                const uint32_t low = __float_as_uint(x[i]) + (u[i / 2] & 0xffffu);
                const uint32_t high = __float_as_uint(x[i + 1]) + (u[i / 2] >> 16);
                v.word[i / 2] = __byte_perm(low, high, 0x7632);
            }
            return v;
        }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const uint32_t piece = u[i / 2] >> 16 * (i % 2) & 0xffffu;
        if (type == DION3_F32) {
            v.word[i % v.WORDS] = __float_as_uint(x[i]);
        } else {
            const uint32_t half =
                type == DION3_BF16 ? d3_to_bf16_stochastic(x[i], piece) : d3_to_fp16_stochastic(x[i], piece);
            v.word[i / 2] = i % 2 ? v.word[i / 2] | half << 16 : half;
        }
    }
    return v;
}

#endif
