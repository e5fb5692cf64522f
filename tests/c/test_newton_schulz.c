/*
 * test_newton_schulz.c - Newton-Schulz programs without a GPU.
 *
 * 1. The lists of products, replayed in float64, equal the polynomials applied one after the other.
 * 2. The driver runs against products and copies on the CPU (below, in place of the CUDA ones) with 16-bit
 *    buffers: any layout, dtype, mixture of stacks and workspace gives the polynomials' values, and the
 *    workspace and the other stacks change no bit.
 * 3. Wrong arguments are refused with a text that names them.
 */
#include "cuda/aligned.h"
#include "cuda/dispatch.h"
#include "cuda/prepare.h"
#include "dion3_round.h"
#include "expect.h"
#include "newton_schulz.h"
#include "restarts.h"

#include <math.h>

/* Polar Express with safety 1.05, eight iterations. */
static double coefficients[24];

static void make_coefficients(void) {
    static const double table[24] = {8.28721201814563,
                                     -23.595886519098837,
                                     17.300387312530933,
                                     4.107059111542203,
                                     -2.9478499167379106,
                                     0.5448431082926601,
                                     3.9486908534822946,
                                     -2.908902115962949,
                                     0.5518191394370137,
                                     3.3184196573706015,
                                     -2.488488024314874,
                                     0.51004894012372,
                                     2.300652019954817,
                                     -1.6689039845747493,
                                     0.4188073119525673,
                                     1.891301407787398,
                                     -1.2679958271945868,
                                     0.37680408948524835,
                                     1.8750014808534479,
                                     -1.2500016453999487,
                                     0.3750001645474248,
                                     1.875,
                                     -1.25,
                                     0.375};
    for (int i = 0; i < 8; ++i) {
        coefficients[3 * i] = table[3 * i] / 1.05;
        coefficients[3 * i + 1] = table[3 * i + 1] / pow(1.05, 3);
        coefficients[3 * i + 2] = table[3 * i + 2] / pow(1.05, 5);
    }
}

static uint64_t seed = 1;

static double uniform(void) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(seed >> 11) / 9007199254740992.0 * 2.0 - 1.0;
}

/* ---- float64 matrices, row-major ---------------------------------------------------------------- */

/* d = a b, a (m, k), b (k, n). */
static void multiply(double* d, const double* a, const double* b, int m, int n, int k) {
    for (int i = 0; i < m; ++i) {
        for (int j = 0; j < n; ++j) {
            double sum = 0.0;
            for (int l = 0; l < k; ++l) sum += a[i * k + l] * b[l * n + j];
            d[i * n + j] = sum;
        }
    }
}

static void transpose(double* d, const double* a, int rows, int cols) {
    for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < cols; ++j) d[j * rows + i] = a[i * cols + j];
    }
}

enum { MOST = 24 * 40 };

/* x <- the polynomials of x; wide or tall. */
static void compose(double* x, int rows, int cols, const double* abc, int steps) {
    static double t[MOST], r[MOST], rr[MOST], y[MOST];
    for (int s = 0; s < steps; ++s, abc += 3) {
        transpose(t, x, rows, cols);
        multiply(r, x, t, rows, rows, cols);
        multiply(rr, r, r, rows, rows, rows);
        for (int i = 0; i < rows * rows; ++i) r[i] = abc[1] * r[i] + abc[2] * rr[i];
        multiply(y, r, x, rows, cols, rows);
        for (int i = 0; i < rows * cols; ++i) x[i] = abc[0] * x[i] + y[i];
    }
}

/* Random rows with a spread of sizes, Frobenius norm 1. */
static void make_input(double* x, int rows, int cols) {
    double norm = 0.0;
    for (int i = 0; i < rows * cols; ++i) {
        x[i] = uniform() * pow(0.5, i % cols % 4);
        norm += x[i] * x[i];
    }
    for (int i = 0; i < rows * cols; ++i) x[i] /= sqrt(norm);
}

static double distance(const double* a, const double* b, int count) {
    double difference = 0.0, norm = 0.0;
    for (int i = 0; i < count; ++i) {
        difference += (a[i] - b[i]) * (a[i] - b[i]);
        norm += b[i] * b[i];
    }
    return norm > 0.0 ? sqrt(difference / norm) : sqrt(difference);
}

