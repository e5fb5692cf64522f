/*
 * ptx_sm80.cuh - the inline PTX of the generic path: what every card from sm_80 has.
 * PTX ISA: "cp.async", "ldmatrix", "mma.sync.aligned.m16n8k16".
 */
#ifndef DION3_PTX_SM80_CUH
#define DION3_PTX_SM80_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define PTX80_FN __device__ __forceinline__

PTX80_FN uint32_t ptx80_shared(const void* pointer) { return (uint32_t)__cvta_generic_to_shared(pointer); }

/* Keeps a value in its register: without this the compiler works addresses out again in every turn of a loop. */
PTX80_FN void ptx80_keep(int32_t& x) { asm volatile("" : "+r"(x)); }
PTX80_FN void ptx80_keep(uint32_t& x) { asm volatile("" : "+r"(x)); }
PTX80_FN void ptx80_keep(int64_t& x) { asm volatile("" : "+l"(x)); }

/* Copies 16 bytes from global memory, or writes 16 zeros and does not access the source. (A source of fewer
 * bytes is possible, but costs four more instructions, and compute-sanitizer takes it for 16.) */
PTX80_FN void ptx80_cp_async16(uint32_t target, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

PTX80_FN void ptx80_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
PTX80_FN void ptx80_cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

PTX80_FN void ptx80_store_shared16(uint32_t target, const uint32_t (&words)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
}

/* How long the L2 cache should keep a line: for the accesses below. */
PTX80_FN uint64_t ptx80_evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

PTX80_FN uint64_t ptx80_evict_normal() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

PTX80_FN uint64_t ptx80_evict_last() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Volatile, so that loads are issued where they stand: before what waits. */
PTX80_FN uint4 ptx80_load16(const void* address, uint64_t policy) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address), "l"(policy));
    return v;
}

PTX80_FN void ptx80_store16(void* address, uint4 v, uint64_t policy) {
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(address), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy)
                 : "memory");
}

PTX80_FN void ptx80_store8(void* address, uint2 v, uint64_t policy) {
    asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(address), "r"(v.x), "r"(v.y),
                 "l"(policy)
                 : "memory");
}

/* Within 1 ulp (rcp) and 2^-22.9 (rsqrt), subnormals as 0. */
PTX80_FN float ptx80_rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

PTX80_FN float ptx80_rsqrt_approx(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Lets a dependent launch that allows it begin; it waits for the end of this one before it reads. */
PTX80_FN void ptx80_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Four 8x8 matrices of 16-bit elements. */
PTX80_FN void ptx80_ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* The same, each transposed. */
PTX80_FN void ptx80_ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* d (16x8, fp32) += a (16x16) * b (16x8). */
PTX80_FN void ptx80_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

PTX80_FN void ptx80_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
