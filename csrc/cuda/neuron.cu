/*
 * neuron.cu - the factors of NorMuon's neuron norm from the row sums of the update.
 *
 *   update (batch, rows, cols), any dtype and strides; second_moment (batch, neurons) fp32;
 *   factor (batch, rows) fp32. s_i = mean_j o_ij^2; v <- beta2 v + (1 - beta2) s; d = sqrt(v) + eps;
 *   factor_i = sqrt(sum s / sum (s / d^2)) / d_i.
 * Two launches: row sums into the workspace (geometry.cuh), then one block of 256 a matrix for the second
 * moments, the two sums over the matrix, and the factors. The normalised update is never stored.
 * Bytes: one read of the update; fp64 sums as in momentum.cu. The second launch is a few microseconds.
 * Source: Algorithm 4 lines 4-6.
 */
#include "../rows.h"
#include "element.cuh"
#include "geometry.cuh"
#include "table.cuh"

#define TARGET_VECTORS 1024
#define MAX_LONG_ROWS (TARGET_VECTORS / (D3_THREADS + 1))

struct neuron_entry {
    const char* update;
    float* mean; /* workspace (batch, rows): s */
    float* second_moment;
    const int32_t* indices;
    float* factor;
    const float* hyper;
    d3_strides o;
    int64_t neurons;
    d3_rows rows;
    int32_t dtype;
};

typedef d3_table<neuron_entry> neuron_table;

template <int OD, int N>
__device__ __forceinline__ double squares_of(const char* o, int dtype) {
    d3_vector<OD, N> v;
    float x[N];
    double sum = 0.0;
    if constexpr (N > 1) {
        v = d3_fetch<OD, N, false>(o);
    } else {
        v = d3_fetch_each<OD, 1>(o, 0, dtype);
    }
    d3_widen<OD, N>(v, dtype, x);
#pragma unroll
    for (int i = 0; i < N; ++i) sum = fma((double)x[i], (double)x[i], sum);
    return sum;
}

template <int OD>
__global__ void __launch_bounds__(D3_THREADS, 5)
    neuron_rows_kernel(const __grid_constant__ neuron_table table) {
    constexpr int N = d3_width(OD);
    __shared__ double part[MAX_LONG_ROWS][D3_WARPS];
    const uint32_t index = d3_find(table, blockIdx.x);
    const neuron_entry& e = table.entries[index];
    const d3_place p = d3_place_of(e.rows, blockIdx.x - table.first[index]);
    const int size = d3_size<OD>(e.dtype);
    const int64_t step = (N > 1 ? 1 : e.o.col) * size;
    const uint32_t cols = e.rows.cols;
    float* const mean = e.mean + (int64_t)p.batch * e.rows.rows + p.first;

    for (uint32_t base = 0; base < p.rows; base += p.groups) {
        const uint32_t r = base + p.group;
        double sum = 0.0;
        if (r < p.rows) {
            const char* o = e.update + (p.batch * e.o.batch + (p.first + r) * e.o.row) * size;
            const uint32_t head = d3_head<N>(o, size, cols), vectors = (cols - head) / N;
            const uint32_t body = vectors * N;
#pragma unroll 2
            for (uint32_t v = p.lane; v < vectors; v += p.lanes) {
                sum += squares_of<OD, N>(o + (head + (int64_t)v * N) * step, e.dtype);
            }
            if constexpr (N > 1) {
                for (uint32_t i = p.lane; i < cols - body; i += p.lanes) {
                    sum += squares_of<OD, 1>(o + (int64_t)(i < head ? i : i + body) * step, e.dtype);
                }
            }
        }
        sum = d3_sum_lanes(sum, p.lanes);
        if (p.lanes > 32) {
            if (threadIdx.x % 32 == 0) part[r][threadIdx.x / 32] = sum;
        } else if (p.lane == 0 && r < p.rows) {
            mean[r] = d3_neuron_mean(sum, cols);
        }
    }
    if (p.lanes <= 32) return;
    __syncthreads();
    if (threadIdx.x < p.rows) {
        double sum = 0.0;
        for (int w = 0; w < D3_WARPS; ++w) sum += part[threadIdx.x][w];
        mean[threadIdx.x] = d3_neuron_mean(sum, cols);
    }
}

