/*
 * restarts.h - which matrix products a Newton-Schulz program runs, in order.
 *
 * Gram form ("Dion3: Full-Stack Orthogonal Updates", stabilised Gram Newton-Schulz): the T iterations
 * are cut into segments after each restart iteration r (1-based, ascending, 1 <= r < T). A segment
 * begins with R = X X^T and ends with X = Q X; inside, for iteration t with coefficients a, b, c:
 *   Z = b R + c R R;   Q = Z + a I (first of the segment: no product) or Q Z + a Q;
 *   and, unless t is the last of its segment, whose R nobody reads:   RZ = R Z + a R;   R = Z RZ + a RZ.
 * A segment of length L costs 4 L - 3 square products. Standard form, every iteration:
 *   R = X X^T;   Z = b R + c R R;   X = Z X + a X.
 */
#ifndef DION3_RESTARTS_H
#define DION3_RESTARTS_H

#include "dion3.h"
#include "host_device.h"

typedef enum d3_ns_op {
    D3_NS_GRAM = 0,   /* R = X X^T                    symmetric, rectangular */
    D3_NS_Z = 1,      /* Z = b R + c R R              symmetric, square */
    D3_NS_Q_INIT = 2, /* Q = Z + a I                  element-wise, no product */
    D3_NS_Q = 3,      /* Q = Q Z + a Q                symmetric, square */
    D3_NS_RZ = 4,     /* RZ = R Z + a R               symmetric, square */
    D3_NS_R = 5,      /* R = Z RZ + a RZ              symmetric, square */
    D3_NS_QX = 6,     /* X = Q X                      general */
    D3_NS_ZX = 7      /* X = Z X + a X                general (standard form) */
} d3_ns_op;

typedef struct d3_ns_launch {
    int32_t op;   /* d3_ns_op */
    int32_t step; /* iteration whose coefficients it takes, 0-based */
} d3_ns_launch;

/* An iteration adds at most GRAM, Z, Q, RZ, R, QX. */
enum { D3_NS_MAX_LAUNCHES = 6 * DION3_NS_MAX_STEPS };

/* Does iteration `step` (0-based) begin a segment: is it the first, or is there a restart after `step` iterations? */
D3_HD int d3_ns_begins_segment(int32_t step, const int32_t* restarts, int32_t restart_count) {
    int32_t i;
    if (step == 0) return 1;
    for (i = 0; i < restart_count; ++i) {
        if (restarts[i] == step) return 1;
    }
    return 0;
}

D3_HD int d3_ns_ends_segment(int32_t step, int32_t steps, const int32_t* restarts, int32_t restart_count) {
    return step + 1 == steps || d3_ns_begins_segment(step + 1, restarts, restart_count);
}

/* The operations in order; returns their number. list may be NULL (count only), else it has room for
 * D3_NS_MAX_LAUNCHES. gram: 1 for the Gram form, 0 for the standard one (restarts are then ignored). */
D3_HD int32_t d3_ns_launches(int gram, int32_t steps, const int32_t* restarts, int32_t restart_count,
                             d3_ns_launch* list) {
    int32_t count = 0;
    int32_t step;
    for (step = 0; step < steps; ++step) {
        int32_t ops[6];
        int32_t n = 0;
        int32_t i;
        if (!gram) {
            ops[n++] = D3_NS_GRAM;
            ops[n++] = D3_NS_Z;
            ops[n++] = D3_NS_ZX;
        } else {
            const int begins = d3_ns_begins_segment(step, restarts, restart_count);
            const int ends = d3_ns_ends_segment(step, steps, restarts, restart_count);
            if (begins) ops[n++] = D3_NS_GRAM;
            ops[n++] = D3_NS_Z;
            ops[n++] = begins ? D3_NS_Q_INIT : D3_NS_Q;
            if (!ends) {
                ops[n++] = D3_NS_RZ;
                ops[n++] = D3_NS_R;
            } else {
                ops[n++] = D3_NS_QX;
            }
        }
        for (i = 0; i < n; ++i) {
            if (list) {
                list[count].op = ops[i];
                list[count].step = step;
            }
            ++count;
        }
    }
    return count;
}

/* How many matrix products of each kind a program runs. */
typedef struct d3_ns_counts {
    int32_t square_symmetric, rectangular_symmetric, general;
} d3_ns_counts;

D3_HD d3_ns_counts d3_ns_count(int gram, int32_t steps, const int32_t* restarts, int32_t restart_count) {
    d3_ns_counts counts = {0, 0, 0};
    int32_t step;
    for (step = 0; step < steps; ++step) {
        const int begins = !gram || d3_ns_begins_segment(step, restarts, restart_count);
        const int ends = !gram || d3_ns_ends_segment(step, steps, restarts, restart_count);
        counts.rectangular_symmetric += begins;
        counts.general += ends;
        counts.square_symmetric += 1 + !begins + (ends ? 0 : 2);
    }
    return counts;
}

#endif
