/*
 * gemm_generic.cuh - the matrix products of gemm.h for every card from sm_80.
 *
 * D = alpha A op(B) + beta C + gamma E + delta I over lists of batches; fp16 or bf16, fp32 accumulation.
 * Tiling: one block computes a TILE x TILE piece of D (128 with 4 warps of 64 x 64, or 64 with 4 warps
 *   of 32 x 32), k in steps of 64 through a ring of 3 stages filled by cp.async; ldmatrix reads either
 *   major (the transposing form where the contiguous dimension is not k) 16 k ahead of mma.sync. The
 *   symmetric product visits the tiles of the lower triangle; the epilogue goes through shared memory in
 *   fp32, so that the direct and the mirrored store both write 16 bytes a thread and round the same value.
 * Roof: tensor cores from n of about 1000; 2 m n k FLOP (half of it symmetric) against
 *   2 (m k + n k + m n) bytes.
 * Constraints: none on sizes, strides and alignment. An operand without a unit stride, or whose rows do
 *   not begin at multiples of 16 bytes, is read element by element, and so is the last chunk of a row that
 *   has less than eight elements: nothing outside of the operands is read. The order of the additions over
 *   k does not depend on tile, alignment or batch: neither does any bit of the result.
 * Source: PTX ISA, mma.sync.m16n8k16 fragment layout; kernels follow the scheme of its ldmatrix figures.
 */
#ifndef DION3_GEMM_GENERIC_CUH
#define DION3_GEMM_GENERIC_CUH

#include "../tri.h"
#include "ptx_sm80.cuh"

namespace {

constexpr int BLOCK_K = 64;
constexpr int STAGES = 3;
constexpr int MAX_GROUPS = 15; /* of one launch: what 4 KB of kernel parameters hold */

/* An operand as the kernel sees it: mn is its row of A or its column of the product, k the summed index. */
struct source {
    const void* data;
    int64_t batch_stride, mn_stride, k_stride;
    int32_t mn_major; /* the contiguous dimension is mn, not k */
    int32_t vector;   /* 16-byte copies are possible along the contiguous dimension */
};

struct addend {
    const void* data;
    int64_t batch_stride, row_stride, col_stride;
    int32_t vector; /* eight columns are one 16-byte access */
    int32_t reserved;
};

struct group {
    source a, b;
    addend c, e, d;
    int64_t first_tile; /* of the whole launch */
    int32_t m, n, k, tile_rows, tile_cols;
    int32_t d_is_half;
    float alpha, beta, gamma, delta;
    const float* alpha_device;
    const float* beta_device;
};

struct launch_table {
    group groups[MAX_GROUPS];
    int64_t tiles;
    int32_t count, symmetric;
};
static_assert(sizeof(launch_table) <= 4096, "kernel parameters beyond 4 KB slow every launch down");

template <int TILE>
struct shape {
    static constexpr int WARP = TILE / 2; /* a warp computes WARP x WARP */
    static constexpr int THREADS = 4 * 32;
    static constexpr int FRAGS_M = WARP / 16;
    static constexpr int FRAGS_N = WARP / 8;
    static constexpr int CHUNKS = TILE * BLOCK_K / 8 / THREADS; /* 16-byte chunks a thread copies */
    static constexpr int OPERAND_BYTES = TILE * BLOCK_K * 2;
    static constexpr int STAGE_BYTES = 2 * OPERAND_BYTES;
    static constexpr int PITCH = TILE + 8; /* floats between rows of the epilogue's tile */
    static constexpr int SHARED_BYTES =
        STAGES * STAGE_BYTES > TILE* PITCH * 4 ? STAGES* STAGE_BYTES : TILE* PITCH * 4;
};

template <int TILE>
using accumulators = float[shape<TILE>::FRAGS_M][shape<TILE>::FRAGS_N][4];

/* ---- operands: global to shared memory ----------------------------------------------------------
 * A k-major stage is TILE rows of 64 k, an mn-major stage 64 k-rows of TILE elements; the 16-byte chunks
 * of a row are permuted by chunk ^ (row % 8), which spreads eight rows of one chunk over all banks. Each
 * thread owns CHUNKS chunks of one column of chunks, STEP rows apart. */
template <int TILE, bool MN_MAJOR>
struct loader {
    static constexpr int PER_ROW = (MN_MAJOR ? TILE : BLOCK_K) / 8;
    static constexpr int STEP = shape<TILE>::THREADS / PER_ROW, CHUNKS = shape<TILE>::CHUNKS;
    const char* pointer; /* the thread's first chunk of the next stage */
    int64_t row_bytes;   /* from one of its chunks to the next */
    int64_t step_bytes;  /* from one stage to the next */
    int64_t element_bytes;
    int32_t rows_left, chunk_left; /* valid rows and elements, counted from the thread's first chunk */
    uint32_t target;

