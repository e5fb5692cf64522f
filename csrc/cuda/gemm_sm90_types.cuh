/*
 * gemm_sm90_types.cuh - what the host and the two halves of the kernel of gemm_sm90.cuh share:
 * the variants, the parameters, the layout of shared memory, the operand ring.
 */
#ifndef DION3_GEMM_SM90_TYPES_CUH
#define DION3_GEMM_SM90_TYPES_CUH

#include "gemm.h"
#include "ptx.cuh"
#include "tile_order.h"

enum {
    D3_BLOCK = 128, /* rows and columns of a tile */
    D3_BLOCK_K = 64,
    D3_BOX = 64, /* a box is 64 x 64 elements, 64 rows of 128 bytes; a wgmma has 64 rows */
    D3_BOX_BYTES = D3_BOX * D3_BOX * 2,
    D3_OPERAND_BYTES = D3_BLOCK * D3_BLOCK_K * 2, /* of A or B in a k-step */
    D3_STAGE_BYTES = 2 * D3_OPERAND_BYTES,
    D3_SCHEDULE = 4, /* tiles that the scheduler may be ahead */
    D3_THREADS = 384,
    D3_PRODUCER_REGISTERS = 40,
    D3_CONSUMER_REGISTERS = 232
};

/* A variant of the kernel is the sum of these. Which one computes a product depends on the shape
 * and layout of one matrix, never on the batch (and all of them add k in the same order):
 *
 *   product    operands in memory                       stages  staging blocks
 *   symmetric  A and B K-major, or both M- and N-major  5       4
 *   general    A K-major, B K-major or N-major          6       2
 *
 * Always 128 x 128 tiles: 128 x 192 on pairs of thread blocks that share B, and 128 x 256, were
 * not faster. */
enum sm90_variant {
    D3_VARIANT_OPERANDS = 1,  /* with C, and perhaps E */
    D3_VARIANT_MN = 2,        /* symmetric: A and B are MN-major; general: B is */
    D3_VARIANT_SYMMETRIC = 4, /* the product is symmetric */
    D3_VARIANTS = 8
};

template <bool BF16_, int VARIANT>
struct sm90_config {
    static constexpr bool BF16 = BF16_;
    static constexpr bool OPERANDS = VARIANT & D3_VARIANT_OPERANDS,
                          SYMMETRIC = VARIANT & D3_VARIANT_SYMMETRIC;
    static constexpr bool B_MN = VARIANT & D3_VARIANT_MN, A_MN = SYMMETRIC && B_MN;
    static constexpr int STAGES = SYMMETRIC ? 5 : 6;
    /* Blocks of 64 x 64 elements in which a consumer prepares its stores. */
    static constexpr int STAGING = SYMMETRIC ? 4 : 2;
    static_assert(!SYMMETRIC || STAGING % 2 == 0, "a block and its mirror are staged together");
};

/* What one group of products looks like to the kernel. */
struct sm90_group {
    CUtensorMap a, b, c, e, d;
    const float* alpha_device;
    const float* beta_device;
    float alpha, beta, gamma, delta;
    d3_order order;
    int32_t m, n;
    int32_t k_steps;
    int32_t k_first;  /* k = 0: one step whose k_first lies beyond the operands, all zeros */
    int32_t operands; /* how many of C and E there are: none, or one or two with OPERANDS */
    int32_t a_is_b;   /* symmetric: a diagonal tile's rows of A are its rows of B */
    int32_t d_bf16;
};

template <int CAPACITY>
struct sm90_params {
    sm90_group group[CAPACITY];
    uint32_t units; /* of tile_order.h */
};

/* A tile of the schedule, or half of one, in elements: its corner and its matrix, and where the ring
 * stands when it begins. */
struct alignas(16) sm90_tile {
    int row, col, batch;
    int group; /* -1: there are no more tiles */
    int slot;
    uint32_t parity;
    int diagonal;
    int slabs; /* of 64 rows: 2, or 1 of half a tile */
};

template <class Config>
struct alignas(1024) sm90_shared {
    uint8_t stage[Config::STAGES][D3_STAGE_BYTES];
    uint8_t staging[2][Config::STAGING][D3_BOX_BYTES]; /* of each consumer */
    sm90_tile tile[D3_SCHEDULE];
    uint64_t full[Config::STAGES], empty[Config::STAGES];
    uint64_t turn[2], tile_full[D3_SCHEDULE], tile_empty[D3_SCHEDULE];
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

PTX_FN uint32_t ring_stage(const sm90_ring& ring) { return ring.stages + ring.slot * D3_STAGE_BYTES; }

/* Called by all threads of a warpgroup that have read a stage: the producer may fill it again. */
PTX_FN void ring_release(const sm90_ring& ring, int slot, int thread) {
    if (thread == 0) ptx_mbarrier_arrive(ring.empty + 8 * slot);
}

/* The tile of a wave, for one thread of the producer (lane -1) or all of a consumer. */
template <class Config>
PTX_FN sm90_tile next_tile(sm90_shared<Config>& shared, uint32_t wave, int lane) {
    const uint32_t entry = wave % D3_SCHEDULE;
    ptx_mbarrier_wait(ptx_shared(&shared.tile_full[entry]), wave / D3_SCHEDULE & 1);
    const sm90_tile tile = shared.tile[entry];
    if (lane >= 0) __syncwarp();
    if (lane <= 0) ptx_mbarrier_arrive(ptx_shared(&shared.tile_empty[entry]));
    return tile;
}

#endif
