/*
 * host_device.h - what a header needs in order to hold the same lines for the CPU and the GPU.
 *
 * Compiles as C11, C++17 and in nvcc, for host and device. Each fp32 operation has a name here, so
 * that the expressions of rows.h are rounded after every operation on both sides: on the device the
 * _rn intrinsics are never contracted to a fused multiply-add, on the host the C core is compiled with
 * -ffp-contract=off.
 */
#ifndef DION3_HOST_DEVICE_H
#define DION3_HOST_DEVICE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define D3_HD static inline __host__ __device__
#else
#define D3_HD static inline
#endif

/* The bits of a float, and back. */
D3_HD uint32_t d3_bits(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return b;
#endif
}

D3_HD float d3_float(uint32_t b) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(b);
#else
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
#endif
}

D3_HD float d3_mul(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

D3_HD float d3_add(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

D3_HD float d3_sub(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fsub_rn(a, b);
#else
    return a - b;
#endif
}

D3_HD float d3_div(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

D3_HD float d3_sqrt(float x) {
#ifdef __CUDA_ARCH__
    return __fsqrt_rn(x);
#else
    return sqrtf(x);
#endif
}

#endif
