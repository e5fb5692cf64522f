/*
 * update.c - w <- round(a * w - g_i * o) on the selected slices, round(a * w) on the others.
 *
 * weight (batch, rows, cols), update (batch, k, cols) or (batch, rows, k); row by row, in pieces of a row.
 * 3 flops and one Philox call per 8 elements; bytes: weight read and written once, update read once.
 * Source: Algorithm 4 lines 7-8.
 */
#include "../check.h"
#include "blocks.h"

typedef struct scalars {
    float decay, step_size;
    uint32_t step;
} scalars;

/* o[j] <- update of column col + j in row i, 0 where the column is not selected. */
D3_INLINE void load_columns(float* restrict o, const dion3_update_item* it, const int32_t* slots,
                            int64_t offset, int64_t n) {
    const int64_t stride = it->update.col_stride;
    if (it->update.dtype == DION3_F32) {
        const float* p = (const float*)it->update.data + offset;
        for (int64_t j = 0; j < n; ++j) o[j] = slots[j] < 0 ? 0.0f : p[slots[j] * stride];
    } else if (it->update.dtype == DION3_BF16) {
        const uint16_t* p = (const uint16_t*)it->update.data + offset;
        for (int64_t j = 0; j < n; ++j) o[j] = d3_from_bf16(slots[j] < 0 ? 0 : p[slots[j] * stride]);
    } else {
        const uint16_t* p = (const uint16_t*)it->update.data + offset;
        for (int64_t j = 0; j < n; ++j) o[j] = d3_from_fp16(slots[j] < 0 ? 0 : p[slots[j] * stride]);
    }
}

/* Contiguous bf16 weights rounded to nearest, n even, two in a word: halves are shifted into place and never
 * packed, which takes half the time of the way through load and store. o NULL: decay only, in a loop of its own,
 * as gcc does not vectorise one that asks. */
D3_INLINE void update_words(uint16_t* restrict w, float decay, float gain, const float* restrict o,
                            int64_t n) {
    uint32_t word;
    d3_prefetch(w, 2 * D3_BLOCK * (int64_t)sizeof *w, n * (int64_t)sizeof *w);
    if (!o) {
        for (int64_t j = 0; j < n; j += 2) {
            memcpy(&word, w + j, sizeof word);
            const uint32_t low = d3_to_bf16_high(d3_decay(decay, d3_float(word << 16)));
            const uint32_t high = d3_to_bf16_high(d3_decay(decay, d3_float(word & 0xffff0000u)));
            word = low >> 16 | (high & 0xffff0000u);
            memcpy(w + j, &word, sizeof word);
        }
        return;
    }
    for (int64_t j = 0; j < n; j += 2) {
        memcpy(&word, w + j, sizeof word);
        const uint32_t low = d3_to_bf16_high(d3_update(decay, d3_float(word << 16), gain, o[j]));
        const uint32_t high = d3_to_bf16_high(d3_update(decay, d3_float(word & 0xffff0000u), gain, o[j + 1]));
        word = low >> 16 | (high & 0xffff0000u);
        memcpy(w + j, &word, sizeof word);
    }
}

/* One piece: columns col .. col + n - 1 of row i of matrix b. */
D3_INLINE void update_piece(const dion3_update_item* it, const scalars* s, int64_t b, int64_t i, int64_t col,
                            int64_t n) {
    float w[D3_BLOCK];
    float o[D3_BLOCK];
    const int by_rows = it->axis == DION3_ROWS;
    const int32_t* slots = it->slots ? it->slots + b * (by_rows ? it->rows : it->cols) : 0;
    const int64_t row = by_rows && slots ? slots[i] : i; /* of the update */
    const int64_t offset = d3_offset(&it->weight, b, i, col);
    const float a = s->decay;
    const int64_t update_rows = by_rows ? it->k : it->rows;
    const float factor = row >= 0 && it->factor ? it->factor[b * update_rows + row] : 1.0f;
    const float gain = d3_update_gain(s->step_size, it->scale, factor);
    const float* u = NULL; /* the update of this piece, whole rows; NULL: not selected */
    if (row >= 0 && (by_rows || !slots)) {
        u = d3_block_view(o, it->update.data, it->update.dtype, d3_offset(&it->update, b, row, col),
                          it->update.col_stride, n);
    }
    if (it->weight.dtype == DION3_BF16 && it->weight.col_stride == 1 && !it->step && (by_rows || !slots) &&
        n % 2 == 0) {
        update_words((uint16_t*)it->weight.data + offset, a, gain, u, n);
        return;
    }
    d3_block_load(w, it->weight.data, it->weight.dtype, offset, it->weight.col_stride, n);
    if (u) {
        for (int64_t j = 0; j < n; ++j) w[j] = d3_update(a, w[j], gain, u[j]);
    } else if (row < 0) {
        for (int64_t j = 0; j < n; ++j) w[j] = d3_decay(a, w[j]);
    } else {
        const int32_t* restrict at = slots + col;
        load_columns(o, it, at, d3_offset(&it->update, b, row, 0), n);
        for (int64_t j = 0; j < n; ++j) {
            w[j] = at[j] < 0 ? d3_decay(a, w[j]) : d3_update(a, w[j], gain, o[j]);
        }
    }
    if (it->step) {
        const int64_t index = it->index_base + b * it->index_batch_stride + i * it->index_row_stride + col;
        d3_block_store_stochastic(w, it->weight.data, it->weight.dtype, offset, it->weight.col_stride, n,
                                  it->seed, s->step, it->param_id, index);
    } else {
        d3_block_store(w, it->weight.data, it->weight.dtype, offset, it->weight.col_stride, n);
    }
}

/* Rows first .. last - 1 of all matrices of the batch laid end to end. */
D3_CLONES static void update_rows(const dion3_update_item* it, int64_t first, int64_t last) {
    scalars s;
    s.decay = it->hyper[DION3_HYPER_DECAY];
    s.step_size = it->hyper[DION3_HYPER_STEP];
    s.step = it->step ? d3_step_number(*it->step) : 0;
    for (int64_t r = first; r < last; ++r) {
        for (int64_t col = 0; col < it->cols; col += D3_BLOCK) {
            update_piece(it, &s, r / it->rows, r % it->rows, col, d3_min(D3_BLOCK, it->cols - col));
        }
    }
}

static dion3_status check_slots(const dion3_update_item* items, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t n = items[i].axis == DION3_ROWS ? items[i].rows : items[i].cols;
        const int64_t total = items[i].slots ? items[i].batch * n : 0;
        for (int64_t j = 0; j < total; ++j) {
            D3_REQUIRE(items[i].slots[j] >= -1 && items[i].slots[j] < items[i].k,
                       "dion3_update: item %lld: slots[%lld]=%d must be -1 .. k-1=%lld", (long long)i,
                       (long long)j, (int)items[i].slots[j], (long long)(items[i].k - 1));
        }
    }
    return DION3_OK;
}

dion3_status dion3_update_cpu(const dion3_update_item* items, int64_t count) {
    D3_TRY(d3_check_update(items, count));
    D3_TRY(check_slots(items, count));
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) elements += items[i].batch * items[i].rows * items[i].cols;
    D3_PARALLEL(elements)
    for (int64_t i = 0; i < count; ++i) {
        const dion3_update_item* it = &items[i];
        const int64_t rows = it->cols ? it->batch * it->rows : 0;
        const int64_t chunk = d3_task_rows(it->cols);
        D3_FOR
        for (int64_t first = 0; first < rows; first += chunk) {
            update_rows(it, first, d3_min(first + chunk, rows));
        }
    }
    return DION3_OK;
}