    __device__ __forceinline__ loader(const source& s, int64_t batch, int64_t mn0, int mn_size, int k_size) {
        const int chunk = threadIdx.x % PER_ROW, row = threadIdx.x / PER_ROW;
        const int mn_left = (int)min((int64_t)TILE, mn_size - mn0);
        const int64_t row_stride = MN_MAJOR ? s.k_stride : s.mn_stride;
        const int64_t chunk_stride = MN_MAJOR ? s.mn_stride : s.k_stride;
        const int64_t first =
            batch * s.batch_stride + mn0 * s.mn_stride + row * row_stride + chunk * 8 * chunk_stride;
        pointer = (const char*)s.data + 2 * first;
        row_bytes = 2 * STEP * row_stride;
        step_bytes = 2 * BLOCK_K * s.k_stride;
        element_bytes = 2 * chunk_stride;
        rows_left = (MN_MAJOR ? k_size : mn_left) - row;
        chunk_left = (MN_MAJOR ? mn_left : k_size) - chunk * 8;
        target = row * PER_ROW * 16 + ((chunk ^ (row & 7)) << 4);
        ptx80_keep(row_bytes);
        ptx80_keep(step_bytes);
        ptx80_keep(rows_left);
        ptx80_keep(target);
    }

    /* Eight elements one by one, zeros from the left-th on. */
    __device__ __forceinline__ void copy_elements(const char* from, uint32_t to, int left) const {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t low = 0, high = 0;
            if (2 * i < left) low = *(const uint16_t*)(from + 2 * i * element_bytes);
            if (2 * i + 1 < left) high = *(const uint16_t*)(from + (2 * i + 1) * element_bytes);
            words[i] = low | (high << 16);
        }
        ptx80_store_shared16(to, words);
    }

    /* The thread's part of the next stage; behind the last k that is zeros. */
    template <bool VECTOR>
    __device__ __forceinline__ void load(uint32_t stage) {
        const bool whole = VECTOR && chunk_left >= 8, ragged = !VECTOR || (chunk_left > 0 && !whole);
        const uint32_t to = stage + target;
        if (VECTOR) {
            const char* from = pointer;
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) {
                if (!ragged) {
                    ptx80_cp_async16(to + i * STEP * PER_ROW * 16, from, whole && i * STEP < rows_left);
                }
                from += row_bytes;
            }
        }
        if (ragged) {
            const char* from = pointer;
#pragma unroll(VECTOR ? 1 : 2)
            for (int i = 0; i < CHUNKS; ++i) {
                copy_elements(from, to + i * STEP * PER_ROW * 16, i * STEP < rows_left ? chunk_left : 0);
                from += row_bytes;
            }
        }
        pointer += step_bytes;
        (MN_MAJOR ? rows_left : chunk_left) -= BLOCK_K;
    }
};

/* ---- operands: shared memory to fragments -------------------------------------------------------
 * Lane addresses of ldmatrix for 16 (mn) x 16 (k) blocks. A block's place enters by an exclusive or where
 * it moves along the permuted chunks, by an addition where it moves along rows. */
template <int TILE, bool MN_MAJOR>
struct reader {
    uint32_t base;

    /* mn_high: whether bit 3 of the lane number means the next eight mn (A) or the next eight k (B). */
    __device__ __forceinline__ reader(int mn0, bool mn_high) {
        const int lane = threadIdx.x & 31, x = lane & 7;
        const int mn8 = mn_high ? (lane >> 3) & 1 : lane >> 4;
        const int k8 = mn_high ? lane >> 4 : (lane >> 3) & 1;
        base = MN_MAJOR ? (k8 * 8 + x) * TILE * 2 + (((mn0 / 8 + mn8) ^ x) << 4)
                        : (mn0 + mn8 * 8 + x) * 128 + ((k8 ^ x) << 4);
        ptx80_keep(base);
    }

    __device__ __forceinline__ void read(uint32_t (&fragment)[4], uint32_t stage, int mn, int k) const {
        if (MN_MAJOR) {
            ptx80_ldmatrix_x4_trans(fragment, stage + (base ^ (mn * 32)) + k * 16 * TILE * 2);
        } else {
            ptx80_ldmatrix_x4(fragment, stage + (base ^ (k * 32)) + mn * 16 * 128);
        }
    }
};

