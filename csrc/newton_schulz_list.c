/*
 * newton_schulz_list.c - the products of the standard and the Gram form of Newton-Schulz, in order.
 *
 * Standard, every iteration (a, b, c):  R = X X^T;  Z = b R + c R R;  X = Z X + a X.
 * Gram ("Dion3: Full-Stack Orthogonal Updates", the stabilised form): the iterations fall into segments,
 * cut at the restarts. A segment begins with R = X X^T and ends with X = Q X; in between, every iteration
 *   Z = b R + c R R;  Q = Q Z + a Q;  and unless it is the segment's last  RZ = R Z + a R;  R = Z RZ + a RZ.
 * a I is never rounded into a 16-bit matrix: after the first iteration of a segment Q is the pair (Z, a)
 * for Z + a I, and the next Q = Z1 Z2 + a1 Z2 + a2 Z1 + a1 a2 I is one product. A segment of one
 * iteration ends with X = Z X + a X. Q and RZ of one iteration are independent: one stage.
 */
#include "newton_schulz.h"
#include "restarts.h"

typedef struct builder {
    const dion3_ns_program* program;
    d3_ns_list* list;
    int32_t stage; /* of the next product */
    int32_t x;     /* how many times X has been written */
    int32_t used;  /* bit i: square i holds something that is still needed */
    int32_t x_buffer[DION3_NS_MAX_STEPS + 1];
} builder;

static int32_t take_square(builder* s) {
    int32_t i = 0;
    while (s->used >> i & 1) ++i;
    s->used |= 1 << i;
    if (i + 1 > s->list->squares) s->list->squares = i + 1;
    return D3_NS_SQUARE + i;
}

static void release_square(builder* s, int32_t buffer) { s->used &= ~(1 << (buffer - D3_NS_SQUARE)); }

static d3_ns_product* add(builder* s, int32_t symmetric, int32_t d, int32_t a, int32_t b) {
    d3_ns_product* p = &s->list->products[s->list->count++];
    p->stage = s->stage;
    p->symmetric = symmetric;
    p->d = d;
    p->a = a;
    p->b = b;
    p->c = p->e = D3_NS_NONE;
    p->alpha = 1.0f;
    p->beta = p->gamma = p->delta = 0.0f;
    return p;
}

static void add_term(d3_ns_product* p, int32_t c, double beta) {
    p->c = c;
    p->beta = (float)beta;
}

static int32_t add_gram(builder* s) {
    const int32_t x = s->x_buffer[s->x], r = take_square(s);
    add(s, 1, r, x, x);
    s->stage++;
    return r;
}

static int32_t add_z(builder* s, int32_t r, const double* abc) {
    const int32_t z = take_square(s);
    d3_ns_product* p = add(s, 1, z, r, r);
    p->alpha = (float)abc[2];
    add_term(p, r, abc[1]);
    s->stage++;
    return z;
}

/* X <- square X + a X; a = 0: no second term. */
static void add_x(builder* s, int32_t square, double a) {
    const int32_t from = s->x_buffer[s->x], to = s->x_buffer[s->x + 1];
    d3_ns_product* p = add(s, 0, to, square, from);
    if (a != 0.0) add_term(p, from, a);
    s->x++;
    s->stage++;
}

/* Q of a segment: nothing yet (buffer NONE), or buffer + identity I. */
typedef struct factor {
    int32_t buffer;
    double identity;
} factor;

/* q <- q (z + a I). The caller gives q's old buffer back once this stage is complete. */
static void add_q(builder* s, factor* q, int32_t z, double a) {
    const int32_t d = take_square(s);
    d3_ns_product* p = add(s, 1, d, q->buffer, z);
    if (q->identity != 0.0) {
        add_term(p, z, q->identity);
        p->e = q->buffer;
        p->gamma = (float)a;
        p->delta = (float)(q->identity * a);
    } else {
        add_term(p, q->buffer, a);
    }
    q->buffer = d;
    q->identity = 0.0;
}

/* One iteration of the Gram form. */
static void add_iteration(builder* s, int32_t* r, factor* q, const double* abc, int ends) {
    const double a = abc[0];
    const int32_t z = add_z(s, *r, abc);
    const int32_t old_q = q->buffer;
    const int first = old_q == D3_NS_NONE;
    if (first && ends) {
        add_x(s, z, a);
        return;
    }
    if (!first) add_q(s, q, z, a);
    if (ends) {
        s->stage++;
        add_x(s, q->buffer, 0.0);
        return;
    }
    const int32_t rz = take_square(s);
    add_term(add(s, 1, rz, *r, z), *r, a);
    s->stage++;
    add_term(add(s, 1, *r, z, rz), rz, a); /* R itself is not read any more */
    s->stage++;
    release_square(s, rz);
    if (first) {
        q->buffer = z;
        q->identity = a;
    } else {
        release_square(s, old_q);
        release_square(s, z);
    }
}

static void add_gram_form(builder* s) {
    const dion3_ns_program* p = s->program;
    int32_t r = D3_NS_NONE;
    factor q = {D3_NS_NONE, 0.0};
    for (int32_t step = 0; step < p->steps; ++step) {
        if (d3_ns_begins_segment(step, p->restarts, p->restart_count)) {
            s->used = 0;
            q.buffer = D3_NS_NONE;
            q.identity = 0.0;
            r = add_gram(s);
        }
        add_iteration(s, &r, &q, p->coefficients + 3 * step,
                      d3_ns_ends_segment(step, p->steps, p->restarts, p->restart_count));
    }
}

static void add_standard_form(builder* s) {
    for (int32_t step = 0; step < s->program->steps; ++step) {
        const double* abc = s->program->coefficients + 3 * step;
        s->used = 0;
        const int32_t r = add_gram(s);
        const int32_t z = add_z(s, r, abc);
        add_x(s, z, abc[0]);
    }
}

/* X_0 .. X_writes alternate between two buffers, chosen from the end: the last is the output where products
 * can write it, and the output is also the other buffer where products can read it. */
static void place_x(builder* s, int32_t writes, int input_is_operand, d3_ns_output output) {
    d3_ns_list* list = s->list;
    int32_t even = output == D3_NS_OUT_OPERAND ? D3_NS_OUT : output == D3_NS_OUT_WRITE ? D3_NS_X1 : D3_NS_X0;
    int32_t odd = output == D3_NS_OUT_COPY ? D3_NS_X1 : D3_NS_X0;
    for (int32_t i = 0; i <= writes; ++i) s->x_buffer[i] = (writes - i) % 2 ? odd : even;
    if (output == D3_NS_OUT_WRITE) s->x_buffer[writes] = D3_NS_OUT;
    if (input_is_operand) s->x_buffer[0] = D3_NS_INPUT;
    list->first = s->x_buffer[0];
    list->last = s->x_buffer[writes];
    list->copies = 0;
    for (int32_t i = 0; i <= writes; ++i) {
        const int32_t needed = s->x_buffer[i] - D3_NS_X0 + 1;
        if (needed > list->copies) list->copies = needed;
    }
}

void d3_ns_build(const dion3_ns_program* program, int gram, int input_is_operand, d3_ns_output output,
                 d3_ns_list* list) {
    builder s = {0};
    s.program = program;
    s.list = list;
    list->count = 0;
    list->squares = 0;
    place_x(&s, gram ? program->restart_count + 1 : program->steps, input_is_operand, output);
    if (gram) {
        add_gram_form(&s);
    } else {
        add_standard_form(&s);
    }
    list->stages = s.stage;
}
