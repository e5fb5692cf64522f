/*
 * torch_binding.cpp - the operators dion3::* on tensors: check, fill the item table, call the C function.
 *
 * The only file that includes torch. The schemas are defined in dion3/ops.py; a list holds one entry a
 * matrix, (rows, cols) or (batch, rows, cols), and an empty tensor in an optional list means "absent". What
 * depends on tensors (dtype, device, sizes against each other) is checked here, the rest by the C functions.
 */
#include "dion3.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/extension.h>
#include <torch/library.h>

#ifdef DION3_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <initializer_list>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using at::TensorList;
using Ints = at::IntArrayRef;

struct Length {
    const char* name;
    size_t length;
};

/* All lists have one entry a matrix. */
void check_lengths(const char* op, int64_t n, std::initializer_list<Length> lists) {
    for (const Length& list : lists) {
        TORCH_CHECK(static_cast<int64_t>(list.length) == n, "dion3::", op, ": ", list.name, " has ",
                    list.length, " entries, must have ", n);
    }
}

/* An empty tensor says "absent". */
bool present(const Tensor& t) { return t.defined() && t.numel() > 0; }

void check_device(const char* op, const char* name, int64_t i, const Tensor& t, at::Device device) {
    TORCH_CHECK(t.device() == device, "dion3::", op, ": ", name, "[", i, "] is on ", t.device(),
                ", must be on ", device);
}

int32_t dtype_of(const char* op, const char* name, int64_t i, const Tensor& t) {
    switch (t.scalar_type()) {
    case at::kFloat:
        return DION3_F32;
    case at::kHalf:
        return DION3_F16;
    case at::kBFloat16:
        return DION3_BF16;
    default:
        TORCH_CHECK(false, "dion3::", op, ": ", name, "[", i, "] has dtype ", t.scalar_type(),
                    ", must be float32, float16 or bfloat16");
    }
}

struct Sizes {
    int64_t batch, rows, cols;
};

Sizes sizes_of(const char* op, const char* name, int64_t i, const Tensor& t) {
    TORCH_CHECK(t.dim() == 2 || t.dim() == 3, "dion3::", op, ": ", name, "[", i, "] has shape ", t.sizes(),
                ", must have 2 or 3 dimensions");
    return {t.dim() == 3 ? t.size(0) : 1, t.size(-2), t.size(-1)};
}

/* A stack of matrices of the sizes that it must have. */
dion3_tensor matrix(const char* op, const char* name, int64_t i, const Tensor& t, at::Device device,
                    Sizes want) {
    check_device(op, name, i, t, device);
    const Sizes s = sizes_of(op, name, i, t);
    TORCH_CHECK(s.batch == want.batch && s.rows == want.rows && s.cols == want.cols, "dion3::", op, ": ",
                name, "[", i, "] has shape ", t.sizes(), ", must be (", want.batch, ", ", want.rows, ", ",
                want.cols, ")");
    return {t.data_ptr(), t.dim() == 3 ? t.stride(0) : 0, t.stride(-2),
            t.stride(-1), dtype_of(op, name, i, t),       0};
}

/* A dense array of a known type, or NULL when it is absent. */
template <typename T>
T* array(const char* op, const char* name, int64_t i, const Tensor& t, at::Device device, int64_t numel) {
    if (!present(t)) return nullptr;
    check_device(op, name, i, t, device);
    TORCH_CHECK(t.scalar_type() == c10::CppTypeToScalarType<T>::value, "dion3::", op, ": ", name, "[", i,
                "] has dtype ", t.scalar_type(), ", must be ", c10::CppTypeToScalarType<T>::value);
    TORCH_CHECK(t.numel() == numel, "dion3::", op, ": ", name, "[", i, "] has ", t.numel(),
                " elements, must have ", numel);
    TORCH_CHECK(t.is_contiguous(), "dion3::", op, ": ", name, "[", i, "] must be contiguous");
    return t.data_ptr<T>();
}

template <typename T>
T* needed(const char* op, const char* name, int64_t i, const Tensor& t, at::Device device, int64_t numel) {
    TORCH_CHECK(numel == 0 || present(t), "dion3::", op, ": ", name, "[", i, "] must not be empty");
    return array<T>(op, name, i, t, device, numel);
}

