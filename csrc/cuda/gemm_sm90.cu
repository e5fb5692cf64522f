/*
 * gemm_sm90.cu - lists of matrix products on Hopper: checks, tensor maps, choice of the kernel,
 * launch.
 *
 * The kernel itself: gemm_sm90.cuh. Everything a launch needs travels in its parameters; nothing is
 * allocated, uploaded or remembered between calls except, per device, that a kernel's shared
 * memory limit has been raised.
 */
#include "cuda_check.cuh"
#include "gemm_sm90.cuh"

#include <limits.h>

static int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- what TMA can address ------------------------------------------------------------------- */

/* Matrices (batch, outer, inner) with inner contiguous, as a tensor map sees them. */
struct sm90_view {
    void* data;
    int64_t batch, outer, inner, batch_stride, outer_stride;
};

/* The view whose contiguous dimension is the columns, or the rows. */
static sm90_view view_of(const dion3_tensor* t, int64_t batch, int64_t rows, int64_t cols, bool rows_inner) {
    const sm90_view by_row = {t->data, batch, rows, cols, t->batch_stride, t->row_stride};
    const sm90_view by_col = {t->data, batch, cols, rows, t->batch_stride, t->col_stride};
    return rows_inner ? by_col : by_row;
}

static bool addressable(const dion3_tensor* t, int64_t batch, int64_t rows, int64_t cols, bool rows_inner) {
    const int64_t limit = (int64_t)1 << 39; /* elements: 2^40 bytes */
    const sm90_view v = view_of(t, batch, rows, cols, rows_inner);
    const int64_t inner_stride = rows_inner ? t->row_stride : t->col_stride;
    if (v.inner > 1 && inner_stride != 1) return false;
    if ((uintptr_t)v.data % 16 != 0) return false;
    if (v.outer > 1 && (v.outer_stride % 8 != 0 || v.outer_stride <= 0 || v.outer_stride >= limit))
        return false;
    return v.batch <= 1 || (v.batch_stride % 8 == 0 && v.batch_stride > 0 && v.batch_stride < limit);
}

static bool reads_c(const d3_group* group) { return group->g.c.data != NULL && group->g.beta != 0.0f; }
static bool reads_e(const d3_group* group) { return group->e.data != NULL && group->gamma != 0.0f; }
static bool reads_product(const d3_group* group) { return group->g.k > 0 && group->g.alpha != 0.0f; }
static bool is_empty(const d3_group* group) {
    return group->g.batch == 0 || group->g.m == 0 || group->g.n == 0;
}

static dion3_status unaddressable(const char* name, const dion3_tensor* t) {
    return d3_fail(DION3_ERR_UNSUPPORTED,
                   "%s at %p with strides (%lld, %lld, %lld): the sm_90a kernels need one "
                   "contiguous dimension, the "
                   "other strides positive multiples of 8 elements, and an address that is a "
                   "multiple of 16 bytes; "
                   "copy it to aligned workspace or use the generic kernels",
                   name, t->data, (long long)t->batch_stride, (long long)t->row_stride,
                   (long long)t->col_stride);
}

/* C, D or E: contiguous rows; of a symmetric matrix contiguous columns will do. */
static bool result_addressable(const dion3_tensor* t, const dion3_gemm* g, int symmetric) {
    return addressable(t, g->batch, g->m, g->n, false) ||
           (symmetric && addressable(t, g->batch, g->m, g->n, true));
}

