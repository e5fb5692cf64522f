/*
 * gemm.h - what the matrix product kernels offer to the rest of csrc: lists of products in one
 * launch.
 *
 * Internal (not part of the C API): dion3_symmetric_mm_cuda, dion3_gemm_add_cuda and the
 * Newton-Schulz programs are written in terms of it. Plain C11, no CUDA include. Two
 * implementations with the same signature and the same meaning: d3_gemm_sm90 (TMA and wgmma,
 * compute capability 9.0 only) and d3_gemm_generic (mma.sync, any card from sm_80).
 */
#ifndef DION3_CUDA_GEMM_H
#define DION3_CUDA_GEMM_H

#include "../dion3.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One batch of equal products:
 *   D <- alpha * alpha_device[b] * A * op(B) + beta * beta_device[b] * C + gamma * E + delta * I
 * in fp32, in that order, rounded once to D's dtype. E and delta belong to the symmetric product
 * only: elsewhere e.data is NULL and delta 0. C is read only if beta != 0, E only if gamma != 0.
 *
 * Dtypes: A, B, C and E share one of DION3_F16 and DION3_BF16; D is either of the two.
 * Aliasing: D may be C or E (the same element is read before it is written, by the same thread
 * block), but must not overlap A or B.
 * Majors are read off the strides (a size of 1 does not count):
 *   A (m, k): col_stride == 1 (K-major) or row_stride == 1 (M-major);
 *   B symmetric (n, k): col_stride == 1 or row_stride == 1; general (k, n): likewise;
 *   C, D, E (m, n): col_stride == 1; in the symmetric product row_stride == 1 means the same
 *   matrix. */
typedef struct d3_group {
    dion3_gemm g;
    dion3_tensor e; /* (batch, m, n) or data NULL */
    float gamma;
    float delta;
    /* 1: the up to 7 elements after each row of d, as far as the next multiple of 8 from the row's
     * begin, exist and may be overwritten (with anything); 0: they are somebody else's. */
    int32_t d_padded;
    int32_t reserved;
} d3_group;

/* Runs all groups in one launch (in several if there are more than a kernel's parameters hold,
 * or if groups with and without C or E, of both dtypes, or of different layouts are mixed).
 * symmetric: 0, the general product A * B with B (k, n); 1, A * B^T with B (n, k), m = n, the
 * result promised symmetric: the lower triangle is computed and each element off the diagonal
 * stored twice.
 * A group with batch, m or n of 0 does nothing; k = 0 gives the terms after the product. No bit of
 * a result depends on the other groups, the batch size or the place in the batch.
 * Asynchronous, no allocation, capturable. Returns DION3_ERR_UNSUPPORTED, with text and
 * before anything was launched, for what these kernels cannot address: copy to aligned
 * workspace, or use the other ones. */
dion3_status d3_gemm_sm90(const d3_group* groups, int64_t count, int symmetric,
                          dion3_stream stream);
dion3_status d3_gemm_generic(const d3_group* groups, int64_t count, int symmetric,
                             dion3_stream stream);

/* Whether d3_gemm_sm90 takes this group on a card of compute capability 9.0, by shapes, strides,
 * dtypes and addresses alone (no CUDA call): DION3_OK, or the status and the text that
 * d3_gemm_sm90 would give. */
dion3_status d3_gemm_sm90_check(const d3_group* group, int symmetric);

/* Elements to which row pitches and batch strides of workspace must be rounded up so that
 * d3_gemm_sm90_check accepts it, with a base address aligned to 16 bytes (256 is faster). */
enum { D3_GEMM_PITCH = 8 };

#ifdef __cplusplus
}
#endif
#endif
