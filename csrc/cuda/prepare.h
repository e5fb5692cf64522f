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

/* dst <- src * s in fp32, rounded once to dst's dtype. s = 1 if partial is NULL; else 1 / max(norm, eps), 0
 * where that divides by 0, norm being the Frobenius norm of the matrix of src as d3_norms left it. */
typedef struct d3_copy {
    dion3_tensor src, dst; /* (batch, rows, cols), any dtypes and strides; dst is not read by d3_norms */
    int64_t batch, rows, cols;
    double* partial; /* (batch, d3_norm_chunks) */
    double eps;
} d3_copy;

/* Partial sums per matrix: depends on rows, cols and the strides of src, never on batch. */
int64_t d3_norm_chunks(const d3_copy* item);

/* partial <- sums of squares of src, in float64 and in a fixed order. One launch for all items (of up to
 * 16 items each); asynchronous, no allocation, capturable. */
dion3_status d3_norms(const d3_copy* items, int64_t count, dion3_stream stream);

/* One launch for all items, likewise. */
dion3_status d3_copies(const d3_copy* items, int64_t count, dion3_stream stream);

#ifdef __cplusplus
}
#endif
#endif