/* The variant of an addressable group, or D3_VARIANTS. */
static int choose_variant(const d3_group* group, int symmetric) {
    const dion3_gemm* g = &group->g;
    const int variant =
        (symmetric ? D3_VARIANT_SYMMETRIC : 0) + (reads_c(group) || reads_e(group) ? D3_VARIANT_OPERANDS : 0);
    const bool a_k = addressable(&g->a, g->batch, g->m, g->k, false);
    const bool a_mn = addressable(&g->a, g->batch, g->m, g->k, true);
    if (!reads_product(group)) return variant;
    if (symmetric) {
        if (a_k && addressable(&g->b, g->batch, g->n, g->k, false)) return variant;
        if (a_mn && addressable(&g->b, g->batch, g->n, g->k, true)) return variant + D3_VARIANT_MN;
    } else if (a_k) {
        if (addressable(&g->b, g->batch, g->k, g->n, false)) return variant + D3_VARIANT_MN;
        if (addressable(&g->b, g->batch, g->k, g->n, true)) return variant;
    }
    return D3_VARIANTS;
}

static dion3_status check_dtypes(const d3_group* group) {
    const dion3_gemm* g = &group->g;
    const int dtype = g->a.dtype;
    D3_REQUIRE(dtype == DION3_F16 || dtype == DION3_BF16, "a: dtype %d must be fp16 (%d) or bf16 (%d)", dtype,
               DION3_F16, DION3_BF16);
    D3_REQUIRE(g->b.dtype == dtype, "b: dtype %d must be that of a, %d", g->b.dtype, dtype);
    D3_REQUIRE(g->d.dtype == DION3_F16 || g->d.dtype == DION3_BF16,
               "d: dtype %d must be fp16 (%d) or bf16 (%d)", g->d.dtype, DION3_F16, DION3_BF16);
    D3_REQUIRE(!reads_c(group) || g->c.dtype == dtype, "c: dtype %d must be that of a, %d", g->c.dtype,
               dtype);
    D3_REQUIRE(!reads_e(group) || group->e.dtype == dtype, "e: dtype %d must be that of a, %d",
               group->e.dtype, dtype);
    return DION3_OK;
}

dion3_status d3_gemm_sm90_check(const d3_group* group, int symmetric) {
    const dion3_gemm* g = &group->g;
    D3_REQUIRE(g->batch >= 0 && g->m >= 0 && g->n >= 0 && g->k >= 0,
               "batch=%lld, m=%lld, n=%lld, k=%lld must not be negative", (long long)g->batch,
               (long long)g->m, (long long)g->n, (long long)g->k);
    D3_REQUIRE(!symmetric || g->m == g->n, "m=%lld must equal n=%lld in a symmetric product", (long long)g->m,
               (long long)g->n);
    D3_REQUIRE(symmetric || (!reads_e(group) && group->delta == 0.0f),
               "e and delta belong to the symmetric product");
    D3_TRY(check_dtypes(group));
    if (is_empty(group)) return DION3_OK;
    if (g->batch > INT_MAX / 2 || g->m > INT_MAX / 2 || g->n > INT_MAX / 2 || g->k > INT_MAX / 2) {
        return d3_fail(DION3_ERR_UNSUPPORTED, "a size of the product is above 2^30");
    }
    if (!result_addressable(&g->d, g, symmetric)) return unaddressable("d", &g->d);
    if (g->n % 8 != 0 && !group->d_padded) {
        return d3_fail(DION3_ERR_UNSUPPORTED,
                       "d has rows of %lld elements, and the sm_90a kernels write rows up to a "
                       "multiple of 8: write to "
                       "workspace with padded rows (d_padded) or use the generic kernels",
                       (long long)g->n);
    }
    if (reads_c(group) && !result_addressable(&g->c, g, symmetric)) return unaddressable("c", &g->c);
    if (reads_e(group) && !result_addressable(&group->e, g, symmetric)) return unaddressable("e", &group->e);
    if (choose_variant(group, symmetric) != D3_VARIANTS) return DION3_OK;
    if (addressable(&g->a, g->batch, g->m, g->k, false) ||
        (symmetric && addressable(&g->a, g->batch, g->m, g->k, true))) {
        return unaddressable("b", &g->b);
    }
    return unaddressable("a", &g->a);
}

/* ---- tensor maps ---------------------------------------------------------------------------- */