/* ---- 1. lists ----------------------------------------------------------------------------------- */

static double buffers[D3_NS_BUFFERS][MOST];

static void poison(void) {
    for (int i = 0; i < D3_NS_BUFFERS; ++i) {
        for (int j = 0; j < MOST; ++j) buffers[i][j] = NAN;
    }
}

static void replay(const d3_ns_product* p, int rows, int cols) {
    static double t[MOST], d[MOST];
    const int tall = rows > cols, n = tall ? cols : rows;
    int d_rows = n, d_cols = n;
    if (!p->symmetric) {
        d_rows = rows;
        d_cols = cols;
        if (tall) {
            multiply(d, buffers[p->b], buffers[p->a], rows, cols, cols);
        } else {
            multiply(d, buffers[p->a], buffers[p->b], rows, cols, rows);
        }
    } else if (p->a < D3_NS_SQUARE) {
        transpose(t, buffers[p->b], rows, cols);
        multiply(d, tall ? t : buffers[p->a], tall ? buffers[p->a] : t, n, n, tall ? rows : cols);
    } else {
        multiply(d, buffers[p->a], buffers[p->b], n, n, n);
    }
    for (int i = 0; i < d_rows * d_cols; ++i) {
        double v = p->alpha * d[i];
        if (p->beta != 0.0f) v += p->beta * buffers[p->c][i];
        if (p->gamma != 0.0f) v += p->gamma * buffers[p->e][i];
        if (i / d_cols == i % d_cols) v += p->delta;
        d[i] = v;
    }
    memcpy(buffers[p->d], d, sizeof(double) * (size_t)(d_rows * d_cols));
}

/* No product reads what another one of its stage writes; D is neither A nor B; stages never go back. */
static void check_order(const d3_ns_list* list) {
    for (int i = 0; i < list->count; ++i) {
        const d3_ns_product* p = &list->products[i];
        EXPECT(p->d != p->a && p->d != p->b, "product %d writes its operand", i);
        EXPECT(p->d > D3_NS_INPUT && p->d < D3_NS_SQUARE + list->squares, "product %d writes buffer %d", i,
               p->d);
        EXPECT(p->stage >= 0 && p->stage < list->stages, "product %d in stage %d", i, p->stage);
        EXPECT(i == 0 || p->stage >= list->products[i - 1].stage, "product %d goes back", i);
        for (int j = 0; j < list->count; ++j) {
            const d3_ns_product* o = &list->products[j];
            if (j == i || o->stage != p->stage) continue;
            EXPECT(o->a != p->d && o->b != p->d && o->c != p->d && o->e != p->d && o->d != p->d,
                   "products %d and %d of stage %d depend on each other", i, j, p->stage);
        }
    }
}

static void check_counts(const d3_ns_list* list, int gram, const dion3_ns_program* program) {
    const d3_ns_counts counts = d3_ns_count(gram, program->steps, program->restarts, program->restart_count);
    int general = 0, rectangular = 0;
    for (int i = 0; i < list->count; ++i) {
        general += !list->products[i].symmetric;
        rectangular += list->products[i].symmetric && list->products[i].a < D3_NS_SQUARE;
    }
    EXPECT(general == counts.general && rectangular == counts.rectangular_symmetric &&
               list->count == general + rectangular + counts.square_symmetric,
           "%d products, %d general, %d rectangular", list->count, general, rectangular);
}

static void check_list(const dion3_ns_program* program, int gram, int in_place, d3_ns_output output, int rows,
                       int cols) {
    static d3_ns_list list;
    static double x[MOST], expected[MOST];
    d3_ns_build(program, gram, in_place, output, &list);
    check_order(&list);
    check_counts(&list, gram, program);
    EXPECT(list.first == D3_NS_INPUT ? in_place : !in_place, "first=%d", list.first);
    EXPECT((list.last == D3_NS_OUT) == (output != D3_NS_OUT_COPY), "last=%d output=%d", list.last,
           (int)output);
    make_input(x, rows, cols);
    memcpy(expected, x, sizeof x);
    compose(expected, rows, cols, program->coefficients, program->steps);
    poison();
    memcpy(buffers[list.first], x, sizeof x);
    for (int i = 0; i < list.count; ++i) {
        const d3_ns_product* p = &list.products[i];
        EXPECT(output == D3_NS_OUT_OPERAND || (p->a != D3_NS_OUT && p->b != D3_NS_OUT && p->c != D3_NS_OUT),
               "product %d reads the output", i);
        replay(p, rows, cols);
    }
    /* alpha .. delta are rounded to fp32: errors of 1e-7 grow by the slopes of the polynomials. */
    const double error = distance(buffers[list.last], expected, rows * cols);
    EXPECT(error < 2e-4, "%s %dx%d steps %d: %g", gram ? "gram" : "standard", rows, cols, program->steps,
           error);
}

