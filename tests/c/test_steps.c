/*
 * test_steps.c - every CPU operation on small integers, where all arithmetic is exact, for every mix of
 * dtypes, with strides and guard elements around what is written.
 */
#include "dion3_round.h"
#include "expect.h"

enum { BATCH = 2, ROWS = 5, COLS = 7, ROOM = 1024, GUARD = 0x3d5a };

typedef struct matrix {
    uint32_t storage[ROOM]; /* room for any dtype */
    dion3_tensor tensor;
} matrix;

/* A (batch, rows, cols) stack with gaps between rows and columns, all elements a guard value. */
static void make(matrix* m, int32_t dtype, int64_t rows, int64_t cols, int transposed) {
    const dion3_tensor t = {
        m->storage, 2 * rows * cols + 30, transposed ? 2 : 2 * cols + 1, transposed ? 2 * rows + 1 : 2, dtype,
        0};
    for (int64_t i = 0; i < ROOM; ++i) m->storage[i] = GUARD | (uint32_t)GUARD << 16;
    m->tensor = t;
    m->tensor.data = (char*)m->storage + 16 * d3_dtype_size(dtype);
    m->tensor.batch_stride = 2 * (rows + 1) * (cols + 1) + 30;
}

static int64_t at(const matrix* m, int64_t b, int64_t i, int64_t j) {
    return b * m->tensor.batch_stride + i * m->tensor.row_stride + j * m->tensor.col_stride;
}

static float get(const matrix* m, int64_t b, int64_t i, int64_t j) {
    return d3_load(m->tensor.data, at(m, b, i, j), m->tensor.dtype);
}

static void set(matrix* m, int64_t b, int64_t i, int64_t j, float x) {
    d3_store(m->tensor.data, at(m, b, i, j), m->tensor.dtype, x);
}

/* How many elements of the storage differ from the guard. */
static int64_t written(const matrix* m) {
    const uint16_t* p = (const uint16_t*)m->storage;
    const int64_t width = d3_dtype_size(m->tensor.dtype) / 2;
    int64_t n = 0;
    for (int64_t i = 0; i < 2 * ROOM; i += width) {
        n += p[i] != GUARD || p[i + width - 1] != GUARD;
    }
    return n;
}

static float value(int64_t b, int64_t i, int64_t j) { return (float)((3 * b + 5 * i + 7 * j) % 11 - 5); }

static void fill(matrix* m, int64_t rows, int64_t cols) {
    for (int64_t b = 0; b < BATCH; ++b) {
        for (int64_t i = 0; i < rows; ++i) {
            for (int64_t j = 0; j < cols; ++j) set(m, b, i, j, value(b, i, j));
        }
    }
}

static const float hyper[DION3_HYPER_COUNT] = {0.5f, 2.0f, 2.0f, -4.0f, 0.5f, 0.25f, 0.5f, 1.0f, 1.0f};

static void test_momentum(int32_t dm, int32_t dg, int32_t axis, int transposed) {
    matrix m, g;
    double score[BATCH * COLS + 2], sumsq[BATCH * COLS + 2];
    int32_t slots[BATCH * COLS];
    const int64_t n = axis == DION3_ROWS ? ROWS : COLS, other = axis == DION3_ROWS ? COLS : ROWS;
    make(&m, dm, ROWS, COLS, transposed);
    make(&g, dg, ROWS, COLS, 0);
    fill(&m, ROWS, COLS);
    fill(&g, ROWS, COLS);
    for (int64_t i = 0; i < BATCH * COLS + 2; ++i) score[i] = sumsq[i] = -7.0;
    for (int64_t i = 0; i < BATCH * COLS; ++i) slots[i] = i % 3 == 1 ? (int32_t)i : -1;
    dion3_momentum_item it = {.momentum = m.tensor,
                              .grad = g.tensor,
                              .batch = BATCH,
                              .rows = ROWS,
                              .cols = COLS,
                              .slots = slots,
                              .feedback = &hyper[DION3_HYPER_FEEDBACK],
                              .hyper = hyper,
                              .score = score + 1,
                              .sumsq = sumsq + 1,
                              .axis = axis};
    EXPECT(dion3_momentum_cpu(&it, 1) == DION3_OK, "%s", dion3_last_error());
    for (int64_t b = 0; b < BATCH; ++b) {
        for (int64_t s = 0; s < n; ++s) {
            double l1 = 0.0, l2 = 0.0;
            for (int64_t t = 0; t < other; ++t) {
                const int64_t i = axis == DION3_ROWS ? s : t, j = axis == DION3_ROWS ? t : s;
                const float before = (slots[b * n + s] < 0 ? 1.0f : 0.5f) * value(b, i, j);
                const float want = 2.0f * before - 4.0f * value(b, i, j);
                EXPECT(get(&m, b, i, j) == want, "momentum %g", (double)get(&m, b, i, j));
                EXPECT(get(&g, b, i, j) == value(b, i, j), "gradient changed");
                l1 += fabs((double)want);
                l2 += (double)want * (double)want;
            }
            EXPECT(score[1 + b * n + s] == l1 && sumsq[1 + b * n + s] == l2, "sums of slice %lld",
                   (long long)s);
        }
    }
    EXPECT(score[0] == -7.0 && score[1 + BATCH * n] == -7.0 && sumsq[0] == -7.0 &&
               sumsq[1 + BATCH * n] == -7.0,
           "sums written outside");
    EXPECT(written(&m) == BATCH * ROWS * COLS && written(&g) == BATCH * ROWS * COLS, "guards");
}