typedef CUresult (*encode_tiled_fn)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                    CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                    CUtensorMapFloatOOBfill);

/* cuTensorMapEncodeTiled of the driver, looked up once. Threads that race find the same. */
static dion3_status find_encode(encode_tiled_fn* encode) {
    static void* found = NULL;
    void* function = __atomic_load_n(&found, __ATOMIC_ACQUIRE);
    if (function == NULL) {
        cudaDriverEntryPointQueryResult result;
        D3_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                 cudaEnableDefault, &result));
        if (result != cudaDriverEntryPointSuccess || function == NULL) {
            return d3_fail(DION3_ERR_UNSUPPORTED,
                           "the CUDA driver has no cuTensorMapEncodeTiled; it must be 12.0 or newer");
        }
        __atomic_store_n(&found, function, __ATOMIC_RELEASE);
    }
    *encode = (encode_tiled_fn)function;
    return DION3_OK;
}

/* Strides that no element uses (sizes of 1) may be anything TMA accepts. 16-bit elements are
 * moved as bits. */
static dion3_status encode_map(encode_tiled_fn encode, CUtensorMap* map, const sm90_view* v, int box_outer) {
    const int64_t outer_stride = v->outer > 1 ? v->outer_stride : div_up(v->inner, 8) * 8;
    const int64_t batch_stride = v->batch > 1 ? v->batch_stride : 8;
    const cuuint64_t sizes[3] = {(cuuint64_t)v->inner, (cuuint64_t)v->outer, (cuuint64_t)v->batch};
    const cuuint64_t strides[2] = {(cuuint64_t)outer_stride * 2, (cuuint64_t)batch_stride * 2};
    const cuuint32_t box[3] = {64, (cuuint32_t)box_outer, 1}, steps[3] = {1, 1, 1};
    const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, v->data, sizes, strides, box,
                                   steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return DION3_OK;
    return d3_fail(DION3_ERR_CUDA,
                   "cuTensorMapEncodeTiled refuses (%lld, %lld, %lld) with strides (%lld, %lld) at "
                   "%p: CUresult %d",
                   (long long)v->batch, (long long)v->outer, (long long)v->inner, (long long)batch_stride,
                   (long long)outer_stride, v->data, (int)result);
}

static dion3_status encode_result(encode_tiled_fn encode, CUtensorMap* map, const dion3_tensor* t,
                                  const dion3_gemm* g) {
    const bool transposed = !addressable(t, g->batch, g->m, g->n, false);
    const sm90_view view = view_of(t, g->batch, g->m, g->n, transposed);
    return encode_map(encode, map, &view, 64);
}

template <class Config>
static dion3_status encode_operands(encode_tiled_fn encode, sm90_group* out, const dion3_gemm* g) {
    const sm90_view a = view_of(&g->a, g->batch, g->m, g->k, Config::A_MN);
    /* In the symmetric product B is (n, k), in the general one (k, n). */
    const sm90_view b = Config::SYMMETRIC ? view_of(&g->b, g->batch, g->n, g->k, Config::B_MN)
                                          : view_of(&g->b, g->batch, g->k, g->n, !Config::B_MN);
    D3_TRY(encode_map(encode, &out->a, &a, sm90_box_rows(Config::A_MN)));
    return encode_map(encode, &out->b, &b, sm90_box_rows(Config::B_MN));
}

/* ---- launch --------------------------------------------------------------------------------- */

static bool same_matrices(const dion3_tensor* a, const dion3_tensor* b) {
    return a->data == b->data && a->batch_stride == b->batch_stride && a->row_stride == b->row_stride &&
           a->col_stride == b->col_stride;
}

