/*
 * dion3_round.h - conversion between fp32 and bf16/fp16, and the random bits of stochastic rounding.
 *
 * Nearest: round to nearest, ties to even, as IEEE 754 and torch do: subnormals are kept, what lies
 * beyond the largest finite value becomes Inf.
 *
 * Stochastic: with u uniform in 0 .. 65535 and ulp the spacing of the target at x,
 *   |y| = ulp * floor(|x| / ulp + u / 65536),   sign(y) = sign(x),
 * so that the mean of y is x (exactly where at most 16 bits are discarded: all of bf16, and fp16 down
 * to 2^-17; to 2^-16 ulp below), and a representable x never changes. Rounding is on the magnitude,
 * so both signs are unbiased. Subnormals follow the same rule. Finite values never become Inf: they
 * saturate to the largest finite value. In both, Inf stays Inf and NaN stays a quiet NaN of the same sign.
 *
 * Random bits: one Philox4x32-10 call (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
 * 2011) serves the eight elements whose global index has the same index >> 3:
 *   counter = {lo32(index >> 3), hi32(index >> 3), step, param_id},  key = {lo32(seed), hi32(seed)};
 * element `lane = index & 7` takes 16-bit piece `lane & 1` (0: low half) of word `lane >> 1`. The bits
 * depend on nothing else, so not on sharding, batching, or the shape of a launch.
 *
 * Everything is branch-free integer arithmetic (plus one exact fp32 operation for fp16 subnormals that
 * is safe when the CPU flushes subnormals), so that loops over it vectorise.
 */
#ifndef DION3_ROUND_H
#define DION3_ROUND_H

#include "dion3.h"
#include "host_device.h"

/* ---- widening: exact ------------------------------------------------------------------------- */

D3_HD float d3_from_bf16(uint16_t h) { return d3_float((uint32_t)h << 16); }

D3_HD float d3_from_fp16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t a = (uint32_t)(h & 0x7fffu) << 13;
    /* A subnormal m * 2^-24 is read as 2^-14 * (1 + m / 1024) - 2^-14. */
    uint32_t subnormal = d3_bits(d3_sub(d3_float(a + (113u << 23)), d3_float(113u << 23)));
    uint32_t normal = a + (112u << 23);
    uint32_t special = a + (224u << 23);
    uint32_t wide = a < (1u << 23) ? subnormal : normal;
    wide = a >= (31u << 23) ? special : wide;
    return d3_float(sign | wide);
}

/* ---- to nearest even ------------------------------------------------------------------------- */

/* x rounded to bf16 in the upper half; the lower half means nothing. */
D3_HD uint32_t d3_to_bf16_high(float x) {
    uint32_t b = d3_bits(x);
    uint32_t rounded = b + 0x7fffu + ((b >> 16) & 1u);
    uint32_t quiet = b | 0x400000u;
    return x != x ? quiet : rounded;
}

D3_HD uint16_t d3_to_bf16(float x) { return (uint16_t)(d3_to_bf16_high(x) >> 16); }

D3_HD uint16_t d3_to_fp16(float x) {
    uint32_t b = d3_bits(x);
    uint32_t sign = (b >> 16) & 0x8000u;
    uint32_t a = b & 0x7fffffffu;
    uint32_t normal = ((a + 0xfffu + ((a >> 13) & 1u)) >> 13) - (112u << 10);
    /* The spacing of floats in [0.5, 1) is 2^-24, fp16's subnormal spacing: the addition rounds. */
    uint32_t subnormal = d3_bits(d3_add(d3_float(a < 0x38800000u ? a : 0u), 0.5f)) - 0x3f000000u;
    uint32_t quiet = 0x7e00u | ((a >> 13) & 0x3ffu);
    uint32_t h = a < 0x38800000u ? subnormal : normal;
    h = a >= 0x47800000u ? 0x7c00u : h; /* 65520 .. 65536 gets there by its carry */
    h = a > 0x7f800000u ? quiet : h;
    return (uint16_t)(sign | h);
}

/* ---- stochastically; u is 16 random bits ------------------------------------------------------- */

D3_HD uint16_t d3_to_bf16_stochastic(float x, uint32_t u) {
    uint32_t b = d3_bits(x);
    uint32_t sign = (b >> 16) & 0x8000u;
    uint32_t a = b & 0x7fffffffu;
    uint32_t rounded = (a + u) >> 16;
    uint32_t special = (a >> 16) | (a > 0x7f800000u ? 0x40u : 0u);
    rounded = rounded > 0x7f7fu ? 0x7f7fu : rounded;
    return (uint16_t)(sign | (a >= 0x7f800000u ? special : rounded));
}

