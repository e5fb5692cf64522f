/*
 * test_arguments.c - every argument that can be refused is refused, in words that carry its name and value,
 * and nothing is written.
 */
#include "dion3.h"
#include "expect.h"

#include <math.h>

enum { ROWS = 4, COLS = 6, K = 2 };

/* One valid call of every operation over shared memory. */
static struct {
    float weight[ROWS * COLS], momentum[ROWS * COLS], grad[ROWS * COLS], part[K * COLS];
    double score[ROWS], sumsq[ROWS], norm[1];
    int32_t indices[K], slots[ROWS];
    float second[ROWS], factor[K], hyper[DION3_HYPER_COUNT], step[1];
} memory, before;

static dion3_tensor tensor_of(float* data) {
    const dion3_tensor t = {data, 0, COLS, 1, DION3_F32, 0};
    return t;
}

static dion3_momentum_item momentum_item(void) {
    const dion3_momentum_item it = {tensor_of(memory.momentum),
                                    tensor_of(memory.grad),
                                    1,
                                    ROWS,
                                    COLS,
                                    memory.slots,
                                    NULL,
                                    memory.hyper,
                                    memory.score,
                                    memory.sumsq,
                                    DION3_ROWS,
                                    0};
    return it;
}

static dion3_select_item select_item(void) {
    const dion3_select_item it = {memory.score,   memory.sumsq, 1,          ROWS, K,
                                  memory.indices, memory.slots, memory.norm};
    return it;
}

static dion3_gather_item gather_item(void) {
    const dion3_gather_item it = {tensor_of(memory.momentum),
                                  tensor_of(memory.grad),
                                  tensor_of(memory.part),
                                  1,
                                  ROWS,
                                  COLS,
                                  K,
                                  memory.indices,
                                  memory.norm,
                                  memory.hyper,
                                  DION3_ROWS,
                                  0};
    return it;
}

static dion3_neuron_item neuron_item(void) {
    const dion3_neuron_item it = {
        tensor_of(memory.part), 1, K, COLS, ROWS, memory.second, memory.indices, memory.factor, memory.hyper};
    return it;
}

static dion3_update_item update_item(void) {
    const dion3_update_item it = {tensor_of(memory.weight),
                                  tensor_of(memory.part),
                                  1,
                                  ROWS,
                                  COLS,
                                  K,
                                  memory.slots,
                                  memory.factor,
                                  memory.hyper,
                                  memory.step,
                                  1,
                                  0,
                                  0,
                                  COLS,
                                  0,
                                  DION3_ROWS,
                                  1.0f,
                                  0};
    return it;
}

static dion3_adamw_item adamw_item(void) {
    const dion3_adamw_item it = {memory.weight,
                                 memory.grad,
                                 memory.momentum,
                                 memory.part,
                                 K * COLS,
                                 memory.step,
                                 memory.hyper,
                                 1,
                                 0,
                                 0,
                                 0,
                                 DION3_F32,
                                 DION3_F32,
                                 DION3_F32,
                                 0};
    return it;
}

static void reset(void) {
    memset(&memory, 0, sizeof memory);
    for (int i = 0; i < K; ++i) memory.indices[i] = i;
    for (int i = 0; i < ROWS; ++i) memory.slots[i] = i < K ? i : -1;
    memory.hyper[DION3_HYPER_NESTEROV] = 1.0f;
    before = memory;
}

/* The call is refused with both texts in the message, and memory is as it was. */
#define REFUSED(call, name, text)                                                                            \
    do {                                                                                                     \
        EXPECT((call) == DION3_ERR_INVALID, "%s %s was accepted", name, text);                               \
        EXPECT(strstr(dion3_last_error(), name) && strstr(dion3_last_error(), text), "message: %s",          \
               dion3_last_error());                                                                          \
        EXPECT(memcmp(&memory, &before, sizeof memory) == 0, "%s %s: memory was written", name, text);       \
    } while (0)

