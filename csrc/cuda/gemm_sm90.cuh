/*
 * gemm_sm90.cuh - the kernel of both products on Hopper: D <- alpha A op(B) + beta C + gamma E + delta I.
 *
 * Tensors: A (batch, m, k), B (batch, n, k) or (batch, k, n), C, D, E (batch, m, n), fp16 or bf16, read and
 * written through 3-D tensor maps {inner, outer, batch} with the 128-byte swizzle; edges and k tails are
 * zero-filled and clipped by TMA.
 * Tiling: persistent thread blocks of 384 threads, one producer warpgroup (TMA) and two consumer warpgroups
 * (wgmma) that take turns at the tensor cores, each owning a whole 128 x BLOCK_N tile, so that one's
 * epilogue runs under the other's main loop. BLOCK_K = 64. C and E travel through the operand ring, two
 * steps (64-row slabs) each, after the k-steps of a tile, and are added into the accumulators.
 * Symmetric product: tiles with row >= col only; a tile below the diagonal is stored twice, straight and
 * mirrored (stmatrix.trans), with the same bits; a diagonal tile multiplies 64 x 64 for its upper slab, and the
 * 8 x 8 blocks on the diagonal are reflected (movmatrix), so that D equals its transpose bitwise.
 * Work: 2 m n k FLOP (half of it if symmetric) against 2 (m k + n k + (1 or 2) m n) bytes; roof: the tensor
 * cores from k of about 400 on, at the card's power limit (docs/kernels.md).
 * Constraints: sm_90a; no relocatable device code; addresses and strides as d3_gemm_sm90_check says.
 * Source: PTX ISA, sections on wgmma, cp.async.bulk.tensor and mbarrier.
 */
#ifndef DION3_GEMM_SM90_CUH
#define DION3_GEMM_SM90_CUH

#include <cuda_fp16.h>

#include "gemm.h"
#include "ptx.cuh"
#include "tile_order.h"

enum {
    D3_BLOCK_M = 128,
    D3_BLOCK_K = 64,
    D3_SLAB = 64,                        /* rows of one wgmma */
    D3_BOX_BYTES = D3_SLAB * D3_SLAB * 2, /* 64 x 64 elements: 64 rows of 128 bytes */
    D3_THREADS = 384,
    D3_TRIGGER_EARLY = 0,
    D3_PEEK = 1, /* look whether the next stage is full while this one is multiplied */
    D3_PRODUCER_REGISTERS = 40,
    D3_CONSUMER_REGISTERS = 232
};

/* What one group of products looks like to the kernel. */
struct sm90_group {
    CUtensorMap a, b, c, e, d;
    const float* alpha_device;
    const float* beta_device;
    float alpha, beta, gamma, delta;
    d3_order order;
    uint32_t tile_end; /* tiles of this and all groups before it */
    int32_t m, n;
    int32_t k_steps, k_first; /* k = 0: one step whose k_first lies beyond the operands, all zeros */
    int32_t operands;         /* how many of C and E there are: none, or one or two in a kernel with OPERANDS */
    int32_t a_is_b;           /* symmetric: a diagonal tile's rows of A are its rows of B */
    int32_t d_bf16;
};

template <int CAPACITY>
struct sm90_params {
    sm90_group group[CAPACITY];
    uint32_t tiles;
};

/* A variant of the kernel. A_MN, B_MN: the operand is MN-major in memory. STAGING: blocks of 64 x 64 elements
 * in which a consumer warpgroup prepares its stores. OPERANDS: with C, and perhaps E; without them one
 * step of the k-loop has nothing to ask. */
template <bool BF16_, bool SYMMETRIC_, bool A_MN_, bool B_MN_, int BLOCK_N_, int CLUSTER_, int STAGES_, int STAGING_,
          bool OPERANDS_>
