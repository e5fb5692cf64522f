/*
 * torch_binding_gemm.cpp - the matrix products and Newton-Schulz on CUDA tensors.
 *
 * Operators dion3::_newton_schulz_, _symmetric_mm and _gemm_add, called by dion3/newton_schulz.py for what the
 * kernels take: CUDA, compute dtype float16 or bfloat16. backend is dion3_backend: 0 chooses, 1 and 2 insist
 * on the sm_90a and on the generic kernels. Runs on the tensors' device and on torch's current stream there.
 */
#ifdef DION3_WITH_CUDA
#include "dion3.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

/* More workspace than this does not make a call faster: a batch that needs more is done in pieces of whole
 * waves of tiles (unless one matrix needs more). */
constexpr size_t WORKSPACE_CAP = size_t(2) << 30;

int32_t dtype_of(const char* op, const char* name, at::ScalarType type) {
    TORCH_CHECK(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, "dion3::", op, ": ", name,
                " has dtype ", type, ", must be float32, float16 or bfloat16");
    return type == at::kFloat ? DION3_F32 : type == at::kHalf ? DION3_F16 : DION3_BF16;
}

void check_device(const char* op, const char* name, const Tensor& t, at::Device device) {
    TORCH_CHECK(device.is_cuda() && t.device() == device, "dion3::", op, ": ", name, " is on ", t.device(),
                ", must be on a CUDA device and all on one (", device, ")");
}

/* (batch, rows, cols) of a tensor with any number of batch dimensions; a copy where no view is possible. */
Tensor as_batch(const char* op, const char* name, const Tensor& t) {
    TORCH_CHECK(t.dim() >= 2, "dion3::", op, ": ", name, " has shape ", t.sizes(),
                ", must have at least 2 dimensions");
    int64_t batch = 1;
    for (int64_t i = 0; i < t.dim() - 2; ++i) batch *= t.size(i);
    return t.reshape({batch, t.size(-2), t.size(-1)});
}

dion3_tensor describe(const char* op, const char* name, const Tensor& t) {
    return {t.numel() ? t.data_ptr() : nullptr,
            t.stride(0),
            t.stride(1),
            t.stride(2),
            dtype_of(op, name, t.scalar_type()),
            0};
}

void check_status(dion3_status status) { TORCH_CHECK(status == DION3_OK, dion3_last_error()); }

Tensor workspace_of(size_t bytes, at::Device device) {
    return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device));
}

