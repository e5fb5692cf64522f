/*
 * aligned.h - whether a kernel may access a tensor by 16 bytes. Plain C, for every place that chooses.
 */
#ifndef DION3_CUDA_ALIGNED_H
#define DION3_CUDA_ALIGNED_H

#include <stdint.h>

/* Whether the inner dimension of (batch, outer, inner) is contiguous and each of its rows begins at a
 * multiple of 16 bytes. The stride of a dimension of size 1 does not count: it is never multiplied. */
static inline int d3_rows_aligned(const void* data, int64_t element_bytes, int64_t batch,
                                  int64_t batch_stride, int64_t outer, int64_t outer_stride, int64_t inner,
                                  int64_t inner_stride) {
    const int64_t unit = 16 / element_bytes;
    return (inner == 1 || inner_stride == 1) && (outer == 1 || outer_stride % unit == 0) &&
           (batch == 1 || batch_stride % unit == 0) && (uintptr_t)data % 16 == 0;
}

#endif