template <class Config>
static dion3_status fill_group(encode_tiled_fn encode, sm90_group* out, const d3_group* group) {
    const dion3_gemm* g = &group->g;
    D3_TRY(encode_result(encode, &out->d, &g->d, g));
    out->operands = 0;
    out->beta = 0.0f;
    out->beta_device = NULL;
    out->gamma = 0.0f;
    if (reads_c(group)) {
        D3_TRY(encode_result(encode, &out->c, &g->c, g));
        out->operands += 1;
        out->beta = g->beta;
        out->beta_device = g->beta_device;
    }
    if (reads_e(group)) { /* E alone takes the place of C */
        D3_TRY(encode_result(encode, out->operands > 0 ? &out->e : &out->c, &group->e, g));
        if (out->operands > 0) {
            out->gamma = group->gamma;
        } else {
            out->beta = group->gamma;
        }
        out->operands += 1;
    }
    out->alpha = g->alpha;
    out->alpha_device = g->alpha_device;
    out->delta = group->delta;
    out->m = (int32_t)g->m;
    out->n = (int32_t)g->n;
    out->d_bf16 = g->d.dtype == DION3_BF16;
    if (reads_product(group)) {
        D3_TRY(encode_operands<Config>(encode, out, g));
        out->k_steps = (int32_t)div_up(g->k, D3_BLOCK_K);
        out->k_first = 0;
        out->a_is_b = Config::SYMMETRIC && same_matrices(&g->a, &g->b);
    } else { /* one step of zeros: every box lies outside of maps with k = 1 */
        const sm90_view none = {g->d.data, g->batch, 1, 1, 8, 8};
        D3_TRY(encode_map(encode, &out->a, &none, sm90_box_rows(Config::A_MN)));
        D3_TRY(encode_map(encode, &out->b, &none, sm90_box_rows(Config::B_MN)));
        out->k_steps = 1;
        out->k_first = D3_BLOCK_K;
        out->a_is_b = 0;
        out->alpha = 1.0f;
        out->alpha_device = NULL;
    }
    out->order.batch = (uint32_t)g->batch;
    out->order.rows = (uint32_t)div_up(g->m, D3_BLOCK);
    out->order.cols = (uint32_t)div_up(g->n, D3_BLOCK);
    out->order.per_matrix = (uint32_t)(Config::SYMMETRIC ? d3_tri_count(out->order.rows)
                                                         : (int64_t)out->order.rows * out->order.cols);
    return DION3_OK;
}

/* Raises the kernel's shared memory limit, once per device. */
template <class Config, int CAPACITY>
static dion3_status prepare_kernel(int device) {
    static uint64_t prepared = 0; /* one bit a device */
    const uint64_t bit = (uint64_t)1 << (device & 63);
    if (device < 64 && (__atomic_load_n(&prepared, __ATOMIC_ACQUIRE) & bit)) return DION3_OK;
    D3_CUDA(cudaFuncSetAttribute(gemm_sm90_kernel<Config, CAPACITY>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)sizeof(sm90_shared<Config>)));
    if (device < 64) __atomic_fetch_or(&prepared, bit, __ATOMIC_RELEASE);
    return DION3_OK;
}

/* The device the launch goes to, and its multiprocessors. */
struct sm90_device {
    int id, multiprocessors;
};

static dion3_status find_device(sm90_device* device) {
    int major, minor;
    D3_CUDA(cudaGetDevice(&device->id));
    D3_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device->id));
    D3_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device->id));
    if (major != 9 || minor != 0) {
        return d3_fail(DION3_ERR_UNSUPPORTED,
                       "device %d has compute capability %d.%d; the sm_90a kernels run on 9.0 "
                       "only: use the generic ones",
                       device->id, major, minor);
    }
    D3_CUDA(cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, device->id));
    return DION3_OK;
}