struct sm90_config {
    static constexpr bool BF16 = BF16_, SYMMETRIC = SYMMETRIC_, A_MN = A_MN_, B_MN = B_MN_, OPERANDS = OPERANDS_;
    static constexpr int BLOCK_N = BLOCK_N_, CLUSTER = CLUSTER_, STAGES = STAGES_, STAGING = STAGING_;
    static constexpr int CHUNKS = BLOCK_N / 64;
    static constexpr int A_BYTES = D3_BLOCK_M * D3_BLOCK_K * 2, B_BYTES = BLOCK_N * D3_BLOCK_K * 2;
    static constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
    /* Rows (outer dimension) of one box of A, and of B; the inner dimension of a box is 64 elements. */
    static constexpr int A_BOX = A_MN ? 64 : D3_BLOCK_M;
    static constexpr int B_BOX = B_MN ? 64 / CLUSTER : BLOCK_N / CLUSTER;
    static_assert(CLUSTER == 1 || (CLUSTER == 2 && B_MN && !A_MN && !SYMMETRIC),
                  "the halves of B that two thread blocks share are rows of k");
    static_assert(!SYMMETRIC || (BLOCK_N == D3_BLOCK_M && STAGING % 2 == 0), "a block and its mirror are staged together");
    /* At a hand-over one k-step and the two of C, or four of C and E, hold a stage each. */
    static_assert(!OPERANDS || STAGES >= (SYMMETRIC ? 5 : 3), "C and E have landed before the turn is handed over");
};

/* A tile of the schedule, in elements: its corner and its matrix, and where the ring stands when it begins. */
struct alignas(16) sm90_tile {
    int row, col, batch;
    int group; /* -1: there are no more tiles */
    int slot;
    uint32_t parity;
    int diagonal;
    int reserved;
};

enum { D3_SCHEDULE = 4 }; /* tiles that the scheduler may be ahead */

template <class Config>
struct alignas(1024) sm90_shared {
    uint8_t stage[Config::STAGES][Config::STAGE_BYTES];
    uint8_t staging[2][Config::STAGING][D3_BOX_BYTES];
    sm90_tile tile[D3_SCHEDULE];
    uint64_t full[Config::STAGES], empty[Config::STAGES], turn[2];
    uint64_t tile_full[D3_SCHEDULE], tile_empty[D3_SCHEDULE];
};

/* The operand ring as one warp sees it: the next stage and the parity of its phase. */
struct sm90_ring {
    uint32_t stages, full, empty; /* shared addresses */
    int slot;
    uint32_t parity;
};

template <class Config>
PTX_FN void ring_next(sm90_ring& ring) {
    if (++ring.slot == Config::STAGES) {
        ring.slot = 0;
        ring.parity ^= 1;
    }
}

template <class Config>
PTX_FN uint32_t ring_stage(const sm90_ring& ring) {
    return ring.stages + ring.slot * Config::STAGE_BYTES;
}

/* Called by all threads of a warpgroup that have read a stage: the thread blocks that fill it may do so again. */
template <class Config>
PTX_FN void ring_release(const sm90_ring& ring, int slot, int thread) {
    if constexpr (Config::CLUSTER == 1) {
        if (thread == 0) ptx_mbarrier_arrive(ring.empty + 8 * slot);
    } else {
        if (thread < Config::CLUSTER) ptx_mbarrier_arrive_cluster(ring.empty + 8 * slot, thread);
    }
}

/* A worker is a cluster of thread blocks (of one or two). */
struct sm90_crew {
    uint32_t worker, workers; /* this one, and how many there are */
    uint32_t rank;            /* of this thread block in its cluster */
};

/* The group that holds tile `index` of the launch; asked for in ascending order. */
template <int CAPACITY>
PTX_FN int find_group(const sm90_params<CAPACITY>& params, int group, uint32_t index) {
    while (index >= params.group[group].tile_end) group += 1;
    return group;
}

/* This worker's tile in a wave, and its group; false when there are no more. The symmetric product shuffles the
 * tiles of a wave that lies in one group; where groups meet, worker i takes tile i. */
template <class Config, int CAPACITY>
PTX_FN bool find_tile(const sm90_params<CAPACITY>& params, uint32_t wave, const sm90_crew& crew, int& group,
                      sm90_tile& tile) {
    const uint32_t first = wave * crew.workers;
    d3_place place;
    if (first >= params.tiles) return false;
    group = find_group(params, group, first);
    uint32_t end = params.group[group].tile_end;
    if (Config::SYMMETRIC && (end == params.tiles || first + crew.workers <= end)) {
        const uint32_t begin = group > 0 ? params.group[group - 1].tile_end : 0;
        const uint32_t count = end - first < crew.workers ? end - first : crew.workers;
        if (!d3_order_symmetric(&params.group[group].order, first - begin, count, crew.worker, crew.workers, &place)) {
            return false;
        }
    } else {
        const uint32_t index = first + crew.worker;
        if (index >= params.tiles) return false;
        group = find_group(params, group, index);
        const uint32_t begin = group > 0 ? params.group[group - 1].tile_end : 0;
        if constexpr (Config::SYMMETRIC) {
            d3_order_symmetric(&params.group[group].order, index - begin, 1, 0, 1, &place);
        } else {
            place = d3_order_general(&params.group[group].order, index - begin);
        }
    }
    tile.row = (int)((place.row * Config::CLUSTER + crew.rank) * D3_BLOCK_M);
    tile.col = (int)(place.col * Config::BLOCK_N);
    tile.batch = (int)place.batch;
    tile.diagonal = Config::SYMMETRIC && place.row == place.col;
    return true;
}

