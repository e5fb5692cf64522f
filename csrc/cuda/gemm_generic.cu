/*
 * gemm_generic.cu - d3_gemm_generic: which of the generic kernels serves a group, and the launch tables.
 *
 * The kernels and their layout: gemm_generic.cuh. Choice: by dtype; the 64 x 64 tile where m or n is at most
 * 64, else 128 x 128; by the majors of A and B, or element by element where either cannot be copied by 16
 * bytes. Groups of one choice share a launch; every choice gives the same bits.
 */
#include "aligned.h"
#include "cuda_check.cuh"
#include "gemm.h"
#include "gemm_generic.cuh"

#include <climits>

namespace {

/* ---- host side ---------------------------------------------------------------------------------- */
/* The operand with mn as its first index. Prefers the major whose rows can be copied by 16 bytes. */
source make_source(const dion3_tensor& t, int64_t batch, int64_t mn, int64_t k, int64_t mn_stride,
                   int64_t k_stride) {
    source s = {t.data, t.batch_stride, mn_stride, k_stride, 0, 0};
    if (d3_rows_aligned(t.data, 2, batch, t.batch_stride, mn, mn_stride, k, k_stride)) {
        s.vector = 1;
    } else if (d3_rows_aligned(t.data, 2, batch, t.batch_stride, k, k_stride, mn, mn_stride)) {
        s.vector = s.mn_major = 1;
    }
    return s;
}

addend make_addend(const dion3_tensor& t, int64_t batch, int64_t m, int64_t n) {
    const bool vector = d3_rows_aligned(t.data, 2, batch, t.batch_stride, m, t.row_stride, n, t.col_stride);
    return {t.data, t.batch_stride, t.row_stride, t.col_stride, vector, 0};
}

void swap_strides(dion3_tensor& t) {
    const int64_t row_stride = t.row_stride;
    t.row_stride = t.col_stride;
    t.col_stride = row_stride;
}

/* Brings D to unit column stride where its row stride is 1: by symmetry, or as D^T = B^T A^T. */
d3_group oriented(const d3_group& in, int symmetric) {
    d3_group out = in;
    dion3_gemm& g = out.g;
    if (symmetric) {
        for (dion3_tensor* t : {&g.d, &g.c, &out.e}) {
            if (t->col_stride != 1 && t->row_stride == 1) swap_strides(*t);
        }
        /* B (n, k) as (k, n), like the general product's. */
        swap_strides(g.b);
    } else if (g.d.col_stride != 1 && g.d.row_stride == 1) {
        g.a = in.g.b;
        g.b = in.g.a;
        g.m = in.g.n;
        g.n = in.g.m;
        for (dion3_tensor* t : {&g.d, &g.a, &g.b, &g.c, &out.e}) swap_strides(*t);
    }
    return out;
}

group make_group(const d3_group& in, int symmetric, int tile) {
    const d3_group o = oriented(in, symmetric);
    const dion3_gemm& g = o.g;
    group out = {};
    out.a = make_source(g.a, g.batch, g.m, g.k, g.a.row_stride, g.a.col_stride);
    out.b = make_source(g.b, g.batch, g.n, g.k, g.b.col_stride, g.b.row_stride);
    out.c = make_addend(g.c, g.batch, g.m, g.n);
    out.e = make_addend(o.e, g.batch, g.m, g.n);
    out.d = make_addend(g.d, g.batch, g.m, g.n);
    out.m = (int32_t)g.m;
    out.n = (int32_t)g.n;
    out.k = g.alpha == 0.0f ? 0 : (int32_t)g.k; /* alpha = 0 reads neither A nor B */
    out.tile_rows = (int32_t)((g.m + tile - 1) / tile);
    out.tile_cols = (int32_t)((g.n + tile - 1) / tile);
    out.d_is_half = g.d.dtype == DION3_F16;
    out.alpha = g.alpha;
    out.beta = g.beta;
    out.gamma = o.gamma;
    out.delta = o.delta;
    out.alpha_device = g.alpha_device;
    out.beta_device = g.beta_device;
    return out;
}

template <typename T, int TILE, int LAYOUT>
dion3_status launch(const launch_table& table, dion3_stream stream) {
    using S = shape<TILE>;
    const auto kernel = gemm_generic_kernel<T, TILE, LAYOUT>;
    D3_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED_BYTES));
    const int64_t blocks = table.tiles < INT_MAX ? table.tiles : INT_MAX;
    kernel<<<(unsigned)blocks, S::THREADS, S::SHARED_BYTES, stream>>>(table);
    D3_LAUNCHED();
    return DION3_OK;
}

