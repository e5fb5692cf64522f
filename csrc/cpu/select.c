/*
 * select.c - the k slices with the largest score, ascending; the map from slice to place; their norm.
 *
 * score, sumsq (batch, n) float64 -> indices (batch, k), slots (batch, n), norm (batch). The k-th largest
 * score is found by radix selection over order-preserving 64-bit keys, 8 bits a pass, from the top: 8
 * reads of the scores, no memory. One thread a matrix. Source: Algorithm 4 line 2.
 */
#include "../check.h"
#include "blocks.h"

enum { DIGITS = 8, BUCKETS = 256 };

/* Unsigned order of keys = order of scores; -0 and 0 are one key; NaN is the largest. */
D3_INLINE uint64_t key_of(double score) {
    uint64_t bits;
    const double x = score + 0.0; /* -0 becomes 0 */
    if (x != x) return UINT64_MAX;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 63 ? ~bits : bits | (1ull << 63);
}

/* The k-th largest key; *ties <- how many slices with that key are selected. */
D3_CLONES static uint64_t threshold_key(const double* score, int64_t n, int64_t k, int64_t* ties) {
    uint64_t prefix = 0;
    int64_t left = k; /* still to be found among the keys that begin with prefix */
    for (int digit = DIGITS - 1; digit >= 0; --digit) {
        const int shift = 8 * digit;
        const uint64_t above = digit == DIGITS - 1 ? 0 : UINT64_MAX << (shift + 8);
        int64_t histogram[BUCKETS] = {0};
        int bucket = BUCKETS - 1;
        for (int64_t i = 0; i < n; ++i) {
            const uint64_t key = key_of(score[i]);
            if ((key & above) == prefix) histogram[(key >> shift) & 255u] += 1;
        }
        while (histogram[bucket] < left) left -= histogram[bucket--];
        prefix |= (uint64_t)bucket << shift;
    }
    *ties = left;
    return prefix;
}

static void select_matrix(const dion3_select_item* it, int64_t b) {
    const double* score = it->k < it->n ? it->score + b * it->n : 0;
    const double* sumsq = it->sumsq ? it->sumsq + b * it->n : 0;
    int32_t* indices = it->indices ? it->indices + b * it->k : 0;
    int32_t* slots = it->slots ? it->slots + b * it->n : 0;
    int64_t ties = 0;
    const uint64_t threshold = score ? threshold_key(score, it->n, it->k, &ties) : 0;
    int32_t place = 0;
    double total = 0.0;
    for (int64_t i = 0; i < it->n; ++i) {
        const uint64_t key = score ? key_of(score[i]) : UINT64_MAX;
        const int selected = key > threshold || (key == threshold && ties-- > 0);
        if (slots) slots[i] = selected ? place : -1;
        if (!selected) continue;
        if (indices) indices[place] = (int32_t)i;
        if (it->norm) total += sumsq[i];
        ++place;
    }
    if (it->norm) it->norm[b] = sqrt(total);
}

dion3_status dion3_select_cpu(const dion3_select_item* items, int64_t count) {
    D3_TRY(d3_check_select(items, count));
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) elements += items[i].batch * items[i].n;
    D3_PARALLEL(elements)
    for (int64_t i = 0; i < count; ++i) {
        const int64_t batch = items[i].n ? items[i].batch : 0;
        const int64_t chunk = d3_task_rows(DIGITS * items[i].n + BUCKETS);
        D3_FOR_BY(chunk)
        for (int64_t b = 0; b < batch; ++b) select_matrix(&items[i], b);
    }
    return DION3_OK;
}
