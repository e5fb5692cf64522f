/*
 * momentum.c - m <- feedback * m in slices that were selected, then m <- keep * m + gain * g, and the sums of
 * |m| and m * m per row or column of the new m.
 *
 * momentum, grad (batch, rows, cols); sums (batch, rows) or (batch, cols) in float64. Row sums are taken in
 * D3_LANES partial sums; column sums row by row, one task holding D3_BLOCK columns of all rows. Both
 * orders are fixed by the shape alone. 3 flops; bytes: momentum read and written, gradient read.
 * Source: Algorithm 4 line 1, scaled by 1 - mu, and line 9 of the step before.
 */
#include "../check.h"
#include "blocks.h"

/* m <- feedback * m as it would be stored, where the last step selected. */
D3_INLINE void feed_back(const dion3_momentum_item* it, int64_t b, int64_t i, int64_t col, int64_t n,
                         float* restrict m) {
    float damped[D3_BLOCK];
    const float feedback = it->feedback ? *it->feedback : 1.0f;
    const int by_rows = it->axis == DION3_ROWS;
    const int32_t* slots = it->slots ? it->slots + b * (by_rows ? it->rows : it->cols) : 0;
    if (feedback == 1.0f || (slots && by_rows && slots[i] < 0)) return;
    for (int64_t j = 0; j < n; ++j) damped[j] = d3_mul(feedback, m[j]);
    d3_block_round(damped, it->momentum.dtype, n);
    if (slots && !by_rows) {
        for (int64_t j = 0; j < n; ++j) m[j] = slots[col + j] < 0 ? m[j] : damped[j];
    } else {
        memcpy(m, damped, (size_t)n * sizeof *m);
    }
}

/* m <- the new momentum of columns col .. col + n - 1 of row i, stored and as it reads back; x <- what
 * Newton-Schulz will see of it, which differs from m only with nesterov. Returns the one to square. */
D3_INLINE const float* momentum_piece(const dion3_momentum_item* it, int64_t b, int64_t i, int64_t col,
                                      int64_t n, float* restrict m, float* restrict x) {
    float g[D3_BLOCK];
    const float keep = it->hyper[DION3_HYPER_KEEP];
    const float gain = it->hyper[DION3_HYPER_GAIN];
    const float nu = it->hyper[DION3_HYPER_NESTEROV];
    const int64_t offset = d3_offset(&it->momentum, b, i, col);
    d3_block_load(m, it->momentum.data, it->momentum.dtype, offset, it->momentum.col_stride, n);
    d3_block_load(g, it->grad.data, it->grad.dtype, d3_offset(&it->grad, b, i, col), it->grad.col_stride, n);
    feed_back(it, b, i, col, n, m);
    for (int64_t j = 0; j < n; ++j) m[j] = d3_momentum(keep, m[j], gain, g[j]);
    d3_block_store(m, it->momentum.data, it->momentum.dtype, offset, it->momentum.col_stride, n);
    if (!it->score && !it->sumsq) return m;
    d3_block_round(m, it->momentum.dtype, n);
    if (nu == 1.0f) return m;
    for (int64_t j = 0; j < n; ++j) x[j] = d3_nesterov(nu, m[j], gain, g[j]);
    return x;
}

/* Adds |m| and x * x to the lanes of a row's sums; element j goes to lane j mod D3_LANES. */
D3_INLINE void add_to_lanes(const float* restrict m, const float* restrict x, int64_t n,
                            double* restrict score, double* restrict sumsq) {
    int64_t j = 0;
    for (; j + D3_LANES <= n; j += D3_LANES) {
        for (int l = 0; l < D3_LANES; ++l) score[l] += fabs((double)m[j + l]);
        for (int l = 0; l < D3_LANES; ++l) sumsq[l] += (double)x[j + l] * (double)x[j + l];
    }
    for (int l = 0; j + l < n; ++l) {
        score[l] += fabs((double)m[j + l]);
        sumsq[l] += (double)x[j + l] * (double)x[j + l];
    }
}

