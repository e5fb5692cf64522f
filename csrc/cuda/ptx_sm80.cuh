/*
 * ptx_sm80.cuh - the inline PTX of the generic path: what every card from sm_80 has.
 * PTX ISA: "cp.async", "ldmatrix", "mma.sync.aligned.m16n8k16".
 */
#ifndef DION3_PTX_SM80_CUH
#define DION3_PTX_SM80_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* Copies bytes (0 to 16) from global memory and fills the rest of the 16 with zeros. With bytes = 0 the
 * source is not accessed. */
__device__ __forceinline__ void cp_async16(uint32_t target, const void* source, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Four 8x8 matrices of 16-bit elements, each transposed if asked; transpose must be alike in the warp. */
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address, int transpose)
{
    asm volatile("{\n"
                 ".reg .pred t;\n"
                 "setp.ne.s32 t, %5, 0;\n"
                 "@t ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 "@!t ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 "}"
                 : "=&r"(r[0]), "=&r"(r[1]), "=&r"(r[2]), "=&r"(r[3])
                 : "r"(address), "r"(transpose)
                 : "memory");
}

/* d (16x8, fp32) += a (16x16) * b (16x8). */
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    __nv_bfloat16)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

} // namespace ptx

#endif
