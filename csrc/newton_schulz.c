/*
 * newton_schulz.c - runs Newton-Schulz programs over lists of stacks: out = poly(x / max(|x|_F, eps)).
 *
 * Each stack (batch, rows, cols) has its list of products (newton_schulz_list.c); stage s of all lists is
 * one launch for the symmetric and one for the general products. Before the first stage one launch
 * normalises and casts into the buffer where the list expects X; an input that is already normalised, in the
 * compute dtype and addressable, is used where it lies. After the last stage one launch casts the results
 * that products could not write. 18 products in 17 launches for 5 steps with one restart.
 * Workspace, for a matrix of n x m, n <= m, 2 bytes an element: the list's squares of n x pitch(n), its copies of
 * rows x pitch(cols), and what the norm needs (8 bytes for each 32 KB of x). For all matrices at once, or else for
 * even parts of the batch, a little more where that fills whole waves of tiles; the program then runs several
 * times. Which products run depends on shape and strides of a matrix, never on batch.
 */
#include "newton_schulz.h"
#include "check.h"
#include "cuda/aligned.h"
#include "cuda/dispatch.h"
#include "cuda/prepare.h"

#include <math.h>
#include <stdlib.h>

#define LL(x) ((long long)(x))

enum { ALIGNMENT = 256, TILE = 128 };

/* ---- one stack ---------------------------------------------------------------------------------- */

/* A stack, turned so that x is row-major, and everything its list needs to know. */
typedef struct plan {
    dion3_tensor x, out; /* (batch, rows, cols) after turning */
    int64_t batch, rows, cols;
    int64_t norm_bytes; /* of workspace for the norm of one matrix */
    int32_t gram, input_is_operand, compute_dtype;
    d3_ns_output output;
    const d3_ns_list* list;
} plan;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Row pitch of workspace: whole 128-byte lines where that is little waste. */
static int64_t pitch(int64_t cols) {
    const int64_t unit = cols > 64 ? 64 : D3_GEMM_PITCH;
    return (cols + unit - 1) / unit * unit;
}

static void turn(dion3_tensor* t) {
    const int64_t row_stride = t->row_stride;
    t->row_stride = t->col_stride;
    t->col_stride = row_stride;
}

/* Whether a product can read or write the tensor by 16 bytes, row by row. */
static int addressable(const dion3_tensor* t, int64_t batch, int64_t rows, int64_t cols) {
    return d3_rows_aligned(t->data, 2, batch, t->batch_stride, rows, t->row_stride, cols, t->col_stride) &&
           (rows == 1 || t->row_stride >= cols) && (batch == 1 || t->batch_stride > 0);
}

/* The same of a result: products store rows up to the next multiple of 8 elements. */
static int writable(const dion3_tensor* t, int64_t batch, int64_t rows, int64_t cols) {
    return cols % D3_GEMM_PITCH == 0 && addressable(t, batch, rows, cols);
}

static plan make_plan(const dion3_ns_stack* stack, const dion3_ns_program* program) {
    plan p = {stack->x, stack->out, stack->batch, stack->rows, stack->cols, 0, 0, 0, 0, D3_NS_OUT_COPY, NULL};
    if (p.x.row_stride < p.x.col_stride && p.rows > 1 && p.cols > 1) {
        turn(&p.x);
        turn(&p.out);
        p.rows = stack->cols;
        p.cols = stack->rows;
    }
    p.compute_dtype = program->compute_dtype;
    p.gram = program->method == DION3_NS_GRAM || (program->method == DION3_NS_AUTO && p.rows != p.cols);
    p.input_is_operand =
        program->normalized && p.x.dtype == p.compute_dtype && addressable(&p.x, p.batch, p.rows, p.cols);
    if (p.out.dtype != DION3_F32 && writable(&p.out, p.batch, p.rows, p.cols)) {
        p.output = p.out.dtype == p.compute_dtype ? D3_NS_OUT_OPERAND : D3_NS_OUT_WRITE;
    }
    return p;
}

static int is_empty(const plan* p) { return p->batch == 0 || p->rows == 0 || p->cols == 0; }

/* ---- workspace ---------------------------------------------------------------------------------- */