static void test_lists(void) {
    static const int shapes[3][2] = {{5, 13}, {13, 5}, {6, 6}};
    for (int steps = 1; steps <= 8; ++steps) {
        for (int set = 0; set < 1 << (steps - 1); ++set) {
            int32_t restarts[8], count = 0;
            for (int r = 1; r < steps; ++r) {
                if (set >> (r - 1) & 1) restarts[count++] = r;
            }
            const dion3_ns_program program = {coefficients, steps, 0, restarts, count, DION3_F16, 0, 0, 0.0};
            for (int v = 0; v < 3 * 2 * 3; ++v) {
                const int* shape = shapes[v % 3];
                check_list(&program, 1, v / 3 % 2, (d3_ns_output)(v / 6), shape[0], shape[1]);
                if (set == 0) check_list(&program, 0, v / 3 % 2, (d3_ns_output)(v / 6), shape[0], shape[1]);
            }
        }
    }
}

static void test_default_program(void) {
    static d3_ns_list list;
    const int32_t restarts[1] = {2};
    const dion3_ns_program program = {coefficients, 5, 0, restarts, 1, DION3_F16, 0, 0, 0.0};
    d3_ns_build(&program, 1, 0, D3_NS_OUT_OPERAND, &list);
    EXPECT(list.count == 18 && list.stages == 17, "%d products in %d stages", list.count, list.stages);
    EXPECT(list.squares == 5 && list.copies == 1, "%d squares, %d copies", list.squares, list.copies);
    d3_ns_build(&program, 0, 0, D3_NS_OUT_OPERAND, &list);
    EXPECT(list.count == 15 && list.stages == 15, "%d products in %d stages", list.count, list.stages);
    EXPECT(list.squares == 2 && list.copies == 1, "%d squares, %d copies", list.squares, list.copies);
}

/* ---- the CUDA side, on the CPU ------------------------------------------------------------------- */

static int64_t index_of(const dion3_tensor* t, int64_t b, int64_t i, int64_t j) {
    return b * t->batch_stride + i * t->row_stride + j * t->col_stride;
}

static double get(const dion3_tensor* t, int64_t b, int64_t i, int64_t j) {
    return d3_load(t->data, index_of(t, b, i, j), t->dtype);
}

static void put(const dion3_tensor* t, int64_t b, int64_t i, int64_t j, double value) {
    d3_store(t->data, index_of(t, b, i, j), t->dtype, (float)value);
}

static int gemm_calls, norm_calls, copy_calls;
static const char* workspace_begin; /* of the running call */
static const char* workspace_end;

/* Workspace that is an operand begins at a multiple of 256 bytes, and its rows of 16. */
static void check_workspace(const dion3_tensor* t, int64_t batch, int64_t rows, int64_t cols) {
    const char* data = t->data;
    if (!data || data < workspace_begin || data >= workspace_end) return;
    const int turned = t->col_stride != 1;
    EXPECT((uintptr_t)data % 256 == 0, "workspace at %p", (const void*)data);
    EXPECT(d3_rows_aligned(data, 2, batch, t->batch_stride, turned ? cols : rows,
                           turned ? t->col_stride : t->row_stride, turned ? rows : cols,
                           turned ? t->row_stride : t->col_stride),
           "strides %lld %lld %lld", (long long)t->batch_stride, (long long)t->row_stride,
           (long long)t->col_stride);
}

static void check_operands(const d3_group* group, int symmetric) {
    const dion3_gemm* g = &group->g;
    check_workspace(&g->a, g->batch, g->m, g->k);
    check_workspace(&g->b, g->batch, symmetric ? g->n : g->k, symmetric ? g->k : g->n);
    check_workspace(&g->c, g->batch, g->m, g->n);
    check_workspace(&g->d, g->batch, g->m, g->n);
    check_workspace(&group->e, g->batch, g->m, g->n);
}

