/*
 * selection.h - how many slices a fraction selects.
 *
 * k = max(1, ceil(f * n)), clamped to n. In binary 0.07 * 100 is 7.000000000000001, whose ceiling is 8;
 * the product is therefore lowered by 1e-6, more than its rounding error for every n below 2^31 and
 * less than any difference that a user could mean.
 */
#ifndef DION3_SELECTION_H
#define DION3_SELECTION_H

#include "host_device.h"

D3_HD int64_t d3_selection_count(double fraction, int64_t n) {
    double product = fraction * (double)n - 1e-6;
    int64_t k;
    if (n <= 0) return 0;
    if (!(product > 1.0)) return 1; /* also what a NaN or negative fraction gives */
    if (product >= (double)n - 1.0) return n;
    k = (int64_t)ceil(product);
    return k < n ? k : n;
}

#endif