/* ---- producer --------------------------------------------------------------------------------- */

/* One k-step: A and B of a tile into the ring's next stage. */
template <class Config>
PTX_FN void load_step(const sm90_group& group, const sm90_tile& tile, sm90_ring& ring, int k, uint32_t rank) {
    const uint32_t full = ring.full + 8 * ring.slot, a = ring_stage<Config>(ring), b = a + Config::A_BYTES;
    const bool skip_a = Config::SYMMETRIC && tile.diagonal && group.a_is_b;
    ptx_mbarrier_wait(ring.empty + 8 * ring.slot, ring.parity);
    ptx_mbarrier_arrive_expect_tx(full, skip_a ? Config::B_BYTES : Config::STAGE_BYTES);
    if (!skip_a) {
        if constexpr (Config::A_MN) {
            ptx_tma_load(a, &group.a, full, tile.row, k, tile.batch);
            ptx_tma_load(a + D3_BOX_BYTES, &group.a, full, tile.row + 64, k, tile.batch);
        } else {
            ptx_tma_load(a, &group.a, full, k, tile.row, tile.batch);
        }
    }
    if constexpr (!Config::B_MN) {
        ptx_tma_load(b, &group.b, full, k, tile.col, tile.batch);
    } else if constexpr (Config::CLUSTER == 1) {
#pragma unroll
        for (int c = 0; c < Config::CHUNKS; c++) {
            ptx_tma_load(b + c * D3_BOX_BYTES, &group.b, full, tile.col + c * 64, k, tile.batch);
        }
    } else {
        /* Each thread block of the cluster loads half of the k-rows for both. */
#pragma unroll
        for (int c = 0; c < Config::CHUNKS; c++) {
            ptx_tma_load_multicast(b + c * D3_BOX_BYTES + rank * (D3_BOX_BYTES / 2), &group.b, full, tile.col + c * 64,
                                   k + (int)rank * 32, tile.batch, 3);
        }
    }
    ring_next<Config>(ring);
}

/* C or E of a tile: one ring step for each slab of 64 rows, of the symmetric product only what is stored. */
template <class Config>
PTX_FN void load_operand(const CUtensorMap* map, const sm90_group& group, const sm90_tile& tile, sm90_ring& ring) {
#pragma unroll
    for (int slab = 0; slab < 2; slab++) {
        const uint32_t full = ring.full + 8 * ring.slot, stage = ring_stage<Config>(ring);
        const int row = tile.row + slab * D3_SLAB;
        int boxes = 0;
#pragma unroll
        for (int c = 0; c < Config::CHUNKS; c++) {
            const int col = tile.col + c * 64;
            if (Config::SYMMETRIC ? col <= row : col < group.n) boxes += 1;
        }
        ptx_mbarrier_wait(ring.empty + 8 * ring.slot, ring.parity);
        ptx_mbarrier_arrive_expect_tx(full, boxes * D3_BOX_BYTES);
#pragma unroll
        for (int c = 0; c < Config::CHUNKS; c++) {
            const int col = tile.col + c * 64;
            if (Config::SYMMETRIC ? col <= row : col < group.n) {
                ptx_tma_load(stage + c * D3_BOX_BYTES, map, full, col, row, tile.batch);
            }
        }
        ring_next<Config>(ring);
    }
}

/* ---- the schedule ------------------------------------------------------------------------------ */

/* One thread works out the tiles of this thread block ahead of those who compute them: the divisions would otherwise
 * stand between two tiles of the producer and of each consumer. `tile` and `found`: those of the first wave. */