static void run_group(const d3_group* group, int symmetric) {
    const dion3_gemm* g = &group->g;
    check_operands(group, symmetric);
    for (int64_t b = 0; b < g->batch; ++b) {
        for (int64_t i = 0; i < g->m; ++i) {
            for (int64_t j = 0; j < (symmetric ? i + 1 : g->n); ++j) {
                double v = 0.0;
                for (int64_t k = 0; k < g->k; ++k) {
                    v += get(&g->a, b, i, k) * (symmetric ? get(&g->b, b, j, k) : get(&g->b, b, k, j));
                }
                v *= g->alpha;
                if (g->beta != 0.0f) v += g->beta * get(&g->c, b, i, j);
                if (group->gamma != 0.0f) v += group->gamma * get(&group->e, b, i, j);
                if (i == j) v += group->delta;
                put(&g->d, b, i, j, v);
                if (symmetric) put(&g->d, b, j, i, v);
            }
        }
        /* The kernels store whole units of 8 elements. */
        EXPECT(group->d_padded || g->n % 8 == 0, "%lld columns into memory of the caller", (long long)g->n);
        for (int64_t i = 0; i < g->m && group->d_padded; ++i) {
            for (int64_t j = g->n; j % 8; ++j) put(&g->d, b, i, j, NAN);
        }
    }
}

dion3_status d3_gemm(const d3_group* groups, int64_t count, int symmetric, int32_t backend,
                     dion3_stream stream) {
    (void)backend;
    (void)stream;
    gemm_calls++;
    for (int64_t i = 0; i < count; ++i) run_group(&groups[i], symmetric);
    return DION3_OK;
}

int d3_multiprocessors(void) { return 4; }

int64_t d3_norm_bytes(const d3_copy* item) { return item->rows < 3 ? 0 : 32; }

/* The squared norm, kept where the item says, which must be inside of what is overwritten first. */
static double squared_norm(const d3_copy* c, int64_t b, const char* norms, size_t norms_bytes) {
    double sum = 0.0;
    for (int64_t i = 0; i < c->rows; ++i) {
        for (int64_t j = 0; j < c->cols; ++j) sum += get(&c->src, b, i, j) * get(&c->src, b, i, j);
    }
    if (d3_norm_bytes(c)) {
        char* own = (char*)c->norms + b * d3_norm_bytes(c);
        EXPECT((uintptr_t)c->norms % 16 == 0, "norms at %p", c->norms);
        EXPECT(own >= norms && own + d3_norm_bytes(c) <= norms + norms_bytes, "matrix %d", (int)b);
        for (int i = 0; i < 32; ++i) EXPECT(own[i] == (char)0xff, "matrix %d shares its norm", (int)b);
        memset(own, 0, 32);
    }
    return sum;
}

dion3_status d3_copies(const d3_copy* items, int64_t count, void* norms, size_t norms_bytes,
                       dion3_stream stream) {
    (void)stream;
    if (norms_bytes) memset(norms, 0xff, norms_bytes);
    if (items->scaled) {
        norm_calls++;
    } else {
        copy_calls++;
    }
    for (const d3_copy* c = items; c < items + count; ++c) {
        for (int64_t b = 0; b < c->batch; ++b) {
            const double divisor =
                c->scaled ? fmax(sqrt(squared_norm(c, b, norms, norms_bytes)), c->eps) : 1.0;
            for (int64_t i = 0; i < c->rows; ++i) {
                for (int64_t j = 0; j < c->cols; ++j) {
                    put(&c->dst, b, i, j, divisor == 0.0 ? 0.0 : get(&c->src, b, i, j) / divisor);
                }
            }
        }
    }
    return DION3_OK;
}

/* ---- 2. the driver ------------------------------------------------------------------------------ */

enum { MAX_BATCH = 5, ELEMENTS = MAX_BATCH * 24 * 48 };

/* A stack in memory of its own, with NaN around it and in its output. */
typedef struct test_stack {
    dion3_ns_stack stack;
    float* x;
    float* out;
    double exact[MAX_BATCH][MOST]; /* the normalised matrices */
} test_stack;

