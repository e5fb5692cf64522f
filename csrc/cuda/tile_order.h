/*
 * tile_order.h - in which order the tiles of a batch of products are computed, and by whom.
 *
 * The workers of a launch (thread blocks) take its units wave by wave, one each: unit w * workers + b
 * is worker b's in wave w. A unit is a tile, or the upper or lower half of one. Which one it is, is
 * arithmetic on a few numbers of its group, so no table has to be uploaded. Neither the order nor
 * the cutting has an influence on any result, only on cache hits and on how evenly the work ends:
 *
 *   - Groups follow each other, longest k first. Where a group ends within a wave, the workers that
 *     are still at its last tiles are left out for as many waves of the next group as those take
 *     (`late`, `extra`).
 *   - Where the last tiles of a group keep at most half of the workers busy, and nothing that follows
 *     could fill the others, they are cut in two (`cut`), unless k is short. Diagonal tiles, which are
 *     shorter, stay whole and come before.
 *
 * Host and device; tests/c checks that every tile is met exactly once.
 */
#ifndef DION3_TILE_ORDER_H
#define DION3_TILE_ORDER_H

#include "../host_device.h"
#include "../tri.h"

#define D3_ORDER_ROWS 8u  /* rows of tiles walked together: what they read stays in the L2 cache */
#define D3_ORDER_STEPS 16 /* k-steps from which half a tile is worth the code that it brings into the cache */

typedef struct d3_order {
    uint32_t batch, rows, cols; /* of tiles; the symmetric product has cols = rows */
    uint32_t per_matrix;        /* tiles of one matrix */
    uint32_t wave, late;        /* of its first unit: that is worker `late`'s */
    uint32_t extra;             /* waves after that one in which the first `late` workers are absent */
    uint32_t cut;               /* tiles that are computed in two halves, none of them on the diagonal */
    uint32_t halves, end;       /* the first unit that is half a tile, and the one after the last */
} d3_order;

typedef struct d3_place {
    uint32_t batch, row, col;
} d3_place;

typedef enum d3_part { D3_NO_PART, D3_WHOLE, D3_UPPER_HALF, D3_LOWER_HALF } d3_part;

D3_HD uint32_t d3_order_tiles(const d3_order* order) { return order->batch * order->per_matrix; }

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

/* How many of the first `count` whole tiles of a symmetric group lie on the diagonal: a matrix ends
 * with them, but they are `cut` tiles ahead, so that they are all among the whole ones. */
D3_HD uint32_t d3_order_diagonals(const d3_order* order, uint32_t count) {
    uint32_t tiles = d3_order_tiles(order), ahead = count < tiles - order->cut ? count + order->cut : tiles;
    uint32_t matrices = ahead / order->per_matrix, below = order->per_matrix - order->rows, diagonals;
    ahead -= matrices * order->per_matrix;
    diagonals = matrices * order->rows + (ahead > below ? ahead - below : 0);
    return diagonals < count ? diagonals : count;
}

/* The tile of worker `worker` in a wave that holds whole tiles first .. first + count - 1 of a
 * symmetric group, for as many workers. The diagonal tiles go to the workers in turn, from wave to
 * wave where the last one ended, so that each gets as many of them. */
D3_HD d3_place d3_order_symmetric(const d3_order* order, uint32_t first, uint32_t count, uint32_t worker) {
    uint32_t before = d3_order_diagonals(order, first);
    uint32_t diagonals = d3_order_diagonals(order, first + count) - before;
    uint32_t slot = (worker + count - before % count) % count;
    if (slot >= diagonals) return d3_order_below(order, first - before + slot - diagonals);
    d3_place place;
    place.batch = (before + slot) / order->rows;
    place.row = place.col = before + slot - place.batch * order->rows;
    return place;
}

