/*
 * dion3.h - the C API of dion3: everything between the kernels and the world.
 *
 * Plain C11, usable from C++ and nvcc; no torch and no CUDA include. Each operation of the optimizer
 * step exists twice with the same item table: dion3_<op>_cpu and dion3_<op>_cuda. One call serves any
 * number of matrices of any shapes.
 *
 * Conventions, everywhere:
 *   - sizes are int64_t, outermost first; strides are in elements and may be any value >= 0;
 *   - pointers in an item of a _cpu call are host pointers, of a _cuda call device pointers; the item
 *     table itself always lies in host memory and may be freed when the call returns;
 *   - inputs are never written; in/out and outputs must not overlap anything else in the call;
 *   - arithmetic is fp32, in the order written here, each operation rounded once and no fused
 *     multiply-add, so CPU and GPU give the same bits; sums of scores are float64, so that their order
 *     does not matter in practice;
 *   - an output or in/out element is rounded exactly once, to its own dtype;
 *   - empty batches and matrices (any size 0) are allowed and do nothing;
 *   - on error nothing has been written: the status says which kind, dion3_last_error() says it in
 *     words, with the argument's name and value. _cuda calls are asynchronous, allocate nothing, never
 *     synchronise, and may be captured in a CUDA graph (item tables are then baked into the graph).
 */
#ifndef DION3_H
#define DION3_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dion3_status {
    DION3_OK = 0,
    DION3_ERR_INVALID = 1,     /* an argument is wrong; nothing was done */
    DION3_ERR_UNSUPPORTED = 2, /* valid, but not on this device or build; nothing was done */
    DION3_ERR_CUDA = 3         /* the CUDA runtime or driver reported an error */
} dion3_status;

/* Text of the last error of this thread, "" if there was none. Valid until the thread's next call. */
const char* dion3_last_error(void);

typedef enum dion3_dtype { DION3_F32 = 0, DION3_F16 = 1, DION3_BF16 = 2 } dion3_dtype;

/* A cudaStream_t. */
typedef struct CUstream_st* dion3_stream;

/* A batch of equal matrices: element (b, i, j) is data[b * batch_stride + i * row_stride + j * col_stride].
 * Its sizes stand in the item that holds it. */
typedef struct dion3_tensor {
    void* data;
    int64_t batch_stride;
    int64_t row_stride;
    int64_t col_stride;
    int32_t dtype; /* dion3_dtype */
    int32_t reserved;
} dion3_tensor;

/* The numbers of a parameter group that a schedule may move: one row of DION3_HYPER_COUNT floats in
 * the memory of the items' device, read when the operation runs. */
enum {
    DION3_HYPER_DECAY = 0, /* a = 1 - lr * weight_decay, multiplies every weight */
    DION3_HYPER_STEP = 1,  /* b = lr * lr_transfer */
    DION3_HYPER_KEEP = 2,  /* multiplies the momentum before the gradient is added (Dion3: 1; Muon: mu) */
    DION3_HYPER_GAIN = 3,  /* multiplies the gradient: 1 - mu, negative to maximise */
    DION3_HYPER_FEEDBACK =
        4,               /* multiplies the selected momentum before the next gradient (Dion3: mu; Muon: 1) */
    DION3_HYPER_EPS = 5, /* the least norm that is divided by */
    DION3_HYPER_BETA2 = 6, /* of the neuron second moment */
    DION3_HYPER_NEURON_EPS = 7,
    DION3_HYPER_NESTEROV =
        8, /* nu: Newton-Schulz sees nu * m + (1 - nu) * sign(gain) * g; 1 = plain momentum */
    DION3_HYPER_COUNT = 12
};

/* The same for an AdamW group. */
enum {
    DION3_ADAMW_DECAY = 0, /* 1 - lr * weight_decay */
    DION3_ADAMW_STEP = 1,  /* lr */
    DION3_ADAMW_BETA1 = 2,
    DION3_ADAMW_BETA1_COMPLEMENT = 3, /* 1 - beta1, rounded once */
    DION3_ADAMW_BETA2 = 4,
    DION3_ADAMW_BETA2_COMPLEMENT = 5,
    DION3_ADAMW_EPS = 6,
    DION3_ADAMW_SIGN = 7 /* 1, or -1 to maximise */
};