static int64_t aligned_bytes(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* Bytes of one square, and of one X, of so many matrices. */
static int64_t square_bytes(const plan* p, int64_t batch) {
    const int64_t n = smaller(p->rows, p->cols);
    return aligned_bytes(2 * batch * n * pitch(n));
}

static int64_t copy_bytes(const plan* p, int64_t batch) {
    return aligned_bytes(2 * batch * p->rows * pitch(p->cols));
}

static int64_t norms_bytes(const plan* p, int64_t batch) { return aligned_bytes(batch * p->norm_bytes); }

static int64_t part_bytes(const plan* p, int64_t batch) {
    return p->list->squares * square_bytes(p, batch) + p->list->copies * copy_bytes(p, batch) +
           norms_bytes(p, batch);
}

/* The most matrices, of at most `batch`, whose buffers fit. */
static int64_t fitting(const plan* p, int64_t batch, int64_t bytes) {
    int64_t low = 0, high = batch;
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        if (part_bytes(p, middle) <= bytes) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* How many of `left` matrices to do next if `most` fit: even parts, each a little larger where that fills the
 * last wave of the triangle's tiles better. */
static int64_t even_part(const plan* p, int64_t left, int64_t most) {
    const int64_t parts = (left + most - 1) / most, even = (left + parts - 1) / parts;
    const int64_t rows = (smaller(p->rows, p->cols) + TILE - 1) / TILE;
    const int64_t tiles = rows * (rows + 1) / 2, slots = d3_multiprocessors();
    int64_t best = even;
    double best_filled = 0.0;
    for (int64_t c = even; c <= most && c < even + 256; ++c) {
        const int64_t waves = (c * tiles + slots - 1) / slots;
        const double filled = (double)(c * tiles) / (double)(waves * slots);
        if (filled > best_filled) {
            best_filled = filled;
            best = c;
        }
    }
    return best;
}

/* ---- a call ------------------------------------------------------------------------------------- */

/* count matrices of a plan from the first on, with their workspace. */
typedef struct part {
    plan view; /* x and out moved to the first matrix, batch = count */
    dion3_tensor buffer[D3_NS_BUFFERS];
    void* norms;
} part;

typedef struct call {
    plan* plans;
    part* parts;
    d3_group* groups;
    d3_copy* copies;
    d3_ns_list* lists; /* by gram, input_is_operand, output */
    int64_t count, part_count;
    char* norms; /* of all parts, at the end of the workspace */
    int64_t norms_bytes;
} call;

enum { LISTS = 2 * 2 * 3 };

static dion3_tensor workspace_tensor(void* at, const plan* p, int64_t rows, int64_t cols) {
    dion3_tensor t = {at, rows * pitch(cols), pitch(cols), 1, p->compute_dtype, 0};
    return t;
}

static d3_copy input_copy(const plan* p, dion3_tensor dst, const dion3_ns_program* program, void* norms) {
    d3_copy copy = {p->x, dst, p->batch, p->rows, p->cols, !program->normalized, 0, norms, program->eps};
    return copy;
}

static int64_t find_norm_bytes(const plan* p, const dion3_ns_program* program) {
    const d3_copy copy = input_copy(
        p, p->list->first == D3_NS_OUT ? p->out : workspace_tensor(NULL, p, p->rows, p->cols), program, NULL);
    return program->normalized ? 0 : d3_norm_bytes(&copy);
}

static void free_call(call* c) {
    free(c->plans);
    free(c->parts);
    free(c->groups);
    free(c->copies);
    free(c->lists);
}

/* Plans of all stacks that hold anything, with their lists. 0 if the host is out of memory. */
static int make_call(call* c, const dion3_ns_stack* stacks, int64_t count, const dion3_ns_program* program) {
    const size_t n = (size_t)count + 1;
    int built[LISTS] = {0};
    c->count = 0;
    c->part_count = 0;
    c->plans = calloc(n, sizeof *c->plans);
    c->parts = calloc(n, sizeof *c->parts);
    c->groups = calloc(2 * n, sizeof *c->groups);
    c->copies = calloc(n, sizeof *c->copies);
    c->lists = malloc(LISTS * sizeof *c->lists);
    if (!c->plans || !c->parts || !c->groups || !c->copies || !c->lists) return 0;
    for (int64_t i = 0; i < count; ++i) {
        plan p = make_plan(&stacks[i], program);
        if (is_empty(&p)) continue;
        const int which = (p.gram * 2 + p.input_is_operand) * 3 + (int)p.output;
        if (!built[which]) {
            d3_ns_build(program, p.gram, p.input_is_operand, p.output, &c->lists[which]);
            built[which] = 1;
        }
        p.list = &c->lists[which];
        p.norm_bytes = find_norm_bytes(&p, program);
        c->plans[c->count++] = p;
    }
    return 1;
}

static void skip_matrices(dion3_tensor* t, int64_t matrices) {
    t->data = (char*)t->data + matrices * t->batch_stride * (t->dtype == DION3_F32 ? 4 : 2);
}

/* Takes bytes from the workspace's begin. */
static void* take(char** at, int64_t bytes) {
    char* taken = *at;
    *at += bytes;
    return taken;
}

static part make_part(const plan* p, int64_t first, int64_t count, char** at, char** end) {
    part out = {.view = *p};
    const int64_t n = smaller(p->rows, p->cols);
    skip_matrices(&out.view.x, first);
    skip_matrices(&out.view.out, first);
    out.view.batch = count;
    out.buffer[D3_NS_INPUT] = out.view.x;
    out.buffer[D3_NS_OUT] = out.view.out;
    for (int i = 0; i < p->list->copies; ++i) {
        out.buffer[D3_NS_X0 + i] = workspace_tensor(take(at, copy_bytes(p, count)), p, p->rows, p->cols);
    }
    for (int i = 0; i < p->list->squares; ++i) {
        out.buffer[D3_NS_SQUARE + i] = workspace_tensor(take(at, square_bytes(p, count)), p, n, n);
    }
    *end -= norms_bytes(p, count);
    out.norms = *end;
    return out;
}

/* The next parts that fit into the workspace, from matrix *first of plan *next on, which move on. */
static void take_parts(call* c, char* workspace, int64_t bytes, int64_t* next, int64_t* first) {
    char* at = workspace;
    char* const end = workspace + bytes / ALIGNMENT * ALIGNMENT;
    c->norms = end;
    c->part_count = 0;
    while (*next < c->count) {
        const plan* p = &c->plans[*next];
        const int64_t left = p->batch - *first;
        int64_t count = fitting(p, left, c->norms - at);
        if (count == 0) break;
        if (count < left) count = even_part(p, left, count);
        c->parts[c->part_count++] = make_part(p, *first, count, &at, &c->norms);
        *first += count;
        if (*first < p->batch) break;
        *first = 0;
        ++*next;
    }
    c->norms_bytes = end - c->norms;
}

/* The dtype of the last product: a 16-bit output gets it in one rounding, even by way of the workspace. */
static int32_t result_dtype(const plan* p) {
    return p->out.dtype == DION3_F32 ? p->compute_dtype : p->out.dtype;
}

static d3_group make_group(const part* p, const d3_ns_product* product) {
    d3_group group = {0};
    dion3_gemm* g = &group.g;
    const plan* view = &p->view;
    const int tall = view->rows > view->cols;
    const int64_t n = smaller(view->rows, view->cols);
    g->batch = view->batch;
    g->d = p->buffer[product->d];
    g->a = p->buffer[product->a];
    g->b = p->buffer[product->b];
    g->m = g->n = g->k = n;
    if (!product->symmetric) {
        g->m = view->rows;
        g->n = view->cols;
        if (tall) {
            g->a = p->buffer[product->b];
            g->b = p->buffer[product->a];
        }
    } else if (product->a < D3_NS_SQUARE) {
        g->k = tall ? view->rows : view->cols;
        if (tall) {
            turn(&g->a);
            turn(&g->b);
        }
    }
    g->alpha = product->alpha;
    g->beta = product->beta;
    if (product->c != D3_NS_NONE) g->c = p->buffer[product->c];
    if (product->e != D3_NS_NONE) group.e = p->buffer[product->e];
    group.gamma = product->gamma;
    group.delta = product->delta;
    group.d_padded = product->d >= D3_NS_X0;
    if (product == &view->list->products[view->list->count - 1]) g->d.dtype = result_dtype(view);
    return group;
}

/* The products of one stage and kind of all parts. */
static dion3_status run_stage(call* c, int32_t stage, int symmetric, int32_t backend, dion3_stream stream) {
    int64_t count = 0;
    for (int64_t i = 0; i < c->part_count; ++i) {
        const d3_ns_list* list = c->parts[i].view.list;
        for (int32_t j = 0; j < list->count; ++j) {
            const d3_ns_product* product = &list->products[j];
            if (product->stage == stage && product->symmetric == symmetric) {
                c->groups[count++] = make_group(&c->parts[i], product);
            }
        }
    }
    return count ? d3_gemm(c->groups, count, symmetric, backend, stream) : DION3_OK;
}

static dion3_status run_input(call* c, const dion3_ns_program* program, dion3_stream stream) {
    int64_t count = 0;
    for (int64_t i = 0; i < c->part_count; ++i) {
        const part* p = &c->parts[i];
        if (!p->view.input_is_operand)
            c->copies[count++] = input_copy(&p->view, p->buffer[p->view.list->first], program, p->norms);
    }
    return count ? d3_copies(c->copies, count, c->norms, (size_t)c->norms_bytes, stream) : DION3_OK;
}

static dion3_status run_output(call* c, dion3_stream stream) {
    int64_t count = 0;
    for (int64_t i = 0; i < c->part_count; ++i) {
        const part* p = &c->parts[i];
        if (p->view.list->last == D3_NS_OUT) continue;
        dion3_tensor result = p->buffer[p->view.list->last];
        result.dtype = result_dtype(&p->view);
        const d3_copy copy = {result, p->view.out, p->view.batch, p->view.rows, p->view.cols,
                              0,      0,           NULL,          0.0};
        c->copies[count++] = copy;
    }
    return count ? d3_copies(c->copies, count, NULL, 0, stream) : DION3_OK;
}

static dion3_status run_parts(call* c, const dion3_ns_program* program, dion3_stream stream) {
    int32_t stages = 0;
    for (int64_t i = 0; i < c->part_count; ++i) {
        if (c->parts[i].view.list->stages > stages) stages = c->parts[i].view.list->stages;
    }
    D3_TRY(run_input(c, program, stream));
    for (int32_t stage = 0; stage < stages; ++stage) {
        D3_TRY(run_stage(c, stage, 1, program->backend, stream));
        D3_TRY(run_stage(c, stage, 0, program->backend, stream));
    }
    return run_output(c, stream);
}

/* ---- arguments ---------------------------------------------------------------------------------- */

#define NAME "dion3_newton_schulz"

static dion3_status check_program(const dion3_ns_program* p) {
    D3_REQUIRE(p, NAME ": program must not be NULL");
    D3_REQUIRE(p->steps >= 1 && p->steps <= DION3_NS_MAX_STEPS, NAME ": steps=%d must be 1 .. %d",
               (int)p->steps, (int)DION3_NS_MAX_STEPS);
    D3_REQUIRE(p->coefficients, NAME ": coefficients must not be NULL");
    for (int32_t i = 0; i < 3 * p->steps; ++i) {
        D3_REQUIRE(isfinite(p->coefficients[i]), NAME ": coefficients[%d][%d]=%g must be finite",
                   (int)(i / 3), (int)(i % 3), p->coefficients[i]);
    }
    D3_REQUIRE(p->method >= DION3_NS_AUTO && p->method <= DION3_NS_GRAM,
               NAME ": method=%d must be 0 (auto), 1 (standard) or 2 (gram)", (int)p->method);
    D3_REQUIRE(p->restart_count >= 0 && (p->restart_count == 0 || p->restarts),
               NAME ": restart_count=%d needs restarts to point at so many numbers", (int)p->restart_count);
    for (int32_t i = 0; i < p->restart_count; ++i) {
        D3_REQUIRE(p->restarts[i] >= 1 && p->restarts[i] < p->steps &&
                       (i == 0 || p->restarts[i] > p->restarts[i - 1]),
                   NAME ": restarts[%d]=%d must be in 1 .. steps - 1 = %d and above the one before it",
                   (int)i, (int)p->restarts[i], (int)p->steps - 1);
    }
    D3_REQUIRE(p->compute_dtype == DION3_F16 || p->compute_dtype == DION3_BF16,
               NAME ": compute_dtype=%d must be 1 (fp16) or 2 (bf16)", (int)p->compute_dtype);
    D3_REQUIRE(p->backend >= DION3_BACKEND_AUTO && p->backend <= DION3_BACKEND_GENERIC,
               NAME ": backend=%d must be 0 (auto), 1 (sm90) or 2 (generic)", (int)p->backend);
    D3_REQUIRE(p->eps >= 0.0 && isfinite(p->eps), NAME ": eps=%g must be finite and not negative", p->eps);
    return DION3_OK;
}

static dion3_status check_stacks(const dion3_ns_stack* stacks, int64_t count) {
    D3_REQUIRE(count >= 0 && (count == 0 || stacks),
               NAME ": count=%lld needs stacks to point at so many items", LL(count));
    for (int64_t i = 0; i < count; ++i) {
        const dion3_ns_stack* s = &stacks[i];
        D3_REQUIRE(s->batch >= 0 && s->rows >= 0 && s->cols >= 0,
                   NAME ": item %lld: batch=%lld, rows=%lld and cols=%lld must not be negative", LL(i),
                   LL(s->batch), LL(s->rows), LL(s->cols));
        D3_REQUIRE(s->rows < 1ll << 31 && s->cols < 1ll << 31,
                   NAME ": item %lld: rows=%lld and cols=%lld must be below 2^31", LL(i), LL(s->rows),
                   LL(s->cols));
        D3_TRY(d3_check_tensor(NAME, i, "x", &s->x, s->batch, s->rows, s->cols, 0));
        D3_TRY(d3_check_tensor(NAME, i, "out", &s->out, s->batch, s->rows, s->cols, 1));
        D3_REQUIRE(s->batch * s->rows * s->cols == 0 || s->x.data != s->out.data,
                   NAME ": item %lld: out=%p must not be x: the result needs memory of its own", LL(i),
                   s->out.data);
    }
    return DION3_OK;
}

static dion3_status check_all(const dion3_ns_stack* stacks, int64_t count, const dion3_ns_program* program) {
    D3_TRY(check_program(program));
    return check_stacks(stacks, count);
}

static size_t sizes(const call* c, size_t* least) {
    int64_t all = 0, one = 0;
    for (int64_t i = 0; i < c->count; ++i) {
        const int64_t single = part_bytes(&c->plans[i], 1);
        all += part_bytes(&c->plans[i], c->plans[i].batch);
        if (single > one) one = single;
    }
    if (least) *least = (size_t)one;
    return (size_t)all;
}

size_t dion3_newton_schulz_workspace_size(const dion3_ns_stack* stacks, int64_t count,
                                          const dion3_ns_program* program, size_t* least) {
    call c;
    size_t all = 0;
    if (least) *least = 0;
    if (check_all(stacks, count, program) != DION3_OK) return 0;
    if (make_call(&c, stacks, count, program)) all = sizes(&c, least);
    free_call(&c);
    return all;
}

dion3_status dion3_newton_schulz_cuda(const dion3_ns_stack* stacks, int64_t count,
                                      const dion3_ns_program* program, void* workspace,
                                      size_t workspace_bytes, dion3_stream stream) {
    call c;
    size_t least = 0;
    dion3_status status = DION3_OK;
    D3_TRY(check_all(stacks, count, program));
    if (!make_call(&c, stacks, count, program)) {
        status = d3_fail(DION3_ERR_UNSUPPORTED, NAME ": no host memory for count=%lld stacks", LL(count));
    } else {
        const size_t all = sizes(&c, &least);
        if (workspace_bytes < least || (least && ((uintptr_t)workspace % ALIGNMENT || !workspace))) {
            status =
                d3_fail(DION3_ERR_INVALID,
                        NAME ": workspace=%p of workspace_bytes=%llu must be aligned to %d bytes and hold at "
                             "least %llu (%llu to run everything at once)",
                        workspace, (unsigned long long)workspace_bytes, (int)ALIGNMENT,
                        (unsigned long long)least, (unsigned long long)all);
        }
        int64_t next = 0, first = 0;
        while (status == DION3_OK && next < c.count) {
            take_parts(&c, workspace, (int64_t)workspace_bytes, &next, &first);
            status = run_parts(&c, program, stream);
        }
    }
    free_call(&c);
    return status;
}