/* layout 0: row-major without padding, 1: rows padded to 8, 2: column-major padded, 3: any strides. */
static dion3_tensor make_tensor(float* memory, int64_t rows, int64_t cols, int layout, int32_t dtype) {
    const int64_t wide = (cols + 7) / 8 * 8, high = (rows + 7) / 8 * 8;
    dion3_tensor t = {memory, rows * cols, cols, 1, dtype, 0};
    if (layout == 1) {
        t.batch_stride = rows * wide;
        t.row_stride = wide;
    } else if (layout == 2) {
        t.batch_stride = cols * high;
        t.row_stride = 1;
        t.col_stride = high;
    } else if (layout == 3) {
        t.batch_stride = 2;
        t.row_stride = 2 * MAX_BATCH;
        t.col_stride = 2 * MAX_BATCH * rows;
    }
    return t;
}

static void make_stack(test_stack* s, int batch, int rows, int cols, int x_layout, int x_dtype,
                       int out_layout, int out_dtype, double scale) {
    s->x = aligned_alloc(256, ELEMENTS * sizeof(float));
    s->out = aligned_alloc(256, ELEMENTS * sizeof(float));
    memset(s->x, 0xff, ELEMENTS * sizeof(float));
    memset(s->out, 0xff, ELEMENTS * sizeof(float));
    s->stack.batch = batch;
    s->stack.rows = rows;
    s->stack.cols = cols;
    s->stack.x = make_tensor(s->x, rows, cols, x_layout, x_dtype);
    s->stack.out = make_tensor(s->out, rows, cols, out_layout, out_dtype);
    for (int b = 0; b < batch; ++b) {
        make_input(s->exact[b], rows, cols);
        for (int i = 0; i < rows * cols; ++i) put(&s->stack.x, b, i / cols, i % cols, scale * s->exact[b][i]);
    }
}

static void free_stack(test_stack* s) {
    free(s->x);
    free(s->out);
}

static void check_stack(test_stack* s, const dion3_ns_program* program, const char* what) {
    static double expected[MOST], got[MOST];
    const int rows = (int)s->stack.rows, cols = (int)s->stack.cols;
    for (int b = 0; b < s->stack.batch; ++b) {
        memcpy(expected, s->exact[b], sizeof expected);
        compose(expected, rows, cols, program->coefficients, program->steps);
        for (int i = 0; i < rows * cols; ++i) got[i] = get(&s->stack.out, b, i / cols, i % cols);
        const double error = distance(got, expected, rows * cols);
        EXPECT(error < 0.06, "%s: matrix %d of %dx%d: error %g", what, b, rows, cols, error);
    }
}

static dion3_status run(const dion3_ns_stack* stacks, int64_t count, const dion3_ns_program* program,
                        size_t bytes) {
    enum { GUARD = 4096 };
    char* workspace = aligned_alloc(256, (bytes + 255) / 256 * 256 + GUARD);
    memset(workspace, 0xff, bytes + GUARD);
    gemm_calls = norm_calls = copy_calls = 0;
    workspace_begin = workspace;
    workspace_end = workspace + bytes;
    const dion3_status status = dion3_newton_schulz_cuda(stacks, count, program, workspace, bytes, NULL);
    for (int i = 0; i < GUARD; ++i)
        EXPECT(workspace[bytes + (size_t)i] == (char)0xff, "byte %d behind the workspace", i);
    free(workspace);
    return status;
}

static const int32_t one_restart[1] = {2};

static dion3_ns_program default_program(void) {
    const dion3_ns_program program = {coefficients, 5, DION3_NS_AUTO, one_restart, 1, DION3_F16, 0, 0, 0.0};
    return program;
}

/* One stack in every layout and dtype. */
static void test_layouts(void) {
    static const int shapes[6][2] = {{8, 24}, {24, 8}, {7, 19}, {19, 7}, {9, 9}, {1, 5}};
    static test_stack s;
    for (int v = 0; v < 6 * 4 * 3 * 4 * 3; ++v) {
        const int* shape = shapes[v % 6];
        const dion3_ns_program program = default_program();
        size_t least;
        make_stack(&s, 2, shape[0], shape[1], v / 6 % 4, v / 24 % 3, v / 72 % 4, v / 288 % 3, 3.0);
        const size_t bytes = dion3_newton_schulz_workspace_size(&s.stack, 1, &program, &least);
        EXPECT(least > 0 && least <= bytes, "least %zu of %zu", least, bytes);
        float* before = malloc(ELEMENTS * sizeof(float));
        memcpy(before, s.x, ELEMENTS * sizeof(float));
        EXPECT(run(&s.stack, 1, &program, bytes) == DION3_OK, "%s", dion3_last_error());
        EXPECT(memcmp(before, s.x, ELEMENTS * sizeof(float)) == 0, "the input was written");
        EXPECT(norm_calls == 1 && gemm_calls == (shape[0] == shape[1] ? 15 : 17),
               "%d norm and %d product calls", norm_calls, gemm_calls);
        check_stack(&s, &program, "layout");
        free(before);
        free_stack(&s);
    }
}