/* The row of a matrix's group. */
const float* hyper_row(const char* op, const Tensor& hyper, at::Device device, int64_t i, int64_t group) {
    TORCH_CHECK(hyper.dim() == 2 && hyper.size(1) == DION3_HYPER_COUNT && hyper.scalar_type() == at::kFloat &&
                    hyper.is_contiguous() && hyper.device() == device,
                "dion3::", op, ": hyper must be a contiguous float32 tensor (groups, ", DION3_HYPER_COUNT + 0,
                ") on ", device, ", not ", hyper.scalar_type(), " ", hyper.sizes(), " on ", hyper.device());
    TORCH_CHECK(group >= 0 && group < hyper.size(0), "dion3::", op, ": group[", i, "]=", group,
                " must be 0 .. ", hyper.size(0) - 1);
    return hyper.data_ptr<float>() + group * DION3_HYPER_COUNT;
}

/* The number of a matrix's group, or NULL when there are none. */
const float* feedback_of(const char* op, const Tensor& feedback, at::Device device, int64_t i,
                         int64_t group) {
    if (!present(feedback)) return nullptr;
    TORCH_CHECK(feedback.dim() == 1 && feedback.scalar_type() == at::kFloat && feedback.is_contiguous() &&
                    feedback.device() == device,
                "dion3::", op, ": feedback must be empty or a contiguous float32 tensor (groups) on ", device,
                ", not ", feedback.scalar_type(), " ", feedback.sizes(), " on ", feedback.device());
    TORCH_CHECK(group >= 0 && group < feedback.size(0), "dion3::", op, ": group[", i, "]=", group,
                " must be 0 .. ", feedback.size(0) - 1, ", of which there is feedback");
    return feedback.data_ptr<float>() + group;
}

void check_status(dion3_status status) { TORCH_CHECK(status == DION3_OK, dion3_last_error()); }

/* Runs the C function of the tensors' device; on CUDA on torch's current stream, the workspace from
 * torch's allocator, which keeps it until that stream is done with it. */
template <typename Item>
using CpuFunction = dion3_status (*)(const Item*, int64_t);

#ifdef DION3_WITH_CUDA
template <typename Item>
using CudaFunction = dion3_status (*)(const Item*, int64_t, dion3_stream);
template <typename Item>
using CudaWorkspaceFunction = dion3_status (*)(const Item*, int64_t, void*, size_t, dion3_stream);
template <typename Item>
using SizeFunction = size_t (*)(const Item*, int64_t);

template <typename Item>
void call(const std::vector<Item>& items, at::Device device, CpuFunction<Item> cpu, CudaFunction<Item> cuda) {
    const int64_t n = static_cast<int64_t>(items.size());
    if (device.is_cpu()) return check_status(cpu(items.data(), n));
    const c10::DeviceGuard guard(device);
    check_status(cuda(items.data(), n, c10::cuda::getCurrentCUDAStream(device.index()).stream()));
}

