/*
 * tri.h - the lower triangle as a line of tiles.
 *
 * Tile (row, col), 0 <= col <= row, has index row * (row + 1) / 2 + col: row by row, the diagonal tile
 * last in its row. The inverse takes a floating-point square root, whose error is far below one, and
 * corrects it by at most one step in either direction; it is exact for every index below 2^60 (64-bit
 * form) and for every uint32 index (32-bit form, single precision only: for kernels).
 */
#ifndef DION3_TRI_H
#define DION3_TRI_H

#include "host_device.h"

typedef struct d3_tile {
    int64_t row, col;
} d3_tile;

/* Number of tiles of a lower triangle of `rows` tile rows, the diagonal included. */
D3_HD int64_t d3_tri_count(int64_t rows) { return rows * (rows + 1) / 2; }

D3_HD int64_t d3_tri_index(int64_t row, int64_t col) { return row * (row + 1) / 2 + col; }

/* The tile of an index, 0 <= index < 2^60. */
D3_HD d3_tile d3_tri_tile(int64_t index) {
    d3_tile tile;
    int64_t row = (int64_t)((sqrt(8.0 * (double)index + 1.0) - 1.0) * 0.5);
    if (row * (row + 1) / 2 > index) row -= 1;
    if ((row + 1) * (row + 2) / 2 <= index) row += 1;
    tile.row = row;
    tile.col = index - row * (row + 1) / 2;
    return tile;
}

/* The same for a 32-bit index without double precision: writes row and col. */
D3_HD void d3_tri_tile32(uint32_t index, uint32_t* row_out, uint32_t* col_out) {
    uint32_t row = (uint32_t)((sqrtf(8.0f * (float)index + 1.0f) - 1.0f) * 0.5f);
    /* row <= 92682, so row * (row + 1) needs 33 bits: the even factor is halved first. */
    uint32_t below = (row & 1u) ? row * ((row + 1u) >> 1) : (row >> 1) * (row + 1u);
    if (below > index) {
        below -= row;
        row -= 1u;
    } else if (index - below > row) {
        below += row + 1u;
        row += 1u;
    }
    *row_out = row;
    *col_out = index - below;
}

#endif
