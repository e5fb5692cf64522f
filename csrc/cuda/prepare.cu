/*
 * prepare.cu - dst = src / max(|src|_F, eps), and plain copies between dtypes and layouts.
 *
 * src, dst (batch, rows, cols), fp32, fp16 or bf16, any strides. The dimension with the smaller stride of
 *   src is the inner one; a unit is 8 elements along it, 16 bytes of a 16-bit row.
 * Tiling: a matrix is cut into at most 1024 chunks of about 2048 units, a block of 256 threads takes one.
 *   The norm kernel leaves one float64 sum of squares a chunk; each block of the copy kernel adds up those
 *   of its matrix. Both orders are fixed by the shape, so a matrix gets the same bits in any batch.
 * Bytes: one read for the norm, one read and one write for the copy; roof: memory bandwidth.
 * Constraints: none; rows that are not 16-byte aligned, or not contiguous, go element by element.
 */
#include "cuda_check.cuh"
#include "prepare.h"

#include <climits>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

constexpr int THREADS = 256;
constexpr int UNIT = 8;
constexpr int CHUNK_UNITS = 2048;
constexpr int MAX_CHUNKS = 1024;
constexpr int MAX_ITEMS = 16; /* of one launch: kernel parameters of at most 4 KB */

struct side {
    void* data;
    int64_t batch_stride, outer_stride, inner_stride;
    int32_t dtype;
    int32_t vector; /* a whole unit is one aligned run of memory */
};

struct item {
    side src, dst;
    int64_t outer, inner, units; /* units: of one outer index */
    int64_t chunk_outer, chunk_units, chunk_columns, chunks;
    int64_t first_block;
    double* partial;
    double eps;
    int32_t lanes; /* threads side by side along the units: a power of two */
    int32_t reserved;
};

struct table {
    item items[MAX_ITEMS];
    int64_t blocks;
    int64_t count;
};
static_assert(sizeof(table) <= 4096, "kernel parameters beyond 4 KB slow every launch down");

/* ---- units -------------------------------------------------------------------------------------- */
__device__ __forceinline__ float load_one(const void* data, int64_t index, int dtype) {
    if (dtype == DION3_F32) {
        return ((const float*)data)[index];
    }
    if (dtype == DION3_F16) {
        return __half2float(((const __half*)data)[index]);
    }
    return __bfloat162float(((const __nv_bfloat16*)data)[index]);
}

/* Elements of the unit from the limit-th on are zeros. */
__device__ __forceinline__ void load_unit(float (&v)[UNIT], const side& s, int64_t index, int limit) {
    if (s.vector && limit == UNIT && s.dtype == DION3_F32) {
        const float4* p = (const float4*)((const float*)s.data + index);
        const float4 low = p[0], high = p[1];
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else if (s.vector && limit == UNIT) {
        const uint4 raw = *(const uint4*)((const uint16_t*)s.data + index);
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int j = 0; j < UNIT; ++j) {
            const uint32_t bits = words[j / 2] >> (j % 2 * 16) & 0xffffu;
            v[j] = s.dtype == DION3_F16 ? __half2float(__ushort_as_half((unsigned short)bits))
                                        : __uint_as_float(bits << 16);
        }
    } else {
#pragma unroll
        for (int j = 0; j < UNIT; ++j) {
            v[j] = j < limit ? load_one(s.data, index + j * s.inner_stride, s.dtype) : 0.0f;
        }
    }
}

