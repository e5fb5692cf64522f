/*
 * gemm_sm90_consumer.cuh - the consuming half of the kernel of gemm_sm90.cuh: wgmma, the terms
 * after the product, rounding, the stores.
 *
 * Accumulators of a warpgroup: two slabs of 64 rows, or one of half a tile, each as wgmma lays it out (PTX ISA,
 * "Register fragments for wgmma.mma_async"): 8 values a thread for 16 columns of its warp's 16
 * rows, four 8 x 8 fragments of which ldmatrix and stmatrix move the 16-bit form.
 */
#ifndef DION3_GEMM_SM90_CONSUMER_CUH
#define DION3_GEMM_SM90_CONSUMER_CUH

#include <cuda_fp16.h>

#include "gemm_sm90_types.cuh"

/* One thread's view of its warpgroup. */
struct sm90_consumer {
    int thread, barrier; /* in the warpgroup; the named barrier of the warpgroup */
    uint32_t own_turn, other_turn, turn_parity;
    uint32_t staging;
    int buffer; /* of the staging: which is next */
};

/* A value that ptxas must keep in a register: it would rather load it again from the parameters
 * in every k-step. */
PTX_FN int keep(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

/* Issues the wgmmas of one k-step and commits them: 128 columns, of the first slab FIRST_N. a
 * and b: the low halves of the descriptors of this stage. */
template <class Config, int FIRST_N, int SLABS>
PTX_FN void multiply_step(float (&accumulators)[SLABS][64], uint32_t a, uint32_t b, int accumulate) {
    ptx_wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < D3_BLOCK_K / 16; kk++) {
        /* 16 k on: 32 bytes in a K-major row, 16 rows of 128 bytes in an MN-major box. */
        const uint32_t a_kk = a + kk * (Config::A_MN ? 2048 : 32) / 16,
                       b_kk = b + kk * (Config::B_MN ? 2048 : 32) / 16;
        ptx_wgmma<Config::BF16, FIRST_N, Config::A_MN, Config::B_MN>(
            accumulators[0], ptx_wgmma_descriptor(a_kk), ptx_wgmma_descriptor(b_kk),
            kk == 0 ? accumulate : 1);
        if constexpr (SLABS == 2) {
            ptx_wgmma<Config::BF16, 128, Config::A_MN, Config::B_MN>(
                accumulators[1], ptx_wgmma_descriptor(a_kk + D3_BOX_BYTES / 16), ptx_wgmma_descriptor(b_kk),
                kk == 0 ? accumulate : 1);
        }
    }
    ptx_wgmma_commit_group();
}

/* accumulators <- the product of one tile, added to them with OPERANDS. Hands the turn at the tensor cores to the other
 * warpgroup once the last wgmma is issued. The other waits for a stage by the parity of its
 * phase, without having seen our steps, and so needs them to be over: they are, all have been
 * waited for. */
template <class Config, int FIRST_N, int SLABS>
PTX_FN void multiply(float (&accumulators)[SLABS][64], sm90_ring& ring, int k_steps, bool a_in_b,
                     const sm90_consumer& self) {
    const uint32_t a = ptx_wgmma_descriptor_low(ring.stages + (a_in_b ? D3_OPERAND_BYTES : 0), 16);
    const uint32_t b =
        ptx_wgmma_descriptor_low(ring.stages + D3_OPERAND_BYTES, Config::B_MN ? D3_BOX_BYTES : 16);
    int previous = 0;
    for (int k = 1; k < k_steps; k++) {
        const uint32_t stage = ring.slot * (D3_STAGE_BYTES / 16);
        ptx_mbarrier_wait(ring.full + 8 * ring.slot, ring.parity);
        multiply_step<Config, FIRST_N, SLABS>(accumulators, a + stage, b + stage, Config::OPERANDS || k > 1);
        ptx_wgmma_wait_group<1>();
        if (k > 1) ring_release(ring, previous, self.thread);
        previous = ring.slot;
        ring_next<Config>(ring);
    }
    const uint32_t stage = ring.slot * (D3_STAGE_BYTES / 16);
    ptx_mbarrier_wait(ring.full + 8 * ring.slot, ring.parity);
    multiply_step<Config, FIRST_N, SLABS>(accumulators, a + stage, b + stage,
                                          Config::OPERANDS || k_steps > 1);
    if ((self.thread & 31) == 0) ptx_mbarrier_arrive(self.other_turn);
    ptx_wgmma_wait_group<1>();
    if (k_steps > 1) ring_release(ring, previous, self.thread);
    ptx_wgmma_wait_group<0>();
    ring_release(ring, ring.slot, self.thread);
    ring_next<Config>(ring);
}

/* This lane's offset in a swizzled 64 x 64 block for ldmatrix and stmatrix of its warp's 16
 * rows, columns 0 to 15. Columns 16 q to 16 q + 15: that ^ 32 q. */