/* Which side is selected, scored and gathered: a slice is a row or a column. */
enum { DION3_ROWS = 0, DION3_COLS = 1 };

/* ---- momentum ---------------------------------------------------------------------------------
 * The feedback of the step before, m <- feedback * m rounded to the dtype of m, in the slices that it
 * selected (Algorithm 4 line 9): here it costs no pass of its own. Then m <- keep * m + gain * g for every
 * element (line 1, scaled by 1 - mu), and of the new, rounded m the sums per slice. */
typedef struct dion3_momentum_item {
    dion3_tensor momentum; /* (batch, rows, cols) in/out, any dtype */
    dion3_tensor grad;     /* (batch, rows, cols) in, any dtype */
    int64_t batch, rows, cols;
    const int32_t* slots;  /* (batch, n) of the last dion3_select, -1 not selected; NULL: all slices were */
    const float* feedback; /* DION3_HYPER_FEEDBACK of the last step; NULL: 1, as it is where none is due */
    const float* hyper;
    double* score; /* out (batch, n): sum of |m| over the slice; n = rows or cols by axis; NULL: not wanted */
    double* sumsq; /* out (batch, n): sum of m * m, or NULL. With nesterov != 1 of the Newton-Schulz input */
    int32_t axis;
    int32_t reserved;
} dion3_momentum_item;

dion3_status dion3_momentum_cpu(const dion3_momentum_item* items, int64_t count);
size_t dion3_momentum_workspace_size(const dion3_momentum_item* items, int64_t count);
dion3_status dion3_momentum_cuda(const dion3_momentum_item* items, int64_t count, void* workspace,
                                 size_t workspace_bytes, dion3_stream stream);

/* ---- select -----------------------------------------------------------------------------------
 * The k slices with the largest score (Algorithm 4 line 2). NaN counts as the largest; ties go to the
 * lower index; indices come out ascending. k == n is the identity whatever the scores (score may then be NULL). */
typedef struct dion3_select_item {
    const double* score; /* (batch, n) */
    const double* sumsq; /* (batch, n) or NULL */
    int64_t batch, n, k; /* 1 <= k <= n < 2^31 */
    int32_t* indices;    /* out (batch, k), or NULL */
    int32_t* slots; /* out (batch, n): where a slice stands in indices, -1 if it is not selected; or NULL */
    double* norm;   /* out (batch): square root of the selected sumsq, or NULL */
} dion3_select_item;

dion3_status dion3_select_cpu(const dion3_select_item* items, int64_t count);
size_t dion3_select_workspace_size(const dion3_select_item* items, int64_t count);
dion3_status dion3_select_cuda(const dion3_select_item* items, int64_t count, void* workspace,
                               size_t workspace_bytes, dion3_stream stream);

/* ---- gather -----------------------------------------------------------------------------------
 * out <- m[selected] * scale, scale = (float)(1 / max(norm, eps)) (0 where that divides by 0, the
 * largest float where it overflows) (Algorithm 4 line 3).
 * With nesterov nu != 1 the value gathered is nu * m + (1 - nu) * sign(gain) * g. */
typedef struct dion3_gather_item {
    dion3_tensor momentum; /* (batch, rows, cols) in */
    dion3_tensor grad;     /* (batch, rows, cols), read only with nesterov != 1; data may be NULL otherwise */
    dion3_tensor out;      /* (batch, k, cols) for rows, (batch, rows, k) for columns */
    int64_t batch, rows, cols, k;
    const int32_t* indices; /* (batch, k); NULL: all slices, k = n */
    const double* norm;     /* (batch); NULL: scale = 1 */
    const float* hyper;
    int32_t axis;
    int32_t reserved;
} dion3_gather_item;

dion3_status dion3_gather_cpu(const dion3_gather_item* items, int64_t count);
dion3_status dion3_gather_cuda(const dion3_gather_item* items, int64_t count, dion3_stream stream);

/* ---- neuron -----------------------------------------------------------------------------------
 * The neuron norm of NorMuon (Algorithm 4 lines 4-6). The neuron is a row of the weight whichever side
 * is selected. For row i of the update o, with s_i = mean_j o_ij^2 (float64 sum, then fp32):
 *   v_i <- beta2 * v_i + (1 - beta2) * s_i;  d_i = sqrt(v_i) + neuron_eps;
 *   factor_i = sqrt(sum_i s_i / sum_i (s_i / d_i^2)) / d_i   (sums in float64; a row with s = 0
 *   adds nothing; 1 where every s is 0 or d_i is 0). */