/* What a warp multiplies for 16 k. */
template <int TILE, bool A_MN, bool B_MN>
struct fragments {
    uint32_t a[shape<TILE>::FRAGS_M][4], b[shape<TILE>::FRAGS_N / 2][4];

    __device__ __forceinline__ void read(const reader<TILE, A_MN>& read_a, const reader<TILE, B_MN>& read_b,
                                         uint32_t stage, int k) {
#pragma unroll
        for (int i = 0; i < shape<TILE>::FRAGS_N / 2; ++i) {
            read_b.read(b[i], stage + shape<TILE>::OPERAND_BYTES, i, k);
        }
#pragma unroll
        for (int i = 0; i < shape<TILE>::FRAGS_M; ++i) read_a.read(a[i], stage, i, k);
    }

    template <typename T>
    __device__ __forceinline__ void multiply(accumulators<TILE>& acc) const {
#pragma unroll
        for (int i = 0; i < shape<TILE>::FRAGS_M; ++i) {
#pragma unroll
            for (int j = 0; j < shape<TILE>::FRAGS_N; ++j) {
                ptx80_mma(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], T());
            }
        }
    }
};

/* ---- epilogue ----------------------------------------------------------------------------------- */
template <typename T>
__device__ __forceinline__ float to_float(uint32_t bits);
template <>
__device__ __forceinline__ float to_float<__half>(uint32_t bits) {
    return __half2float(__ushort_as_half((unsigned short)bits));
}
template <>
__device__ __forceinline__ float to_float<__nv_bfloat16>(uint32_t bits) {
    return __uint_as_float(bits << 16);
}

/* Eight columns of C or E from col on, those from the limit-th on zero. */
__device__ __forceinline__ uint4 load8(const addend& x, int64_t batch, int64_t row, int64_t col, int limit) {
    const uint16_t* p =
        (const uint16_t*)x.data + batch * x.batch_stride + row * x.row_stride + col * x.col_stride;
    if (x.vector && limit == 8) return *(const uint4*)p;
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (j < limit) words[j / 2] |= (uint32_t)p[j * x.col_stride] << (j % 2 * 16);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* v[j] += factor * x[j] */
template <typename T>
__device__ __forceinline__ void add_scaled(float (&v)[8], float factor, uint4 x) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        v[j] = fmaf(factor, to_float<T>(words[j / 2] >> (j % 2 * 16) & 0xffffu), v[j]);
    }
}

__device__ __forceinline__ uint16_t round_bits(float x, int half) {
    return half ? __half_as_ushort(__float2half_rn(x)) : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

/* Stores the columns first <= j < limit of eight. */
__device__ __forceinline__ void store8(const float (&v)[8], const group& g, int64_t batch, int64_t row,
                                       int64_t col, int first, int limit) {
    uint16_t* p =
        (uint16_t*)g.d.data + batch * g.d.batch_stride + row * g.d.row_stride + col * g.d.col_stride;
    if (g.d.vector && first <= 0 && limit >= 8) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            words[j] =
                round_bits(v[2 * j], g.d_is_half) | ((uint32_t)round_bits(v[2 * j + 1], g.d_is_half) << 16);
        }
        *(uint4*)p = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j >= first && j < limit) p[j * g.d.col_stride] = round_bits(v[j], g.d_is_half);
        }
    }
}

/* Where element (row, col) of the tile lies in shared memory: the permutation of the 8-column blocks lets
 * a warp read 4 x 8 rows of 8 columns without bank conflicts. */
template <int TILE>
__device__ __forceinline__ int tile_offset(int row, int col) {
    return row * shape<TILE>::PITCH + (col ^ (((row >> 3) & 3) << 3));
}

/* Units of eight columns that a thread has under way at a time, so that their latencies overlap. */
constexpr int BATCH = 4;

/* Adds the other terms to the accumulators in shared memory and stores the tile, of the symmetric product
 * what is on or below the diagonal; its finished fp32 values stay in shared memory for the mirrored store. */