PTX_FN uint32_t block_offset(int warp, int lane) {
    const int row = warp * 16 + (lane & 15);
    return (uint32_t)(row * 128 + (((lane >> 4) ^ (row & 7)) << 4));
}

/* The same for the transposed store of these 8 x 8 fragments into the mirrored block. Columns 16
 * q to 16 q + 15: that + 2048 q. */
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
        pair = __half22float2(*(const __half2*)&packed); /* whole: halves apart are taken apart and packed */
    }
    return pair;
}

/* accumulators <- factor * C (FIRST), or factor * E added to them: from the next stage of the ring, while
 * the last wgmmas of the other warpgroup run. */
template <class Config, bool DIAGONAL, bool FIRST, int SLABS>
PTX_FN void start_from(float (&accumulators)[SLABS][64], float factor, sm90_ring& ring,
                       const sm90_consumer& self) {
    const uint32_t from = ring_stage(ring) + block_offset(self.thread >> 5, self.thread & 31);
    ptx_mbarrier_wait(ring.full + 8 * ring.slot, ring.parity);
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            if (DIAGONAL && c > slab) continue;
#pragma unroll
            for (int q = 0; q < 4; q++) {
                float* v = &accumulators[slab][c * 32 + q * 8];
                uint32_t packed[4];
                ptx_ldmatrix_x4(packed, (from + (slab * 2 + c) * D3_BOX_BYTES) ^ (32 * q));
#pragma unroll
                for (int u = 0; u < 4; u++) {
                    const float2 pair = unpack<Config::BF16>(packed[u]);
                    v[2 * u] = FIRST ? factor * pair.x : fmaf(factor, pair.x, v[2 * u]);
                    v[2 * u + 1] = FIRST ? factor * pair.y : fmaf(factor, pair.y, v[2 * u + 1]);
                }
            }
        }
    }
    ptx_fence_proxy_async_shared(); /* what was read here, TMA will overwrite */
    ptx_bar_sync_warpgroup(self.barrier);
    ring_release(ring, ring.slot, self.thread);
    ring_next<Config>(ring);
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

/* Rounds scale (SCALED; else 1) * one 64 x 64 block of the accumulators into `straight` and, symmetric, its
 * mirror into `mirror`. On the diagonal `mirror` becomes the block, and `straight` takes what is
 * not wanted. */
template <class Config, bool ON_DIAGONAL, bool SCALED>
PTX_FN void stage_block(const float* v, float scale, float delta, bool bf16, uint32_t straight,
                        uint32_t mirror, int thread) {
    const int lane = thread & 31, warp = thread >> 5;
    const uint32_t to_straight = straight + block_offset(warp, lane),
                   to_block = mirror + block_offset(warp, lane);
    const uint32_t to_mirror = mirror + mirror_offset(warp, lane);
#pragma unroll
    for (int q = 0; q < 4; q++, v += 8) {
        uint32_t packed[4];
        float x[8];
#pragma unroll
        for (int u = 0; u < 8; u++) x[u] = SCALED ? scale * v[u] : v[u];
        if (ON_DIAGONAL && q == warp) add_identity(x, delta, lane);
#pragma unroll
        for (int u = 0; u < 4; u++) {
            packed[u] =
                bf16 ? ptx_pack_bf16x2(x[2 * u], x[2 * u + 1]) : ptx_pack_f16x2(x[2 * u], x[2 * u + 1]);
        }
        if constexpr (ON_DIAGONAL) {
            /* This lane addresses one row of the 8 x 8 fragment (fragment_row, fragment_col). */
            const int fragment_row = warp * 2 + ((lane >> 3) & 1), fragment_col = q * 2 + (lane >> 4);
            if (q == warp) {
                packed[0] = reflect(packed[0], lane);
                packed[3] = reflect(packed[3], lane);
            }
            ptx_stmatrix_x4((fragment_col <= fragment_row ? to_block : to_straight) ^ (32 * q), packed);
            ptx_stmatrix_x4_trans(fragment_col < fragment_row ? to_mirror + 2048 * q : to_straight ^ (32 * q),
                                  packed);
        } else {
            ptx_stmatrix_x4(to_straight ^ (32 * q), packed);
            if constexpr (Config::SYMMETRIC) ptx_stmatrix_x4_trans(to_mirror + 2048 * q, packed);
        }
    }
}