static void test_gather(int32_t dm, int32_t dout, int32_t axis, int transposed) {
    static const int32_t indices[BATCH * 3] = {0, 2, 4, 1, 3, 4};
    static const double norm[BATCH] = {0.125, 2.0}; /* the first is below eps = 1/4 */
    matrix m, out;
    const int64_t rows = axis == DION3_ROWS ? 3 : ROWS, cols = axis == DION3_ROWS ? COLS : 3;
    make(&m, dm, ROWS, COLS, transposed);
    make(&out, dout, rows, cols, 0);
    fill(&m, ROWS, COLS);
    dion3_gather_item it = {.momentum = m.tensor,
                            .out = out.tensor,
                            .batch = BATCH,
                            .rows = ROWS,
                            .cols = COLS,
                            .k = 3,
                            .indices = indices,
                            .norm = norm,
                            .hyper = hyper,
                            .axis = axis};
    EXPECT(dion3_gather_cpu(&it, 1) == DION3_OK, "%s", dion3_last_error());
    for (int64_t b = 0; b < BATCH; ++b) {
        for (int64_t i = 0; i < ROWS; ++i) {
            for (int64_t j = 0; j < COLS; ++j) {
                const int64_t slice = axis == DION3_ROWS ? i : j;
                const float scale = b == 0 ? 4.0f : 0.5f;
                int64_t place = -1;
                EXPECT(get(&m, b, i, j) == value(b, i, j), "momentum changed");
                for (int64_t s = 0; s < 3; ++s) {
                    if (indices[3 * b + s] == slice) place = s;
                }
                if (place < 0) continue;
                EXPECT((axis == DION3_ROWS ? get(&out, b, place, j) : get(&out, b, i, place)) ==
                           scale * value(b, i, j),
                       "gathered (%lld, %lld, %lld)", (long long)b, (long long)i, (long long)j);
            }
        }
    }
    EXPECT(written(&m) == BATCH * ROWS * COLS && written(&out) == BATCH * rows * cols, "guards");
}

static void test_update(int32_t dw, int32_t du, int32_t axis, int transposed) {
    static const int32_t row_slots[BATCH * ROWS] = {0, -1, 1, -1, 2, -1, 0, -1, 1, 2};
    static const int32_t col_slots[BATCH * COLS] = {0, -1, 1, -1, 2, -1, -1, -1, 0, -1, 1, -1, -1, 2};
    static const float factor[BATCH * ROWS] = {1, 2, 4, 1, 2, 1, 0.5f, 1, 2, 4};
    static const float step = 3.0f;
    const int by_rows = axis == DION3_ROWS;
    const int64_t rows = by_rows ? 3 : ROWS, cols = by_rows ? COLS : 3;
    for (int stochastic = 0; stochastic < 2; ++stochastic) {
        matrix w, o;
        make(&w, dw, ROWS, COLS, transposed);
        make(&o, du, rows, cols, transposed);
        fill(&w, ROWS, COLS);
        fill(&o, rows, cols);
        dion3_update_item it = {.weight = w.tensor,
                                .update = o.tensor,
                                .batch = BATCH,
                                .rows = ROWS,
                                .cols = COLS,
                                .k = 3,
                                .slots = by_rows ? row_slots : col_slots,
                                .factor = factor,
                                .hyper = hyper,
                                .step = stochastic ? &step : 0,
                                .axis = axis,
                                .scale = 0.25f};
        EXPECT(dion3_update_cpu(&it, 1) == DION3_OK, "%s", dion3_last_error());
        for (int64_t b = 0; b < BATCH; ++b) {
            for (int64_t i = 0; i < ROWS; ++i) {
                for (int64_t j = 0; j < COLS; ++j) {
                    const int32_t slot = by_rows ? row_slots[b * ROWS + i] : col_slots[b * COLS + j];
                    float want = 0.5f * value(b, i, j);
                    if (slot >= 0) {
                        const int64_t r = by_rows ? slot : i, c = by_rows ? j : slot;
                        want -= 0.5f * factor[b * rows + r] * value(b, r, c);
                    }
                    EXPECT(get(&w, b, i, j) == want, "weight (%lld, %lld, %lld) = %g, not %g", (long long)b,
                           (long long)i, (long long)j, (double)get(&w, b, i, j), (double)want);
                }
            }
        }
        EXPECT(written(&w) == BATCH * ROWS * COLS && written(&o) == BATCH * rows * cols, "guards");
    }
}

