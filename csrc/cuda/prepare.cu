/*
 * prepare.cu - dst = src / max(|src|_F, eps), and plain copies between dtypes and layouts.
 *
 * src, dst (batch, rows, cols), fp32, fp16 or bf16, any strides. The dimension with the smaller stride of
 *   src is the inner one; a unit is 16 bytes of a contiguous row of src. Rows that follow each other without a
 *   gap in both tensors count as one row.
 * Tiling: a block holds one chunk of a matrix, up to 2048 units, in registers, 8 a thread, all loads in flight.
 *   A matrix of one chunk is read once: sum, scale, store. For larger ones, two kinds of blocks share a launch:
 *   norm blocks leave a sum of squares each, the last of a matrix adds them up and publishes the factor; copy
 *   blocks load, wait for the factor, store. Blocks come in slots of whole matrices, about 8 MB: the norms
 *   of slot j + 1 before the copies of slot j, so that factors are there in time and the second read comes from
 *   the L2 cache. A matrix above 12 MB is a slot of its own, copied right after its norm and backwards, so
 *   that what was read last is met first.
 *   A copy block waits only for blocks with lower indices, which wait for nobody; blocks start in the order
 *   of their indices (as decoupled look-back scans rely on).
 * Sums: in float64, so that their order does not matter in practice; it is fixed by the shape and the
 *   strides, so a matrix gets the same bits in any batch. The conversion instruction is slow: magnitudes
 *   become float64 by moving their bits, which is wrong for 0, denormals (2^-127 and up), Inf and NaN (2^128
 *   and up). Only a sum between 2^-180 and 2^256 proves that none of these mattered; the others are taken again.
 * Bytes: with cached second reads one read and one write of memory; roof: memory bandwidth.
 * Constraints: none; rows that are not 16-byte aligned, or not contiguous, go element by element.
 */
#include "aligned.h"
#include "cuda_check.cuh"
#include "prepare.h"
#include "ptx_sm80.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int PER_THREAD = 8;
constexpr int CHUNK_UNITS = THREADS * PER_THREAD;
constexpr int MAX_ITEMS = 16; /* of one launch: kernel parameters of at most 4 KB */
constexpr int64_t MAX_BLOCKS = 1 << 30;
constexpr int64_t MAX_ELEMENTS = 1ll << 40; /* of a matrix: less than MAX_BLOCKS / 4 chunks */
constexpr int64_t SLOT_BYTES = 8 << 20;
constexpr int64_t AHEAD_BYTES = 12 << 20;  /* larger matrices are copied right after their norm */
constexpr int64_t STREAM_BYTES = 24 << 20; /* more output than this is not kept in the L2 cache */

struct side {
    void* data;
    int64_t batch_stride, outer_stride, inner_stride;
    int32_t dtype;
    int32_t vector; /* rows are contiguous and begin at multiples of 16 bytes */
};

enum { COPY = 0, BOTH = 1, PIPELINE = 2 }; /* copy; norm and copy in one block; in two */

/* What the blocks of a matrix tell each other. All bits are set before the launch. */
struct header {
    unsigned long long factor; /* bits of a double; NOT_YET until it is known */
    uint32_t arrived;          /* norm blocks that are done, minus 1 */
    uint32_t reserved;
};
constexpr unsigned long long NOT_YET = ~0ull;

struct item {
    side src, dst;
    int64_t batch, outer, inner, units; /* units: of one row */
    header* headers;                    /* (batch) */
    double* partial;                    /* (batch, chunks) */
    double eps;
    uint32_t chunk_units,
        chunk_outer; /* a chunk: so many units of so many rows, one of the two being 1 or whole rows */
    uint32_t columns, chunks; /* chunks in a row, in a matrix */
    uint32_t magic;           /* 2^32 / chunk_units, rounded up; 0 for one unit */
    uint32_t group;           /* matrices of a slot */
    uint32_t first_block;
    int16_t mode;
    int8_t ahead, stream;
};

