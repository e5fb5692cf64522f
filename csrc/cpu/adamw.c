/*
 * adamw.c - decoupled AdamW on flat arrays, the weight rounded once (to nearest or stochastically).
 *
 * About 12 flops with a division and a square root an element; bytes: param, exp_avg and exp_avg_sq
 * read and written, grad read. The formula is in dion3.h.
 */
#include "../check.h"
#include "blocks.h"

/* Elements first .. last - 1. */
D3_CLONES static void adamw_range(const dion3_adamw_item* it, int64_t first, int64_t last) {
    float w[D3_BLOCK];
    float g[D3_BLOCK];
    float m[D3_BLOCK];
    float v[D3_BLOCK];
    const d3_adamw s = d3_adamw_scalars(it->hyper, *it->step);
    const uint32_t step = d3_step_number(*it->step);
    for (int64_t at = first; at < last; at += D3_BLOCK) {
        const int64_t n = d3_min(D3_BLOCK, last - at);
        d3_block_load(w, it->param, it->param_dtype, at, 1, n);
        d3_block_load(g, it->grad, it->grad_dtype, at, 1, n);
        d3_block_load(m, it->exp_avg, it->state_dtype, at, 1, n);
        d3_block_load(v, it->exp_avg_sq, it->state_dtype, at, 1, n);
        for (int64_t j = 0; j < n; ++j) {
            d3_adamw_moments(&s, g[j], &m[j], &v[j]);
            w[j] = d3_adamw_weight(&s, w[j], d3_adamw_direction(&s, m[j], v[j]));
        }
        d3_block_store(m, it->exp_avg, it->state_dtype, at, 1, n);
        d3_block_store(v, it->exp_avg_sq, it->state_dtype, at, 1, n);
        if (it->stochastic) {
            d3_block_store_stochastic(w, it->param, it->param_dtype, at, 1, n, it->seed, step, it->param_id,
                                      it->index_base + at);
        } else {
            d3_block_store(w, it->param, it->param_dtype, at, 1, n);
        }
    }
}

dion3_status dion3_adamw_cpu(const dion3_adamw_item* items, int64_t count) {
    D3_TRY(d3_check_adamw(items, count));
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) elements += items[i].count;
    D3_PARALLEL(elements)
    for (int64_t i = 0; i < count; ++i) {
        D3_FOR
        for (int64_t at = 0; at < items[i].count; at += D3_TASK_ELEMENTS) {
            adamw_range(&items[i], at, d3_min(at + D3_TASK_ELEMENTS, items[i].count));
        }
    }
    return DION3_OK;
}