/* Rows first .. last - 1 of the matrices laid end to end, with sums per row if they are wanted. */
D3_CLONES static void momentum_rows(const dion3_momentum_item* it, int64_t first, int64_t last) {
    float m[D3_BLOCK];
    float x[D3_BLOCK];
    for (int64_t r = first; r < last; ++r) {
        double score[D3_LANES] = {0};
        double sumsq[D3_LANES] = {0};
        for (int64_t col = 0; col < it->cols; col += D3_BLOCK) {
            const int64_t n = d3_min(D3_BLOCK, it->cols - col);
            const float* seen = momentum_piece(it, r / it->rows, r % it->rows, col, n, m, x);
            if (it->score || it->sumsq) add_to_lanes(m, seen, n, score, sumsq);
        }
        if (it->score) it->score[r] = d3_lane_total(score);
        if (it->sumsq) it->sumsq[r] = d3_lane_total(sumsq);
    }
}

/* Columns col .. col + n - 1 of matrix b, with sums per column. */
D3_CLONES static void momentum_columns(const dion3_momentum_item* it, int64_t b, int64_t col, int64_t n) {
    float m[D3_BLOCK];
    float x[D3_BLOCK];
    double score[D3_BLOCK];
    double sumsq[D3_BLOCK];
    for (int64_t j = 0; j < n; ++j) score[j] = sumsq[j] = 0.0; /* not all of it: n may be 1 */
    for (int64_t i = 0; i < it->rows; ++i) {
        const float* seen = momentum_piece(it, b, i, col, n, m, x);
        for (int64_t j = 0; j < n; ++j) score[j] += fabs((double)m[j]);
        for (int64_t j = 0; j < n; ++j) sumsq[j] += (double)seen[j] * (double)seen[j];
    }
    for (int64_t j = 0; it->score && j < n; ++j) it->score[b * it->cols + col + j] = score[j];
    for (int64_t j = 0; it->sumsq && j < n; ++j) it->sumsq[b * it->cols + col + j] = sumsq[j];
}

/* An item without elements still has sums: of nothing, 0. */
static void clear_sums(const dion3_momentum_item* it) {
    const int64_t n = it->batch * (it->axis == DION3_ROWS ? it->rows : it->cols);
    for (int64_t j = 0; it->score && j < n; ++j) it->score[j] = 0.0;
    for (int64_t j = 0; it->sumsq && j < n; ++j) it->sumsq[j] = 0.0;
}

dion3_status dion3_momentum_cpu(const dion3_momentum_item* items, int64_t count) {
    D3_TRY(d3_check_momentum(items, count));
    for (int64_t i = 0; i < count; ++i) {
        if (items[i].rows == 0 || items[i].cols == 0) clear_sums(&items[i]);
    }
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) elements += items[i].batch * items[i].rows * items[i].cols;
    D3_PARALLEL(elements)
    for (int64_t i = 0; i < count; ++i) {
        const dion3_momentum_item* it = &items[i];
        const int64_t rows = it->cols ? it->batch * it->rows : 0;
        if (it->axis == DION3_COLS && (it->score || it->sumsq)) {
            const int64_t pieces = it->rows ? d3_ceil_div(it->cols, D3_BLOCK) : 0;
            const int64_t chunk = d3_task_rows(it->rows * d3_min(D3_BLOCK, it->cols));
            D3_FOR_BY(chunk)
            for (int64_t t = 0; t < it->batch * pieces; ++t) {
                const int64_t col = t % pieces * D3_BLOCK;
                momentum_columns(it, t / pieces, col, d3_min(D3_BLOCK, it->cols - col));
            }
        } else {
            const int64_t chunk = d3_task_rows(it->cols);
            D3_FOR
            for (int64_t first = 0; first < rows; first += chunk) {
                momentum_rows(it, first, d3_min(first + chunk, rows));
            }
        }
    }
    return DION3_OK;
}
