/*
 * neuron.cu - the factors of NorMuon's neuron norm from the row sums of the update.
 *
 *   update (batch, rows, cols), any dtype and strides; second_moment (batch, neurons) fp32;
 *   factor (batch, rows) fp32. s_i = mean_j o_ij^2; v <- beta2 v + (1 - beta2) s; d = sqrt(v) + eps;
 *   factor_i = sqrt(sum s / sum (s / d^2)) / d_i.
 * Two launches. Row sums (geometry.cuh); who finishes a row also moves its second moment and leaves d_i in
 * factor, and every block leaves its share of the two sums over the matrix in the workspace. Then a block to
 * 2048 rows adds the shares, in order, and turns d_i into factor_i. The normalised update is never stored.
 * Bytes: one read of the update. Sums: one conversion to fp64 and one fp64 multiply-add an element, the
 * conversions half of their roof where that is 16 a clock (compute capability 8.0, 9.0).
 * Source: Algorithm 4 lines 4-6.
 */
#include "../rows.h"
#include "element.cuh"
#include "geometry.cuh"
#include "table.cuh"

struct neuron_entry {
    const char* update;
    double* shares; /* workspace (batch, blocks_per_matrix, 2): sum s and sum s / d^2 of a block's rows */
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

#define FACTOR_ROWS 2048 /* rows of a block of the second launch */
#define VECTORS_AHEAD 4

template <int OD, int N>
__device__ __forceinline__ double squares_of(const d3_vector<OD, N>& v, int dtype, double sum) {
    float x[N];
    d3_widen<OD, N>(v, dtype, x);
#pragma unroll
    for (int i = 0; i < N; ++i) sum = fma((double)x[i], (double)x[i], sum);
    return sum;
}

/* The numbers of a row whose sum of squares is known: its second moment moves, factor takes d. */
__device__ __forceinline__ void finish_row(const neuron_entry& e, int64_t batch, uint32_t row, double squares,
                                           double& total, double& scaled) {
    const int64_t at = batch * e.rows.rows + row;
    const int64_t neuron = batch * e.neurons + (e.indices ? e.indices[at] : (int64_t)row);
    const float s = d3_neuron_mean(squares, e.rows.cols);
    const float v = d3_neuron_second_moment(e.hyper[DION3_HYPER_BETA2], e.second_moment[neuron], s);
    const float d = d3_neuron_divisor(v, e.hyper[DION3_HYPER_NEURON_EPS]);
    e.second_moment[neuron] = v;
    e.factor[at] = d;
    total += (double)s;
    scaled += d3_neuron_term(s, d);
}

template <int OD>
__global__ void __launch_bounds__(D3_THREADS, 4)
    neuron_rows_kernel(const __grid_constant__ neuron_table table) {
    constexpr int N = d3_width(OD);
    __shared__ double part[D3_BLOCK_VECTORS], block_part[32]; /* of a row its sum, or those of the warps */
    const uint32_t index = d3_find(table, blockIdx.x);
    const neuron_entry& e = table.entries[index];
    const uint32_t block = blockIdx.x - table.first[index];
    const d3_place p = d3_place_of(e.rows, block);
    const int size = d3_size<OD>(e.dtype);
    const int64_t step = (N > 1 ? 1 : e.o.col) * size;
    const uint32_t cols = e.rows.cols, parts = p.lanes > 32 ? p.lanes / 32 : 1;
    double total = 0.0, scaled = 0.0;

    for (uint32_t base = 0; base < p.rows; base += p.groups) {
        const uint32_t r = base + p.group;
        double sum = 0.0;
        if (r < p.rows) {
            const char* o = e.update + (p.batch * e.o.batch + (p.first + r) * e.o.row) * size;
            const uint32_t head = d3_head<N>(o, size, cols), vectors = (cols - head) / N;
            const uint32_t body = vectors * N;
            const char* at = o + (head + (int64_t)p.lane * N) * step;
            const int64_t apart = (int64_t)p.lanes * N * step;
            uint32_t v = p.lane;
#pragma unroll 1
            for (; v + (VECTORS_AHEAD - 1) * p.lanes < vectors; v += VECTORS_AHEAD * p.lanes) {
                d3_vector<OD, N> ahead[VECTORS_AHEAD];
#pragma unroll
                for (int i = 0; i < VECTORS_AHEAD; ++i) {
                    ahead[i] = d3_fetch_aligned<OD, N, true>(at + i * apart, e.dtype);
                }
#pragma unroll
                for (int i = 0; i < VECTORS_AHEAD; ++i) sum = squares_of<OD, N>(ahead[i], e.dtype, sum);
                at += VECTORS_AHEAD * apart;
            }
#pragma unroll 1
            for (; v < vectors; v += p.lanes) {
                sum = squares_of<OD, N>(d3_fetch_aligned<OD, N, true>(at, e.dtype), e.dtype, sum);
                at += apart;
            }
            if constexpr (N > 1) {
                for (uint32_t i = p.lane; i < cols - body; i += p.lanes) {
                    const char* single = o + (int64_t)(i < head ? i : i + body) * step;
                    sum = squares_of<OD, 1>(d3_fetch_each<OD, 1>(single, 0, e.dtype), e.dtype, sum);
                }
            }
        }
        sum = d3_sum_lanes(sum, p.lanes);
        if (p.lane % 32 == 0) part[r * parts + p.lane / 32] = sum;
    }
    __syncthreads();
    for (uint32_t r = threadIdx.x; r < p.rows; r += D3_THREADS) { /* all at once: each waits for memory */
        double sum = 0.0;
        for (uint32_t w = 0; w < parts; ++w) sum += part[r * parts + w];
        finish_row(e, p.batch, p.first + r, sum, total, scaled);
    }
    total = d3_sum_block(total, block_part);
    scaled = d3_sum_block(scaled, block_part);
    if (threadIdx.x == 0) {
        e.shares[2 * (int64_t)block] = total;
        e.shares[2 * (int64_t)block + 1] = scaled;
    }
}

__global__ void __launch_bounds__(D3_THREADS)
    neuron_factor_kernel(const __grid_constant__ neuron_table table) {
    __shared__ double part[32];
    const uint32_t index = d3_find(table, blockIdx.x);
    const neuron_entry& e = table.entries[index];
    const uint32_t rows = e.rows.rows, pieces = (rows + FACTOR_ROWS - 1) / FACTOR_ROWS;
    const uint32_t block = blockIdx.x - table.first[index], batch = block / pieces;
    const uint32_t begin = (block - batch * pieces) * FACTOR_ROWS;
    const uint32_t end = begin + min(rows - begin, (uint32_t)FACTOR_ROWS);
    const double* const shares = e.shares + 2 * (int64_t)batch * e.rows.blocks_per_matrix;
    float* const factor = e.factor + (int64_t)batch * rows;
    double total = 0.0, scaled = 0.0;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < e.rows.blocks_per_matrix; i += D3_THREADS) {
        total += shares[2 * (int64_t)i];
        scaled += shares[2 * (int64_t)i + 1];
    }
    total = d3_sum_block(total, part);
    scaled = d3_sum_block(scaled, part);
    for (uint32_t i = begin + threadIdx.x; i < end; i += D3_THREADS) {
        factor[i] = d3_neuron_factor(total, scaled, factor[i]);
    }
}

