/*
 * prepare.h - Frobenius norms, and copies that scale, cast and change the layout: the two ends of a
 * Newton-Schulz program and the padded copies of matrix products. Internal; plain C11, no CUDA include.
 */
#ifndef DION3_CUDA_PREPARE_H
#define DION3_CUDA_PREPARE_H

#include "../dion3.h"

#ifdef __cplusplus
extern "C" {
#endif

/* dst <- src * s in fp32, rounded once to dst's dtype. s = 1, or with scaled 1 / max(norm, eps), 0 where that
 * divides by 0; norm is the Frobenius norm of the matrix of src, summed in a fixed order. */
typedef struct d3_copy {
    dion3_tensor src, dst; /* (batch, rows, cols), any dtypes and strides; they do not overlap */
    int64_t batch, rows, cols;
    int32_t scaled;
    int32_t reserved;
    void* norms; /* batch * d3_norm_bytes(item) bytes, aligned to 16; NULL where that is 0 */
    double eps;
} d3_copy;

/* Bytes of norms per matrix: depends on rows, cols, dtypes and strides, never on batch. 0 for small matrices. */
int64_t d3_norm_bytes(const d3_copy* item);

/* Runs all items in one launch (of up to 16 items each); asynchronous, no allocation, capturable. norms and
 * norms_bytes: the one piece of memory that holds the norms of all items; it is overwritten. */
dion3_status d3_copies(const d3_copy* items, int64_t count, void* norms, size_t norms_bytes,
                       dion3_stream stream);

#ifdef __cplusplus
}
#endif
#endif
