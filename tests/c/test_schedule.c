/*
 * test_schedule.c - the triangle index, the selection count, and the launch lists of Newton-Schulz.
 */
#include "expect.h"
#include "restarts.h"
#include "selection.h"
#include "tri.h"

static void check_tile(int64_t row, int64_t col) {
    const int64_t index = d3_tri_index(row, col);
    const d3_tile tile = d3_tri_tile(index);
    uint32_t row32, col32;
    EXPECT(tile.row == row && tile.col == col, "%lld -> (%lld, %lld)", (long long)index, (long long)tile.row,
           (long long)tile.col);
    if (index > UINT32_MAX) return;
    d3_tri_tile32((uint32_t)index, &row32, &col32);
    EXPECT(row32 == row && col32 == col, "%lld -> (%u, %u)", (long long)index, row32, col32);
}

static void test_triangle(void) {
    int64_t next = 0;
    for (int64_t row = 0; row < 2000; ++row) {
        for (int64_t col = 0; col <= row; ++col) {
            EXPECT(d3_tri_index(row, col) == next, "(%lld, %lld)", (long long)row, (long long)col);
            check_tile(row, col);
            ++next;
        }
        EXPECT(d3_tri_count(row + 1) == next, "%lld rows", (long long)row + 1);
    }
    /* The ends of each row are where a wrong root shows. */
    for (int64_t row = 2000; row < 100000; ++row) {
        check_tile(row, 0);
        check_tile(row, row);
    }
    for (int64_t row = 100000; row < 1500000000; row += row / 97 + 1) {
        check_tile(row, 0);
        check_tile(row, 1);
        check_tile(row, row - 1);
        check_tile(row, row);
    }
    {
        uint32_t row, col;
        d3_tri_tile32(UINT32_MAX, &row, &col);
        EXPECT(row == 92681 && col == 37074, "the last 32-bit index is (%u, %u)", row, col);
    }
}

static void test_selection(void) {
    /* Products that are one ulp above an integer in binary. */
    static const struct {
        double fraction;
        int64_t n, k;
    } cases[] = {
        {0.07, 100, 7},
        {0.14, 100, 14},
        {0.28, 50, 14},
        {0.55, 100, 55},
        {0.56, 100, 56},
        {0.29, 100, 29},
        {0.57, 100, 57},
        {0.58, 100, 58},
        {1.0 / 3, 3, 1},
        {0.1, 3, 1},
        {0.25, 10, 3},
        {0.25, 8, 2},
        {1.0, 17, 17},
        {0.5, 1, 1},
        {1e-9, 100, 1},
        {0.999999, 10, 10},
        {0.0, 5, 1},
        {2.0, 5, 5},
        {-1.0, 5, 1},
        {NAN, 5, 1},
        {INFINITY, 5, 5},
        {0.25, 0, 0},
        {0.5, 2147483647, 1073741824},
        {1.0, 2147483647, 2147483647},
        {0.1 + 0.2, 10, 3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const int64_t k = dion3_selection_count(cases[i].fraction, cases[i].n);
        EXPECT(k == cases[i].k, "%.17g of %lld: %lld", cases[i].fraction, (long long)cases[i].n,
               (long long)k);
    }
    for (int64_t percent = 1; percent <= 100; ++percent) {
        for (int64_t n = 1; n <= 1000; ++n) {
            const int64_t exact = (percent * n + 99) / 100;
            EXPECT(dion3_selection_count((double)percent / 100, n) == exact, "%lld%% of %lld",
                   (long long)percent, (long long)n);
        }
    }
}

static void test_restarts(void) {
    static const char names[] = "GZIQRSXY"; /* Gram, Z, Q init, Q, RZ, R, QX, ZX */
    static const struct {
        int gram;
        int32_t steps, count;
        int32_t restarts[3];
        const char* ops;
        int32_t square, rectangular, general;
    } cases[] = {
        {1, 5, 1, {2}, "GZIRSZQXGZIRSZQRSZQX", 14, 2, 2},
        {1, 5, 0, {0}, "GZIRSZQRSZQRSZQRSZQX", 17, 1, 1},
        {1, 3, 2, {1, 2}, "GZIXGZIXGZIX", 3, 3, 3},
        {1, 1, 0, {0}, "GZIX", 1, 1, 1},
        {0, 2, 1, {1}, "GZYGZY", 2, 2, 2},
    };
    d3_ns_launch list[D3_NS_MAX_LAUNCHES];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const int32_t n =
            d3_ns_launches(cases[i].gram, cases[i].steps, cases[i].restarts, cases[i].count, list);
        const d3_ns_counts c = d3_ns_count(cases[i].gram, cases[i].steps, cases[i].restarts, cases[i].count);
        EXPECT(n == (int32_t)strlen(cases[i].ops), "case %zu: %d launches", i, (int)n);
        for (int32_t j = 0; j < n; ++j)
            EXPECT(names[list[j].op] == cases[i].ops[j], "case %zu, %d", i, (int)j);
        EXPECT(c.square_symmetric == cases[i].square && c.rectangular_symmetric == cases[i].rectangular &&
                   c.general == cases[i].general,
               "case %zu: %d %d %d", i, (int)c.square_symmetric, (int)c.rectangular_symmetric,
               (int)c.general);
        EXPECT(list[n - 1].step == cases[i].steps - 1, "case %zu ends at iteration %d", i,
               (int)list[n - 1].step);
        EXPECT(d3_ns_launches(cases[i].gram, cases[i].steps, cases[i].restarts, cases[i].count, 0) == n,
               "counting alone");
    }
    /* A segment of length L costs 4 L - 3 square products, wherever the restarts are. */
    for (int32_t mask = 0; mask < 1 << 6; ++mask) {
        int32_t restarts[6], count = 0, square = 0, start = 0;
        for (int32_t r = 1; r <= 6; ++r) {
            if (!(mask >> (r - 1) & 1)) continue;
            restarts[count++] = r;
            square += 4 * (r - start) - 3;
            start = r;
        }
        square += 4 * (7 - start) - 3;
        const d3_ns_counts c = d3_ns_count(1, 7, restarts, count);
        EXPECT(c.square_symmetric == square && c.general == count + 1, "restarts %x", (unsigned)mask);
    }
    EXPECT(d3_ns_launches(0, DION3_NS_MAX_STEPS, 0, 0, list) <= D3_NS_MAX_LAUNCHES,
           "the longest program fits");
}

int main(void) {
    test_triangle();
    test_selection();
    test_restarts();
    return finish("schedule");
}
