/*
 * check.c - the rules of dion3.h about item tables, each fact checked once, with the values in the text.
 * Texts read "dion3_update: item 3: k=9 must be 0 .. n=8".
 */
#include "check.h"
#include "host_device.h"

#define LL(x) ((long long)(x))
#define ITEM "%s: item %lld: "

static dion3_status check_table(const char* operation, const void* items, int64_t count) {
    D3_REQUIRE(count >= 0, "%s: count=%lld must not be negative", operation, LL(count));
    D3_REQUIRE(count == 0 || items, "%s: items must not be NULL when count=%lld", operation, LL(count));
    return DION3_OK;
}

static dion3_status check_sizes(const char* operation, int64_t item, int64_t batch, int64_t rows,
                                int64_t cols) {
    D3_REQUIRE(batch >= 0, ITEM "batch=%lld must not be negative", operation, LL(item), LL(batch));
    D3_REQUIRE(rows >= 0, ITEM "rows=%lld must not be negative", operation, LL(item), LL(rows));
    D3_REQUIRE(cols >= 0, ITEM "cols=%lld must not be negative", operation, LL(item), LL(cols));
    return DION3_OK;
}

static dion3_status check_axis(const char* operation, int64_t item, int32_t axis) {
    D3_REQUIRE(axis == DION3_ROWS || axis == DION3_COLS, ITEM "axis=%d must be 0 (rows) or 1 (columns)",
               operation, LL(item), (int)axis);
    return DION3_OK;
}

static dion3_status check_dtype(const char* operation, int64_t item, const char* name, int32_t dtype) {
    D3_REQUIRE(dtype == DION3_F32 || dtype == DION3_F16 || dtype == DION3_BF16,
               ITEM "%s dtype=%d must be 0 (fp32), 1 (fp16) or 2 (bf16)", operation, LL(item), name,
               (int)dtype);
    return DION3_OK;
}

static dion3_status check_pointer(const char* operation, int64_t item, const char* name, const void* pointer,
                                  int64_t alignment) {
    D3_REQUIRE(pointer, ITEM "%s must not be NULL", operation, LL(item), name);
    D3_REQUIRE((uintptr_t)pointer % (uintptr_t)alignment == 0, ITEM "%s=%p must be aligned to %lld bytes",
               operation, LL(item), name, pointer, LL(alignment));
    return DION3_OK;
}

dion3_status d3_check_tensor(const char* operation, int64_t item, const char* name,
                             const dion3_tensor* tensor, int64_t batch, int64_t rows, int64_t cols,
                             int written) {
    D3_TRY(check_dtype(operation, item, name, tensor->dtype));
    D3_REQUIRE(tensor->batch_stride >= 0 && tensor->row_stride >= 0 && tensor->col_stride >= 0,
               ITEM "%s strides (%lld, %lld, %lld) must not be negative", operation, LL(item), name,
               LL(tensor->batch_stride), LL(tensor->row_stride), LL(tensor->col_stride));
    if (batch == 0 || rows == 0 || cols == 0) return DION3_OK;
    D3_TRY(check_pointer(operation, item, name, tensor->data, tensor->dtype == DION3_F32 ? 4 : 2));
    D3_REQUIRE(!written || ((batch == 1 || tensor->batch_stride) && (rows == 1 || tensor->row_stride) &&
                            (cols == 1 || tensor->col_stride)),
               ITEM "%s strides (%lld, %lld, %lld) of a written tensor must not be 0 where its size is "
                    "not 1",
               operation, LL(item), name, LL(tensor->batch_stride), LL(tensor->row_stride),
               LL(tensor->col_stride));
    return DION3_OK;
}

dion3_status d3_check_momentum(const dion3_momentum_item* items, int64_t count) {
    const char* op = "dion3_momentum";
    D3_TRY(check_table(op, items, count));
    for (int64_t i = 0; i < count; ++i) {
        const dion3_momentum_item* it = &items[i];
        D3_TRY(check_sizes(op, i, it->batch, it->rows, it->cols));
        D3_TRY(check_axis(op, i, it->axis));
        D3_TRY(d3_check_tensor(op, i, "momentum", &it->momentum, it->batch, it->rows, it->cols, 1));
        D3_TRY(d3_check_tensor(op, i, "grad", &it->grad, it->batch, it->rows, it->cols, 0));
        D3_TRY(check_pointer(op, i, "hyper", it->hyper, 4));
        if (it->slots) D3_TRY(check_pointer(op, i, "slots", it->slots, 4));
        if (it->feedback) D3_TRY(check_pointer(op, i, "feedback", it->feedback, 4));
        if (it->score) D3_TRY(check_pointer(op, i, "score", it->score, 8));
        if (it->sumsq) D3_TRY(check_pointer(op, i, "sumsq", it->sumsq, 8));
    }
    return DION3_OK;
}