/* ---- host ------------------------------------------------------------------------------------- */

static bool is_empty(const dion3_neuron_item* it) { return it->batch == 0 || it->rows == 0 || it->cols == 0; }

static d3_work prepare_rows(const dion3_neuron_item* it, neuron_entry* e, char** workspace) {
    d3_work work = {3, 0};
    if (is_empty(it)) return work;
    e->update = (const char*)it->update.data;
    e->shares = (double*)*workspace;
    e->second_moment = it->second_moment;
    e->indices = it->indices;
    e->factor = it->factor;
    e->hyper = it->hyper;
    e->o = d3_strides_of(&it->update);
    e->neurons = it->neurons;
    e->dtype = it->update.dtype;
    if (e->o.col == 1) work.kernel = it->update.dtype;
    work.blocks = d3_deal_rows(&e->rows, it->batch, it->rows, it->cols,
                               work.kernel == 3 ? 1 : d3_width(it->update.dtype), 4, 4);
    if (work.blocks != D3_TOO_LARGE) *workspace += work.blocks * 2 * sizeof(double);
    return work;
}

static d3_work prepare_factors(const dion3_neuron_item* it, neuron_entry* e, char** workspace) {
    d3_work work = prepare_rows(it, e, workspace);
    work.kernel = 0;
    if (work.blocks != 0 && work.blocks != D3_TOO_LARGE) {
        work.blocks = ((uint64_t)it->rows + FACTOR_ROWS - 1) / FACTOR_ROWS * (uint64_t)it->batch;
    }
    return work;
}

static size_t workspace_bytes_of(const dion3_neuron_item* items, int64_t count) {
    neuron_entry entry;
    char* const base = (char*)256;
    char* left = base;
    for (int64_t i = 0; i < count; ++i) (void)prepare_rows(&items[i], &entry, &left);
    return (size_t)(left - base);
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