template <class Config, int CAPACITY>
PTX_FN void schedule(const sm90_params<CAPACITY>& params, sm90_shared<Config>& shared, const sm90_crew& crew,
                     sm90_tile tile, bool found) {
    int slot = 0, ends = 0;
    uint32_t parity = 0;
    for (uint32_t wave = 0; ends < 2; wave++) { /* one end for each consumer */
        const uint32_t entry = wave % D3_SCHEDULE;
        int steps = 0;
        if (wave > 0 && ends == 0) found = find_tile<Config>(params, wave, crew, tile.group, tile);
        if (found) {
            steps = params.group[tile.group].k_steps + (Config::OPERANDS ? 2 * params.group[tile.group].operands : 0);
        } else {
            tile.group = -1;
            ends += 1;
        }
        tile.slot = slot;
        tile.parity = parity;
        ptx_mbarrier_wait(ptx_shared(&shared.tile_empty[entry]), (wave / D3_SCHEDULE & 1) ^ 1);
        shared.tile[entry] = tile;
        ptx_mbarrier_arrive(ptx_shared(&shared.tile_full[entry]));
        parity ^= ((slot + steps) / Config::STAGES) & 1;
        slot = (slot + steps) % Config::STAGES;
    }
}

/* The tile of a wave, for one thread of the producer or all of a consumer. */
template <class Config>
PTX_FN sm90_tile next_tile(sm90_shared<Config>& shared, uint32_t wave, int lane) {
    const uint32_t entry = wave % D3_SCHEDULE;
    ptx_mbarrier_wait(ptx_shared(&shared.tile_full[entry]), wave / D3_SCHEDULE & 1);
    const sm90_tile tile = shared.tile[entry];
    if (lane >= 0) __syncwarp();
    if (lane <= 0) ptx_mbarrier_arrive(ptx_shared(&shared.tile_empty[entry]));
    return tile;
}

template <class Config, int CAPACITY>
PTX_FN void produce(const sm90_params<CAPACITY>& params, sm90_shared<Config>& shared, sm90_ring ring, uint32_t rank) {
    ring.parity = 1; /* the stages start empty */
    for (uint32_t wave = 0;; wave++) {
        const sm90_tile tile = next_tile<Config>(shared, wave, -1);
        if (tile.group < 0) break;
        const sm90_group& group = params.group[tile.group];
        const int k_end = group.k_first + group.k_steps * D3_BLOCK_K;
        for (int k = group.k_first; k < k_end; k += D3_BLOCK_K) load_step<Config>(group, tile, ring, k, rank);
        if constexpr (Config::OPERANDS) {
            load_operand<Config>(&group.c, group, tile, ring);
            if (Config::SYMMETRIC && group.operands > 1) load_operand<Config>(&group.e, group, tile, ring);
        }
    }
}

/* ---- consumers -------------------------------------------------------------------------------- */

/* A value that ptxas must keep in a register: it would rather load it again from the parameters in every k-step. */
PTX_FN int keep(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

/* One k-step: issues the wgmmas of both slabs, FIRST_N columns of the first one, and commits them. a and b: the low
 * halves of the descriptors of this stage. Returns whether the next stage is known to be full; LAST: of no interest. */
template <class Config, int FIRST_N, bool LAST>
PTX_FN bool multiply_step(float (&accumulators)[2][Config::BLOCK_N / 2], uint32_t a, uint32_t b, int accumulate,
                          uint32_t next_full, uint32_t next_parity) {
    bool ready = false;
    ptx_wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < D3_BLOCK_K / 16; kk++) {
        /* 16 k on: 32 bytes in a K-major row, 16 rows of 128 bytes in an MN-major box. */
        const uint32_t a_kk = a + kk * (Config::A_MN ? 2048 : 32) / 16, b_kk = b + kk * (Config::B_MN ? 2048 : 32) / 16;
        ptx_wgmma<Config::BF16, FIRST_N, Config::A_MN, Config::B_MN>(
            accumulators[0], ptx_wgmma_descriptor(a_kk), ptx_wgmma_descriptor(b_kk), kk == 0 ? accumulate : 1);
        ptx_wgmma<Config::BF16, Config::BLOCK_N, Config::A_MN, Config::B_MN>(
            accumulators[1], ptx_wgmma_descriptor(a_kk + D3_BOX_BYTES / 16), ptx_wgmma_descriptor(b_kk),
            kk == 0 ? accumulate : 1);
        if (D3_PEEK && !LAST && kk == 1) ready = ptx_mbarrier_test_wait(next_full, next_parity);
    }
    ptx_wgmma_commit_group();
    return ready;
}