template <class Config, int CAPACITY>
static dion3_status launch(encode_tiled_fn encode, const sm90_device* device, const d3_group* const* groups,
                           int count, dion3_stream stream) {
    sm90_params<CAPACITY> params;
    d3_order* orders[CAPACITY];
    int32_t steps[CAPACITY];
    D3_TRY((prepare_kernel<Config, CAPACITY>(device->id)));
    for (int i = 0; i < count; i++) {
        D3_TRY(fill_group<Config>(encode, &params.group[i], groups[i]));
        orders[i] = &params.group[i].order;
        steps[i] = params.group[i].k_steps;
    }
    if (!d3_order_launch(orders, steps, count, Config::SYMMETRIC, (uint32_t)device->multiprocessors))
        return d3_fail(DION3_ERR_UNSUPPORTED, "2^31 tiles or more in one list of products");
    params.units = orders[count - 1]->end;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(
        params.units < (uint32_t)device->multiprocessors ? params.units : (uint32_t)device->multiprocessors);
    config.blockDim = dim3(D3_THREADS);
    config.dynamicSmemBytes = sizeof(sm90_shared<Config>);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    D3_CUDA(cudaLaunchKernelEx(&config, gemm_sm90_kernel<Config, CAPACITY>, params));
    D3_LAUNCHED();
    return DION3_OK;
}

enum {
    FEW_GROUPS = 4,  /* short parameters are faster to launch */
    MANY_GROUPS = 42 /* what 32,764 bytes hold */
};
static_assert(sizeof(sm90_params<MANY_GROUPS>) <= 32764, "the limit of kernel parameters");

template <class Config>
static dion3_status launch_all(encode_tiled_fn encode, const sm90_device* device,
                               const d3_group* const* groups, int count, dion3_stream stream) {
    if (count == 0) return DION3_OK;
    if (count <= FEW_GROUPS) return launch<Config, FEW_GROUPS>(encode, device, groups, count, stream);
    return launch<Config, MANY_GROUPS>(encode, device, groups, count, stream);
}

template <bool BF16, int VARIANT>
static dion3_status launch_variant(int variant, encode_tiled_fn encode, const sm90_device* device,
                                   const d3_group* const* groups, int count, dion3_stream stream) {
    if constexpr (VARIANT == D3_VARIANTS) {
        return DION3_OK;
    } else {
        if (variant == VARIANT)
            return launch_all<sm90_config<BF16, VARIANT>>(encode, device, groups, count, stream);
        return launch_variant<BF16, VARIANT + 1>(variant, encode, device, groups, count, stream);
    }
}

/* Longest k first: the short tiles then fill the end of the launch. Stable, few elements. */
static void sort_by_k(const d3_group** list, int count) {
    for (int i = 1; i < count; i++) {
        const d3_group* group = list[i];
        int j = i;
        for (; j > 0 && list[j - 1]->g.k < group->g.k; j--) list[j] = list[j - 1];
        list[j] = group;
    }
}

dion3_status d3_gemm_sm90(const d3_group* groups, int64_t count, int symmetric, dion3_stream stream) {
    sm90_device device;
    encode_tiled_fn encode = NULL;
    for (int64_t i = 0; i < count; i++) D3_TRY(d3_gemm_sm90_check(&groups[i], symmetric));
    D3_TRY(find_device(&device));
    D3_TRY(find_encode(&encode));
    for (int variant = 0; variant < D3_VARIANTS; variant++) {
        for (int bf16 = 0; bf16 < 2; bf16++) {
            for (int64_t next = 0; next < count;) {
                const d3_group* list[MANY_GROUPS];
                int length = 0;
                for (; next < count && length < MANY_GROUPS; next++) {
                    const d3_group* group = &groups[next];
                    if (is_empty(group) || (group->g.a.dtype == DION3_BF16) != bf16) continue;
                    if (choose_variant(group, symmetric) == variant) list[length++] = group;
                }
                sort_by_k(list, length);
                D3_TRY((bf16 ? launch_variant<true, 0>(variant, encode, &device, list, length, stream)
                             : launch_variant<false, 0>(variant, encode, &device, list, length, stream)));
            }
        }
    }
    return DION3_OK;
}
