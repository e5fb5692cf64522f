/*
 * gemm_sm90.cuh - the kernel of both products on Hopper: D <- alpha A op(B) + beta C + gamma E +
 * delta I.
 *
 * Tensors: A (batch, m, k), B (batch, n, k) or (batch, k, n), C, D, E (batch, m, n), fp16 or
 * bf16, read and written through 3-D tensor maps {inner, outer, batch} with the 128-byte
 * swizzle; edges and k tails are zero-filled and clipped by TMA. Tiling: persistent thread
 * blocks of 384 threads, one producer warpgroup (TMA) and two consumer warpgroups (wgmma) that
 * take turns at the tensor cores, each owning a whole 128 x 128 tile, so that one's epilogue
 * runs under the other's main loop. 64 k in a step, five or six steps in the ring. C and E come
 * first, a step each: the consumer whose turn it is starts its accumulators from (beta / alpha) C +
 * (gamma / alpha) E while the last wgmmas of the other one run, and alpha is applied at the end.
 * The last tiles of a launch may be computed in halves of 64 rows (tile_order.h). Symmetric
 * product: tiles with row >= col only; a tile below the diagonal is stored twice, straight and
 * mirrored (stmatrix.trans), with the same bits; a diagonal tile multiplies 64 x 64 for its upper
 * slab, and the 8 x 8 blocks on the diagonal are reflected (movmatrix), so that D equals its
 * transpose bitwise. Work: 2 m n k FLOP (half of it if symmetric) against 2 (m k + n k + (1 or 2) m
 * n) bytes; roof: the tensor cores from k of about 400 on, at the card's power limit
 * (docs/kernels.md). Constraints: sm_90a; no
 * relocatable device code; addresses and strides as d3_gemm_sm90_check says. Source: PTX ISA,
 * sections on wgmma, cp.async.bulk.tensor and mbarrier.
 */
#ifndef DION3_GEMM_SM90_CUH
#define DION3_GEMM_SM90_CUH

#include "gemm_sm90_consumer.cuh"
#include "gemm_sm90_types.cuh"

/* ---- the schedule --------------------------------------------------------------------------- */

/* This thread block's next tile from wave `wave` on, which moves past it; false: there are no more. */
template <class Config, int CAPACITY>
PTX_FN bool find_tile(const sm90_params<CAPACITY>& params, uint32_t& wave, sm90_tile& tile) {
    while (true) {
        const uint32_t unit = wave * gridDim.x + blockIdx.x;
        if (unit >= params.units) return false;
        while (unit >= params.group[tile.group].order.end) tile.group += 1;
        d3_place place;
        const d3_part part = d3_order_unit(&params.group[tile.group].order, Config::SYMMETRIC, wave++,
                                           blockIdx.x, gridDim.x, &place);
        if (part == D3_NO_PART) continue;
        tile.row = (int)(place.row * D3_BLOCK) + (part == D3_LOWER_HALF ? D3_BOX : 0);
        tile.col = (int)(place.col * D3_BLOCK);
        tile.batch = (int)place.batch;
        tile.diagonal = Config::SYMMETRIC && place.row == place.col;
        tile.slabs = part == D3_WHOLE ? 2 : 1;
        return true;
    }
}

/* One thread works out the tiles of this thread block ahead of those who compute them: the
 * divisions would otherwise stand between two tiles of the producer and of each consumer. `tile`
 * and `found`: its first; `wave`: where to look for the next. */