/* accumulators[slab] <- the product of one tile; BLOCK_N columns of it, FIRST_N for the first slab. Hands the turn at
 * the tensor cores to the other warpgroup once the last wgmma is issued. */
template <class Config, int FIRST_N>
PTX_FN void multiply(float (&accumulators)[2][Config::BLOCK_N / 2], sm90_ring& ring, int k_steps, int operand_steps,
                     bool a_in_b, uint32_t other_turn, int thread) {
    const uint32_t a = ptx_wgmma_descriptor_low(ring.stages + (a_in_b ? Config::A_BYTES : 0), 16);
    const uint32_t b = ptx_wgmma_descriptor_low(ring.stages + Config::A_BYTES, Config::B_MN ? D3_BOX_BYTES : 16);
    int previous = 0;
    bool ready = false;
    for (int k = 1; k < k_steps; k++) {
        const uint32_t stage = ring.slot * (Config::STAGE_BYTES / 16);
        sm90_ring next = ring;
        ring_next<Config>(next);
        if (!ready) ptx_mbarrier_wait(ring.full + 8 * ring.slot, ring.parity);
        ready = multiply_step<Config, FIRST_N, false>(accumulators, a + stage, b + stage, k > 1,
                                                      ring.full + 8 * next.slot, next.parity);
        ptx_wgmma_wait_group<1>();
        if (k > 1) ring_release<Config>(ring, previous, thread);
        previous = ring.slot;
        ring = next;
    }
    /* The last one. */
    const uint32_t stage = ring.slot * (Config::STAGE_BYTES / 16);
    if (!ready) ptx_mbarrier_wait(ring.full + 8 * ring.slot, ring.parity);
    multiply_step<Config, FIRST_N, true>(accumulators, a + stage, b + stage, k_steps > 1, 0, 0);
    if constexpr (Config::OPERANDS) {
        /* The other warpgroup waits on these barriers by parity, without having seen our steps: if C landed late, it
         * could take our unfinished phase for its own. So all of ours have landed first. */
        ptx_wgmma_wait_group<1>();
        if (k_steps > 1) ring_release<Config>(ring, previous, thread);
        sm90_ring ahead = ring;
        for (int step = 0; step < operand_steps; step++) {
            ring_next<Config>(ahead);
            ptx_mbarrier_wait(ahead.full + 8 * ahead.slot, ahead.parity);
        }
    }
    if ((thread & 31) == 0) ptx_mbarrier_arrive(other_turn);
    if constexpr (!Config::OPERANDS) {
        ptx_wgmma_wait_group<1>();
        if (k_steps > 1) ring_release<Config>(ring, previous, thread);
    }
    ptx_wgmma_wait_group<0>();
    ring_release<Config>(ring, ring.slot, thread);
    ring_next<Config>(ring);
}

/* This lane's offset in a swizzled 64 x 64 block for ldmatrix and stmatrix of its warp's 16 rows, columns 0 to 15.
 * Columns 16 q to 16 q + 15: that ^ 32 q. */
PTX_FN uint32_t block_offset(int warp, int lane) {
    const int row = warp * 16 + (lane & 15);
    return (uint32_t)(row * 128 + (((lane >> 4) ^ (row & 7)) << 4));
}

/* The same for the transposed store of these 8 x 8 fragments into the mirrored block. Columns 16 q to 16 q + 15:
 * that + 2048 q. */
PTX_FN uint32_t mirror_offset(int warp, int lane) {
    const int fragment_row = warp * 2 + ((lane >> 3) & 1), row = (lane >> 4) * 8 + (lane & 7);
    return (uint32_t)(row * 128 + ((fragment_row ^ (row & 7)) << 4));
}

template <bool BF16>
PTX_FN float2 unpack(uint32_t packed) {
    float2 pair;
    if constexpr (BF16) {
        pair.x = __uint_as_float(packed << 16);
        pair.y = __uint_as_float(packed & 0xFFFF0000u);
    } else {
        const __half2_raw raw = {(unsigned short)packed, (unsigned short)(packed >> 16)};
        pair = __half22float2(raw);
    }
    return pair;
}