/* A normalised fp16 input with aligned rows is read where it lies. */
static void test_in_place(void) {
    static test_stack s;
    dion3_ns_program program = default_program();
    program.normalized = 1;
    make_stack(&s, 2, 8, 24, 1, DION3_F16, 1, DION3_F16, 1.0);
    EXPECT(run(&s.stack, 1, &program, dion3_newton_schulz_workspace_size(&s.stack, 1, &program, NULL)) ==
               DION3_OK,
           "%s", dion3_last_error());
    EXPECT(copy_calls == 0 && norm_calls == 0, "%d copies and %d norms", copy_calls, norm_calls);
    check_stack(&s, &program, "in place");
    free_stack(&s);
    program.steps = 1; /* one segment of one iteration: X = Z X + a X */
    program.restart_count = 0;
    make_stack(&s, 2, 8, 24, 2, DION3_F16, 2, DION3_F16, 1.0);
    EXPECT(run(&s.stack, 1, &program, dion3_newton_schulz_workspace_size(&s.stack, 1, &program, NULL)) ==
               DION3_OK,
           "%s", dion3_last_error());
    EXPECT(copy_calls == 0 && gemm_calls == 3, "%d copies and %d products", copy_calls, gemm_calls);
    check_stack(&s, &program, "one step");
    free_stack(&s);
}

/* Wide, tall and square stacks in one call (17 launches, and 6 more where the standard form has the other kind), with all the workspace, with the least, and in between. */
static void test_groups_and_chunks(void) {
    static test_stack s[4];
    static unsigned char first[4][ELEMENTS * sizeof(float)];
    dion3_ns_stack stacks[4];
    const dion3_ns_program program = default_program();
    size_t least;
    make_stack(&s[0], 5, 8, 24, 1, DION3_F32, 1, DION3_F16, 1e-3);
    make_stack(&s[1], 3, 9, 9, 0, DION3_F32, 0, DION3_F32, 1e3);
    make_stack(&s[2], 0, 4, 4, 0, DION3_F32, 0, DION3_F32, 1.0);
    make_stack(&s[3], 4, 19, 7, 2, DION3_BF16, 0, DION3_BF16, 1.0);
    for (int i = 0; i < 4; ++i) stacks[i] = s[i].stack;
    const size_t bytes = dion3_newton_schulz_workspace_size(stacks, 4, &program, &least);
    EXPECT(run(stacks, 4, &program, bytes) == DION3_OK, "%s", dion3_last_error());
    EXPECT(norm_calls == 1 && copy_calls == 1 && gemm_calls == 23, "%d norms, %d copies, %d products",
           norm_calls, copy_calls, gemm_calls);
    for (int i = 0; i < 4; ++i) {
        if (i != 3) check_stack(&s[i], &program, "grouped"); /* the bf16 input is coarser than this bound */
        memcpy(first[i], s[i].out, sizeof first[i]);
    }
    for (size_t some = least; some < bytes; some += (bytes - least) / 7 + 256) {
        for (int i = 0; i < 4; ++i) memset(s[i].out, 0xff, sizeof first[i]);
        EXPECT(run(stacks, 4, &program, some) == DION3_OK, "%s", dion3_last_error());
        for (int i = 0; i < 4; ++i) {
            EXPECT(memcmp(first[i], s[i].out, sizeof first[i]) == 0, "stack %d changes with workspace %zu", i,
                   some);
        }
    }
    for (int i = 0; i < 4; ++i) { /* alone */
        memset(s[i].out, 0xff, sizeof first[i]);
        EXPECT(run(&stacks[i], 1, &program, bytes) == DION3_OK, "%s", dion3_last_error());
        EXPECT(memcmp(first[i], s[i].out, sizeof first[i]) == 0, "stack %d changes alone", i);
        free_stack(&s[i]);
    }
}