/* The item with one change is refused. */
#define BAD(op, change, text)                                                                                \
    do {                                                                                                     \
        dion3_##op##_item it[2];                                                                             \
        reset();                                                                                             \
        it[0] = op##_item();                                                                                 \
        it[1] = op##_item();                                                                                 \
        EXPECT(dion3_##op##_cpu(it, 2) == DION3_OK, "valid: %s", dion3_last_error());                        \
        reset();                                                                                             \
        it[1].change;                                                                                        \
        REFUSED(dion3_##op##_cpu(it, 2), "dion3_" #op ": item 1: ", text);                                   \
    } while (0)

#define BAD_TABLE(op)                                                                                        \
    do {                                                                                                     \
        reset();                                                                                             \
        dion3_##op##_item it = op##_item();                                                                  \
        REFUSED(dion3_##op##_cpu(&it, -1), "dion3_" #op, "count=-1");                                        \
        REFUSED(dion3_##op##_cpu(NULL, 3), "dion3_" #op, "NULL when count=3");                               \
        EXPECT(dion3_##op##_cpu(NULL, 0) == DION3_OK, "an empty table is fine");                             \
    } while (0)

#define BAD_TENSOR(op, field)                                                                                \
    do {                                                                                                     \
        BAD(op, field.data = NULL, #field " must not be NULL");                                              \
        BAD(op, field.data = (char*)it[1].field.data + 1, #field "=");                                       \
        BAD(op, field.dtype = 3, #field " dtype=3");                                                         \
        BAD(op, field.dtype = -1, #field " dtype=-1");                                                       \
        BAD(op, field.batch_stride = -2, #field " strides (-2, ");                                           \
        BAD(op, field.row_stride = -3, "-3, ");                                                              \
        BAD(op, field.col_stride = -4, "-4)");                                                               \
    } while (0)

#define BAD_WRITTEN(op, field)                                                                               \
    do {                                                                                                     \
        BAD(op, field.row_stride = 0, #field " strides (0, 0, 1) of a written tensor");                      \
        BAD(op, field.col_stride = 0, #field " strides (0, 6, 0) of a written tensor");                      \
    } while (0)

#define BAD_SIZES(op)                                                                                        \
    do {                                                                                                     \
        BAD(op, batch = -1, "batch=-1");                                                                     \
        BAD(op, rows = -2, "rows=-2");                                                                       \
        BAD(op, cols = -3, "cols=-3");                                                                       \
        BAD(op, hyper = NULL, "hyper must not be NULL");                                                     \
    } while (0)

static void test_momentum(void) {
    BAD_TABLE(momentum);
    BAD_SIZES(momentum);
    BAD_TENSOR(momentum, momentum);
    BAD_WRITTEN(momentum, momentum);
    BAD_TENSOR(momentum, grad);
    BAD(momentum, axis = 2, "axis=2");
    BAD(momentum, axis = -1, "axis=-1");
    BAD(momentum, slots = (int32_t*)((char*)memory.slots + 2), "slots=");
    BAD(momentum, feedback = (float*)((char*)memory.hyper + 1), "feedback=");
    BAD(momentum, score = (double*)((char*)memory.score + 4), "score=");
    BAD(momentum, sumsq = (double*)((char*)memory.sumsq + 4), "sumsq=");
}

static void test_select(void) {
    BAD_TABLE(select);
    BAD(select, batch = -1, "batch=-1");
    BAD(select, n = -1, "n=-1");
    BAD(select, n = 1ll << 31, "n=2147483648");
    BAD(select, k = 0, "k=0 must be 1 .. n=4");
    BAD(select, k = 5, "k=5 must be 1 .. n=4");
    BAD(select, score = NULL, "score must not be NULL");
    BAD(select, sumsq = NULL, "sumsq must not be NULL when norm is wanted");
    BAD(select, indices = (int32_t*)((char*)memory.indices + 1), "indices=");
    BAD(select, slots = (int32_t*)((char*)memory.slots + 1), "slots=");
    BAD(select, norm = (double*)((char*)memory.norm + 1), "norm=");
}

static void test_gather(void) {
    static int32_t outside[K] = {0, ROWS}, negative[K] = {-1, 0};
    BAD_TABLE(gather);
    BAD_SIZES(gather);
    BAD_TENSOR(gather, momentum);
    BAD_TENSOR(gather, out);
    BAD_WRITTEN(gather, out);
    BAD(gather, grad.dtype = 7, "grad dtype=7");
    BAD(gather, axis = 3, "axis=3");
    BAD(gather, k = -1, "k=-1");
    BAD(gather, k = 5, "k=5 must be 0 .. n=4");
    BAD(gather, indices = NULL, "k=2 must equal n=4 when indices is NULL");
    BAD(gather, indices = outside, "indices[1]=4 must be 0 .. n-1=3");
    BAD(gather, indices = negative, "indices[0]=-1");
    BAD(gather, norm = (double*)((char*)memory.norm + 2), "norm=");
    {
        static float nesterov[DION3_HYPER_COUNT];
        dion3_gather_item it;
        reset();
        memcpy(nesterov, memory.hyper, sizeof nesterov);
        nesterov[DION3_HYPER_NESTEROV] = 0.5f;
        it = gather_item();
        it.hyper = nesterov;
        it.grad.data = NULL;
        REFUSED(dion3_gather_cpu(&it, 1), "dion3_gather", "grad must not be NULL with nesterov=0.5");
    }
}

static void test_neuron(void) {
    static int32_t outside[K] = {0, ROWS};
    BAD_TABLE(neuron);
    BAD_SIZES(neuron);
    BAD_TENSOR(neuron, update);
    BAD(neuron, neurons = 1, "neurons=1 must be rows=2");
    BAD(neuron, neurons = 1ll << 31, "neurons=2147483648");
    BAD(neuron, second_moment = NULL, "second_moment must not be NULL");
    BAD(neuron, factor = NULL, "factor must not be NULL");
    BAD(neuron, indices = outside, "indices[1]=4 must be 0 .. neurons-1=3");
}

static void test_update(void) {
    static int32_t outside[ROWS] = {0, 1, 2, -1}, below[ROWS] = {0, -2, 1, -1};
    BAD_TABLE(update);
    BAD_SIZES(update);
    BAD_TENSOR(update, weight);
    BAD_WRITTEN(update, weight);
    BAD_TENSOR(update, update);
    BAD(update, axis = 9, "axis=9");
    BAD(update, k = -1, "k=-1");
    BAD(update, k = 5, "k=5 must be 0 .. n=4");
    BAD(update, slots = NULL, "k=2 must equal n=4 when slots is NULL");
    BAD(update, slots = outside, "slots[2]=2 must be -1 .. k-1=1");
    BAD(update, slots = below, "slots[1]=-2");
    BAD(update, factor = (float*)((char*)memory.factor + 1), "factor=");
    BAD(update, step = (float*)((char*)memory.step + 1), "step=");
    BAD(update, index_base = -1, "index_base=-1");
    BAD(update, index_batch_stride = -1, "index_batch_stride=-1");
    BAD(update, index_row_stride = -1, "index_row_stride=-1");
}

static void test_adamw(void) {
    BAD_TABLE(adamw);
    BAD(adamw, count = -1, "count=-1");
    BAD(adamw, index_base = -5, "index_base=-5");
    BAD(adamw, param_dtype = 3, "param dtype=3");
    BAD(adamw, grad_dtype = 4, "grad dtype=4");
    BAD(adamw, state_dtype = 5, "state dtype=5");
    BAD(adamw, step = NULL, "step must not be NULL");
    BAD(adamw, hyper = NULL, "hyper must not be NULL");
    BAD(adamw, param = NULL, "param must not be NULL");
    BAD(adamw, grad = NULL, "grad must not be NULL");
    BAD(adamw, exp_avg = NULL, "exp_avg must not be NULL");
    BAD(adamw, exp_avg_sq = (char*)memory.part + 2, "exp_avg_sq=");
}

/* Sizes of 0 do nothing, whatever the pointers; but the sums of an empty slice are 0. */
static void test_empty(void) {
    reset();
    dion3_momentum_item m = momentum_item();
    m.cols = 0;
    m.momentum.data = m.grad.data = NULL;
    memory.score[1] = memory.sumsq[2] = 5.0;
    EXPECT(dion3_momentum_cpu(&m, 1) == DION3_OK, "%s", dion3_last_error());
    EXPECT(memcmp(&memory, &before, sizeof memory) == 0, "sums of nothing are 0");
    dion3_gather_item g = gather_item();
    g.batch = 0;
    g.momentum.data = g.out.data = NULL;
    dion3_update_item u = update_item();
    u.batch = 0;
    u.weight.data = u.update.data = NULL;
    dion3_neuron_item n = neuron_item();
    n.rows = 0;
    n.second_moment = n.factor = NULL;
    dion3_select_item s = select_item();
    s.n = 0;
    dion3_adamw_item a = adamw_item();
    a.count = 0;
    a.param = NULL;
    EXPECT(dion3_gather_cpu(&g, 1) == DION3_OK && dion3_update_cpu(&u, 1) == DION3_OK &&
               dion3_neuron_cpu(&n, 1) == DION3_OK && dion3_select_cpu(&s, 1) == DION3_OK &&
               dion3_adamw_cpu(&a, 1) == DION3_OK,
           "%s", dion3_last_error());
    EXPECT(memcmp(&memory, &before, sizeof memory) == 0, "empty calls wrote something");
}

int main(void) {
    EXPECT(dion3_last_error()[0] == 0, "no error yet: %s", dion3_last_error());
    test_momentum();
    test_select();
    test_gather();
    test_neuron();
    test_update();
    test_adamw();
    test_empty();
    return finish("arguments");
}