__device__ __forceinline__ uint16_t round_bits(float x, int dtype) {
    return dtype == DION3_F16 ? __half_as_ushort(__float2half_rn(x))
                              : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

__device__ __forceinline__ void store_unit(const float (&v)[UNIT], const side& s, int64_t index, int limit) {
    if (s.vector && limit == UNIT && s.dtype == DION3_F32) {
        float4* p = (float4*)((float*)s.data + index);
        p[0] = make_float4(v[0], v[1], v[2], v[3]);
        p[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else if (s.vector && limit == UNIT) {
        uint32_t words[UNIT / 2];
#pragma unroll
        for (int j = 0; j < UNIT / 2; ++j) {
            words[j] = round_bits(v[2 * j], s.dtype) | ((uint32_t)round_bits(v[2 * j + 1], s.dtype) << 16);
        }
        *(uint4*)((uint16_t*)s.data + index) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
        for (int j = 0; j < UNIT; ++j) {
            const int64_t at = index + j * s.inner_stride;
            if (j < limit && s.dtype == DION3_F32) {
                ((float*)s.data)[at] = v[j];
            } else if (j < limit) {
                ((uint16_t*)s.data)[at] = round_bits(v[j], s.dtype);
            }
        }
    }
}

/* ---- blocks ------------------------------------------------------------------------------------- */
/* The sum over the block, in every thread; the order is fixed. */
__device__ __forceinline__ double block_sum(double x) {
    __shared__ double warps[THREADS / 32];
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    __syncthreads(); /* the sums of the call before have been read */
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0.0;
    for (int i = 0; i < THREADS / 32; ++i) sum += warps[i];
    return sum;
}

struct block_range {
    int64_t batch, chunk, outer, outer_end, unit, unit_end, outer_step;
};

__device__ __forceinline__ const item& locate(const table& t, int64_t block, block_range& range) {
    int which = 0;
    while (which + 1 < t.count && block >= t.items[which + 1].first_block) ++which;
    const item& it = t.items[which];
    const int64_t local = block - it.first_block;
    range.batch = local / it.chunks;
    range.chunk = local - range.batch * it.chunks;
    const int64_t row = range.chunk / it.chunk_columns, column = range.chunk - row * it.chunk_columns;
    range.outer_step = THREADS / it.lanes;
    range.outer = row * it.chunk_outer + threadIdx.x / it.lanes;
    range.outer_end = min((row + 1) * it.chunk_outer, it.outer);
    range.unit = column * it.chunk_units + threadIdx.x % it.lanes;
    range.unit_end = min((column + 1) * it.chunk_units, it.units);
    return it;
}

__global__ void __launch_bounds__(THREADS) norms_kernel(const __grid_constant__ table t) {
    for (int64_t block = blockIdx.x; block < t.blocks; block += gridDim.x) {
        block_range range;
        const item& it = locate(t, block, range);
        double sum = 0.0;
        for (int64_t i = range.outer; i < range.outer_end; i += range.outer_step) {
            const int64_t row = range.batch * it.src.batch_stride + i * it.src.outer_stride;
#pragma unroll 2
            for (int64_t u = range.unit; u < range.unit_end; u += it.lanes) {
                float v[UNIT];
                const int limit = (int)min((int64_t)UNIT, it.inner - u * UNIT);
                load_unit(v, it.src, row + u * UNIT * it.src.inner_stride, limit);
#pragma unroll
                for (int j = 0; j < UNIT; ++j) sum = fma((double)v[j], (double)v[j], sum);
            }
        }
        sum = block_sum(sum);
        if (threadIdx.x == 0) it.partial[range.batch * it.chunks + range.chunk] = sum;
    }
}

/* The factor of one matrix. A NaN norm gives NaN: a bad gradient stays visible. */
__device__ __forceinline__ double matrix_scale(const item& it, int64_t batch) {
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < it.chunks; i += THREADS) sum += it.partial[batch * it.chunks + i];
    const double norm = sqrt(block_sum(sum));
    const double divisor = norm < it.eps ? it.eps : norm;
    return divisor == 0.0 ? 0.0 : 1.0 / divisor;
}

__global__ void __launch_bounds__(THREADS) copies_kernel(const __grid_constant__ table t) {
    for (int64_t block = blockIdx.x; block < t.blocks; block += gridDim.x) {
        block_range range;
        const item& it = locate(t, block, range);
        const double exact = it.partial ? matrix_scale(it, range.batch) : 1.0;
        const float scale = (float)exact;
        /* Beyond the normal range of fp32 the factor alone would lose digits. */
        const bool wide = exact > 1e38 || (exact < 1e-37 && exact != 0.0);
        for (int64_t i = range.outer; i < range.outer_end; i += range.outer_step) {
            const int64_t from = range.batch * it.src.batch_stride + i * it.src.outer_stride;
            const int64_t to = range.batch * it.dst.batch_stride + i * it.dst.outer_stride;
#pragma unroll 2
            for (int64_t u = range.unit; u < range.unit_end; u += it.lanes) {
                float v[UNIT];
                const int limit = (int)min((int64_t)UNIT, it.inner - u * UNIT);
                load_unit(v, it.src, from + u * UNIT * it.src.inner_stride, limit);
#pragma unroll
                for (int j = 0; j < UNIT; ++j) v[j] = wide ? (float)((double)v[j] * exact) : v[j] * scale;
                store_unit(v, it.dst, to + u * UNIT * it.dst.inner_stride, limit);
            }
        }
    }
}

/* ---- host side ---------------------------------------------------------------------------------- */
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

side make_side(const dion3_tensor& t, int64_t batch, int64_t outer, int64_t inner, bool swapped) {
    side s = {t.data,
              t.batch_stride,
              swapped ? t.col_stride : t.row_stride,
              swapped ? t.row_stride : t.col_stride,
              t.dtype,
              0};
    const int64_t whole = t.dtype == DION3_F32 ? 4 : 8; /* elements in 16 bytes */
    s.vector = inner >= UNIT && s.inner_stride == 1 && (outer == 1 || s.outer_stride % whole == 0) &&
               (batch == 1 || s.batch_stride % whole == 0) && (uintptr_t)t.data % 16 == 0;
    return s;
}

item make_item(const d3_copy& c) {
    item it = {};
    const bool swapped = c.cols == 1 || (c.rows != 1 && c.src.row_stride < c.src.col_stride);
    it.outer = swapped ? c.cols : c.rows;
    it.inner = swapped ? c.rows : c.cols;
    it.units = ceil_div(it.inner, UNIT);
    it.src = make_side(c.src, c.batch, it.outer, it.inner, swapped);
    it.dst = make_side(c.dst, c.batch, it.outer, it.inner, swapped);
    it.partial = c.partial;
    it.eps = c.eps;
    it.chunk_units = it.units <= CHUNK_UNITS ? it.units : CHUNK_UNITS;
    if (it.chunk_units * MAX_CHUNKS < it.units) it.chunk_units = ceil_div(it.units, MAX_CHUNKS);
    it.chunk_columns = ceil_div(it.units, it.chunk_units);
    it.chunk_outer = it.units < CHUNK_UNITS ? CHUNK_UNITS / it.units : 1;
    const int64_t most = MAX_CHUNKS / it.chunk_columns;
    if (it.chunk_outer * most < it.outer) it.chunk_outer = ceil_div(it.outer, most);
    it.chunks = it.chunk_columns * ceil_div(it.outer, it.chunk_outer);
    it.lanes = 1;
    while (it.lanes < THREADS && it.lanes < it.chunk_units) it.lanes *= 2;
    return it;
}

bool is_empty(const d3_copy& c) { return c.batch == 0 || c.rows == 0 || c.cols == 0; }

/* Fills tables and hands each full one to launch. */
dion3_status for_tables(const d3_copy* items, int64_t count, void (*kernel)(table), dion3_stream stream) {
    table t = {};
    for (int64_t i = 0; i < count; ++i) {
        if (!is_empty(items[i])) {
            item& it = t.items[t.count++] = make_item(items[i]);
            it.first_block = t.blocks;
            t.blocks += items[i].batch * it.chunks;
        }
        if (t.count == MAX_ITEMS || (i + 1 == count && t.count > 0)) {
            kernel<<<(unsigned)(t.blocks < INT_MAX ? t.blocks : INT_MAX), THREADS, 0, stream>>>(t);
            D3_LAUNCHED();
            t.count = 0;
            t.blocks = 0;
        }
    }
    return DION3_OK;
}

} // namespace

extern "C" int64_t d3_norm_chunks(const d3_copy* c) { return is_empty(*c) ? 0 : make_item(*c).chunks; }

extern "C" dion3_status d3_norms(const d3_copy* items, int64_t count, dion3_stream stream) {
    return for_tables(items, count, norms_kernel, stream);
}

extern "C" dion3_status d3_copies(const d3_copy* items, int64_t count, dion3_stream stream) {
    return for_tables(items, count, copies_kernel, stream);
}