dion3_status d3_check_select(const dion3_select_item* items, int64_t count) {
    const char* op = "dion3_select";
    D3_TRY(check_table(op, items, count));
    for (int64_t i = 0; i < count; ++i) {
        const dion3_select_item* it = &items[i];
        D3_REQUIRE(it->batch >= 0, ITEM "batch=%lld must not be negative", op, LL(i), LL(it->batch));
        D3_REQUIRE(it->n >= 0 && it->n < (1ll << 31), ITEM "n=%lld must be 0 .. 2^31 - 1", op, LL(i),
                   LL(it->n));
        if (it->batch == 0 || it->n == 0) continue;
        D3_REQUIRE(it->k >= 1 && it->k <= it->n, ITEM "k=%lld must be 1 .. n=%lld", op, LL(i), LL(it->k),
                   LL(it->n));
        if (it->k < it->n) D3_TRY(check_pointer(op, i, "score", it->score, 8));
        D3_REQUIRE(!it->norm || it->sumsq, ITEM "sumsq must not be NULL when norm is wanted", op, LL(i));
        if (it->sumsq) D3_TRY(check_pointer(op, i, "sumsq", it->sumsq, 8));
        if (it->indices) D3_TRY(check_pointer(op, i, "indices", it->indices, 4));
        if (it->slots) D3_TRY(check_pointer(op, i, "slots", it->slots, 4));
        if (it->norm) D3_TRY(check_pointer(op, i, "norm", it->norm, 8));
    }
    return DION3_OK;
}

/* The sizes of the selected part: k slices of the n along the axis, all of them where no index says which. */
static dion3_status check_selection(const char* op, int64_t i, int32_t axis, int64_t rows, int64_t cols,
                                    int64_t k, const char* name, const int32_t* map) {
    const int64_t n = axis == DION3_ROWS ? rows : cols;
    D3_REQUIRE(n < (1ll << 31), ITEM "%s=%lld must be below 2^31 on the selected side", op, LL(i),
               axis == DION3_ROWS ? "rows" : "cols", LL(n));
    D3_REQUIRE(k >= 0 && k <= n, ITEM "k=%lld must be 0 .. n=%lld", op, LL(i), LL(k), LL(n));
    D3_REQUIRE(map || k == n, ITEM "k=%lld must equal n=%lld when %s is NULL", op, LL(i), LL(k), LL(n), name);
    if (map) D3_TRY(check_pointer(op, i, name, map, 4));
    return DION3_OK;
}

dion3_status d3_check_gather(const dion3_gather_item* items, int64_t count) {
    const char* op = "dion3_gather";
    D3_TRY(check_table(op, items, count));
    for (int64_t i = 0; i < count; ++i) {
        const dion3_gather_item* it = &items[i];
        const int by_rows = it->axis == DION3_ROWS;
        D3_TRY(check_sizes(op, i, it->batch, it->rows, it->cols));
        D3_TRY(check_axis(op, i, it->axis));
        D3_TRY(check_selection(op, i, it->axis, it->rows, it->cols, it->k, "indices", it->indices));
        D3_TRY(d3_check_tensor(op, i, "momentum", &it->momentum, it->batch, it->rows, it->cols, 0));
        if (it->grad.data) {
            D3_TRY(d3_check_tensor(op, i, "grad", &it->grad, it->batch, it->rows, it->cols, 0));
        }
        D3_TRY(d3_check_tensor(op, i, "out", &it->out, it->batch, by_rows ? it->k : it->rows,
                               by_rows ? it->cols : it->k, 1));
        if (it->norm) D3_TRY(check_pointer(op, i, "norm", it->norm, 8));
        D3_TRY(check_pointer(op, i, "hyper", it->hyper, 4));
    }
    return DION3_OK;
}

