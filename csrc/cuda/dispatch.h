/*
 * dispatch.h - lists of products on whatever kernels the device has. Internal; plain C11.
 */
#ifndef DION3_CUDA_DISPATCH_H
#define DION3_CUDA_DISPATCH_H

#include "gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* d3_gemm_sm90 or d3_gemm_generic, as backend (dion3_backend) says. AUTO on compute capability 9.0: sm_90a
 * kernels for the groups that d3_gemm_sm90_check accepts, the generic ones for the rest. */
dion3_status d3_gemm(const d3_group* groups, int64_t count, int symmetric, int32_t backend,
                     dion3_stream stream);

/* Whether AUTO means the sm_90a kernels on the current device. */
int d3_has_sm90(void);

/* Multiprocessors of the current device; 1 where none can be asked. */
int d3_multiprocessors(void);

#ifdef __cplusplus
}
#endif
#endif