template <class Config, int CAPACITY>
PTX_FN void schedule(const sm90_params<CAPACITY>& params, sm90_shared<Config>& shared, sm90_tile tile,
                     bool found, uint32_t wave) {
    int slot = 0, ends = 0;
    uint32_t parity = 0;
    for (uint32_t count = 0; ends < 2; count++) { /* one end for each consumer */
        const uint32_t entry = count % D3_SCHEDULE;
        int steps = 0;
        if (count > 0 && found) found = find_tile<Config>(params, wave, tile);
        if (found) {
            steps = params.group[tile.group].operands + params.group[tile.group].k_steps;
        } else {
            tile.group = -1;
            ends += 1;
        }
        tile.slot = slot;
        tile.parity = parity;
        ptx_mbarrier_wait(ptx_shared(&shared.tile_empty[entry]), (count / D3_SCHEDULE & 1) ^ 1);
        shared.tile[entry] = tile;
        ptx_mbarrier_arrive(ptx_shared(&shared.tile_full[entry]));
        parity ^= ((slot + steps) / Config::STAGES) & 1;
        slot = (slot + steps) % Config::STAGES;
    }
}

/* ---- producer ------------------------------------------------------------------------------- */

/* Rows (outer dimension) of one box of an operand: K-major it is one box of all its rows, and half a
 * tile loads more of A than it needs. Two boxes of 64 rows take longer to issue than they save. */
constexpr int sm90_box_rows(bool mn_major) { return mn_major ? D3_BOX : D3_BLOCK; }

/* 128 rows, or 64 if one slab suffices, and 64 k of A or B to shared memory. */
template <bool MN>
PTX_FN void load_block(uint32_t to, const CUtensorMap* map, uint32_t full, int row, int k, int batch,
                       int slabs) {
    ptx_mbarrier_arrive_expect_tx(full, MN ? slabs * D3_BOX_BYTES : D3_OPERAND_BYTES);
    if constexpr (MN) {
        ptx_tma_load(to, map, full, row, k, batch);
        if (slabs > 1) ptx_tma_load(to + D3_BOX_BYTES, map, full, row + D3_BOX, k, batch);
    } else {
        ptx_tma_load(to, map, full, k, row, batch);
    }
}

/* A or B of one k-step into the ring's next stage. */
template <class Config, bool FOR_B>
PTX_FN void load_step(const sm90_group& group, const sm90_tile& tile, sm90_ring& ring, int k) {
    const uint32_t full = ring.full + 8 * ring.slot, to = ring_stage(ring);
    ptx_mbarrier_wait(ring.empty + 8 * ring.slot, ring.parity);
    if constexpr (FOR_B) {
        load_block<Config::B_MN>(to + D3_OPERAND_BYTES, &group.b, full, tile.col, k, tile.batch, 2);
    } else if (Config::SYMMETRIC && tile.diagonal && group.a_is_b) {
        ptx_mbarrier_arrive(full);
    } else {
        load_block<Config::A_MN>(to, &group.a, full, tile.row, k, tile.batch, tile.slabs);
    }
    ring_next<Config>(ring);
}

/* C or E of a tile into the ring's next stage, each thread the 64 columns of its own: blocks of 64 x 64,
 * of a diagonal tile only what is stored. */
template <class Config, bool FOR_B>
PTX_FN void load_operand(const CUtensorMap* map, const sm90_tile& tile, sm90_ring& ring) {
    const uint32_t full = ring.full + 8 * ring.slot, to = ring_stage(ring) + (FOR_B ? D3_BOX_BYTES : 0);
    const int first = FOR_B && Config::SYMMETRIC && tile.diagonal ? 1 : 0; /* slab */
    ptx_mbarrier_wait(ring.empty + 8 * ring.slot, ring.parity);
    ptx_mbarrier_arrive_expect_tx(full, (tile.slabs - first) * D3_BOX_BYTES);
    for (int slab = first; slab < tile.slabs; slab++) {
        ptx_tma_load(to + slab * 2 * D3_BOX_BYTES, map, full, tile.col + (FOR_B ? D3_BOX : 0),
                     tile.row + slab * D3_BOX, tile.batch);
    }
    ring_next<Config>(ring);
}

/* Two threads of different warps fill the ring: one with A, the other with B, each with half of C and
 * E. To issue the loads of a stage takes one thread so long that it would show. All waits and arrivals
 * are modelled in tests/test_sm90_pipeline.py. */