dion3_status d3_check_neuron(const dion3_neuron_item* items, int64_t count) {
    const char* op = "dion3_neuron";
    D3_TRY(check_table(op, items, count));
    for (int64_t i = 0; i < count; ++i) {
        const dion3_neuron_item* it = &items[i];
        D3_TRY(check_sizes(op, i, it->batch, it->rows, it->cols));
        D3_TRY(d3_check_tensor(op, i, "update", &it->update, it->batch, it->rows, it->cols, 0));
        D3_REQUIRE(it->neurons >= it->rows && it->neurons < (1ll << 31),
                   ITEM "neurons=%lld must be rows=%lld .. 2^31 - 1", op, LL(i), LL(it->neurons),
                   LL(it->rows));
        D3_TRY(check_pointer(op, i, "hyper", it->hyper, 4));
        if (it->batch == 0 || it->rows == 0 || it->cols == 0) continue;
        D3_TRY(check_pointer(op, i, "second_moment", it->second_moment, 4));
        D3_TRY(check_pointer(op, i, "factor", it->factor, 4));
        if (it->indices) D3_TRY(check_pointer(op, i, "indices", it->indices, 4));
    }
    return DION3_OK;
}

dion3_status d3_check_update(const dion3_update_item* items, int64_t count) {
    const char* op = "dion3_update";
    D3_TRY(check_table(op, items, count));
    for (int64_t i = 0; i < count; ++i) {
        const dion3_update_item* it = &items[i];
        const int by_rows = it->axis == DION3_ROWS;
        D3_TRY(check_sizes(op, i, it->batch, it->rows, it->cols));
        D3_TRY(check_axis(op, i, it->axis));
        D3_TRY(check_selection(op, i, it->axis, it->rows, it->cols, it->k, "slots", it->slots));
        D3_TRY(d3_check_tensor(op, i, "weight", &it->weight, it->batch, it->rows, it->cols, 1));
        D3_TRY(d3_check_tensor(op, i, "update", &it->update, it->batch, by_rows ? it->k : it->rows,
                               by_rows ? it->cols : it->k, 0));
        D3_TRY(check_pointer(op, i, "hyper", it->hyper, 4));
        if (it->factor) D3_TRY(check_pointer(op, i, "factor", it->factor, 4));
        if (it->step) D3_TRY(check_pointer(op, i, "step", it->step, 4));
        D3_REQUIRE(it->index_base >= 0 && it->index_batch_stride >= 0 && it->index_row_stride >= 0,
                   ITEM "index_base=%lld, index_batch_stride=%lld and index_row_stride=%lld must not be "
                        "negative",
                   op, LL(i), LL(it->index_base), LL(it->index_batch_stride), LL(it->index_row_stride));
    }
    return DION3_OK;
}

dion3_status d3_check_adamw(const dion3_adamw_item* items, int64_t count) {
    const char* op = "dion3_adamw";
    D3_TRY(check_table(op, items, count));
    for (int64_t i = 0; i < count; ++i) {
        const dion3_adamw_item* it = &items[i];
        const int64_t state_size = it->state_dtype == DION3_F32 ? 4 : 2;
        D3_REQUIRE(it->count >= 0, ITEM "count=%lld must not be negative", op, LL(i), LL(it->count));
        D3_REQUIRE(it->index_base >= 0, ITEM "index_base=%lld must not be negative", op, LL(i),
                   LL(it->index_base));
        D3_TRY(check_dtype(op, i, "param", it->param_dtype));
        D3_TRY(check_dtype(op, i, "grad", it->grad_dtype));
        D3_TRY(check_dtype(op, i, "state", it->state_dtype));
        D3_TRY(check_pointer(op, i, "step", it->step, 4));
        D3_TRY(check_pointer(op, i, "hyper", it->hyper, 4));
        if (it->count == 0) continue;
        D3_TRY(check_pointer(op, i, "param", it->param, it->param_dtype == DION3_F32 ? 4 : 2));
        D3_TRY(check_pointer(op, i, "grad", it->grad, it->grad_dtype == DION3_F32 ? 4 : 2));
        D3_TRY(check_pointer(op, i, "exp_avg", it->exp_avg, state_size));
        D3_TRY(check_pointer(op, i, "exp_avg_sq", it->exp_avg_sq, state_size));
    }
    return DION3_OK;
}