/* The workspace formula: 5 squares and 1 copy of the default program, plus the partial norms. */
static void test_workspace(void) {
    static test_stack s;
    const dion3_ns_program program = default_program();
    size_t least;
    make_stack(&s, 2, 8, 24, 1, DION3_F32, 1, DION3_F16, 1.0);
    const size_t bytes = dion3_newton_schulz_workspace_size(&s.stack, 1, &program, &least);
    EXPECT(bytes == 5 * (2 * 2 * 8 * 8) + (2 * 2 * 8 * 24) + 256, "%zu bytes", bytes);
    EXPECT(least == 5 * 256 + 512 + 256, "%zu bytes at least", least);
    EXPECT(run(&s.stack, 1, &program, least - 1) == DION3_ERR_INVALID &&
               strstr(dion3_last_error(), "workspace_bytes"),
           "%s", dion3_last_error());
    free_stack(&s);
}

/* ---- 3. refusals -------------------------------------------------------------------------------- */

static void refused(dion3_ns_stack stack, dion3_ns_program program, const char* name) {
    const dion3_status status = dion3_newton_schulz_cuda(&stack, 1, &program, NULL, 0, NULL);
    EXPECT(status == DION3_ERR_INVALID && strstr(dion3_last_error(), name), "%s: status %d, \"%s\"", name,
           (int)status, dion3_last_error());
    EXPECT(dion3_newton_schulz_workspace_size(&stack, 1, &program, NULL) == 0, "%s has a workspace size",
           name);
}

static void test_refusals(void) {
    static test_stack s;
    static const int32_t twice[2] = {2, 2}, late[1] = {5}, early[1] = {0};
    static const double bad[3] = {1.0, NAN, 0.0};
    make_stack(&s, 2, 8, 24, 1, DION3_F32, 1, DION3_F16, 1.0);
    const dion3_ns_program good = default_program();
#define PROGRAM(change, name)                                                                                \
    do {                                                                                                     \
        dion3_ns_program p = good;                                                                           \
        change;                                                                                              \
        refused(s.stack, p, name);                                                                           \
    } while (0)
#define STACK(change, name)                                                                                  \
    do {                                                                                                     \
        dion3_ns_stack t = s.stack;                                                                          \
        change;                                                                                              \
        refused(t, good, name);                                                                              \
    } while (0)
    PROGRAM(p.steps = 0, "steps=0");
    PROGRAM(p.steps = 101, "steps=101");
    PROGRAM(p.coefficients = NULL, "coefficients");
    PROGRAM((p.coefficients = bad, p.steps = 1, p.restart_count = 0), "coefficients[0][1]");
    PROGRAM(p.method = 3, "method=3");
    PROGRAM((p.restarts = twice, p.restart_count = 2), "restarts[1]=2");
    PROGRAM(p.restarts = late, "restarts[0]=5");
    PROGRAM(p.restarts = early, "restarts[0]=0");
    PROGRAM(p.restarts = NULL, "restart_count=1");
    PROGRAM(p.compute_dtype = DION3_F32, "compute_dtype=0");
    PROGRAM(p.backend = 3, "backend=3");
    PROGRAM(p.eps = -1.0, "eps=-1");
    PROGRAM(p.eps = NAN, "eps=");
    STACK(t.batch = -1, "batch=-1");
    STACK(t.rows = -1, "rows=-1");
    STACK(t.rows = 1ll << 31, "rows=2147483648");
    STACK(t.x.dtype = 7, "x dtype=7");
    STACK(t.x.data = NULL, "x must not be NULL");
    STACK(t.out.row_stride = 0, "out strides");
    STACK(t.out.data = t.x.data, "out=");
    free_stack(&s);
    EXPECT(dion3_newton_schulz_cuda(NULL, 0, &good, NULL, 0, NULL) == DION3_OK, "no stacks");
}

int main(void) {
    make_coefficients();
    test_lists();
    test_default_program();
    test_layouts();
    test_in_place();
    test_groups_and_chunks();
    test_workspace();
    test_refusals();
    return finish("newton_schulz");
}
