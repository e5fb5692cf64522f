/*
 * neuron.c - the neuron second moment and the factor of each row of the update.
 *
 * update (batch, rows, cols), second_moment (batch, neurons), factor (batch, rows). First the mean square of
 * every row (float64 sums in D3_LANES lanes), left in factor; then, one thread a matrix, the second moments
 * and the factors. 2 flops an element; bytes: the update read once. Source: Algorithm 4 lines 4-6.
 */
#include "../check.h"
#include "blocks.h"

/* factor[r] <- mean square of row r, for rows first .. last - 1 of the matrices laid end to end. */
D3_CLONES static void mean_squares(const dion3_neuron_item* it, int64_t first, int64_t last) {
    float x[D3_BLOCK];
    for (int64_t r = first; r < last; ++r) {
        double sums[D3_LANES] = {0};
        for (int64_t col = 0; col < it->cols; col += D3_BLOCK) {
            const int64_t n = d3_min(D3_BLOCK, it->cols - col);
            int64_t j = 0;
            d3_block_load(x, it->update.data, it->update.dtype,
                          d3_offset(&it->update, r / it->rows, r % it->rows, col), it->update.col_stride, n);
            for (; j + D3_LANES <= n; j += D3_LANES) {
                for (int l = 0; l < D3_LANES; ++l) sums[l] += (double)x[j + l] * (double)x[j + l];
            }
            for (int l = 0; j + l < n; ++l) sums[l] += (double)x[j + l] * (double)x[j + l];
        }
        it->factor[r] = d3_neuron_mean(d3_lane_total(sums), it->cols);
    }
}

/* Second moments and factors of matrix b, whose mean squares stand in factor. */
static void factors(const dion3_neuron_item* it, int64_t b) {
    const float beta2 = it->hyper[DION3_HYPER_BETA2];
    const float eps = it->hyper[DION3_HYPER_NEURON_EPS];
    const int32_t* indices = it->indices ? it->indices + b * it->rows : 0;
    float* second_moment = it->second_moment + b * it->neurons;
    float* factor = it->factor + b * it->rows;
    double total = 0.0;
    double scaled = 0.0;
    for (int64_t i = 0; i < it->rows; ++i) {
        float* v = &second_moment[indices ? indices[i] : i];
        *v = d3_neuron_second_moment(beta2, *v, factor[i]);
        total += (double)factor[i];
        scaled += d3_neuron_term(factor[i], d3_neuron_divisor(*v, eps));
    }
    for (int64_t i = 0; i < it->rows; ++i) {
        const float v = second_moment[indices ? indices[i] : i];
        factor[i] = d3_neuron_factor(total, scaled, d3_neuron_divisor(v, eps));
    }
}

static dion3_status check_indices(const dion3_neuron_item* items, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t total = items[i].indices ? items[i].batch * items[i].rows : 0;
        for (int64_t j = 0; j < total; ++j) {
            D3_REQUIRE(items[i].indices[j] >= 0 && items[i].indices[j] < items[i].neurons,
                       "dion3_neuron: item %lld: indices[%lld]=%d must be 0 .. neurons-1=%lld", (long long)i,
                       (long long)j, (int)items[i].indices[j], (long long)(items[i].neurons - 1));
        }
    }
    return DION3_OK;
}

dion3_status dion3_neuron_cpu(const dion3_neuron_item* items, int64_t count) {
    D3_TRY(d3_check_neuron(items, count));
    D3_TRY(check_indices(items, count));
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) elements += items[i].batch * items[i].rows * items[i].cols;
    D3_PARALLEL(elements) {
        for (int64_t i = 0; i < count; ++i) {
            const int64_t rows = items[i].cols ? items[i].batch * items[i].rows : 0;
            const int64_t chunk = d3_task_rows(items[i].cols);
            D3_FOR
            for (int64_t first = 0; first < rows; first += chunk) {
                mean_squares(&items[i], first, d3_min(first + chunk, rows));
            }
        }
        D3_BARRIER
        for (int64_t i = 0; i < count; ++i) {
            const int64_t batch = items[i].cols && items[i].rows ? items[i].batch : 0;
            const int64_t chunk = d3_task_rows(16 * items[i].rows); /* a row costs as much as 16 elements */
            D3_FOR_BY(chunk)
            for (int64_t b = 0; b < batch; ++b) factors(&items[i], b);
        }
    }
    return DION3_OK;
}