template <typename T, int TILE>
__device__ __forceinline__ void store_direct(float* tile, const group& g, int symmetric, int64_t batch,
                                             int64_t row0, int64_t col0) {
    float alpha = g.alpha, beta = g.beta;
    if (g.alpha_device) alpha *= g.alpha_device[batch];
    if (g.beta_device) beta *= g.beta_device[batch];
#pragma unroll 1
    for (int first = threadIdx.x; first < TILE * TILE / 8; first += BATCH * shape<TILE>::THREADS) {
        uint4 terms[2][BATCH] = {};
        int64_t rows[BATCH], cols[BATCH];
        int limits[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int u = first + i * shape<TILE>::THREADS;
            rows[i] = row0 + u / (TILE / 8);
            cols[i] = col0 + u % (TILE / 8) * 8;
            limits[i] = rows[i] >= g.m || (symmetric && cols[i] > rows[i])
                            ? 0
                            : (int)max((int64_t)0, min((int64_t)8, g.n - cols[i]));
            if (limits[i] == 0) continue;
            if (g.beta != 0.0f) terms[0][i] = load8(g.c, batch, rows[i], cols[i], limits[i]);
            if (g.gamma != 0.0f) terms[1][i] = load8(g.e, batch, rows[i], cols[i], limits[i]);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (limits[i] == 0) continue;
            float4* staged =
                (float4*)(tile + tile_offset<TILE>((int)(rows[i] - row0), (int)(cols[i] - col0)));
            const float4 low = staged[0], high = staged[1];
            float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] *= alpha;
            if (g.beta != 0.0f) add_scaled<T>(v, beta, terms[0][i]);
            if (g.gamma != 0.0f) add_scaled<T>(v, g.gamma, terms[1][i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                if (rows[i] == cols[i] + j) v[j] += g.delta;
            }
            store8(v, g, batch, rows[i], cols[i], 0,
                   symmetric ? (int)min((int64_t)limits[i], rows[i] - cols[i] + 1) : limits[i]);
            if (symmetric) {
                staged[0] = make_float4(v[0], v[1], v[2], v[3]);
                staged[1] = make_float4(v[4], v[5], v[6], v[7]);
            }
        }
    }
}

/* Stores the elements below the diagonal once more, transposed. */
template <int TILE>
__device__ __forceinline__ void store_mirrored(const float* tile, const group& g, int64_t batch, int64_t row0,
                                               int64_t col0) {
#pragma unroll 1
    for (int first = threadIdx.x; first < TILE * TILE / 8; first += BATCH * shape<TILE>::THREADS) {
        float v[BATCH][8];
        int r[BATCH], c[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            /* A warp takes 8 columns by 4 x 8 rows: 64 bytes in a row of D at a time. */
            const int u = first + i * shape<TILE>::THREADS, block = u / 32, lane = u % 32;
            r[i] = (block % (TILE / 32) * 4 + (lane & 3)) * 8;
            c[i] = block / (TILE / 32) * 8 + (lane >> 2);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] = tile[tile_offset<TILE>(r[i] + j, c[i])];
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int64_t row = row0 + r[i], col = col0 + c[i];
            const int limit = (int)min((int64_t)8, g.m - row);
            if (col >= g.n || limit <= 0 || col >= row + 7) continue;
            store8(v[i], g, batch, col, row, (int)max((int64_t)0, col - row + 1), limit);
        }
    }
}

/* ---- kernel ------------------------------------------------------------------------------------- */
struct position {
    int64_t batch, row0, col0;
};

template <int TILE>
__device__ __forceinline__ const group& locate(const launch_table& table, int64_t index, position& at) {
    int which = 0;
    while (which + 1 < table.count && index >= table.groups[which + 1].first_tile) ++which;
    const group& g = table.groups[which];
    const int64_t local = index - g.first_tile;
    const int64_t tiles = table.symmetric ? d3_tri_count(g.tile_rows) : (int64_t)g.tile_rows * g.tile_cols;
    at.batch = local / tiles;
    const int64_t tile = local - at.batch * tiles;
    if (table.symmetric) {
        uint32_t row, col;
        d3_tri_tile32((uint32_t)tile, &row, &col);
        at.row0 = (int64_t)row * TILE;
        at.col0 = (int64_t)col * TILE;
    } else {
        /* Eight tile rows at a time, down before right: a wave of blocks reads few panels of A and B. */
        const int64_t band = tile / (8 * (int64_t)g.tile_cols), rest = tile - band * 8 * g.tile_cols;
        const int64_t rows = min((int64_t)8, g.tile_rows - band * 8);
        at.row0 = (band * 8 + rest % rows) * TILE;
        at.col0 = rest / rows * TILE;
    }
    return g;
}

/* What a kernel is compiled for: majors of A and B, and whether both are copied by 16 bytes (else they are
 * stored k-major whatever their strides). */
enum { A_MN_MAJOR = 1, B_MN_MAJOR = 2, ELEMENTS = 4, LAYOUTS = 5 };

/* DIAGONAL: of a diagonal tile of a symmetric product nobody needs what lies wholly above the diagonal. Those
 * warps copy all the same, and run the same code: all warps of a block must meet at the same barrier. */
