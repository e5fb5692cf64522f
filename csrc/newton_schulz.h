/*
 * newton_schulz.h - Newton-Schulz programs as lists of matrix products over numbered buffers.
 *
 * The list is plain data: newton_schulz.c runs it on the GPU, the tests replay it in float64 on the CPU.
 * All in terms of a matrix X of n x m or m x n, n <= m; a "square" buffer is n x n and symmetric.
 */
#ifndef DION3_NEWTON_SCHULZ_H
#define DION3_NEWTON_SCHULZ_H

#include "dion3.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Buffers of a list. The input itself is an operand only if it needs neither norm nor cast. */
enum {
    D3_NS_NONE = -1,
    D3_NS_INPUT = 0,
    D3_NS_OUT = 1,
    D3_NS_X0 = 2, /* workspace, shaped like the input */
    D3_NS_X1 = 3,
    D3_NS_SQUARE = 4, /* the first of the squares, all workspace */
    D3_NS_SQUARES = 5,
    D3_NS_BUFFERS = D3_NS_SQUARE + D3_NS_SQUARES
};

/* What the products may do with the caller's output. */
typedef enum d3_ns_output {
    D3_NS_OUT_COPY = 0,   /* nothing: the result is cast or copied there afterwards */
    D3_NS_OUT_WRITE = 1,  /* the last product writes it (16 bit, but not the compute dtype) */
    D3_NS_OUT_OPERAND = 2 /* it may also hold X in between */
} d3_ns_output;

/* symmetric 1: D = alpha A B^T + beta C + gamma E + delta I, all symmetric; with A = B an X buffer this is
 *   the Gram matrix of the short side: X X^T of a wide matrix, X^T X of a tall one.
 * symmetric 0: D = alpha A B + beta C with A a square, B, C, D X buffers; of a tall matrix B A + beta C. */
typedef struct d3_ns_product {
    int32_t stage; /* products of one stage are independent */
    int32_t symmetric;
    int32_t d, a, b, c, e;
    float alpha, beta, gamma, delta;
} d3_ns_product;

/* At most: Gram matrix, Z, Q, RZ, R, X for each step. */
enum { D3_NS_MAX_PRODUCTS = 6 * DION3_NS_MAX_STEPS };

typedef struct d3_ns_list {
    int32_t count, stages;
    int32_t squares;     /* square buffers used: D3_NS_SQUARE .. D3_NS_SQUARE + squares - 1 */
    int32_t copies;      /* X buffers of workspace used: D3_NS_X0 .. */
    int32_t first, last; /* where X is expected before, and where the result is after */
    d3_ns_product products[D3_NS_MAX_PRODUCTS]; /* in the order of their stages */
} d3_ns_list;

/* Writes the list of a program. gram: which form (program->method is not looked at). input_is_operand: the
 * input is used in place. The program must be valid. */
void d3_ns_build(const dion3_ns_program* program, int gram, int input_is_operand, d3_ns_output output,
                 d3_ns_list* list);

#ifdef __cplusplus
}
#endif
#endif