D3_HD uint16_t d3_to_fp16_stochastic(float x, uint32_t u) {
    uint32_t b = d3_bits(x);
    uint32_t sign = (b >> 16) & 0x8000u;
    uint32_t a = b & 0x7fffffffu;
    uint32_t normal = ((a + (u >> 3)) >> 13) - (112u << 10);
    /* |x| in units of 2^-40 = fp16's subnormal spacing / 65536, below 2^26: the product is exact. */
    float small = d3_mul(d3_float(a < 0x38800000u ? a : 0u), 1099511627776.0f);
    uint32_t subnormal = ((uint32_t)(int32_t)small + u) >> 16;
    uint32_t special = a > 0x7f800000u ? 0x7e00u | ((a >> 13) & 0x3ffu) : 0x7c00u;
    uint32_t h = normal > 0x7bffu ? 0x7bffu : normal;
    h = a < 0x38800000u ? subnormal : h;
    h = a >= 0x7f800000u ? special : h;
    return (uint16_t)(sign | h);
}

/* ---- by dtype --------------------------------------------------------------------------------- */

D3_HD int64_t d3_dtype_size(int32_t dtype) { return dtype == DION3_F32 ? 4 : 2; }

D3_HD float d3_load(const void* data, int64_t i, int32_t dtype) {
    if (dtype == DION3_F32) return ((const float*)data)[i];
    if (dtype == DION3_BF16) return d3_from_bf16(((const uint16_t*)data)[i]);
    return d3_from_fp16(((const uint16_t*)data)[i]);
}

/* Stores to nearest even and gives back what was stored. */
D3_HD float d3_store(void* data, int64_t i, int32_t dtype, float x) {
    uint16_t h;
    if (dtype == DION3_F32) {
        ((float*)data)[i] = x;
        return x;
    }
    if (dtype == DION3_BF16) {
        h = d3_to_bf16(x);
        ((uint16_t*)data)[i] = h;
        return d3_from_bf16(h);
    }
    h = d3_to_fp16(x);
    ((uint16_t*)data)[i] = h;
    return d3_from_fp16(h);
}

/* Stores stochastically; an fp32 element is stored as it is. */
D3_HD void d3_store_stochastic(void* data, int64_t i, int32_t dtype, float x, uint32_t u) {
    if (dtype == DION3_F32) {
        ((float*)data)[i] = x;
    } else if (dtype == DION3_BF16) {
        ((uint16_t*)data)[i] = d3_to_bf16_stochastic(x, u);
    } else {
        ((uint16_t*)data)[i] = d3_to_fp16_stochastic(x, u);
    }
}

/* ---- Philox4x32-10 ---------------------------------------------------------------------------- */

#define D3_PHILOX_M0 0xD2511F53u
#define D3_PHILOX_M1 0xCD9E8D57u
#define D3_PHILOX_W0 0x9E3779B9u
#define D3_PHILOX_W1 0xBB67AE85u

typedef struct d3_random {
    uint32_t x, y, z, w;
} d3_random;

D3_HD d3_random d3_philox4x32(d3_random c, uint32_t k0, uint32_t k1) {
    int round;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (round = 0; round < 10; ++round) {
        uint64_t p0 = (uint64_t)D3_PHILOX_M0 * c.x;
        uint64_t p1 = (uint64_t)D3_PHILOX_M1 * c.z;
        c.x = (uint32_t)(p1 >> 32) ^ c.y ^ k0;
        c.z = (uint32_t)(p0 >> 32) ^ c.w ^ k1;
        c.y = (uint32_t)p1;
        c.w = (uint32_t)p0;
        k0 += D3_PHILOX_W0;
        k1 += D3_PHILOX_W1;
    }
    return c;
}

/* The 128 bits of the eight elements around `index`. */
D3_HD d3_random d3_random_block(uint64_t seed, uint32_t step, uint32_t param_id, int64_t index) {
    uint64_t block = (uint64_t)index >> 3;
    d3_random c;
    c.x = (uint32_t)block;
    c.y = (uint32_t)(block >> 32);
    c.z = step;
    c.w = param_id;
    return d3_philox4x32(c, (uint32_t)seed, (uint32_t)(seed >> 32));
}

/* The 16 bits of one of them; lane = index & 7. */
D3_HD uint32_t d3_random_piece(d3_random r, uint32_t lane) {
    uint32_t low = (lane & 2u) ? r.y : r.x;
    uint32_t high = (lane & 2u) ? r.w : r.z;
    uint32_t word = (lane & 4u) ? high : low;
    return (lane & 1u) ? word >> 16 : word & 0xffffu;
}

/* The step's number as a counter word. A float counts exactly up to 2^24 steps. */
D3_HD uint32_t d3_step_number(float step) { return step > 0.0f ? (uint32_t)step : 0u; }

#endif
