/*
 * gather.c - out <- m[selected] * scale.
 *
 * momentum (batch, rows, cols), out (batch, k, cols) or (batch, rows, k); scale = 1 / max(norm, eps). Walks
 * out row by row, in pieces. One flop; bytes: the selected momentum read, out written. Source: Algorithm 4
 * line 3.
 */
#include "../check.h"
#include "blocks.h"

/* x[j] <- element index[j] of a row. */
D3_INLINE void pick(float* restrict x, const dion3_tensor* t, int64_t offset, const int32_t* index,
                    int64_t n) {
    for (int64_t j = 0; j < n; ++j) x[j] = d3_load(t->data, offset + index[j] * t->col_stride, t->dtype);
}

/* A piece of row `row` of out: n elements from column col. */
D3_INLINE void gather_piece(const dion3_gather_item* it, int64_t b, int64_t row, int64_t col, int64_t n,
                            float scale) {
    float m[D3_BLOCK];
    float x[D3_BLOCK];
    const int by_rows = it->axis == DION3_ROWS;
    const int32_t* indices = it->indices ? it->indices + b * it->k : 0;
    const int64_t source = by_rows && indices ? indices[row] : row;
    const int32_t* columns = by_rows || !indices ? 0 : indices + col;
    const float nu = it->hyper[DION3_HYPER_NESTEROV];
    const int64_t offset = d3_offset(&it->momentum, b, source, columns ? 0 : col);
    if (columns) {
        pick(m, &it->momentum, offset, columns, n);
    } else {
        d3_block_load(m, it->momentum.data, it->momentum.dtype, offset, it->momentum.col_stride, n);
    }
    if (nu == 1.0f) {
        for (int64_t j = 0; j < n; ++j) x[j] = d3_mul(m[j], scale);
    } else {
        const float gain = it->hyper[DION3_HYPER_GAIN];
        const int64_t at = d3_offset(&it->grad, b, source, columns ? 0 : col);
        if (columns) {
            pick(x, &it->grad, at, columns, n);
        } else {
            d3_block_load(x, it->grad.data, it->grad.dtype, at, it->grad.col_stride, n);
        }
        for (int64_t j = 0; j < n; ++j) x[j] = d3_mul(d3_nesterov(nu, m[j], gain, x[j]), scale);
    }
    d3_block_store(x, it->out.data, it->out.dtype, d3_offset(&it->out, b, row, col), it->out.col_stride, n);
}

/* Rows first .. last - 1 of the outputs laid end to end. */
D3_CLONES static void gather_rows(const dion3_gather_item* it, int64_t rows, int64_t cols, int64_t first,
                                  int64_t last) {
    for (int64_t r = first; r < last; ++r) {
        const int64_t b = r / rows;
        const float scale = it->norm ? d3_norm_scale(it->norm[b], it->hyper[DION3_HYPER_EPS]) : 1.0f;
        for (int64_t col = 0; col < cols; col += D3_BLOCK) {
            gather_piece(it, b, r % rows, col, d3_min(D3_BLOCK, cols - col), scale);
        }
    }
}

static dion3_status check_values(const dion3_gather_item* items, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const dion3_gather_item* it = &items[i];
        const int64_t n = it->axis == DION3_ROWS ? it->rows : it->cols;
        const int64_t total = it->indices ? it->batch * it->k : 0;
        for (int64_t j = 0; j < total; ++j) {
            D3_REQUIRE(it->indices[j] >= 0 && it->indices[j] < n,
                       "dion3_gather: item %lld: indices[%lld]=%d must be 0 .. n-1=%lld", (long long)i,
                       (long long)j, (int)it->indices[j], (long long)(n - 1));
        }
        if (it->batch == 0 || it->rows == 0 || it->cols == 0) continue;
        D3_REQUIRE(it->grad.data || it->hyper[DION3_HYPER_NESTEROV] == 1.0f,
                   "dion3_gather: item %lld: grad must not be NULL with nesterov=%g", (long long)i,
                   (double)it->hyper[DION3_HYPER_NESTEROV]);
    }
    return DION3_OK;
}

dion3_status dion3_gather_cpu(const dion3_gather_item* items, int64_t count) {
    D3_TRY(d3_check_gather(items, count));
    D3_TRY(check_values(items, count));
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t length = items[i].axis == DION3_ROWS ? items[i].cols : items[i].rows;
        elements += items[i].batch * items[i].k * length;
    }
    D3_PARALLEL(elements)
    for (int64_t i = 0; i < count; ++i) {
        const dion3_gather_item* it = &items[i];
        const int64_t rows = it->axis == DION3_ROWS ? it->k : it->rows;
        const int64_t cols = it->axis == DION3_ROWS ? it->cols : it->k;
        const int64_t total = cols ? it->batch * rows : 0;
        const int64_t chunk = d3_task_rows(cols);
        D3_FOR
        for (int64_t first = 0; first < total; first += chunk) {
            gather_rows(it, rows, cols, first, d3_min(first + chunk, total));
        }
    }
    return DION3_OK;
}