__global__ void __launch_bounds__(D3_THREADS)
    neuron_factor_kernel(const __grid_constant__ neuron_table table) {
    __shared__ double part[32];
    const uint32_t index = d3_find(table, blockIdx.x);
    const neuron_entry& e = table.entries[index];
    const int64_t batch = blockIdx.x - table.first[index];
    const uint32_t rows = e.rows.rows;
    const float* const mean = e.mean + batch * rows;
    const int32_t* const indices = e.indices ? e.indices + batch * rows : NULL;
    float* const factor = e.factor + batch * rows;
    float* const second_moment = e.second_moment + batch * e.neurons;
    const float beta2 = e.hyper[DION3_HYPER_BETA2], eps = e.hyper[DION3_HYPER_NEURON_EPS];
    double total = 0.0, scaled = 0.0;
    for (uint32_t i = threadIdx.x; i < rows; i += D3_THREADS) {
        const int64_t neuron = indices ? indices[i] : (int64_t)i;
        const float s = mean[i], v = d3_neuron_second_moment(beta2, second_moment[neuron], s);
        const float d = d3_neuron_divisor(v, eps);
        second_moment[neuron] = v;
        factor[i] = d; /* until the sums are known */
        total += (double)s;
        scaled += d3_neuron_term(s, d);
    }
    total = d3_sum_block(total, part);
    scaled = d3_sum_block(scaled, part);
    for (uint32_t i = threadIdx.x; i < rows; i += D3_THREADS) {
        factor[i] = d3_neuron_factor(total, scaled, factor[i]);
    }
}

/* ---- host ------------------------------------------------------------------------------------- */

static bool is_empty(const dion3_neuron_item* it) { return it->batch == 0 || it->rows == 0 || it->cols == 0; }

static d3_work prepare_rows(const dion3_neuron_item* it, neuron_entry* e, char** workspace) {
    d3_work work = {3, 0};
    if (is_empty(it)) return work;
    e->update = (const char*)it->update.data;
    e->mean = (float*)*workspace;
    e->second_moment = it->second_moment;
    e->indices = it->indices;
    e->factor = it->factor;
    e->hyper = it->hyper;
    e->o = d3_strides_of(&it->update);
    e->neurons = it->neurons;
    e->dtype = it->update.dtype;
    if (e->o.col == 1) work.kernel = it->update.dtype;
    work.blocks = d3_deal_rows(&e->rows, it->batch, it->rows, it->cols,
                               work.kernel == 3 ? 1 : d3_width(it->update.dtype), TARGET_VECTORS);
    *workspace += (size_t)it->batch * (size_t)it->rows * sizeof(float);
    return work;
}

static d3_work prepare_factors(const dion3_neuron_item* it, neuron_entry* e, char** workspace) {
    d3_work work = prepare_rows(it, e, workspace);
    work.kernel = 0;
    if (work.blocks != 0 && work.blocks != D3_TOO_LARGE) work.blocks = (uint64_t)it->batch;
    return work;
}

static size_t workspace_bytes_of(const dion3_neuron_item* items, int64_t count) {
    size_t bytes = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (!is_empty(&items[i])) bytes += (size_t)items[i].batch * (size_t)items[i].rows * sizeof(float);
    }
    return bytes;
}

size_t dion3_neuron_workspace_size(const dion3_neuron_item* items, int64_t count) {
    if (d3_check_neuron(items, count) != DION3_OK) return 0;
    return workspace_bytes_of(items, count);
}

dion3_status dion3_neuron_cuda(const dion3_neuron_item* items, int64_t count, void* workspace,
                               size_t workspace_bytes, dion3_stream stream) {
    static const void* const rows[] = {
        (const void*)neuron_rows_kernel<DION3_F32>, (const void*)neuron_rows_kernel<DION3_F16>,
        (const void*)neuron_rows_kernel<DION3_BF16>, (const void*)neuron_rows_kernel<D3_ANY>};
    static const void* const factors[] = {(const void*)neuron_factor_kernel};
    D3_TRY(d3_check_neuron(items, count));
    D3_TRY(d3_check_workspace("dion3_neuron", workspace, workspace_bytes, workspace_bytes_of(items, count)));
    D3_TRY(d3_launch("dion3_neuron", items, count, prepare_rows, rows, D3_THREADS, workspace, stream));
    return d3_launch("dion3_neuron", items, count, prepare_factors, factors, D3_THREADS, workspace, stream);
}