/* Stores the tile block by block through this warpgroup's staging. */
template <class Config, bool DIAGONAL, bool SCALED, int SLABS>
PTX_FN void store_tile(float (&accumulators)[SLABS][64], float scale, const sm90_group& group,
                       const sm90_tile& tile, sm90_consumer& self) {
    constexpr int BLOCKS = Config::SYMMETRIC ? 2 : 1, BUFFERS = Config::STAGING / BLOCKS;
    const bool bf16 = keep(group.d_bf16);
    const float delta = Config::SYMMETRIC ? group.delta : 0.0f;
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
        const int row = tile.row + slab * D3_BOX;
        if (row >= group.m) break;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int col = tile.col + c * D3_BOX;
            if (DIAGONAL && c > slab) continue;
            if (!Config::SYMMETRIC && col >= group.n) continue;
            const uint32_t straight = self.staging + self.buffer * (BLOCKS * D3_BOX_BYTES);
            const uint32_t mirror = straight + D3_BOX_BYTES;
            if (BUFFERS > 1) self.buffer = self.buffer + 1 == BUFFERS ? 0 : self.buffer + 1;
            if (self.thread == 0) ptx_bulk_wait_group_read<BUFFERS - 1>();
            ptx_bar_sync_warpgroup(self.barrier);
            float* v = &accumulators[slab][c * 32];
            if (DIAGONAL && c == slab) {
                stage_block<Config, true, SCALED>(v, scale, delta, bf16, straight, mirror, self.thread);
            } else {
                stage_block<Config, false, SCALED>(v, scale, delta, bf16, straight, mirror, self.thread);
            }
            ptx_fence_proxy_async_shared();
            ptx_bar_sync_warpgroup(self.barrier);
            if (self.thread == 0) {
                if (!(DIAGONAL && c == slab)) ptx_tma_store(&group.d, straight, col, row, tile.batch);
                if (Config::SYMMETRIC) ptx_tma_store(&group.d, mirror, row, col, tile.batch);
                ptx_bulk_commit_group();
            }
        }
    }
}

/* One tile, compiled apart for the diagonal and for half a tile: two main loops of different N that meet before code
 * which writes the accumulators make ptxas serialise wgmma (C7515). */
template <class Config, bool DIAGONAL, int SLABS>
PTX_FN void compute_tile(const sm90_group& group, const sm90_tile& tile, sm90_ring ring,
                         sm90_consumer& self) {
    float accumulators[SLABS][64];
    const int k_steps = keep(group.k_steps);
    float alpha = group.alpha;
    if (group.alpha_device != NULL) alpha *= group.alpha_device[tile.batch];
    ring.slot = tile.slot;
    ring.parity = tile.parity;
    float beta = group.beta; /* like alpha read before the turn, not in it */
    if (Config::OPERANDS && group.beta_device != NULL) beta *= group.beta_device[tile.batch];
    if (Config::OPERANDS && alpha == 0.0f)
        alpha = 1.0f; /* the producer sees to it that the product is zero */
    ptx_mbarrier_wait(self.own_turn, self.turn_parity);
    self.turn_parity ^= 1;
    if constexpr (Config::OPERANDS) {
        start_from<Config, DIAGONAL, true, SLABS>(accumulators, beta / alpha, ring, self);
        if (Config::SYMMETRIC && group.operands > 1)
            start_from<Config, DIAGONAL, false, SLABS>(accumulators, group.gamma / alpha, ring, self);
    }
    multiply<Config, DIAGONAL ? 64 : 128, SLABS>(accumulators, ring, k_steps, DIAGONAL && group.a_is_b, self);
    if (!Config::SYMMETRIC && alpha == 1.0f) { /* up to k of 512 the multiplications show */
        store_tile<Config, DIAGONAL, false, SLABS>(accumulators, alpha, group, tile, self);
    } else {
        store_tile<Config, DIAGONAL, true, SLABS>(accumulators, alpha, group, tile, self);
    }
}

/* Consumer 0 takes the even, consumer 1 the odd ones of its thread block's tiles. */
template <class Config, int CAPACITY>
PTX_FN void consume(const sm90_params<CAPACITY>& params, sm90_shared<Config>& shared, const sm90_ring& ring,
                    int consumer) {
    sm90_consumer self = {};
    self.thread = threadIdx.x & 127;
    self.barrier = 1 + consumer;
    self.own_turn = ptx_shared(&shared.turn[consumer]);
    self.other_turn = ptx_shared(&shared.turn[1 - consumer]);
    self.turn_parity = consumer == 0; /* the first turn is consumer 0's */
    self.staging = ptx_shared(shared.staging[consumer]);
    for (uint32_t wave = consumer;; wave += 2) {
        const sm90_tile tile = next_tile<Config>(shared, wave, self.thread & 31);
        if (tile.group < 0) break;
        const sm90_group& group = params.group[tile.group];
        if constexpr (Config::SYMMETRIC) {
            if (tile.diagonal) {
                compute_tile<Config, true, 2>(group, tile, ring, self);
                continue;
            }
        }
        if (tile.slabs == 2) {
            compute_tile<Config, false, 2>(group, tile, ring, self);
        } else {
            compute_tile<Config, false, 1>(group, tile, ring, self);
        }
    }
    if (self.thread == 0) ptx_bulk_wait_group_all();
}

#endif
