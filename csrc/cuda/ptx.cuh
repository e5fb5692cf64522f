/*
 * ptx.cuh - every inline-asm wrapper of the sm_90a kernels: mbarrier, TMA, wgmma, stmatrix,
 * ldmatrix, movmatrix, fences, register reallocation, programmatic dependent launch.
 *
 * Names follow the PTX instructions; addresses of shared memory are 32-bit (ptx_shared). No
 * policy here. Source: PTX ISA 8.0 and later, sections on mbarrier, cp.async.bulk.tensor, wgmma,
 * griddepcontrol.
 */
#ifndef DION3_PTX_CUH
#define DION3_PTX_CUH

#include <cuda.h> /* CUtensorMap */
#include <stdint.h>

#define PTX_FN __device__ __forceinline__

PTX_FN uint32_t ptx_shared(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* ---- barriers of threads -------------------------------------------------------------------- */

/* 128 threads of one warpgroup meet at named barrier `id`. */
PTX_FN void ptx_bar_sync_warpgroup(int id) {
    asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

template <int COUNT>
PTX_FN void ptx_setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
PTX_FN void ptx_setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* ---- programmatic dependent launch ---------------------------------------------------------- */

/* Returns once the kernels this one depends on have finished and their writes are visible. */
PTX_FN void ptx_griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

PTX_FN void ptx_griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* ---- mbarrier ------------------------------------------------------------------------------- */

PTX_FN void ptx_mbarrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

PTX_FN void ptx_fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

PTX_FN void ptx_mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

PTX_FN void ptx_mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

PTX_FN uint32_t ptx_mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

/* Nothing else in this loop: a clock and a trap as a hang guard made ptxas cap the consumers'
 * registers (600 bytes of spills and serialised wgmma). */
PTX_FN void ptx_mbarrier_wait(uint32_t barrier, uint32_t parity) {
    while (!ptx_mbarrier_try_wait(barrier, parity)) {
    }
}

/* ---- TMA ------------------------------------------------------------------------------------ */

PTX_FN void ptx_prefetch_tensormap(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Box at element (x, y, z) of the map, x innermost, to shared memory; the barrier counts its
 * bytes. */
PTX_FN void ptx_tma_load(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y,
                         int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

PTX_FN void ptx_tma_store(const CUtensorMap* map, uint32_t shared, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::
            "l"(map),
        "r"(shared), "r"(x), "r"(y), "r"(z)
        : "memory");
}

PTX_FN void ptx_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/* Until at most PENDING committed groups have not yet read their shared memory. */
template <int PENDING>
PTX_FN void ptx_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

PTX_FN void ptx_bulk_wait_group_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/* Orders this thread's ordinary accesses to shared memory before later ones by TMA and wgmma. */
PTX_FN void ptx_fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- matrices of 8 x 8 16-bit elements in shared memory ------------------------------------- */

PTX_FN void ptx_ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

PTX_FN void ptx_stmatrix_x4(uint32_t shared, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

PTX_FN void ptx_stmatrix_x4_trans(uint32_t shared, const uint32_t (&r)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

PTX_FN uint32_t ptx_movmatrix_trans(uint32_t r) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
    return transposed;
}

/* Rounds to nearest even and packs, `low` in the low half. */
PTX_FN uint32_t ptx_pack_f16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

PTX_FN uint32_t ptx_pack_bf16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/* ---- wgmma ---------------------------------------------------------------------------------- */

PTX_FN void ptx_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

PTX_FN void ptx_wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
PTX_FN void ptx_wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Descriptor of an operand in shared memory with the 128-byte swizzle, in two halves: shared
 * memory ends below 2^18, so an offset can be added to the low half (in units of 16 bytes).
 * K-major: rows of 64 k, eight of them 1024 bytes apart (leading unused). MN-major: boxes of 64
 * mn by 64 k, eight k 1024 bytes apart, the next 64 mn `leading` bytes on. */
PTX_FN uint32_t ptx_wgmma_descriptor_low(uint32_t shared, uint32_t leading) {
    return shared >> 4 | leading >> 4 << 16;
}

PTX_FN uint64_t ptx_wgmma_descriptor(uint32_t low) {
    return (uint64_t)(1024 >> 4 | 1u << 30) << 32 | low;
}

// clang-format off
#define D3_TEXT32_0 \
    "%0, %1, %2, %3, %4, %5, %6, %7, " \
    "%8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define D3_TEXT32_32 \
    "%32, %33, %34, %35, %36, %37, %38, %39, " \
    "%40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, " \
    "%56, %57, %58, %59, %60, %61, %62, %63"
#define D3_REG8(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), \
                   "+f"(d[o + 4]), "+f"(d[o + 5]), "+f"(d[o + 6]), "+f"(d[o + 7])
#define D3_REG32(o) D3_REG8(o), D3_REG8(o + 8), D3_REG8(o + 16), D3_REG8(o + 24)

/* One instruction: TEXT and REGS name the N / 2 accumulators, A to TB the numbers of the
 * operands after them. */
#define D3_WGMMA(N, TYPE, TEXT, REGS, A, B, P, TA, TB)                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " "               \
                 "{" TEXT "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB ";\n}\n"                 \
                 : REGS                                                                            \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(A_MN), "n"(B_MN))
#define D3_WGMMA_ALL(TYPE)                                                                         \
    if constexpr (N == 64)                                                                         \
        D3_WGMMA(64, TYPE, D3_TEXT32_0, D3_REG32(0), 32, 33, 34, 35, 36);                          \
    else                                                                                           \
        D3_WGMMA(128, TYPE, D3_TEXT32_0 ", " D3_TEXT32_32, D3_REG32(0) D3_COMMA D3_REG32(32),      \
                 64, 65, 66, 67, 68)
#define D3_COMMA ,

/* D (64 x N, fp32, in registers) <- A (64 x 16) * B (16 x N) + (accumulate ? D : 0),
 * asynchronous. A_MN, B_MN: the operand is MN-major. */
template <bool BF16, int N, bool A_MN, bool B_MN, int LENGTH>
PTX_FN void ptx_wgmma(float (&d)[LENGTH], uint64_t a, uint64_t b, int accumulate) {
    static_assert(N == 64 || N == 128, "the widths in use");
    static_assert(LENGTH >= N / 2, "N / 2 accumulators a thread");
    if constexpr (BF16) {
        D3_WGMMA_ALL("bf16");
    } else {
        D3_WGMMA_ALL("f16");
    }
}
#undef D3_WGMMA_ALL
#undef D3_WGMMA
#undef D3_COMMA
#undef D3_REG32
#undef D3_REG8
// clang-format on

#endif
