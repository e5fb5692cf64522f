/*
 * test_tile_order.c - every tile of a launch is handed out exactly once, whatever the shapes and
 * the number of workers.
 */
#include "cuda/tile_order.h"
#include "expect.h"

#include <stdint.h>

static uint8_t* seen;
static d3_order order_of(uint32_t batch, uint32_t rows, uint32_t cols, int symmetric) {
    d3_order order = {0};
    order.batch = batch;
    order.rows = rows;
    order.cols = cols;
    order.per_matrix = symmetric ? (uint32_t)d3_tri_count(rows) : rows * cols;
    return order;
}

/* Marks a tile; it must lie in the batch, on or below the diagonal if symmetric, and be new. */
static void mark(const d3_order* order, d3_place place, int symmetric) {
    const int inside = place.batch < order->batch && place.row < order->rows && place.col < order->cols &&
                       (!symmetric || place.col <= place.row);
    EXPECT(inside, "batch %u row %u col %u", place.batch, place.row, place.col);
    if (inside) {
        const size_t index = ((size_t)place.batch * order->rows + place.row) * order->cols + place.col;
        EXPECT(!seen[index], "batch %u row %u col %u comes twice", place.batch, place.row, place.col);
        seen[index] = 1;
    }
}

static void check_general(uint32_t batch, uint32_t rows, uint32_t cols) {
    const d3_order order = order_of(batch, rows, cols, 0);
    memset(seen, 0, (size_t)batch * rows * cols);
    for (uint32_t i = 0; i < batch * order.per_matrix; i++) mark(&order, d3_order_general(&order, i), 0);
}

/* One group alone: wave by wave, each worker once a wave. Counts each worker's diagonal tiles:
 * they differ by one. */
static void check_symmetric(uint32_t batch, uint32_t rows, uint32_t workers) {
    const d3_order order = order_of(batch, rows, rows, 1);
    const uint32_t tiles = batch * order.per_matrix;
    uint32_t total = 0, least = UINT32_MAX, most = 0;
    memset(seen, 0, (size_t)batch * rows * rows);
    for (uint32_t worker = 0; worker < workers; worker++) {
        uint32_t diagonals = 0;
        for (uint32_t first = 0; first < tiles; first += workers) {
            const uint32_t count = tiles - first < workers ? tiles - first : workers;
            d3_place place;
            if (!d3_order_symmetric(&order, first, count, worker, workers, &place)) {
                EXPECT(count < workers, "a full wave has a tile for worker %u", worker);
                continue;
            }
            mark(&order, place, 1);
            diagonals += place.row == place.col;
            total += 1;
        }
        if (diagonals < least) least = diagonals;
        if (diagonals > most) most = diagonals;
    }
    EXPECT(total == tiles, "%u of %u tiles, batch %u rows %u workers %u", total, tiles, batch, rows, workers);
    EXPECT(most - least <= 2, "diagonal tiles %u to %u, batch %u rows %u workers %u", least, most, batch,
           rows, workers);
}

/* Where groups meet, a worker takes the tile of its own number. */
static void check_single(uint32_t batch, uint32_t rows) {
    const d3_order order = order_of(batch, rows, rows, 1);
    memset(seen, 0, (size_t)batch * rows * rows);
    for (uint32_t i = 0; i < batch * order.per_matrix; i++) {
        d3_place place;
        EXPECT(d3_order_symmetric(&order, i, 1, 0, 1, &place) == 1, "tile %u", i);
        mark(&order, place, 1);
    }
}

int main(void) {
    static const uint32_t workers[] = {1, 2, 7, 66, 78, 114, 132};
    seen = malloc((size_t)8 << 20);
    if (seen == NULL) return 1;
    for (uint32_t rows = 1; rows <= 40; rows++) {
        for (uint32_t batch = 1; batch <= 9; batch += 4) {
            for (uint32_t cols = 1; cols <= 40; cols += 3) check_general(batch, rows, cols);
            check_single(batch, rows);
            for (size_t i = 0; i < sizeof workers / sizeof *workers; i++)
                check_symmetric(batch, rows, workers[i]);
        }
    }
    check_general(2, 1027, 3);
    check_symmetric(1, 1027, 132);
    check_symmetric(4100, 1, 132);
    check_symmetric(216, 2, 132);
    check_symmetric(64, 4, 132);
    free(seen);
    return finish("tile_order");
}
