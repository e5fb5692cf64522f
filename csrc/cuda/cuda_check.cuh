/*
 * cuda_check.cuh - CUDA errors as statuses, from the enclosing function, with file, line and CUDA's text.
 */
#ifndef DION3_CUDA_CHECK_CUH
#define DION3_CUDA_CHECK_CUH

#include "../check.h"

#include <cuda_runtime.h>

#define D3_CUDA(call)                                                                                        \
    do {                                                                                                     \
        const cudaError_t error_ = (call);                                                                   \
        if (error_ != cudaSuccess) {                                                                         \
            (void)cudaGetLastError();                                                                        \
            return d3_fail(DION3_ERR_CUDA, "%s:%d: %s: %s", __FILE__, __LINE__, #call,                       \
                           cudaGetErrorString(error_));                                                      \
        }                                                                                                    \
    } while (0)

/* After every launch. With -DDION3_DEBUG also waits for it, so that the error names the right kernel. */
#ifdef DION3_DEBUG
#define D3_LAUNCHED()                                                                                        \
    do {                                                                                                     \
        D3_CUDA(cudaGetLastError());                                                                         \
        D3_CUDA(cudaDeviceSynchronize());                                                                    \
    } while (0)
#else
#define D3_LAUNCHED() D3_CUDA(cudaGetLastError())
#endif

#endif