dion3_stream stream_of(at::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

/* ---- Newton-Schulz ------------------------------------------------------------------------------ */
int32_t method_of(const std::string& method) {
    if (method == "auto") return DION3_NS_AUTO;
    if (method == "standard") return DION3_NS_STANDARD;
    TORCH_CHECK(method == "gram", "dion3::newton_schulz: method=\"", method,
                "\" must be \"auto\", \"standard\" or \"gram\"");
    return DION3_NS_GRAM;
}

void run_newton_schulz(const std::vector<dion3_ns_stack>& stacks, const dion3_ns_program& program,
                       at::Device device) {
    const int64_t count = static_cast<int64_t>(stacks.size());
    size_t least = 0;
    const size_t all = dion3_newton_schulz_workspace_size(stacks.data(), count, &program, &least);
    const size_t bytes = std::max(least, std::min(all, WORKSPACE_CAP));
    const Tensor workspace = workspace_of(bytes, device);
    check_status(dion3_newton_schulz_cuda(stacks.data(), count, &program, workspace.data_ptr(), bytes,
                                          stream_of(device)));
}

void newton_schulz_(at::TensorList x, at::TensorList out, at::ArrayRef<double> coefficients,
                    at::IntArrayRef restarts, const std::string& method, at::ScalarType compute_dtype,
                    bool normalized, double eps, int64_t backend) {
    const char* op = "newton_schulz_out";
    TORCH_CHECK(x.size() == out.size(), "dion3::", op, ": x and out have ", x.size(), " and ", out.size(),
                " entries, must have as many");
    TORCH_CHECK(coefficients.size() % 3 == 0, "dion3::", op, ": coefficients has ", coefficients.size(),
                " numbers, must have 3 for each iteration");
    if (x.empty()) return;
    const at::Device device = x[0].device();
    const c10::DeviceGuard guard(device);
    const std::vector<int32_t> after(restarts.begin(), restarts.end());
    const dion3_ns_program program = {coefficients.data(),
                                      static_cast<int32_t>(coefficients.size() / 3),
                                      method_of(method),
                                      after.data(),
                                      static_cast<int32_t>(after.size()),
                                      dtype_of(op, "compute", compute_dtype),
                                      static_cast<int32_t>(backend),
                                      normalized,
                                      eps};
    std::vector<dion3_ns_stack> stacks;
    std::vector<Tensor> sources, targets; /* keep copies alive */
    for (size_t i = 0; i < x.size(); ++i) {
        check_device(op, "x", x[i], device);
        check_device(op, "out", out[i], device);
        TORCH_CHECK(x[i].sizes() == out[i].sizes(), "dion3::", op, ": x[", i, "] and out[", i,
                    "] have shapes ", x[i].sizes(), " and ", out[i].sizes(), ", must be alike");
        const Tensor source = as_batch(op, "x", x[i]), target = as_batch(op, "out", out[i]);
        stacks.push_back({describe(op, "x", source), describe(op, "out", target), source.size(0),
                          source.size(1), source.size(2)});
        sources.push_back(source);
        targets.push_back(target);
    }
    run_newton_schulz(stacks, program, device);
    for (size_t i = 0; i < out.size(); ++i) {
        if (targets[i].numel() && targets[i].data_ptr() != out[i].data_ptr()) {
            out[i].copy_(targets[i].view(out[i].sizes()));
        }
    }
}

/* ---- products ----------------------------------------------------------------------------------- */

/* A factor of one element or one per matrix as (batch) float32; undefined where there is none. */
Tensor factors(const char* op, const char* name, const OptionalTensor& t, int64_t batch, at::Device device) {
    if (!t) return Tensor();
    TORCH_CHECK(t->numel() == 1 || t->numel() == batch, "dion3::", op, ": ", name, " has ", t->numel(),
                " elements, must have 1 or one per matrix (", batch, ")");
    return t->to(device, at::kFloat).reshape({-1}).expand({batch}).contiguous();
}

Tensor product(const char* op, bool symmetric, const Tensor& a_in, const Tensor& b_in,
               const OptionalTensor& c_in, double alpha, double beta, const OptionalTensor& alpha_tensor,
               const OptionalTensor& beta_tensor, int64_t backend) {
    const at::Device device = a_in.device();
    check_device(op, "a", a_in, device);
    check_device(op, "b", b_in, device);
    const c10::DeviceGuard guard(device);
    const Tensor a = as_batch(op, "a", a_in), b = as_batch(op, "b", b_in);
    const int64_t batch = a.size(0), m = a.size(1), k = a.size(2), n = b.size(symmetric ? 1 : 2);
    TORCH_CHECK(b.size(0) == batch && b.size(symmetric ? 2 : 1) == k, "dion3::", op, ": a and b have shapes ",
                a_in.sizes(), " and ", b_in.sizes(), ", which do not fit");
    std::vector<int64_t> shape = a_in.sizes().vec();
    shape.back() = n;
    const Tensor result = at::empty(shape, a_in.options());
    const Tensor d = result.view({batch, m, n});
    dion3_gemm g = {describe(op, "d", d),
                    describe(op, "a", a),
                    describe(op, "b", b),
                    {},
                    batch,
                    m,
                    n,
                    k,
                    static_cast<float>(alpha),
                    0.0f,
                    nullptr,
                    nullptr};
    Tensor c;
    if (c_in && beta != 0.0) {
        check_device(op, "c", *c_in, device);
        c = as_batch(op, "c", *c_in);
        TORCH_CHECK(c_in->sizes() == result.sizes(), "dion3::", op, ": c has shape ", c_in->sizes(),
                    ", must be ", result.sizes());
        g.c = describe(op, "c", c);
        g.beta = static_cast<float>(beta);
    }
    const Tensor alphas = factors(op, "alpha_tensor", alpha_tensor, batch, device);
    const Tensor betas = factors(op, "beta_tensor", beta_tensor, batch, device);
    if (alphas.defined()) g.alpha_device = alphas.data_ptr<float>();
    if (betas.defined()) g.beta_device = betas.data_ptr<float>();
    const auto which = static_cast<dion3_backend>(backend);
    const auto size = symmetric ? dion3_symmetric_mm_workspace_size : dion3_gemm_add_workspace_size;
    const auto run = symmetric ? dion3_symmetric_mm_cuda : dion3_gemm_add_cuda;
    const size_t bytes = size(&g, which);
    const Tensor workspace = workspace_of(bytes, device);
    check_status(run(&g, which, bytes ? workspace.data_ptr() : nullptr, bytes, stream_of(device)));
    return result;
}

Tensor symmetric_mm(const Tensor& a, const Tensor& b, const OptionalTensor& c, double alpha, double beta,
                    const OptionalTensor& alpha_tensor, const OptionalTensor& beta_tensor, int64_t backend) {
    return product("symmetric_mm", true, a, b, c, alpha, beta, alpha_tensor, beta_tensor, backend);
}

Tensor gemm_add(const Tensor& a, const Tensor& b, const OptionalTensor& c, double alpha, double beta,
                const OptionalTensor& alpha_tensor, const OptionalTensor& beta_tensor, int64_t backend) {
    return product("gemm_add", false, a, b, c, alpha, beta, alpha_tensor, beta_tensor, backend);
}

} // namespace

#define PRODUCT_ARGUMENTS                                                                                    \
    "(Tensor a, Tensor b, Tensor? c, float alpha, float beta, Tensor? alpha_tensor=None, "                   \
    "Tensor? beta_tensor=None, int backend=0) -> Tensor"

TORCH_LIBRARY_FRAGMENT(dion3, m) {
    m.def("_newton_schulz_(Tensor[] x, Tensor(a!)[] out, float[] coefficients, int[] restarts, str method, "
          "ScalarType compute_dtype, bool normalized, float eps, int backend=0) -> ()");
    m.def("_symmetric_mm" PRODUCT_ARGUMENTS);
    m.def("_gemm_add" PRODUCT_ARGUMENTS);
}

TORCH_LIBRARY_IMPL(dion3, CUDA, m) {
    m.impl("_newton_schulz_", newton_schulz_);
    m.impl("_symmetric_mm", symmetric_mm);
    m.impl("_gemm_add", gemm_add);
}
#endif