/* accumulators <- scale * accumulators + factor * (C or E), which lies in the next two steps of the ring. */
template <class Config, bool DIAGONAL>
PTX_FN void add_operand(float (&accumulators)[2][Config::BLOCK_N / 2], sm90_ring& ring, const sm90_group& group,
                        const sm90_tile& tile, float scale, float factor, int barrier, int thread) {
    const int lane = thread & 31, warp = thread >> 5;
#pragma unroll
    for (int slab = 0; slab < 2; slab++) {
        ptx_mbarrier_wait(ring.full + 8 * ring.slot, ring.parity);
#pragma unroll
        for (int c = 0; c < Config::CHUNKS; c++) {
            if (DIAGONAL && c > slab) continue;
            if (!Config::SYMMETRIC && tile.col + c * 64 >= group.n) continue;
#pragma unroll
            for (int q = 0; q < 4; q++) {
                float* v = &accumulators[slab][c * 32 + q * 8];
                uint32_t packed[4];
                ptx_ldmatrix_x4(packed, (ring_stage<Config>(ring) + c * D3_BOX_BYTES + block_offset(warp, lane)) ^ (32 * q));
#pragma unroll
                for (int u = 0; u < 4; u++) {
                    const float2 pair = unpack<Config::BF16>(packed[u]);
                    v[2 * u] = fmaf(factor, pair.x, scale * v[2 * u]);
                    v[2 * u + 1] = fmaf(factor, pair.y, scale * v[2 * u + 1]);
                }
            }
        }
        ptx_fence_proxy_async_shared();
        ptx_bar_sync_warpgroup(barrier);
        ring_release<Config>(ring, ring.slot, thread);
        ring_next<Config>(ring);
    }
}

/* An 8 x 8 block on the diagonal: its lower triangle, and that reflected. */
PTX_FN uint32_t reflect(uint32_t own, int lane) {
    const uint32_t transposed = ptx_movmatrix_trans(own);
    const int row = lane >> 2, col = (lane & 3) * 2;
    const uint32_t low = row >= col ? own : transposed, high = row >= col + 1 ? own : transposed;
    return (low & 0xFFFFu) | (high & 0xFFFF0000u);
}

/* Adds delta on the diagonal of a warp's 16 x 16 elements. */
PTX_FN void add_identity(float (&v)[8], float delta, int lane) {
    const int row = lane >> 2, col = (lane & 3) * 2;
    if (row == col) {
        v[0] += delta;
        v[6] += delta;
    }
    if (row == col + 1) {
        v[1] += delta;
        v[7] += delta;
    }
}

/* Rounds scale * one 64 x 64 block of the accumulators into `straight` and, symmetric, its mirror into `mirror`. On the
 * diagonal `mirror` becomes the block, and `straight` takes what is not wanted. */
template <class Config, bool ON_DIAGONAL>
PTX_FN void stage_block(const float* v, float scale, float delta, bool bf16, uint32_t straight, uint32_t mirror, int thread) {
    const int lane = thread & 31, warp = thread >> 5;
    const uint32_t to_straight = straight + block_offset(warp, lane), to_block = mirror + block_offset(warp, lane);
    const uint32_t to_mirror = mirror + mirror_offset(warp, lane);
#pragma unroll
    for (int q = 0; q < 4; q++, v += 8) {
        uint32_t packed[4];
        float x[8];
#pragma unroll
        for (int u = 0; u < 8; u++) x[u] = scale * v[u];
        if (ON_DIAGONAL && q == warp) add_identity(x, delta, lane);
#pragma unroll
        for (int u = 0; u < 4; u++) {
            packed[u] = bf16 ? ptx_pack_bf16x2(x[2 * u], x[2 * u + 1]) : ptx_pack_f16x2(x[2 * u], x[2 * u + 1]);
        }
        if constexpr (ON_DIAGONAL) {
            /* This lane addresses one row of the 8 x 8 fragment (fragment_row, fragment_col). */
            const int fragment_row = warp * 2 + ((lane >> 3) & 1), fragment_col = q * 2 + (lane >> 4);
            if (q == warp) {
                packed[0] = reflect(packed[0], lane);
                packed[3] = reflect(packed[3], lane);
            }
            ptx_stmatrix_x4((fragment_col <= fragment_row ? to_block : to_straight) ^ (32 * q), packed);
            ptx_stmatrix_x4_trans(fragment_col < fragment_row ? to_mirror + 2048 * q : to_straight ^ (32 * q), packed);
        } else {
            ptx_stmatrix_x4(to_straight ^ (32 * q), packed);
            if constexpr (Config::SYMMETRIC) ptx_stmatrix_x4_trans(to_mirror + 2048 * q, packed);
        }
    }
}