template <class Config, bool FOR_B, int CAPACITY>
PTX_FN void produce(const sm90_params<CAPACITY>& params, sm90_shared<Config>& shared, sm90_ring ring) {
    ring.parity = 1; /* the stages start empty */
    for (uint32_t wave = 0;; wave++) {
        const sm90_tile tile = next_tile<Config>(shared, wave, -1);
        if (tile.group < 0) break;
        const sm90_group& group = params.group[tile.group];
        const int k_length = group.k_steps * D3_BLOCK_K;
        int k_first = group.k_first;
        if constexpr (Config::OPERANDS) {
            load_operand<Config, FOR_B>(&group.c, tile, ring);
            if (Config::SYMMETRIC && group.operands > 1) {
                load_operand<Config, FOR_B>(&group.e, tile, ring);
            }
            /* A product that is not wanted: beyond the operands TMA reads zeros. */
            if (group.alpha_device != NULL && group.alpha * group.alpha_device[tile.batch] == 0.0f) {
                k_first += k_length;
            }
        }
        for (int k = k_first; k < k_first + k_length; k += D3_BLOCK_K) {
            load_step<Config, FOR_B>(group, tile, ring, k);
        }
    }
}

/* ---- the kernel ----------------------------------------------------------------------------- */

/* Called by one thread. */
template <class Config>
PTX_FN void initialise(sm90_shared<Config>& shared) {
    for (int s = 0; s < Config::STAGES; s++) {
        ptx_mbarrier_init(ptx_shared(&shared.full[s]), 2); /* A and B */
        ptx_mbarrier_init(ptx_shared(&shared.empty[s]), 1);
    }
    for (int w = 0; w < 2; w++) {
        ptx_mbarrier_init(ptx_shared(&shared.turn[w]), 4);
    }
    for (int i = 0; i < D3_SCHEDULE; i++) { /* read by two producers and a consumer's four warps */
        ptx_mbarrier_init(ptx_shared(&shared.tile_full[i]), 1);
        ptx_mbarrier_init(ptx_shared(&shared.tile_empty[i]), 6);
    }
    ptx_fence_mbarrier_init();
}

template <class Config, int CAPACITY>
__global__ void __launch_bounds__(D3_THREADS, 1)
    gemm_sm90_kernel(const __grid_constant__ sm90_params<CAPACITY> params) {
    extern __shared__ __align__(1024) uint8_t memory[];
    sm90_shared<Config>& shared = *(sm90_shared<Config>*)memory;
    const sm90_ring ring = {ptx_shared(shared.stage), ptx_shared(shared.full), ptx_shared(shared.empty), 0,
                            0};
    const int warpgroup = threadIdx.x >> 7;
    sm90_tile first = {};
    uint32_t wave = 0;
    bool found = false;
    if (threadIdx.x == 0) initialise<Config>(shared);
    if (threadIdx.x == 32) found = find_tile<Config>(params, wave, first);
    if (threadIdx.x == 64) {
        ptx_prefetch_tensormap(&params.group[0].a);
        ptx_prefetch_tensormap(&params.group[0].b);
        if (Config::OPERANDS) ptx_prefetch_tensormap(&params.group[0].c);
        ptx_prefetch_tensormap(&params.group[0].d);
    }
    __syncthreads();
    if (warpgroup == 0) {
        ptx_setmaxnreg_dec<D3_PRODUCER_REGISTERS>();
        if (threadIdx.x == 32) schedule<Config>(params, shared, first, found, wave);
        if (threadIdx.x == 0) {
            ptx_griddepcontrol_wait();
            produce<Config, false>(params, shared, ring);
            ptx_griddepcontrol_launch_dependents();
        }
        if (threadIdx.x == 64) {
            ptx_griddepcontrol_wait();
            produce<Config, true>(params, shared, ring);
        }
    } else {
        ptx_setmaxnreg_inc<D3_CONSUMER_REGISTERS>();
        ptx_griddepcontrol_wait();
        consume<Config>(params, shared, ring, warpgroup - 1);
    }
}

#endif
