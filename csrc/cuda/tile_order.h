/*
 * tile_order.h - in which order the tiles of a batch of products are computed.
 *
 * The workers of a launch (thread blocks) take its tiles wave by wave, one each. Which one is
 * arithmetic on a few numbers of the group, so no table has to be uploaded. The order has no
 * influence on any result, only on cache hits and on how evenly the work ends. Host and device;
 * tests/c checks that every tile is met exactly once.
 */
#ifndef DION3_TILE_ORDER_H
#define DION3_TILE_ORDER_H

#include "../host_device.h"
#include "../tri.h"

#define D3_ORDER_ROWS 8u /* rows of tiles walked together: what they read stays in the L2 cache */

typedef struct d3_order {
    uint32_t batch, rows, cols; /* of tiles; the symmetric product has cols = rows */
    uint32_t per_matrix;        /* tiles of one matrix */
} d3_order;

typedef struct d3_place {
    uint32_t batch, row, col;
} d3_place;

/* All tiles of a matrix: eight rows at a time, column by column. */
D3_HD d3_place d3_order_general(const d3_order* order, uint32_t index) {
    d3_place place;
    uint32_t band_size = D3_ORDER_ROWS * order->cols, first, height;
    place.batch = index / order->per_matrix;
    index -= place.batch * order->per_matrix;
    first = index / band_size;
    index -= first * band_size;
    first *= D3_ORDER_ROWS;
    height = order->rows - first < D3_ORDER_ROWS ? order->rows - first : D3_ORDER_ROWS;
    place.col = index / height;
    place.row = first + index - place.col * height;
    return place;
}

/* The tiles below the diagonal of all matrices: eight rows at a time, column by column up to the
 * square where the diagonal passes, then the rest of that square row by row. */
D3_HD d3_place d3_order_below(const d3_order* order, uint32_t index) {
    d3_place place;
    uint32_t per_matrix = order->per_matrix - order->rows, row, col, first, height, square;
    place.batch = index / per_matrix;
    index -= place.batch * per_matrix;
    d3_tri_tile32(index, &row, &col); /* row r of the triangle without its diagonal is row r + 1 */
    first = (row + 1) / D3_ORDER_ROWS * D3_ORDER_ROWS;
    height = order->rows - first < D3_ORDER_ROWS ? order->rows - first : D3_ORDER_ROWS;
    index -= first == 0 ? 0 : first * (first - 1) / 2;
    square = first * height;
    if (index < square) {
        place.col = index / height;
        place.row = first + index - place.col * height;
    } else {
        d3_tri_tile32(index - square, &row, &col);
        place.row = first + row + 1;
        place.col = first + col;
    }
    return place;
}

/* How many of the first `count` tiles of a symmetric group lie on the diagonal: a matrix ends
 * with them. */
D3_HD uint32_t d3_order_diagonals(const d3_order* order, uint32_t count) {
    uint32_t matrices = count / order->per_matrix, below = order->per_matrix - order->rows;
    count -= matrices * order->per_matrix;
    return matrices * order->rows + (count > below ? count - below : 0);
}

/* The tile of worker `worker` in a wave that holds tiles first .. first + count - 1 of a
 * symmetric group. The diagonal tiles, which are shorter, go to the workers in turn, from wave
 * to wave where the last one ended, so that each gets as many of them; `workers` are all that
 * take turns, count <= workers. Returns 0 if the wave has no tile for this worker. */
D3_HD int d3_order_symmetric(const d3_order* order, uint32_t first, uint32_t count, uint32_t worker,
                             uint32_t workers, d3_place* place) {
    uint32_t before = d3_order_diagonals(order, first);
    uint32_t diagonals = d3_order_diagonals(order, first + count) - before;
    uint32_t slot = (worker + workers - before % workers) % workers;
    if (count < workers) slot = workers - 1 - slot;
    if (slot >= count) return 0;
    if (slot < diagonals) {
        place->batch = (before + slot) / order->rows;
        place->row = place->col = before + slot - place->batch * order->rows;
    } else {
        *place = d3_order_below(order, first - before + slot - diagonals);
    }
    return 1;
}

#endif