/* What a group has for a worker in a wave, from the group's first unit to the one before its end. */
D3_HD d3_part d3_order_unit(const d3_order* order, int symmetric, uint32_t wave, uint32_t worker,
                            uint32_t workers, d3_place* place) {
    uint32_t unit = wave * workers + worker, whole = d3_order_tiles(order) - order->cut;
    if (unit >= order->halves) {
        uint32_t tile = whole + (unit - order->halves) / 2;
        *place = symmetric ? d3_order_below(order, tile - order->batch * order->rows)
                           : d3_order_general(order, tile);
        return (unit - order->halves) % 2 ? D3_LOWER_HALF : D3_UPPER_HALF;
    }
    wave -= order->wave;
    uint32_t absent = wave <= order->extra ? order->late : 0, first, count;
    if (worker < absent) return D3_NO_PART;
    first = wave * workers - order->late * (1 + (wave <= order->extra ? wave : order->extra)) + absent;
    count = whole - first < workers - absent ? whole - first : workers - absent;
    *place = symmetric ? d3_order_symmetric(order, first, count, worker - absent)
                       : d3_order_general(order, first + worker - absent);
    return D3_WHOLE;
}

/* Sets wave to halves of a group whose first unit is `next` and whose predecessor's last tiles take
 * `waves` times as long as its own; returns the unit after its last, uncut, tile. */
D3_HD uint64_t d3_order_begin(d3_order* order, uint64_t next, uint32_t waves, uint32_t workers) {
    const uint64_t tiles = (uint64_t)order->batch * order->per_matrix;
    order->wave = (uint32_t)(next / workers);
    order->late = (uint32_t)(next % workers);
    order->extra = order->cut = 0;
    if (order->late > 0 && waves > 1) {
        const uint64_t present = workers - order->late, most = (tiles + present - 1) / present;
        order->extra = (uint32_t)(waves < most ? waves : most) - 1;
    }
    next += tiles + (uint64_t)order->late * order->extra;
    order->halves = (uint32_t)next;
    return next;
}

/* How many tiles of a group that ends before unit order->halves are worth cutting: those of its last
 * wave, if the idle workers of that wave can take the other halves and what follows would leave them
 * idle. Of a group within one wave the diagonal tiles stay beside the halves. */
D3_HD uint32_t d3_order_cut(const d3_order* order, int symmetric, uint32_t workers, int32_t steps,
                            uint64_t tiles_after, uint64_t steps_after) {
    const uint32_t tiles = d3_order_tiles(order), waves = (order->halves - 1) / workers - order->wave;
    const uint32_t busy = (order->halves - 1) % workers + 1, idle = workers - busy;
    const uint32_t below = symmetric ? tiles - order->batch * order->rows : tiles;
    const uint32_t cut = waves == 0 ? below : busy;
    if (steps < D3_ORDER_STEPS || cut > idle || cut > below) return 0;
    if (waves > 0 && waves <= order->extra) return 0;
    if (steps_after >= (uint64_t)idle * (uint32_t)steps) return 0;
    return tiles_after > idle || tiles_after <= idle - cut ? cut : 0;
}

/* The schedule of the groups of a launch; steps[i]: k-steps of a tile of group i, descending. Returns 0
 * if there are 2^31 units or more. */
D3_HD int d3_order_launch(d3_order* const* groups, const int32_t* steps, int count, int symmetric,
                          uint32_t workers) {
    uint64_t next = 0, tiles_after = 0, steps_after = 0;
    int i;
    for (i = 0; i < count; i++) {
        const uint64_t tiles = (uint64_t)groups[i]->batch * groups[i]->per_matrix;
        tiles_after += tiles;
        steps_after += tiles * (uint32_t)steps[i];
    }
    for (i = 0; i < count; i++) {
        d3_order* order = groups[i];
        const uint64_t tiles = (uint64_t)order->batch * order->per_matrix;
        const uint32_t before = i == 0 ? 0 : (uint32_t)steps[i - 1] / (groups[i - 1]->cut > 0 ? 2 : 1);
        next = d3_order_begin(order, next, before / (uint32_t)steps[i], workers);
        tiles_after -= tiles;
        steps_after -= tiles * (uint32_t)steps[i];
        if (next + workers >= (uint64_t)1 << 31) return 0;
        if (i + 1 == count || 2 * steps[i + 1] <= steps[i]) { /* else the next are as good as halves */
            order->cut = d3_order_cut(order, symmetric, workers, steps[i], tiles_after, steps_after);
            order->halves -= order->cut;
            next += order->cut;
        }
        order->end = (uint32_t)next;
    }
    return 1;
}

#endif