struct table {
    item items[MAX_ITEMS];
    uint32_t count, blocks;
};
static_assert(sizeof(table) <= 4096, "kernel parameters beyond 4 KB slow every launch down");

/* ---- units -------------------------------------------------------------------------------------- */
__device__ __forceinline__ uint32_t word_of(const uint4& raw, int i) {
    return i == 0 ? raw.x : i == 1 ? raw.y : i == 2 ? raw.z : raw.w;
}

__device__ __forceinline__ unsigned short half_word(const uint4& raw, int i) {
    return (unsigned short)(word_of(raw, i / 2) >> (i % 2 * 16));
}

/* |x| of a normal fp32 number: the exponent moves by 3 bits and from bias 127 to 1023. */
__device__ __forceinline__ double widen(uint32_t bits) {
    return __hiloint2double((int)((bits >> 3 & 0x0fffffffu) + 0x38000000u), (int)(bits << 29));
}

/* An element as it is, and its magnitude where it is a normal number. */
template <typename T>
struct unit;
template <>
struct unit<float> {
    enum { SIZE = 4 };
    static __device__ __forceinline__ float get(const uint4& raw, int i) {
        return __uint_as_float(word_of(raw, i));
    }
    static __device__ __forceinline__ double magnitude(const uint4& raw, int i) {
        return widen(word_of(raw, i));
    }
};
template <>
struct unit<__half> {
    enum { SIZE = 8 };
    static __device__ __forceinline__ float get(const uint4& raw, int i) {
        return __half2float(__ushort_as_half(half_word(raw, i)));
    }
    static __device__ __forceinline__ double magnitude(const uint4& raw, int i) {
        return widen(__float_as_uint(get(raw, i)));
    }
};
template <>
struct unit<__nv_bfloat16> {
    enum { SIZE = 8 };
    static __device__ __forceinline__ float get(const uint4& raw, int i) {
        return __uint_as_float((uint32_t)half_word(raw, i) << 16);
    }
    static __device__ __forceinline__ double magnitude(const uint4& raw, int i) {
        const uint32_t word = word_of(raw, i / 2), bits = i % 2 ? word >> 3 : word << 13;
        return __hiloint2double((int)((bits & 0x0fffe000u) + 0x38000000u), 0);
    }
};