template <typename Item>
void call(const std::vector<Item>& items, at::Device device, CpuFunction<Item> cpu, SizeFunction<Item> size,
          CudaWorkspaceFunction<Item> cuda) {
    const int64_t n = static_cast<int64_t>(items.size());
    if (device.is_cpu()) return check_status(cpu(items.data(), n));
    const c10::DeviceGuard guard(device);
    const int64_t bytes = static_cast<int64_t>(size(items.data(), n));
    const Tensor workspace = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    check_status(cuda(items.data(), n, bytes ? workspace.data_ptr() : nullptr, static_cast<size_t>(bytes),
                      c10::cuda::getCurrentCUDAStream(device.index()).stream()));
}
#define D3_CALL(op) call(items, device, dion3_##op##_cpu, dion3_##op##_cuda)
#define D3_CALL_WITH_WORKSPACE(op)                                                                           \
    call(items, device, dion3_##op##_cpu, dion3_##op##_workspace_size, dion3_##op##_cuda)
#else
template <typename Item>
void call(const std::vector<Item>& items, CpuFunction<Item> cpu) {
    check_status(cpu(items.data(), static_cast<int64_t>(items.size())));
}
#define D3_CALL(op) call(items, dion3_##op##_cpu)
#define D3_CALL_WITH_WORKSPACE(op) D3_CALL(op)
#endif

void momentum_(TensorList momentum, TensorList grad, TensorList slots, const Tensor& feedback,
               const Tensor& hyper, Ints group, Ints axis, TensorList score, TensorList sumsq) {
    const char* op = "momentum_";
    const int64_t n = static_cast<int64_t>(momentum.size());
    check_lengths(op, n,
                  {{"grad", grad.size()},
                   {"slots", slots.size()},
                   {"group", group.size()},
                   {"axis", axis.size()},
                   {"score", score.size()},
                   {"sumsq", sumsq.size()}});
    if (n == 0) return;
    const at::Device device = momentum[0].device();
    std::vector<dion3_momentum_item> items(n);
    for (int64_t i = 0; i < n; ++i) {
        const Sizes s = sizes_of(op, "momentum", i, momentum[i]);
        const int64_t slices = s.batch * (axis[i] == DION3_COLS ? s.cols : s.rows);
        items[i] = {matrix(op, "momentum", i, momentum[i], device, s),
                    matrix(op, "grad", i, grad[i], device, s),
                    s.batch,
                    s.rows,
                    s.cols,
                    array<int32_t>(op, "slots", i, slots[i], device, slices),
                    feedback_of(op, feedback, device, i, group[i]),
                    hyper_row(op, hyper, device, i, group[i]),
                    array<double>(op, "score", i, score[i], device, slices),
                    array<double>(op, "sumsq", i, sumsq[i], device, slices),
                    static_cast<int32_t>(axis[i]),
                    0};
    }
    D3_CALL_WITH_WORKSPACE(momentum);
}

void select_(TensorList score, TensorList sumsq, TensorList indices, TensorList slots, TensorList norm,
             Ints k) {
    const char* op = "select_";
    const int64_t n = static_cast<int64_t>(score.size());
    check_lengths(op, n,
                  {{"sumsq", sumsq.size()},
                   {"indices", indices.size()},
                   {"slots", slots.size()},
                   {"norm", norm.size()},
                   {"k", k.size()}});
    if (n == 0) return;
    const at::Device device = score[0].device();
    std::vector<dion3_select_item> items(n);
    for (int64_t i = 0; i < n; ++i) {
        const Tensor& shaped = present(score[i]) ? score[i] : present(sumsq[i]) ? sumsq[i] : slots[i];
        TORCH_CHECK(shaped.dim() == 1 || shaped.dim() == 2, "dion3::select_: score[", i, "] has shape ",
                    shaped.sizes(), ", must be (n,) or (batch, n)");
        const int64_t batch = shaped.dim() == 2 ? shaped.size(0) : 1;
        const int64_t slices = shaped.size(-1);
        items[i] = {array<double>(op, "score", i, score[i], device, batch * slices),
                    array<double>(op, "sumsq", i, sumsq[i], device, batch * slices),
                    batch,
                    slices,
                    k[i],
                    array<int32_t>(op, "indices", i, indices[i], device, batch * k[i]),
                    array<int32_t>(op, "slots", i, slots[i], device, batch * slices),
                    array<double>(op, "norm", i, norm[i], device, batch)};
    }
    D3_CALL_WITH_WORKSPACE(select);
}

/* The sizes of what is selected from a matrix. */
Sizes selected(Sizes s, int64_t axis, int64_t k) {
    return axis == DION3_COLS ? Sizes{s.batch, s.rows, k} : Sizes{s.batch, k, s.cols};
}

void gather_(TensorList momentum, TensorList grad, TensorList indices, TensorList norm, const Tensor& hyper,
             Ints group, Ints axis, TensorList out) {
    const char* op = "gather_";
    const int64_t n = static_cast<int64_t>(momentum.size());
    check_lengths(op, n,
                  {{"grad", grad.size()},
                   {"indices", indices.size()},
                   {"norm", norm.size()},
                   {"group", group.size()},
                   {"axis", axis.size()},
                   {"out", out.size()}});
    if (n == 0) return;
    const at::Device device = momentum[0].device();
    std::vector<dion3_gather_item> items(n);
    for (int64_t i = 0; i < n; ++i) {
        const Sizes s = sizes_of(op, "momentum", i, momentum[i]);
        const Sizes o = sizes_of(op, "out", i, out[i]);
        const int64_t k = axis[i] == DION3_COLS ? o.cols : o.rows;
        items[i] = {matrix(op, "momentum", i, momentum[i], device, s),
                    present(grad[i]) ? matrix(op, "grad", i, grad[i], device, s) : dion3_tensor{},
                    matrix(op, "out", i, out[i], device, selected(s, axis[i], k)),
                    s.batch,
                    s.rows,
                    s.cols,
                    k,
                    array<int32_t>(op, "indices", i, indices[i], device, s.batch * k),
                    array<double>(op, "norm", i, norm[i], device, s.batch),
                    hyper_row(op, hyper, device, i, group[i]),
                    static_cast<int32_t>(axis[i]),
                    0};
    }
    D3_CALL(gather);
}

void neuron_(TensorList update, TensorList second_moment, TensorList indices, const Tensor& hyper, Ints group,
             TensorList factor) {
    const char* op = "neuron_";
    const int64_t n = static_cast<int64_t>(update.size());
    check_lengths(op, n,
                  {{"second_moment", second_moment.size()},
                   {"indices", indices.size()},
                   {"group", group.size()},
                   {"factor", factor.size()}});
    if (n == 0) return;
    const at::Device device = update[0].device();
    std::vector<dion3_neuron_item> items(n);
    for (int64_t i = 0; i < n; ++i) {
        const Sizes s = sizes_of(op, "update", i, update[i]);
        const int64_t neurons = s.batch ? second_moment[i].numel() / s.batch : s.rows;
        items[i] = {matrix(op, "update", i, update[i], device, s),
                    s.batch,
                    s.rows,
                    s.cols,
                    neurons,
                    needed<float>(op, "second_moment", i, second_moment[i], device, s.batch * neurons),
                    array<int32_t>(op, "indices", i, indices[i], device, s.batch * s.rows),
                    needed<float>(op, "factor", i, factor[i], device, s.batch * s.rows),
                    hyper_row(op, hyper, device, i, group[i])};
    }
    D3_CALL_WITH_WORKSPACE(neuron);
}

void update_(TensorList weight, TensorList update, TensorList slots, TensorList factor, const Tensor& hyper,
             Ints group, Ints axis, at::ArrayRef<double> scale, TensorList step, int64_t seed, Ints param_id,
             Ints index_base, Ints index_batch_stride, Ints index_row_stride) {
    const char* op = "update_";
    const int64_t n = static_cast<int64_t>(weight.size());
    check_lengths(op, n,
                  {{"update", update.size()},
                   {"slots", slots.size()},
                   {"factor", factor.size()},
                   {"group", group.size()},
                   {"axis", axis.size()},
                   {"scale", scale.size()},
                   {"step", step.size()},
                   {"param_id", param_id.size()},
                   {"index_base", index_base.size()},
                   {"index_batch_stride", index_batch_stride.size()},
                   {"index_row_stride", index_row_stride.size()}});
    if (n == 0) return;
    const at::Device device = weight[0].device();
    std::vector<dion3_update_item> items(n);
    for (int64_t i = 0; i < n; ++i) {
        const Sizes s = sizes_of(op, "weight", i, weight[i]);
        const Sizes o = sizes_of(op, "update", i, update[i]);
        const bool by_columns = axis[i] == DION3_COLS;
        const int64_t k = by_columns ? o.cols : o.rows;
        items[i] = {
            matrix(op, "weight", i, weight[i], device, s),
            matrix(op, "update", i, update[i], device, selected(s, axis[i], k)),
            s.batch,
            s.rows,
            s.cols,
            k,
            array<int32_t>(op, "slots", i, slots[i], device, s.batch * (by_columns ? s.cols : s.rows)),
            array<float>(op, "factor", i, factor[i], device, s.batch * o.rows),
            hyper_row(op, hyper, device, i, group[i]),
            array<float>(op, "step", i, step[i], device, 1),
            static_cast<uint64_t>(seed),
            index_base[i],
            index_batch_stride[i],
            index_row_stride[i],
            static_cast<uint32_t>(param_id[i]),
            static_cast<int32_t>(axis[i]),
            static_cast<float>(scale[i]),
            0};
    }
    D3_CALL(update);
}

/* AdamW walks flat arrays: what is not dense is copied, and copied back if it is written. */
struct Flat {
    Tensor original, dense;
    explicit Flat(const Tensor& t) : original(t), dense(t.contiguous()) {}
    void write_back() const {
        if (!dense.is_same(original)) original.copy_(dense);
    }
};

void adamw_(TensorList param, TensorList grad, TensorList exp_avg, TensorList exp_avg_sq, TensorList step,
            const Tensor& hyper, Ints group, c10::List<bool> stochastic, int64_t seed, Ints param_id,
            Ints index_base) {
    const char* op = "adamw_";
    const int64_t n = static_cast<int64_t>(param.size());
    check_lengths(op, n,
                  {{"grad", grad.size()},
                   {"exp_avg", exp_avg.size()},
                   {"exp_avg_sq", exp_avg_sq.size()},
                   {"step", step.size()},
                   {"group", group.size()},
                   {"stochastic", stochastic.size()},
                   {"param_id", param_id.size()},
                   {"index_base", index_base.size()}});
    if (n == 0) return;
    const at::Device device = param[0].device();
    std::vector<dion3_adamw_item> items(n);
    std::vector<Flat> written, read;
    written.reserve(3 * n);
    read.reserve(n);
    for (int64_t i = 0; i < n; ++i) {
        const Tensor* tensors[] = {&param[i], &grad[i], &exp_avg[i], &exp_avg_sq[i]};
        const char* names[] = {"param", "grad", "exp_avg", "exp_avg_sq"};
        for (int j = 0; j < 4; ++j) {
            check_device(op, names[j], i, *tensors[j], device);
            TORCH_CHECK(tensors[j]->sizes() == param[i].sizes(), "dion3::adamw_: ", names[j], "[", i,
                        "] has shape ", tensors[j]->sizes(), ", must be ", param[i].sizes());
        }
        TORCH_CHECK(exp_avg[i].scalar_type() == exp_avg_sq[i].scalar_type(), "dion3::adamw_: exp_avg[", i,
                    "] is ", exp_avg[i].scalar_type(), " and exp_avg_sq[", i, "] is ",
                    exp_avg_sq[i].scalar_type(), ", must be of one dtype");
        const int32_t dtypes[] = {dtype_of(op, "param", i, param[i]), dtype_of(op, "grad", i, grad[i]),
                                  dtype_of(op, "exp_avg", i, exp_avg[i])};
        const float* step_number = needed<float>(op, "step", i, step[i], device, 1);
        const float* row = hyper_row(op, hyper, device, i, group[i]);
        written.emplace_back(param[i]);
        written.emplace_back(exp_avg[i]);
        written.emplace_back(exp_avg_sq[i]);
        read.emplace_back(grad[i]);
        items[i] = {written[3 * i].dense.data_ptr(),
                    read[i].dense.data_ptr(),
                    written[3 * i + 1].dense.data_ptr(),
                    written[3 * i + 2].dense.data_ptr(),
                    param[i].numel(),
                    step_number,
                    row,
                    static_cast<uint64_t>(seed),
                    index_base[i],
                    static_cast<uint32_t>(param_id[i]),
                    stochastic.get(i) ? 1 : 0,
                    dtypes[0],
                    dtypes[1],
                    dtypes[2],
                    0};
    }
    D3_CALL(adamw);
    for (const Flat& flat : written) flat.write_back();
}

/* Address, sizes and strides of every tensor of a list, as bytes to be compared. A step asks for those of
 * all parameters and states: one call instead of three a tensor. */
pybind11::bytes geometry(const pybind11::list& tensors) {
    std::vector<int64_t> facts;
    facts.reserve(8 * tensors.size());
    for (const pybind11::handle item : tensors) {
        TORCH_CHECK_TYPE(THPVariable_Check(item.ptr()), "geometry: a list of tensors is needed");
        const Tensor& t = THPVariable_Unpack(item.ptr());
        facts.push_back(reinterpret_cast<int64_t>(t.const_data_ptr()));
        facts.push_back(t.dim());
        for (const int64_t size : t.sizes()) facts.push_back(size);
        for (const int64_t stride : t.strides()) facts.push_back(stride);
    }
    return {reinterpret_cast<const char*>(facts.data()), facts.size() * sizeof(int64_t)};
}

void register_all(torch::Library& m) {
    m.impl("momentum_", momentum_);
    m.impl("select_", select_);
    m.impl("gather_", gather_);
    m.impl("neuron_", neuron_);
    m.impl("update_", update_);
    m.impl("adamw_", adamw_);
}

} // namespace

TORCH_LIBRARY_IMPL(dion3, CPU, m) { register_all(m); }
#ifdef DION3_WITH_CUDA
TORCH_LIBRARY_IMPL(dion3, CUDA, m) { register_all(m); }
#endif

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.doc() = "Build facts of the native part; importing it registers the operators dion3::*.";
    m.def("geometry", &geometry, pybind11::arg("tensors"));
    m.def("selection_count", &dion3_selection_count, pybind11::arg("fraction"), pybind11::arg("n"));
    m.attr("compiler") = std::string(__VERSION__);
    m.attr("torch_version") = std::string(TORCH_VERSION);
#ifdef DION3_WITH_CUDA
    m.attr("cuda") = true;
    m.def(
        "runs_on",
        [](int32_t device) { /* the guard goes back without making a context where it came from */
                             const c10::DeviceGuard guard(
                                 c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
                             return dion3_cuda_runs_on(device) != 0;
        },
        pybind11::arg("device"));
#else
    m.attr("cuda") = false;
#endif
}