typedef struct dion3_neuron_item {
    dion3_tensor update; /* (batch, rows, cols) in */
    int64_t batch, rows, cols;
    int64_t neurons;        /* rows of the weight: row stride of second_moment between matrices */
    float* second_moment;   /* (batch, neurons) in/out; only the rows in indices change */
    const int32_t* indices; /* (batch, rows): the neuron of a row of the update; NULL: the identity */
    float* factor;          /* out (batch, rows) */
    const float* hyper;
} dion3_neuron_item;

dion3_status dion3_neuron_cpu(const dion3_neuron_item* items, int64_t count);
size_t dion3_neuron_workspace_size(const dion3_neuron_item* items, int64_t count);
dion3_status dion3_neuron_cuda(const dion3_neuron_item* items, int64_t count, void* workspace,
                               size_t workspace_bytes, dion3_stream stream);

/* ---- update -----------------------------------------------------------------------------------
 * Algorithm 4 lines 7-8 in one read and one write: with g = (b * scale) * factor_i,
 *   w <- round(a * w - g * o)   selected,      w <- round(a * w)   otherwise.
 * Stochastic rounding when step is not NULL: dion3_round.h; the random bits depend on seed, step, param_id
 * and the element's global index, index_base + b * index_batch_stride + i * index_row_stride + j, only. */
typedef struct dion3_update_item {
    dion3_tensor weight; /* (batch, rows, cols) in/out */
    dion3_tensor update; /* (batch, k, cols) for rows, (batch, rows, k) for columns */
    int64_t batch, rows, cols, k;
    const int32_t* slots; /* (batch, n) of dion3_select; NULL: every slice, in order (k = n) */
    const float* factor;  /* (batch, rows of update) of dion3_neuron, or NULL */
    const float* hyper;
    const float* step; /* one float holding the step's number, or NULL: round to nearest even */
    uint64_t seed;
    int64_t index_base, index_batch_stride, index_row_stride;
    uint32_t param_id;
    int32_t axis;
    float scale; /* shape scale s of the learning rate */
    int32_t reserved;
} dion3_update_item;

dion3_status dion3_update_cpu(const dion3_update_item* items, int64_t count);
dion3_status dion3_update_cuda(const dion3_update_item* items, int64_t count, dion3_stream stream);

/* ---- adamw ------------------------------------------------------------------------------------
 * Decoupled AdamW on flat arrays of count elements; step holds the number of this step (1 at the first):
 *   m <- beta1 * m + (1 - beta1) * g;  v <- beta2 * v + (1 - beta2) * (g * g)   (g = sign * grad)
 *   w <- round(decay * w - (lr / (1 - beta1^t)) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps)))
 * m and v in the last line are the unrounded fp32 values; bias corrections in float64, then fp32,
 * with beta = 1 - BETA_COMPLEMENT there and the power by squaring. */
typedef struct dion3_adamw_item {
    void* param;      /* in/out */
    const void* grad; /* in */
    void* exp_avg;    /* in/out */
    void* exp_avg_sq; /* in/out */
    int64_t count;
    const float* step;
    const float* hyper;
    uint64_t seed;
    int64_t index_base;
    uint32_t param_id;
    int32_t stochastic;                           /* 0: round the weight to nearest even */
    int32_t param_dtype, grad_dtype, state_dtype; /* exp_avg and exp_avg_sq share one */
    int32_t reserved;
} dion3_adamw_item;

dion3_status dion3_adamw_cpu(const dion3_adamw_item* items, int64_t count);
dion3_status dion3_adamw_cuda(const dion3_adamw_item* items, int64_t count, dion3_stream stream);

/* ---- selection count --------------------------------------------------------------------------
 * k = max(1, ceil(f * n)) without the float trap (0.07 * 100 is 7, not 8), clamped to n; 0 for n = 0. */
int64_t dion3_selection_count(double fraction, int64_t n);

