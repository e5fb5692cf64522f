/*
 * gemm.cu - the public matrix products, and the choice between the sm_90a and the generic kernels.
 *
 * Rules of DION3_BACKEND_AUTO: compute capability 9.0 exactly and operands that TMA can address: sm_90a
 * kernels. Operands that it cannot address are copied into padded workspace, and an unaddressable D back,
 * where the product is large enough to win by it (copies_pay). Everything else: generic kernels.
 */
#include "aligned.h"
#include "cuda_check.cuh"
#include "dispatch.h"
#include "prepare.h"

namespace {

constexpr int MIXED = 32; /* groups handed over at a time when a list needs both kinds of kernels */
constexpr int64_t ALIGNMENT = 256;

/* ---- choice of kernels -------------------------------------------------------------------------- */
dion3_status run_mixed(const d3_group* groups, int64_t count, int symmetric, dion3_stream stream) {
    for (int64_t first = 0; first < count; first += MIXED) {
        d3_group tma[MIXED], generic[MIXED];
        int64_t tma_count = 0, generic_count = 0;
        for (int64_t i = first; i < count && i < first + MIXED; ++i) {
            if (d3_gemm_sm90_check(&groups[i], symmetric) == DION3_OK) {
                tma[tma_count++] = groups[i];
            } else {
                generic[generic_count++] = groups[i];
            }
        }
        if (tma_count) D3_TRY(d3_gemm_sm90(tma, tma_count, symmetric, stream));
        if (generic_count) D3_TRY(d3_gemm_generic(generic, generic_count, symmetric, stream));
    }
    return DION3_OK;
}

/* ---- public products ---------------------------------------------------------------------------- */
enum { OPERANDS = 4 };

/* A product with the operands that TMA cannot address moved to workspace. */
struct padded_product {
    d3_group group;
    d3_copy in[OPERANDS];
    d3_copy out;
    int in_count;
    bool out_copied;
    size_t bytes;
};

bool addressable(const dion3_tensor& t, int64_t batch, int64_t rows, int64_t cols, bool rows_only) {
    return d3_rows_aligned(t.data, 2, batch, t.batch_stride, rows, t.row_stride, cols, t.col_stride) ||
           (!rows_only &&
            d3_rows_aligned(t.data, 2, batch, t.batch_stride, cols, t.col_stride, rows, t.row_stride));
}

/* Workspace for a copy of t with the same major, unless it must be row-major. */
dion3_tensor place(padded_product& p, char* workspace, const dion3_tensor& t, int64_t batch, int64_t rows,
                   int64_t cols, bool rows_only) {
    const bool by_cols = !rows_only && t.row_stride < t.col_stride;
    const int64_t outer = by_cols ? cols : rows, inner = by_cols ? rows : cols;
    const int64_t pitch = (inner + D3_GEMM_PITCH - 1) / D3_GEMM_PITCH * D3_GEMM_PITCH;
    dion3_tensor out = {workspace + p.bytes, outer * pitch, by_cols ? 1 : pitch,
                        by_cols ? pitch : 1, t.dtype,       0};
    p.bytes += (size_t)((2 * batch * outer * pitch + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    return out;
}

void pad_input(padded_product& p, char* workspace, dion3_tensor& t, int64_t rows, int64_t cols,
               bool rows_only) {
    const int64_t batch = p.group.g.batch;
    if (!t.data || addressable(t, batch, rows, cols, rows_only)) return;
    const dion3_tensor copy = place(p, workspace, t, batch, rows, cols, rows_only);
    p.in[p.in_count++] = {t, copy, batch, rows, cols, 0, 0, nullptr, 0.0};
    t = copy;
}

padded_product pad(const d3_group& group, int symmetric, void* memory) {
    padded_product p = {};
    p.group = group;
    dion3_gemm& g = p.group.g;
    char* workspace = (char*)memory;
    pad_input(p, workspace, g.a, g.m, g.k, false);
    pad_input(p, workspace, g.b, symmetric ? g.n : g.k, symmetric ? g.k : g.n, false);
    if (g.beta != 0.0f) pad_input(p, workspace, g.c, g.m, g.n, true);
    if (g.n % D3_GEMM_PITCH != 0 || !addressable(g.d, g.batch, g.m, g.n, true)) {
        const dion3_tensor copy = place(p, workspace, g.d, g.batch, g.m, g.n, true);
        p.out = {copy, g.d, g.batch, g.m, g.n, 0, 0, nullptr, 0.0};
        p.out_copied = true;
        p.group.d_padded = 1;
        g.d = copy;
    }
    return p;
}

/* Estimated for an H200: a copied element costs as much as 400 multiply-adds save by leaving the generic
 * kernels, about 1 ps against 2.4 fs. */
bool copies_pay(const dion3_gemm& g) {
    const double elements = (double)g.m * g.k + (double)g.n * g.k + 2.0 * (double)g.m * g.n;
    return (double)g.m * (double)g.n * (double)g.k > 400.0 * elements;
}

bool is_empty(const dion3_gemm& g) { return g.batch == 0 || g.m == 0 || g.n == 0; }

/* Whether the product goes through padded copies. */
bool wants_padding(const d3_group& group, int symmetric, int32_t backend) {
    if (is_empty(group.g) || backend == DION3_BACKEND_GENERIC || !d3_has_sm90()) return false;
    if (d3_gemm_sm90_check(&group, symmetric) == DION3_OK) return false;
    if (backend == DION3_BACKEND_AUTO && !copies_pay(group.g)) return false;
    static char* const somewhere = (char*)ALIGNMENT; /* only its alignment is looked at */
    const padded_product p = pad(group, symmetric, somewhere);
    return d3_gemm_sm90_check(&p.group, symmetric) == DION3_OK;
}

d3_group group_of(const dion3_gemm& product) {
    d3_group group = {};
    group.g = product;
    if (product.beta == 0.0f) group.g.c = {};
    return group;
}

dion3_status check_product(const char* name, const dion3_gemm* p, int symmetric, int32_t backend) {
    D3_REQUIRE(p, "%s: product must not be NULL", name);
    D3_REQUIRE(backend >= DION3_BACKEND_AUTO && backend <= DION3_BACKEND_GENERIC,
               "%s: backend=%d must be 0 (auto), 1 (sm90) or 2 (generic)", name, (int)backend);
    D3_REQUIRE(p->batch >= 0 && p->m >= 0 && p->n >= 0 && p->k >= 0,
               "%s: batch=%lld, m=%lld, n=%lld and k=%lld must not be negative", name, (long long)p->batch,
               (long long)p->m, (long long)p->n, (long long)p->k);
    D3_REQUIRE(p->m < 1ll << 31 && p->n < 1ll << 31 && p->k < 1ll << 31,
               "%s: m=%lld, n=%lld and k=%lld must be below 2^31", name, (long long)p->m, (long long)p->n,
               (long long)p->k);
    D3_REQUIRE(!symmetric || p->m == p->n, "%s: m=%lld and n=%lld of a symmetric product must be equal", name,
               (long long)p->m, (long long)p->n);
    D3_REQUIRE(p->a.dtype == DION3_F16 || p->a.dtype == DION3_BF16,
               "%s: a dtype=%d must be 1 (fp16) or 2 (bf16)", name, (int)p->a.dtype);
    D3_REQUIRE(p->b.dtype == p->a.dtype && p->d.dtype == p->a.dtype,
               "%s: dtypes of a=%d, b=%d and d=%d must be alike", name, (int)p->a.dtype, (int)p->b.dtype,
               (int)p->d.dtype);
    const int64_t b_rows = symmetric ? p->n : p->k, b_cols = symmetric ? p->k : p->n;
    D3_TRY(d3_check_tensor(name, 0, "a", &p->a, p->batch, p->m, p->k, 0));
    D3_TRY(d3_check_tensor(name, 0, "b", &p->b, p->batch, b_rows, b_cols, 0));
    D3_TRY(d3_check_tensor(name, 0, "d", &p->d, p->batch, p->m, p->n, 1));
    if (p->beta != 0.0f) {
        D3_REQUIRE(p->c.dtype == p->a.dtype, "%s: dtypes of a=%d and c=%d must be alike", name,
                   (int)p->a.dtype, (int)p->c.dtype);
        D3_TRY(d3_check_tensor(name, 0, "c", &p->c, p->batch, p->m, p->n, 0));
    }
    D3_REQUIRE(is_empty(*p) || p->k == 0 || (p->d.data != p->a.data && p->d.data != p->b.data),
               "%s: d=%p must not be a=%p nor b=%p: the result needs memory of its own (it may be c)", name,
               p->d.data, p->a.data, p->b.data);
    return DION3_OK;
}

size_t workspace_size(const char* name, const dion3_gemm* product, int symmetric, int32_t backend) {
    if (check_product(name, product, symmetric, backend) != DION3_OK) return 0;
    const d3_group group = group_of(*product);
    return wants_padding(group, symmetric, backend) ? pad(group, symmetric, nullptr).bytes : 0;
}

dion3_status run_product(const char* name, const dion3_gemm* product, int symmetric, int32_t backend,
                         void* workspace, size_t workspace_bytes, dion3_stream stream) {
    D3_TRY(check_product(name, product, symmetric, backend));
    if (is_empty(*product)) return DION3_OK;
    const d3_group group = group_of(*product);
    if (!wants_padding(group, symmetric, backend)) return d3_gemm(&group, 1, symmetric, backend, stream);
    const padded_product p = pad(group, symmetric, workspace);
    D3_REQUIRE(workspace && (uintptr_t)workspace % ALIGNMENT == 0 && workspace_bytes >= p.bytes,
               "%s: workspace=%p of workspace_bytes=%llu must be aligned to %d bytes and hold %llu", name,
               workspace, (unsigned long long)workspace_bytes, (int)ALIGNMENT, (unsigned long long)p.bytes);
    D3_TRY(d3_copies(p.in, p.in_count, nullptr, 0, stream));
    D3_TRY(d3_gemm_sm90(&p.group, 1, symmetric, stream));
    return p.out_copied ? d3_copies(&p.out, 1, nullptr, 0, stream) : DION3_OK;
}

} // namespace

extern "C" int d3_has_sm90(void) {
    int device = 0, major = 0, minor = -1;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
           major == 9 && minor == 0;
}

extern "C" int d3_multiprocessors(void) {
    int device = 0, count = 1;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
        (void)cudaGetLastError();
        return 1;
    }
    return count;
}

extern "C" dion3_status d3_gemm(const d3_group* groups, int64_t count, int symmetric, int32_t backend,
                                dion3_stream stream) {
    if (backend == DION3_BACKEND_GENERIC) return d3_gemm_generic(groups, count, symmetric, stream);
    const bool sm90 = d3_has_sm90();
    if (backend == DION3_BACKEND_SM90) {
        if (!sm90) {
            return d3_fail(DION3_ERR_UNSUPPORTED,
                           "backend=1 (sm90) needs a device of compute capability 9.0; use 0 or 2");
        }
        return d3_gemm_sm90(groups, count, symmetric, stream);
    }
    if (!sm90) return d3_gemm_generic(groups, count, symmetric, stream);
    for (int64_t i = 0; i < count; ++i) {
        if (d3_gemm_sm90_check(&groups[i], symmetric) != DION3_OK)
            return run_mixed(groups, count, symmetric, stream);
    }
    return d3_gemm_sm90(groups, count, symmetric, stream);
}

extern "C" size_t dion3_symmetric_mm_workspace_size(const dion3_gemm* product, dion3_backend backend) {
    return workspace_size("dion3_symmetric_mm", product, 1, backend);
}

extern "C" dion3_status dion3_symmetric_mm_cuda(const dion3_gemm* product, dion3_backend backend,
                                                void* workspace, size_t workspace_bytes,
                                                dion3_stream stream) {
    return run_product("dion3_symmetric_mm", product, 1, backend, workspace, workspace_bytes, stream);
}

extern "C" size_t dion3_gemm_add_workspace_size(const dion3_gemm* product, dion3_backend backend) {
    return workspace_size("dion3_gemm_add", product, 0, backend);
}

extern "C" dion3_status dion3_gemm_add_cuda(const dion3_gemm* product, dion3_backend backend, void* workspace,
                                            size_t workspace_bytes, dion3_stream stream) {
    return run_product("dion3_gemm_add", product, 0, backend, workspace, workspace_bytes, stream);
}