/* Stores the tile block by block through this warpgroup's staging. */
template <class Config, bool DIAGONAL>
PTX_FN void store_tile(float (&accumulators)[2][Config::BLOCK_N / 2], float scale, uint32_t staging, int& buffer,
                       const sm90_group& group, const sm90_tile& tile, int barrier, int thread) {
    constexpr int BLOCKS = Config::SYMMETRIC ? 2 : 1, BUFFERS = Config::STAGING / BLOCKS;
    const bool bf16 = keep(group.d_bf16);
    const float delta = Config::SYMMETRIC ? group.delta : 0.0f;
#pragma unroll
    for (int slab = 0; slab < 2; slab++) {
        const int row = tile.row + slab * D3_SLAB;
        if (row >= group.m) break;
#pragma unroll
        for (int c = 0; c < Config::CHUNKS; c++) {
            const int col = tile.col + c * 64;
            if (DIAGONAL && c > slab) continue;
            if (!Config::SYMMETRIC && col >= group.n) continue;
            const uint32_t straight = staging + buffer * (BLOCKS * D3_BOX_BYTES), mirror = straight + D3_BOX_BYTES;
            if (BUFFERS > 1) buffer = buffer + 1 == BUFFERS ? 0 : buffer + 1;
            if (thread == 0) ptx_bulk_wait_group_read<BUFFERS - 1>();
            ptx_bar_sync_warpgroup(barrier);
            float* v = &accumulators[slab][c * 32];
            if (DIAGONAL && c == slab) {
                stage_block<Config, true>(v, scale, delta, bf16, straight, mirror, thread);
            } else {
                stage_block<Config, false>(v, scale, delta, bf16, straight, mirror, thread);
            }
            ptx_fence_proxy_async_shared();
            ptx_bar_sync_warpgroup(barrier);
            if (thread == 0) {
                if (!(DIAGONAL && c == slab)) ptx_tma_store(&group.d, straight, col, row, tile.batch);
                if (Config::SYMMETRIC) ptx_tma_store(&group.d, mirror, row, col, tile.batch);
                ptx_bulk_commit_group();
            }
        }
    }
}

/* One tile, compiled apart for the diagonal: two main loops of different N that meet before code which writes
 * the accumulators make ptxas serialise wgmma (C7515). */
template <class Config, bool DIAGONAL>
PTX_FN void compute_tile(const sm90_group& group, const sm90_tile& tile, sm90_ring& ring, uint32_t staging,
                         int& buffer, uint32_t other_turn, int barrier, int thread) {
    float accumulators[2][Config::BLOCK_N / 2];
    constexpr int FIRST_N = DIAGONAL ? Config::BLOCK_N / 2 : Config::BLOCK_N;
    const int operands = !Config::OPERANDS ? 0 : Config::SYMMETRIC ? keep(group.operands) : 1;
    float alpha = group.alpha, beta = group.beta;
    if (group.alpha_device != NULL) alpha *= group.alpha_device[tile.batch];
    if (Config::OPERANDS && group.beta_device != NULL) beta *= group.beta_device[tile.batch];
    multiply<Config, FIRST_N>(accumulators, ring, keep(group.k_steps), 2 * operands, DIAGONAL && group.a_is_b, other_turn,
                              thread);
    if constexpr (Config::OPERANDS && Config::SYMMETRIC) {
        /* alpha is applied by whoever touches the accumulators first: a pass of its own over them makes ptxas keep
         * two copies of them (spills). */
        float factor = beta;
        int left = operands;
#pragma unroll 1
        do {
            add_operand<Config, DIAGONAL>(accumulators, ring, group, tile, alpha, factor, barrier, thread);
            alpha = 1.0f;
            factor = group.gamma;
        } while (--left > 0);
    } else if constexpr (Config::OPERANDS) {
        add_operand<Config, DIAGONAL>(accumulators, ring, group, tile, alpha, beta, barrier, thread);
        alpha = 1.0f;
    }
    store_tile<Config, DIAGONAL>(accumulators, alpha, staging, buffer, group, tile, barrier, thread);
}