/* The kernels that serve a group. They give the same bits; this is about speed only. */
struct variant {
    int32_t dtype, tile, layout;
    bool operator==(const variant& o) const {
        return dtype == o.dtype && tile == o.tile && layout == o.layout;
    }
};

template <typename T, int TILE>
dion3_status launch_layout(int layout, const launch_table& table, dion3_stream stream) {
    switch (layout) {
    case 0:
        return launch<T, TILE, 0>(table, stream);
    case A_MN_MAJOR:
        return launch<T, TILE, A_MN_MAJOR>(table, stream);
    case B_MN_MAJOR:
        return launch<T, TILE, B_MN_MAJOR>(table, stream);
    case A_MN_MAJOR | B_MN_MAJOR:
        return launch<T, TILE, (A_MN_MAJOR | B_MN_MAJOR)>(table, stream);
    default:
        return launch<T, TILE, ELEMENTS>(table, stream);
    }
}

dion3_status launch_variant(const variant& v, const launch_table& table, dion3_stream stream) {
    if (v.dtype == DION3_F16) {
        return v.tile == 128 ? launch_layout<__half, 128>(v.layout, table, stream)
                             : launch_layout<__half, 64>(v.layout, table, stream);
    }
    return v.tile == 128 ? launch_layout<__nv_bfloat16, 128>(v.layout, table, stream)
                         : launch_layout<__nv_bfloat16, 64>(v.layout, table, stream);
}

variant choose(const d3_group& in, int symmetric) {
    const int32_t tile = in.g.m <= 64 || in.g.n <= 64 ? 64 : 128;
    const group g = make_group(in, symmetric, tile);
    const bool vector = g.a.vector && g.b.vector;
    return {in.g.a.dtype, tile,
            !vector ? ELEMENTS : (g.a.mn_major ? A_MN_MAJOR : 0) | (g.b.mn_major ? B_MN_MAJOR : 0)};
}

bool is_empty(const d3_group& group) { return group.g.batch == 0 || group.g.m == 0 || group.g.n == 0; }

dion3_status check_group(const d3_group& group, int64_t index) {
    const dion3_gemm& g = group.g;
    D3_REQUIRE(g.m <= INT_MAX && g.n <= INT_MAX && g.k <= INT_MAX,
               "gemm: group %lld: m=%lld, n=%lld and k=%lld must be below 2^31", (long long)index,
               (long long)g.m, (long long)g.n, (long long)g.k);
    return DION3_OK;
}

/* Launches the groups of one variant. */
dion3_status run_variant(const d3_group* groups, int64_t count, int symmetric, const variant& v,
                         dion3_stream stream) {
    launch_table table = {};
    table.symmetric = symmetric;
    for (int64_t i = 0; i < count; ++i) {
        if (!is_empty(groups[i]) && choose(groups[i], symmetric) == v) {
            group& g = table.groups[table.count++] = make_group(groups[i], symmetric, v.tile);
            g.first_tile = table.tiles;
            table.tiles += groups[i].g.batch *
                           (symmetric ? d3_tri_count(g.tile_rows) : (int64_t)g.tile_rows * g.tile_cols);
        }
        if (table.count == MAX_GROUPS || (i + 1 == count && table.count > 0)) {
            D3_TRY(launch_variant(v, table, stream));
            table.count = 0;
            table.tiles = 0;
        }
    }
    return DION3_OK;
}

} // namespace

extern "C" dion3_status d3_gemm_generic(const d3_group* groups, int64_t count, int symmetric,
                                        dion3_stream stream) {
    for (int64_t i = 0; i < count; ++i) D3_TRY(check_group(groups[i], i));
    for (const int32_t dtype : {DION3_F16, DION3_BF16}) {
        for (const int32_t tile : {128, 64}) {
            for (int32_t layout = 0; layout < LAYOUTS; ++layout) {
                D3_TRY(run_variant(groups, count, symmetric, {dtype, tile, layout}, stream));
            }
        }
    }
    return DION3_OK;
}