/* ---- matrix products (CUDA) -------------------------------------------------------------------
 * D <- alpha * A * op(B) + beta * C over a batch, 16-bit in and out (fp16 or bf16, all alike), fp32
 * accumulation, one rounding. alpha and beta may be given per matrix in device memory besides: the factor
 * used is alpha * alpha_device[b] (NULL: 1). beta == 0 never reads C. */
typedef struct dion3_gemm {
    dion3_tensor d; /* (batch, m, n) out; must not overlap a or b; may be c */
    dion3_tensor a; /* (batch, m, k) */
    dion3_tensor b; /* symmetric product: (batch, n, k), op transposes; general product: (batch, k, n) */
    dion3_tensor c; /* (batch, m, n) or data NULL */
    int64_t batch, m, n, k;
    float alpha, beta;
    const float* alpha_device; /* (batch) or NULL */
    const float* beta_device;  /* (batch) or NULL */
} dion3_gemm;

/* Which kernels run. AUTO: the sm_90a ones on compute capability 9.0, the generic ones elsewhere. */
typedef enum dion3_backend {
    DION3_BACKEND_AUTO = 0,
    DION3_BACKEND_SM90 = 1,
    DION3_BACKEND_GENERIC = 2
} dion3_backend;

/* D <- alpha * A * B^T + beta * C where A * B^T and C are symmetric (m = n): the lower triangle is computed,
 * each off-diagonal element stored twice with the same bits, so D equals its transpose bitwise. */
size_t dion3_symmetric_mm_workspace_size(const dion3_gemm* product, dion3_backend backend);
dion3_status dion3_symmetric_mm_cuda(const dion3_gemm* product, dion3_backend backend, void* workspace,
                                     size_t workspace_bytes, dion3_stream stream);
/* D <- alpha * A * B + beta * C, general. */
size_t dion3_gemm_add_workspace_size(const dion3_gemm* product, dion3_backend backend);
dion3_status dion3_gemm_add_cuda(const dion3_gemm* product, dion3_backend backend, void* workspace,
                                 size_t workspace_bytes, dion3_stream stream);

/* ---- Newton-Schulz (CUDA) ---------------------------------------------------------------------
 * out <- the Newton-Schulz polynomials applied to the singular values of x / max(|x|_F, eps). */
typedef enum dion3_ns_method { DION3_NS_AUTO = 0, DION3_NS_STANDARD = 1, DION3_NS_GRAM = 2 } dion3_ns_method;
enum { DION3_NS_MAX_STEPS = 100 };

typedef struct dion3_ns_program {
    const double* coefficients; /* (steps, 3): a, b, c of a x + b x^3 + c x^5 */
    int32_t steps;
    int32_t method;          /* dion3_ns_method; AUTO: standard for square matrices, Gram otherwise */
    const int32_t* restarts; /* ascending, each in 1 .. steps - 1: restart after that many iterations */
    int32_t restart_count;
    int32_t compute_dtype; /* DION3_F16 or DION3_BF16 */
    int32_t backend;       /* dion3_backend */
    int32_t normalized;    /* 1: x is already divided by its norm */
    double eps;
} dion3_ns_program;

typedef struct dion3_ns_stack {
    dion3_tensor x;   /* (batch, rows, cols) in, any dtype; never written */
    dion3_tensor out; /* (batch, rows, cols) out, any dtype; must not overlap x */
    int64_t batch, rows, cols;
} dion3_ns_stack;

/* All stacks of a call run together, stage by stage. workspace_size gives the bytes with which no stack
 * has to be cut; *least is the fewest with which the call works (the batch is then done in chunks). The result does not
 * depend on the workspace, on the other stacks, or on a matrix's place in its stack, not by a bit. */
size_t dion3_newton_schulz_workspace_size(const dion3_ns_stack* stacks, int64_t count,
                                          const dion3_ns_program* program, size_t* least);
dion3_status dion3_newton_schulz_cuda(const dion3_ns_stack* stacks, int64_t count,
                                      const dion3_ns_program* program, void* workspace,
                                      size_t workspace_bytes, dion3_stream stream);

/* 0 if this library holds no kernels for the GPU of that number, or there is no such GPU, else 1. */
int32_t dion3_cuda_runs_on(int32_t device);

#ifdef __cplusplus
}
#endif
#endif
