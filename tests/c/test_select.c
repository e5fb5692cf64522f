/*
 * test_select.c - top-k against a quadratic reference: ties, NaN, infinities, zeros of both signs, subnormals.
 */
#include "dion3.h"
#include "expect.h"

#include <math.h>

enum { MAX = 300 };

/* Does slice a come before slice b: NaN first, then larger, then lower index. */
static int before(const double* score, int64_t a, int64_t b) {
    const int na = isnan(score[a]) != 0, nb = isnan(score[b]) != 0;
    if (na != nb) return na;
    if (!na && score[a] != score[b]) return score[a] > score[b];
    return a < b;
}

static void check_case(const double* score, int64_t n, int64_t k) {
    double sumsq[MAX], norm = NAN, total = 0.0;
    int32_t indices[MAX + 2], slots[MAX + 2];
    dion3_select_item item = {0};
    int64_t place = 0;
    for (int64_t i = 0; i < n; ++i) sumsq[i] = (double)i + 0.5;
    memset(indices, 0x55, sizeof indices);
    memset(slots, 0x55, sizeof slots);
    item.score = score;
    item.sumsq = sumsq;
    item.batch = 1;
    item.n = n;
    item.k = k;
    item.indices = indices + 1;
    item.slots = slots + 1;
    item.norm = &norm;
    EXPECT(dion3_select_cpu(&item, 1) == DION3_OK, "%s", dion3_last_error());
    for (int64_t i = 0; i < n; ++i) {
        int64_t ahead = 0;
        for (int64_t j = 0; j < n; ++j) ahead += before(score, j, i);
        if (ahead < k) {
            EXPECT(indices[1 + place] == i, "n=%lld k=%lld place %lld: %d", (long long)n, (long long)k,
                   (long long)place, indices[1 + place]);
            EXPECT(slots[1 + i] == place, "n=%lld k=%lld slot of %lld: %d", (long long)n, (long long)k,
                   (long long)i, slots[1 + i]);
            total += sumsq[i];
            ++place;
        } else {
            EXPECT(slots[1 + i] == -1, "n=%lld k=%lld slot of %lld: %d", (long long)n, (long long)k,
                   (long long)i, slots[1 + i]);
        }
    }
    EXPECT(fabs(norm - sqrt(total)) <= 1e-15 * n * sqrt(total), "norm %.17g", norm);
    EXPECT(indices[0] == 0x55555555 && indices[1 + k] == 0x55555555, "indices written outside");
    EXPECT(slots[0] == 0x55555555 && slots[1 + n] == 0x55555555, "slots written outside");
}

int main(void) {
    static const double odd[] = {0.0, -0.0, 1.0, 1.0, 5e-324, 1e-310, INFINITY, NAN, -1.0, -INFINITY, 1e300};
    static const int64_t sizes[] = {1, 2, 3, 8, 17, 64, 255, 256, 300};
    uint32_t state = 7;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; ++s) {
        for (int kind = 0; kind < 5; ++kind) {
            double score[MAX];
            for (int64_t i = 0; i < sizes[s]; ++i) {
                state = state * 1664525u + 1013904223u;
                score[i] = kind == 0   ? 3.0                            /* all equal */
                           : kind == 1 ? (double)(state >> 29)          /* many ties */
                           : kind == 2 ? ldexp(state, -32)              /* distinct */
                           : kind == 3 ? odd[(state >> 8) % 11]         /* what breaks comparisons */
                                       : 1.0 + ldexp(state >> 30, -52); /* ties but for the last bits */
            }
            for (int64_t k = 1; k <= sizes[s]; k += 1 + sizes[s] / 9) check_case(score, sizes[s], k);
            check_case(score, sizes[s], sizes[s]);
        }
    }
    {
        /* k == n needs no scores. */
        int32_t indices[4], slots[4];
        dion3_select_item item = {.batch = 2, .n = 2, .k = 2, .indices = indices, .slots = slots};
        EXPECT(dion3_select_cpu(&item, 1) == DION3_OK, "%s", dion3_last_error());
        for (int i = 0; i < 4; ++i) EXPECT(indices[i] == i % 2 && slots[i] == i % 2, "identity at %d", i);
    }
    return finish("select");
}
