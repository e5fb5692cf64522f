/*
 * test_tile_order.c - every tile of a launch is handed out exactly once, whole or as two halves,
 * whatever the shapes and the number of workers, and the busiest worker has less to do than if the
 * tiles were handed out wave by wave: a thirtieth less over many lists, never an eighth more.
 */
#include "cuda/tile_order.h"
#include "expect.h"

#include <stdint.h>

static uint8_t* seen;
static uint64_t sum_load, sum_by_wave; /* half k-steps of the busiest worker, over check_lists */

static d3_order order_of(uint32_t batch, uint32_t rows, uint32_t cols, int symmetric) {
    d3_order order = {0};
    order.batch = batch;
    order.rows = rows;
    order.cols = cols;
    order.per_matrix = symmetric ? (uint32_t)d3_tri_count(rows) : rows * cols;
    return order;
}

/* Marks halves of a tile, bits 1 and 2; it must lie in the batch, on or below the diagonal if symmetric,
 * and be new. */
static void mark(const d3_order* order, d3_place place, int symmetric, uint8_t halves) {
    const int inside = place.batch < order->batch && place.row < order->rows && place.col < order->cols &&
                       (!symmetric || place.col <= place.row);
    EXPECT(inside, "batch %u row %u col %u", place.batch, place.row, place.col);
    if (inside) {
        const size_t index = ((size_t)place.batch * order->rows + place.row) * order->cols + place.col;
        EXPECT(!(seen[index] & halves), "batch %u row %u col %u comes twice", place.batch, place.row,
               place.col);
        seen[index] |= halves;
    }
}

/* All units of one group: each half of each tile once, and the k-steps (two of a half) of each worker. */
static void walk(const d3_order* order, int symmetric, uint32_t workers, uint64_t steps, uint64_t* load) {
    static const uint8_t halves[] = {0, 3, 1, 2};
    uint32_t marked = 0;
    memset(seen, 0, (size_t)order->batch * order->rows * order->cols);
    for (uint32_t unit = order->wave * workers + order->late; unit < order->end; unit++) {
        d3_place place;
        const d3_part part = d3_order_unit(order, symmetric, unit / workers, unit % workers, workers, &place);
        if (part == D3_NO_PART) continue;
        EXPECT(part == D3_WHOLE || !symmetric || place.row != place.col, "half a diagonal tile");
        mark(order, place, symmetric, halves[part]);
        marked += part == D3_WHOLE ? 2 : 1;
        load[unit % workers] += part == D3_WHOLE ? 2 * steps : steps;
    }
    EXPECT(marked == 2 * d3_order_tiles(order), "%u halves of %u tiles, batch %u rows %u workers %u", marked,
           d3_order_tiles(order), order->batch, order->rows, workers);
}

static uint64_t largest(const uint64_t* load, uint32_t workers) {
    uint64_t most = 0;
    for (uint32_t i = 0; i < workers; i++) most = load[i] > most ? load[i] : most;
    return most;
}

/* A launch of up to four groups. */
static void check_launch(d3_order* groups, const int32_t* steps, int count, int symmetric, uint32_t workers) {
    uint64_t load[132] = {0}, by_wave[132] = {0};
    d3_order* pointers[4] = {&groups[0], &groups[1], &groups[2], &groups[3]};
    uint32_t next = 0;
    EXPECT(d3_order_launch(pointers, steps, count, symmetric, workers), "launch of %d groups", count);
    for (int i = 0; i < count; i++) {
        const uint32_t begin = groups[i].wave * workers + groups[i].late;
        EXPECT(begin == (i == 0 ? 0 : groups[i - 1].end), "group %d begins at %u", i, begin);
        walk(&groups[i], symmetric, workers, (uint64_t)steps[i], load);
        for (uint32_t tile = 0; tile < d3_order_tiles(&groups[i]); tile++)
            by_wave[next++ % workers] += 2 * (uint64_t)steps[i];
    }
    sum_load += largest(load, workers);
    sum_by_wave += largest(by_wave, workers);
    EXPECT(8 * largest(load, workers) <= 9 * largest(by_wave, workers),
           "%u workers: %llu half k-steps, %llu wave by wave; first group %u x %u, %d groups", workers,
           (unsigned long long)largest(load, workers), (unsigned long long)largest(by_wave, workers),
           groups[0].batch, groups[0].rows, count);
}

static void check_one(uint32_t batch, uint32_t rows, uint32_t cols, int symmetric, uint32_t workers) {
    const int32_t steps = D3_ORDER_STEPS;
    d3_order group[4] = {order_of(batch, rows, cols, symmetric)};
    check_launch(group, &steps, 1, symmetric, workers);
}

/* A full wave hands the diagonal tiles out in turn: how many a worker gets differs by two at most. */
static void check_diagonals(uint32_t batch, uint32_t rows, uint32_t workers) {
    const d3_order order = order_of(batch, rows, rows, 1);
    uint32_t least = UINT32_MAX, most = 0;
    for (uint32_t worker = 0; worker < workers; worker++) {
        uint32_t diagonals = 0;
        for (uint32_t first = 0; first + workers <= d3_order_tiles(&order); first += workers) {
            const d3_place place = d3_order_symmetric(&order, first, workers, worker);
            diagonals += place.row == place.col;
        }
        if (diagonals < least) least = diagonals;
        if (diagonals > most) most = diagonals;
    }
    EXPECT(most - least <= 2, "diagonal tiles %u to %u, batch %u rows %u workers %u", least, most, batch,
           rows, workers);
}

/* Groups of the sizes that meet in a step: long and short k, many and few tiles. */
static void check_lists(uint32_t workers) {
    uint32_t state = 1;
    sum_load = sum_by_wave = 0;
    for (int round = 0; round < 3000; round++) {
        d3_order groups[4];
        int32_t steps[4], longest = 512;
        const int count = 1 + round % 4, symmetric = round / 4 % 2;
        for (int i = 0; i < count; i++) {
            state = state * 1664525u + 1013904223u;
            groups[i] =
                order_of(1 + (state >> 20) % 40, 1 + (state >> 10) % 11, 1 + (state >> 14) % 11, symmetric);
            if (symmetric) groups[i].cols = groups[i].rows;
            steps[i] = longest >> (state >> 28) % 3;
            longest = steps[i];
        }
        check_launch(groups, steps, count, symmetric, workers);
    }
    EXPECT(workers < 132 || 30 * sum_load <= 29 * sum_by_wave, "%llu half k-steps, %llu wave by wave",
           (unsigned long long)sum_load, (unsigned long long)sum_by_wave);
}

int main(void) {
    static const uint32_t workers[] = {1, 2, 7, 66, 78, 114, 132};
    seen = malloc((size_t)8 << 20);
    if (seen == NULL) return 1;
    for (size_t i = 0; i < sizeof workers / sizeof *workers; i++) {
        for (uint32_t rows = 1; rows <= 40; rows++) {
            for (uint32_t batch = 1; batch <= 9; batch += 4) {
                for (uint32_t cols = 1; cols <= 40; cols += 13) check_one(batch, rows, cols, 0, workers[i]);
                check_one(batch, rows, rows, 1, workers[i]);
                check_diagonals(batch, rows, workers[i]);
            }
        }
        check_lists(workers[i]);
    }
    check_one(2, 1027, 3, 0, 132);
    check_one(1, 1027, 1027, 1, 132);
    check_one(4100, 1, 1, 1, 132);
    check_one(216, 2, 2, 1, 132);
    check_one(64, 4, 4, 1, 132);
    free(seen);
    return finish("tile_order");
}