/* limit elements one by one, zeros behind. */
template <typename T>
__device__ __forceinline__ uint4 load_elements(const T* p, int64_t stride, int limit) {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < unit<T>::SIZE; ++i) {
        if (i >= limit) continue;
        if (sizeof(T) == 4) {
            words[i % 4] = ((const uint32_t*)p)[i * stride];
        } else {
            words[i / 2] |= (uint32_t)((const uint16_t*)p)[i * stride] << (i % 2 * 16);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ uint32_t round_bits(float x, int dtype) {
    return dtype == DION3_F16 ? __half_as_ushort(__float2half_rn(x))
                              : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

__device__ __forceinline__ uint32_t round_pair(float low, float high, int dtype) {
    return round_bits(low, dtype) | (round_bits(high, dtype) << 16);
}

__device__ __forceinline__ void store_element(const side& s, int64_t index, float x) {
    if (s.dtype == DION3_F32) {
        ((float*)s.data)[index] = x;
    } else {
        ((uint16_t*)s.data)[index] = (uint16_t)round_bits(x, s.dtype);
    }
}

template <int SIZE>
__device__ __forceinline__ void store_unit(const float (&v)[SIZE], const side& s, int64_t index, int limit,
                                           uint64_t policy) {
    if (!s.vector || limit < SIZE) {
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (i < limit) store_element(s, index + i * s.inner_stride, v[i]);
        }
    } else if (s.dtype == DION3_F32) {
#pragma unroll
        for (int i = 0; i < SIZE; i += 4) {
            ptx80_store16((float*)s.data + index + i,
                          make_uint4(__float_as_uint(v[i]), __float_as_uint(v[i + 1]),
                                     __float_as_uint(v[i + 2]), __float_as_uint(v[i + 3])),
                          policy);
        }
    } else {
        uint32_t words[SIZE / 2];
#pragma unroll
        for (int i = 0; i < SIZE / 2; ++i) words[i] = round_pair(v[2 * i], v[2 * i + 1], s.dtype);
        uint16_t* p = (uint16_t*)s.data + index;
        if constexpr (SIZE == 8) {
            ptx80_store16(p, make_uint4(words[0], words[1], words[2], words[3]), policy);
        } else {
            ptx80_store8(p, make_uint2(words[0], words[1]), policy);
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

/* What a block does: a chunk of a matrix. */
struct task {
    int64_t matrix, outer, first_unit;
    uint32_t chunk, count; /* count: units */
    bool norm, copy;
};

__device__ __forceinline__ const item& locate(const table& t, task& at) {
    uint32_t which = 0;
    while (which + 1 < t.count && blockIdx.x >= t.items[which + 1].first_block) ++which;
    const item& it = t.items[which];
    uint32_t local = blockIdx.x - it.first_block;
    int64_t first_matrix = 0;
    at.norm = it.mode == BOTH;
    at.copy = true;
    if (it.mode == PIPELINE) {
        const uint32_t slot_blocks = it.group * it.chunks, slot = local / slot_blocks;
        local -= slot * slot_blocks;
        /* With ahead: norms 0, norms 1, copies 0, norms 2, copies 1, ...; without: norms 0, copies 0, ... */
        at.norm = it.ahead ? slot == 0 || slot % 2 == 1 : slot % 2 == 0;
        at.copy = !at.norm;
        if (at.copy) local = slot_blocks - 1 - local;
        first_matrix = (int64_t)(it.ahead && at.norm ? (slot + 1) / 2 : (slot - it.ahead) / 2) * it.group;
    }
    const uint32_t matrix = local / it.chunks;
    at.matrix = first_matrix + matrix;
    at.chunk = local - matrix * it.chunks;
    const uint32_t row = at.chunk / it.columns, column = at.chunk - row * it.columns;
    at.outer = (int64_t)row * it.chunk_outer;
    at.first_unit = (int64_t)column * it.chunk_units;
    const uint32_t rows = (uint32_t)min((int64_t)it.chunk_outer, it.outer - at.outer);
    at.count = rows * (uint32_t)min((int64_t)it.chunk_units, it.units - at.first_unit);
    return it;
}

/* Row and unit, counted from those of the chunk. A chunk of several rows has whole ones. */
__device__ __forceinline__ void place_unit(const item& it, uint32_t index, uint32_t& row, uint32_t& column) {
    row = it.magic ? __umulhi(index, it.magic) : index;
    column = index - row * it.chunk_units;
}

template <typename T, bool VECTOR>
__device__ __forceinline__ void load_chunk(uint4 (&raw)[PER_THREAD], const item& it, const task& at,
                                           uint64_t policy) {
    constexpr int SIZE = unit<T>::SIZE;
    const T* data = (const T*)it.src.data + at.matrix * it.src.batch_stride + at.outer * it.src.outer_stride;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const uint32_t index = threadIdx.x + i * THREADS;
        raw[i] = make_uint4(0, 0, 0, 0);
        if (index < at.count) {
            uint32_t row, column;
            place_unit(it, index, row, column);
            const int64_t first = (at.first_unit + column) * SIZE;
            const T* p = data + row * it.src.outer_stride + first * (VECTOR ? 1 : it.src.inner_stride);
            if (VECTOR && first + SIZE <= it.inner) {
                raw[i] = ptx80_load16(p, policy);
            } else {
                raw[i] = load_elements<T>(p, it.src.inner_stride, (int)min((int64_t)SIZE, it.inner - first));
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ double chunk_squares(const uint4 (&raw)[PER_THREAD]) {
    double even = 0.0, odd = 0.0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
#pragma unroll
        for (int j = 0; j < unit<T>::SIZE; j += 2) {
            const double v = unit<T>::magnitude(raw[i], j), w = unit<T>::magnitude(raw[i], j + 1);
            even = fma(v, v, even);
            odd = fma(w, w, odd);
        }
    }
    double sum = block_sum(even + odd);
    if (sum >= 0x1p-180 && sum < 0x1p256) return sum;
    sum = 0.0; /* the same branch in all threads */
#pragma unroll 1
    for (int j = 0; j < unit<T>::SIZE; ++j) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const double v = (double)unit<T>::get(raw[i], j);
            sum = fma(v, v, sum);
        }
    }
    return block_sum(sum);
}

/* A NaN norm gives NaN: a bad gradient stays visible. */
__device__ __forceinline__ double factor_of(double squares, double eps) {
    const double norm = sqrt(squares);
    const double divisor = norm < eps ? eps : norm;
    return divisor == 0.0 ? 0.0 : 1.0 / divisor;
}

/* Leaves the chunk's sum; the matrix's last block makes the factor. */
__device__ __forceinline__ void publish(const item& it, const task& at, double squares) {
    __shared__ bool last;
    double* partial = it.partial + at.matrix * it.chunks;
    header* head = it.headers + at.matrix;
    if (threadIdx.x == 0) {
        __stcg(partial + at.chunk, squares);
        __threadfence();
        last = atomicAdd(&head->arrived, 1u) + 2u == it.chunks;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    double sum = 0.0;
#pragma unroll 8
    for (uint32_t i = threadIdx.x; i < it.chunks; i += THREADS) sum += __ldcg(partial + i);
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        const double factor = factor_of(sum, it.eps);
        /* One NaN for all, so that none has the bits of NOT_YET. */
        *(volatile unsigned long long*)&head->factor =
            isnan(factor) ? 0x7ff8000000000000ull : (unsigned long long)__double_as_longlong(factor);
    }
}

__device__ __forceinline__ double wait_for_factor(const item& it, const task& at) {
    __shared__ unsigned long long factor;
    if (threadIdx.x == 0) {
        const volatile unsigned long long* source = &it.headers[at.matrix].factor;
        unsigned long long bits = *source;
        while (bits == NOT_YET) {
#if __CUDA_ARCH__ >= 700
            __nanosleep(64);
#endif
            bits = *source;
        }
        factor = bits;
    }
    __syncthreads();
    return __longlong_as_double((long long)factor);
}

template <typename T>
__device__ __forceinline__ void store_chunk(const uint4 (&raw)[PER_THREAD], const item& it, const task& at,
                                            double exact) {
    constexpr int SIZE = unit<T>::SIZE;
    const uint64_t policy = it.stream ? ptx80_evict_first() : ptx80_evict_normal();
    const int64_t base = at.matrix * it.dst.batch_stride + at.outer * it.dst.outer_stride;
    const float scale = (float)exact;
    /* Beyond the normal range of fp32 the factor alone would lose digits. */
    const bool wide = exact > 1e38 || (exact < 1e-37 && exact != 0.0);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const uint32_t index = threadIdx.x + i * THREADS;
        if (index >= at.count) continue;
        uint32_t row, column;
        place_unit(it, index, row, column);
        const int64_t first = (at.first_unit + column) * SIZE;
        float v[SIZE];
#pragma unroll
        for (int j = 0; j < SIZE; ++j) v[j] = unit<T>::get(raw[i], j) * scale;
        if (wide) {
#pragma unroll
            for (int j = 0; j < SIZE; ++j) v[j] = (float)((double)unit<T>::get(raw[i], j) * exact);
        }
        store_unit(v, it.dst, base + row * it.dst.outer_stride + first * it.dst.inner_stride,
                   (int)min((int64_t)SIZE, it.inner - first), policy);
    }
}

template <typename T, bool VECTOR>
__device__ __forceinline__ void run(const item& it, const task& at) {
    uint4 raw[PER_THREAD];
    load_chunk<T, VECTOR>(raw, it, at,
                          at.copy    ? ptx80_evict_first()
                          : it.ahead ? ptx80_evict_last()
                                     : ptx80_evict_normal());
    double factor = 1.0;
    if (at.norm) {
        const double squares = chunk_squares<T>(raw);
        if (!at.copy) {
            publish(it, at, squares);
            return;
        }
        factor = factor_of(squares, it.eps);
    } else if (it.mode == PIPELINE) {
        factor = wait_for_factor(it, at);
    }
    store_chunk<T>(raw, it, at, factor);
}

template <typename T>
__device__ __forceinline__ void run(const item& it, const task& at) {
    if (it.src.vector) {
        run<T, true>(it, at);
    } else {
        run<T, false>(it, at);
    }
}

__global__ void __launch_bounds__(THREADS, 3) copies_kernel(const __grid_constant__ table t) {
    task at;
    const item& it = locate(t, at);
    if (at.matrix < it.batch) { /* the last slot may not be full */
        if (it.src.dtype == DION3_F32) {
            run<float>(it, at);
        } else if (it.src.dtype == DION3_F16) {
            run<__half>(it, at);
        } else {
            run<__nv_bfloat16>(it, at);
        }
    }
    ptx80_launch_dependents();
}

/* ---- host side ---------------------------------------------------------------------------------- */
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t bytes_of(int32_t dtype) { return dtype == DION3_F32 ? 4 : 2; }

side make_side(const dion3_tensor& t, int64_t batch, int64_t outer, int64_t inner, bool swapped) {
    side s = {t.data,
              t.batch_stride,
              swapped ? t.col_stride : t.row_stride,
              swapped ? t.row_stride : t.col_stride,
              t.dtype,
              0};
    s.vector = d3_rows_aligned(t.data, bytes_of(t.dtype), batch, s.batch_stride, outer, s.outer_stride, inner,
                               s.inner_stride);
    return s;
}

bool gapless(const side& s, int64_t inner) { return s.inner_stride == 1 && s.outer_stride == inner; }

item make_item(const d3_copy& c) {
    item it = {};
    const bool swapped = c.cols == 1 || (c.rows != 1 && c.src.row_stride < c.src.col_stride);
    it.batch = c.batch;
    it.outer = swapped ? c.cols : c.rows;
    it.inner = swapped ? c.rows : c.cols;
    it.src = make_side(c.src, c.batch, it.outer, it.inner, swapped);
    it.dst = make_side(c.dst, c.batch, it.outer, it.inner, swapped);
    if (gapless(it.src, it.inner) && gapless(it.dst, it.inner)) {
        it.inner *= it.outer;
        it.outer = 1;
        it.src = make_side(c.src, c.batch, 1, it.inner, swapped);
        it.dst = make_side(c.dst, c.batch, 1, it.inner, swapped);
    }
    it.eps = c.eps;
    it.units = ceil_div(it.inner, 16 / bytes_of(c.src.dtype));
    const int64_t columns = ceil_div(it.units, CHUNK_UNITS);
    it.columns = (uint32_t)columns;
    it.chunk_units = (uint32_t)ceil_div(it.units, columns);
    it.chunk_outer = columns > 1 ? 1 : CHUNK_UNITS / it.chunk_units;
    it.chunks = (uint32_t)(columns * ceil_div(it.outer, it.chunk_outer));
    it.magic = it.chunk_units == 1 ? 0 : (uint32_t)(((1ull << 32) + it.chunk_units - 1) / it.chunk_units);
    it.mode = !c.scaled ? COPY : it.chunks == 1 ? BOTH : PIPELINE;
    const int64_t matrix_bytes = it.outer * it.inner * bytes_of(c.src.dtype);
    it.ahead = matrix_bytes <= AHEAD_BYTES;
    it.group = matrix_bytes < SLOT_BYTES ? (uint32_t)(SLOT_BYTES / matrix_bytes) : 1;
    if (it.group > c.batch) it.group = (uint32_t)c.batch;
    return it;
}

bool is_empty(const d3_copy& c) { return c.batch == 0 || c.rows == 0 || c.cols == 0; }

int64_t blocks_of(const item& it, int64_t batch) {
    const int64_t slots = ceil_div(batch, it.group);
    return it.mode == PIPELINE ? (2 * slots + it.ahead) * it.group * it.chunks : batch * it.chunks;
}

int64_t output_bytes(const d3_copy* items, int64_t count) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; ++i) {
        bytes += items[i].batch * items[i].rows * items[i].cols * bytes_of(items[i].dst.dtype);
    }
    return bytes;
}

dion3_status launch(table& t, dion3_stream stream) {
    if (t.count == 0) return DION3_OK;
    copies_kernel<<<t.blocks, THREADS, 0, stream>>>(t);
    D3_LAUNCHED();
    t.count = 0;
    t.blocks = 0;
    return DION3_OK;
}

/* The matrices of `whole` from the first on. */
item part_of(const item& whole, int64_t first, int64_t count) {
    item it = whole;
    it.src.data = (char*)it.src.data + first * it.src.batch_stride * bytes_of(it.src.dtype);
    it.dst.data = (char*)it.dst.data + first * it.dst.batch_stride * bytes_of(it.dst.dtype);
    it.headers = whole.headers + first;
    it.partial = whole.partial + first * it.chunks;
    it.batch = count;
    return it;
}

} // namespace

extern "C" int64_t d3_norm_bytes(const d3_copy* c) {
    if (is_empty(*c)) return 0;
    const item it = make_item(*c);
    return it.mode == PIPELINE ? (int64_t)(sizeof(header) + it.chunks * sizeof(double)) : 0;
}

extern "C" dion3_status d3_copies(const d3_copy* items, int64_t count, void* norms, size_t norms_bytes,
                                  dion3_stream stream) {
    table t = {};
    const bool streams = output_bytes(items, count) > STREAM_BYTES;
    if (norms_bytes) D3_CUDA(cudaMemsetAsync(norms, 0xff, norms_bytes, stream));
    for (int64_t i = 0; i < count; ++i) {
        if (is_empty(items[i])) continue;
        if (items[i].rows > MAX_ELEMENTS / items[i].cols) {
            return d3_fail(DION3_ERR_UNSUPPORTED,
                           "rows=%lld and cols=%lld: at most 2^40 elements can be copied",
                           (long long)items[i].rows, (long long)items[i].cols);
        }
        item whole = make_item(items[i]);
        whole.stream = streams;
        whole.headers = (header*)items[i].norms;
        whole.partial = (double*)(whole.headers + items[i].batch);
        /* At most MAX_BLOCKS blocks in a launch: billions of tiny matrices take several. */
        const int64_t most =
            MAX_BLOCKS / 4 / whole.chunks > whole.group ? MAX_BLOCKS / 4 / whole.chunks : whole.group;
        for (int64_t first = 0; first < items[i].batch; first += most) {
            const int64_t left = items[i].batch - first;
            item it = part_of(whole, first, left < most ? left : most);
            const int64_t blocks = blocks_of(it, it.batch);
            if (t.count == MAX_ITEMS || t.blocks + blocks > MAX_BLOCKS) D3_TRY(launch(t, stream));
            it.first_block = t.blocks;
            t.items[t.count++] = it;
            t.blocks += (uint32_t)blocks;
        }
    }
    return launch(t, stream);
}