template <typename T, int TILE, int LAYOUT, bool DIAGONAL>
__device__ __forceinline__ void main_loop(accumulators<TILE>& acc, const group& g, const position& at,
                                          uint32_t ring, int warp_row, int warp_col) {
    using S = shape<TILE>;
    constexpr bool A_MN = LAYOUT & A_MN_MAJOR, B_MN = LAYOUT & B_MN_MAJOR, VECTOR = LAYOUT != ELEMENTS;
    constexpr int LAST = BLOCK_K / 16 - 1;
    const bool multiplies = !DIAGONAL || warp_row + S::WARP > warp_col;
    loader<TILE, A_MN> load_a(g.a, at.batch, at.row0, g.m, g.k);
    loader<TILE, B_MN> load_b(g.b, at.batch, at.col0, g.n, g.k);
    const reader<TILE, A_MN> read_a(warp_row, true);
    const reader<TILE, B_MN> read_b(warp_col, false);
    const int steps = (int)(((int64_t)g.k + BLOCK_K - 1) / BLOCK_K);
    const uint32_t end = ring + STAGES * S::STAGE_BYTES;
    uint32_t stage = ring, next = ring;
#pragma unroll 1
    for (; next < end - S::STAGE_BYTES; next += S::STAGE_BYTES) {
        load_a.template load<VECTOR>(next);
        load_b.template load<VECTOR>(next + S::OPERAND_BYTES);
        ptx80_cp_async_commit();
    }
    fragments<TILE, A_MN, B_MN> now[2]; /* of even and odd k / 16: one is read while the other multiplies */
    ptx80_cp_async_wait<STAGES - 2>();
    __syncthreads();
    if (multiplies) now[0].read(read_a, read_b, stage, 0);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int k = 0; k <= LAST; ++k) {
            if (k == LAST) {
                /* All of this stage has been read: on to the next, which is there for all after the barrier. */
                ptx80_cp_async_wait<STAGES - 2>();
                __syncthreads();
                next = stage;
                stage = stage + S::STAGE_BYTES == end ? ring : stage + S::STAGE_BYTES;
            }
            /* Not with the first k, so that multiplications hide the copies' arithmetic. */
            if (k == 1) load_a.template load<VECTOR>(next);
            if (k == 2) {
                load_b.template load<VECTOR>(next + S::OPERAND_BYTES);
                ptx80_cp_async_commit();
            }
            if (multiplies) now[(k + 1) % 2].read(read_a, read_b, stage, k == LAST ? 0 : k + 1);
            if (multiplies) now[k % 2].template multiply<T>(acc);
        }
    }
    ptx80_cp_async_wait<0>();
}

template <typename T, int TILE, int LAYOUT>
__global__ void __launch_bounds__(shape<TILE>::THREADS, LAYOUT == ELEMENTS ? 1 : 256 / TILE)
    gemm_generic_kernel(const __grid_constant__ launch_table table) {
    using S = shape<TILE>;
    extern __shared__ __align__(1024) unsigned char shared[];
    uint32_t ring = ptx80_shared(shared);
    ptx80_keep(ring);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int warp_row = (warp & 1) * S::WARP, warp_col = (warp >> 1) * S::WARP;
    for (int64_t index = blockIdx.x; index < table.tiles; index += gridDim.x) {
        position at;
        const group& g = locate<TILE>(table, index, at);
        accumulators<TILE> acc = {};
        if (table.symmetric && at.row0 == at.col0) {
            main_loop<T, TILE, LAYOUT, true>(acc, g, at, ring, warp_row, warp_col);
        } else {
            main_loop<T, TILE, LAYOUT, false>(acc, g, at, ring, warp_row, warp_col);
        }
        __syncthreads(); /* the epilogue overwrites the stages */
        float* tile = (float*)shared;
#pragma unroll
        for (int i = 0; i < S::FRAGS_M; ++i) {
#pragma unroll
            for (int j = 0; j < S::FRAGS_N; ++j) {
                const int row = warp_row + i * 16 + lane / 4, col = warp_col + j * 8 + lane % 4 * 2;
                *(float2*)(tile + tile_offset<TILE>(row, col)) = make_float2(acc[i][j][0], acc[i][j][1]);
                *(float2*)(tile + tile_offset<TILE>(row + 8, col)) = make_float2(acc[i][j][2], acc[i][j][3]);
            }
        }
        __syncthreads();
        store_direct<T, TILE>(tile, g, table.symmetric, at.batch, at.row0, at.col0);
        if (table.symmetric) {
            __syncthreads();
            store_mirrored<TILE>(tile, g, at.batch, at.row0, at.col0);
        }
        __syncthreads(); /* before the next tile fills the stages */
    }
}

} // namespace

#endif
