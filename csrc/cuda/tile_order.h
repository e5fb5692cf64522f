/*
 * tile_order.h - in which order the tiles of a batch of products are computed.
 *
 * A kernel's thread blocks (or clusters) take the tiles of a launch wave by wave; index -> (batch, row, col) is
 * arithmetic on a few numbers of the group, so no table has to be uploaded. The order has no influence on
 * any result, only on cache hits and on how evenly the work ends. Host and device; tests/c checks that every
 * tile is met exactly once.
 */
#ifndef DION3_TILE_ORDER_H
#define DION3_TILE_ORDER_H

#include "../host_device.h"
#include "../tri.h"

#define D3_ORDER_ROWS 8u /* rows of tiles walked together: what they read stays in the L2 cache */

typedef struct d3_order {
    uint32_t batch, rows, cols; /* of tiles; the symmetric product has cols = rows */
    uint32_t per_matrix;        /* tiles of one matrix */
    uint32_t chunk;             /* symmetric: so many matrices finish before the next ones begin */
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

/* The tiles below the diagonal of one matrix: eight rows at a time, column by column up to the square where
 * the diagonal passes, then the rest of that square row by row. */
D3_HD void d3_order_below(const d3_order* order, uint32_t index, d3_place* place) {
    uint32_t row, col, first, height, square;
    d3_tri_tile32(index, &row, &col); /* row r of the triangle without its diagonal is row r + 1 */
    first = (row + 1) / D3_ORDER_ROWS * D3_ORDER_ROWS;
    height = order->rows - first < D3_ORDER_ROWS ? order->rows - first : D3_ORDER_ROWS;
    index -= first == 0 ? 0 : first * (first - 1) / 2;
    square = first * height;
    if (index < square) {
        place->col = index / height;
        place->row = first + index - place->col * height;
    } else {
        d3_tri_tile32(index - square, &row, &col);
        place->row = first + row + 1;
        place->col = first + col;
    }
}

/* Lower triangle: the tiles below the diagonal of `chunk` matrices, then their diagonal tiles, which are
 * shorter. */
D3_HD d3_place d3_order_symmetric(const d3_order* order, uint32_t index) {
    d3_place place;
    uint32_t below = order->per_matrix - order->rows, size = order->chunk, batch;
    batch = index / (size * order->per_matrix) * size;
    index -= batch * order->per_matrix;
    if (order->batch - batch < size) size = order->batch - batch;
    if (index < size * below) {
        place.batch = index / below;
        d3_order_below(order, index - place.batch * below, &place);
    } else {
        index -= size * below;
        place.batch = index / order->rows;
        place.row = place.col = index - place.batch * order->rows;
    }
    place.batch += batch;
    return place;
}

/* The tile that worker (of `workers`) takes in a wave. Every wave but the last is full. The rotation moves a
 * worker from place to place, so that it does not meet the same kind of tile in every wave. */
D3_HD uint32_t d3_order_wave(uint32_t wave, uint32_t worker, uint32_t workers, uint32_t rotation) {
    return wave * workers + (worker + wave * rotation) % workers;
}

#endif