static void test_neuron(int32_t du) {
    matrix o;
    float second[2 * 4 + 2] = {-7, 1, 2, 4, 8, 1, 2, 4, 8, -7}, factor[BATCH * 2 + 2] = {-7, 0, 0, 0, 0, -7};
    static const int32_t indices[BATCH * 2] = {0, 2, 1, 3};
    make(&o, du, 2, 4, 1);
    for (int64_t b = 0; b < BATCH; ++b) {
        for (int64_t j = 0; j < 4; ++j) {
            set(&o, b, 0, j, 1.0f + (float)b);
            set(&o, b, 1, j, b ? 0.0f : 2.0f);
        }
    }
    dion3_neuron_item it = {.update = o.tensor,
                            .batch = BATCH,
                            .rows = 2,
                            .cols = 4,
                            .neurons = 4,
                            .second_moment = second + 1,
                            .indices = indices,
                            .factor = factor + 1,
                            .hyper = hyper};
    EXPECT(dion3_neuron_cpu(&it, 1) == DION3_OK, "%s", dion3_last_error());
    /* beta2 = 1/2, eps = 1: v = 1, 4 -> d = 2, 3; mean squares 1 and 4: ratio sqrt(5 / (1/4 + 4/9)). */
    const float ratio = (float)sqrt(5.0 / (0.25 + 4.0 / 9.0));
    const float want[10] = {-7, 1, 2, 4, 8, 1, 3, 4, 4, -7};
    for (int i = 0; i < 10; ++i) EXPECT(second[i] == want[i], "second moment %d = %g", i, (double)second[i]);
    EXPECT(factor[1] == ratio / 2.0f && factor[2] == ratio / 3.0f, "%g %g", (double)factor[1],
           (double)factor[2]);
    /* The second matrix has one moving row, whose norm is kept: factor 1; the other's is finite. */
    EXPECT(fabsf(factor[3] - 1.0f) < 1e-6f && isfinite(factor[4]), "%g", (double)factor[3]);
    EXPECT(factor[0] == -7.0f && factor[5] == -7.0f, "factor written outside");
    memset(o.storage, 0, sizeof o.storage);
    EXPECT(dion3_neuron_cpu(&it, 1) == DION3_OK, "%s", dion3_last_error());
    for (int i = 1; i < 5; ++i) EXPECT(factor[i] == 1.0f, "no update at all: factor %g", (double)factor[i]);
}

static void test_adamw(int32_t dp, int32_t dg, int32_t ds) {
    /* beta1 = beta2 = 1/2, first step: m / (1 - beta1) = g, sqrt(v / (1 - beta2)) = |g|, so w / 2 - sign(g) / 4. */
    static const float scalars[DION3_HYPER_COUNT] = {0.5f, 0.25f, 0.5f, 0.5f, 0.5f, 0.5f, 0.0f, 1.0f};
    static const float step = 1.0f;
    enum { N = 9 };
    uint32_t p[N + 2], g[N + 2], m[N + 2], v[N + 2];
    memset(p, 0x11, sizeof p);
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    for (int i = 0; i < N; ++i) {
        d3_store(p, 1 + i, dp, (float)i);
        d3_store(g, 1 + i, dg, i % 2 ? 2.0f : -4.0f);
    }
    dion3_adamw_item it = {.param = (char*)p + d3_dtype_size(dp),
                           .grad = (char*)g + d3_dtype_size(dg),
                           .exp_avg = (char*)m + d3_dtype_size(ds),
                           .exp_avg_sq = (char*)v + d3_dtype_size(ds),
                           .count = N,
                           .step = &step,
                           .hyper = scalars,
                           .param_dtype = dp,
                           .grad_dtype = dg,
                           .state_dtype = ds};
    EXPECT(dion3_adamw_cpu(&it, 1) == DION3_OK, "%s", dion3_last_error());
    for (int i = 0; i < N; ++i) {
        /* sqrt(4) / sqrt(1/2) is not exact: a few ulp, rounded to dp. */
        const float want = 0.5f * (float)i - (i % 2 ? 0.25f : -0.25f);
        EXPECT(fabsf(d3_load(p, 1 + i, dp) - want) <= 4e-7f * fabsf(want), "%d: %.9g, not %g", i,
               (double)d3_load(p, 1 + i, dp), (double)want);
        EXPECT(d3_load(m, 1 + i, ds) == (i % 2 ? 1.0f : -2.0f), "m");
        EXPECT(d3_load(v, 1 + i, ds) == (i % 2 ? 2.0f : 8.0f), "v");
    }
    EXPECT(*(uint16_t*)p == 0x1111 && ((uint16_t*)p)[(N + 1) * d3_dtype_size(dp) / 2] == 0x1111, "guards");
}

int main(void) {
    for (int32_t first = 0; first < 3; ++first) {
        for (int32_t second = 0; second < 3; ++second) {
            for (int32_t axis = 0; axis < 2; ++axis) {
                for (int transposed = 0; transposed < 2; ++transposed) {
                    test_momentum(first, second, axis, transposed);
                    test_gather(first, second, axis, transposed);
                    test_update(first, second, axis, transposed);
                }
            }
            for (int32_t third = 0; third < 3; ++third) test_adamw(first, second, third);
        }
        test_neuron(first);
    }
    return finish("steps");
}
