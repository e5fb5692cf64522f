/*
 * columns.cuh - selected columns of a row-major matrix, as a warp sees them.
 *
 * A warp takes a tile of a row: 32 vectors of N columns, one a lane. Slots ascend with the columns, so those of
 * the tile's selected columns follow one another, and what belongs to them in a row of the compact matrix
 * (batch, rows, k) is one run of elements, at any alignment. Runs are accessed by neighbouring lanes, an
 * element each, vectors of the tile whole; the two meet in shared memory.
 */
#ifndef DION3_COLUMNS_CUH
#define DION3_COLUMNS_CUH

#include <stdint.h>

struct d3_columns {
    uint32_t mask;  /* which of the lane's columns are selected */
    uint32_t slot;  /* where the tile's run begins; anything if it is empty */
    uint32_t count; /* how long it is */
};

/* slots: of the lane's columns, below 0 where one is not selected. column_of[j] becomes the column of the run's
 * element j, counted from the tile's first. The whole warp calls. */
template <int N>
__device__ __forceinline__ d3_columns d3_columns_of(const int32_t (&slots)[N], uint8_t (&column_of)[32 * N]) {
    const uint32_t lane = threadIdx.x % 32;
    d3_columns c;
    uint32_t first = ~0u;
    c.mask = 0;
#pragma unroll
    for (int i = N - 1; i >= 0; --i) {
        if (slots[i] >= 0) {
            c.mask |= 1u << i;
            first = (uint32_t)slots[i];
        }
    }
    c.slot = __reduce_min_sync(0xffffffffu, first);
    c.count = __reduce_add_sync(0xffffffffu, (uint32_t)__popc(c.mask));
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (slots[i] >= 0) column_of[(uint32_t)slots[i] - c.slot] = (uint8_t)(lane * N + i);
    }
    __syncwarp();
    return c;
}

#endif