/* Consumer 0 takes the even, consumer 1 the odd ones of its thread block's tiles. */
template <class Config, int CAPACITY>
PTX_FN void consume(const sm90_params<CAPACITY>& params, sm90_shared<Config>& shared, sm90_ring ring, int consumer) {
    const int thread = threadIdx.x & 127, barrier = 1 + consumer;
    const uint32_t staging = ptx_shared(shared.staging[consumer]);
    const uint32_t own_turn = ptx_shared(&shared.turn[consumer]), other_turn = ptx_shared(&shared.turn[1 - consumer]);
    int buffer = 0; /* of the staging */
    uint32_t turn_parity = consumer == 0; /* the first turn is consumer 0's */
    for (uint32_t wave = consumer;; wave += 2) {
        const sm90_tile tile = next_tile<Config>(shared, wave, thread & 31);
        if (tile.group < 0) break;
        const sm90_group& group = params.group[tile.group];
        ring.slot = tile.slot;
        ring.parity = tile.parity;
        ptx_mbarrier_wait(own_turn, turn_parity);
        turn_parity ^= 1;
        if constexpr (Config::SYMMETRIC) {
            if (tile.diagonal) {
                compute_tile<Config, true>(group, tile, ring, staging, buffer, other_turn, barrier, thread);
                continue;
            }
        }
        compute_tile<Config, false>(group, tile, ring, staging, buffer, other_turn, barrier, thread);
    }
    if (thread == 0) ptx_bulk_wait_group_all();
}

template <class Config, int CAPACITY>
__global__ void __launch_bounds__(D3_THREADS, 1)
    gemm_sm90_kernel(const __grid_constant__ sm90_params<CAPACITY> params) {
    extern __shared__ __align__(1024) uint8_t memory[];
    sm90_shared<Config>& shared = *(sm90_shared<Config>*)memory;
    const sm90_ring ring = {ptx_shared(shared.stage), ptx_shared(shared.full), ptx_shared(shared.empty), 0, 0};
    const sm90_crew crew = {blockIdx.x / Config::CLUSTER, gridDim.x / Config::CLUSTER,
                            Config::CLUSTER > 1 ? ptx_cluster_rank() : 0};
    const int warpgroup = threadIdx.x >> 7;
    sm90_tile first = {};
    bool found = false;
    if (threadIdx.x == 0) {
        for (int s = 0; s < Config::STAGES; s++) {
            ptx_mbarrier_init(ring.full + 8 * s, 1);
            ptx_mbarrier_init(ring.empty + 8 * s, Config::CLUSTER);
        }
        for (int w = 0; w < 2; w++) ptx_mbarrier_init(ptx_shared(&shared.turn[w]), 4);
        for (int i = 0; i < D3_SCHEDULE; i++) {
            ptx_mbarrier_init(ptx_shared(&shared.tile_full[i]), 1);
            ptx_mbarrier_init(ptx_shared(&shared.tile_empty[i]), 5); /* the producer and a consumer's four warps */
        }
        ptx_fence_mbarrier_init();
    }
    if (threadIdx.x == 32) found = find_tile<Config>(params, 0, crew, first.group, first);
    if (threadIdx.x == 64) {
        ptx_prefetch_tensormap(&params.group[0].a);
        ptx_prefetch_tensormap(&params.group[0].b);
        ptx_prefetch_tensormap(&params.group[0].d);
    }
    if constexpr (Config::CLUSTER > 1) {
        __syncwarp();
        ptx_cluster_sync();
    } else {
        __syncthreads();
    }
    if (D3_TRIGGER_EARLY && threadIdx.x == 0) ptx_griddepcontrol_launch_dependents();
    if (warpgroup == 0) {
        ptx_setmaxnreg_dec<D3_PRODUCER_REGISTERS>();
        if (threadIdx.x == 32) schedule<Config>(params, shared, crew, first, found);
        if (threadIdx.x == 0) {
            ptx_griddepcontrol_wait();
            produce<Config>(params, shared, ring, crew.rank);
            if (!D3_TRIGGER_EARLY) ptx_griddepcontrol_launch_dependents();
        }
    } else {
        ptx_setmaxnreg_inc<D3_CONSUMER_REGISTERS>();
        ptx_griddepcontrol_wait();
        consume<Config>(params, shared, ring, warpgroup - 1);
    }
    /* Nobody leaves while the other thread block may still multicast to it or arrive on its barriers. */
    if constexpr (Config::CLUSTER > 1) ptx_cluster_sync_unaligned();
}

#endif
