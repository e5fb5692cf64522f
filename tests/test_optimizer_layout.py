"""How parameters become matrices: stacks, heads, blocks, kernels, odd strides, odd storage."""

from __future__ import annotations

import pytest
import torch
from optimizer_helpers import matrix, parameter, steps, watch
from torch.utils._pytree import tree_map

import dion3
from dion3 import plan
from dion3.options import shape_scale
from dion3.workspace import Workspace

FLAVOURS = [
    lambda p, **kw: dion3.Dion3(p, lr=0.1, **kw),
    lambda p, **kw: dion3.Dion3(p, lr=0.1, neuron_norm=True, **kw),
    lambda p, **kw: dion3.Muon(p, lr=0.1, **kw),
]
flavours = pytest.mark.parametrize("make", FLAVOURS, ids=["dion3", "dion3-neuron", "muon"])


def twin(p):
    return torch.nn.Parameter(p.detach().clone())


def run(make, params, grads, **group):
    """Three steps of parameters in one group; gradients as given at each step."""
    opt = make([{"params": params, **group}])
    steps(opt, params, grads)
    return opt


# ---- stacks ----


@flavours
@pytest.mark.parametrize(
    "shape", [(8, 12), (12, 8), (10, 10), (3, 8, 12), (2, 3, 8, 12), (4, 1, 6)]
)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_equal_shapes_do_not_mix(device, make, shape, count):
    """N parameters of one shape get bitwise the update that each gets alone."""
    together = [parameter(*shape, seed=i, device=device) for i in range(count)]
    alone = [twin(p) for p in together]
    grads = [
        [matrix(*shape, seed=10 * t + i, device=device) for i in range(count)] for t in range(3)
    ]
    run(make, together, grads)
    for i, p in enumerate(alone):
        run(make, [p], [[g[i].clone()] for g in grads])
        assert torch.equal(p, together[i]), i


@flavours
@pytest.mark.parametrize(
    "shape", [(5, 8, 12), (1, 12, 8), (2, 3, 6, 6), (6, 1, 1), (3, 1, 7), (64, 32, 3)]
)
def test_a_stack_is_its_matrices(device, make, shape):
    stack = parameter(*shape, device=device)
    flat = stack.detach().flatten(0, -3)
    singles = [torch.nn.Parameter(m.clone()) for m in flat]
    grads = [matrix(*shape, seed=t, device=device) for t in range(3)]
    run(make, [stack], [[g] for g in grads])
    run(make, singles, [list(g.flatten(0, -3).clone()) for g in grads])
    assert torch.equal(stack.detach().flatten(0, -3), torch.stack([p.detach() for p in singles]))
    assert stack.isfinite().all()


@pytest.mark.parametrize("limit", [1, 2000, 10**9])
@pytest.mark.parametrize("neuron_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_change_no_bit(device, monkeypatch, limit, neuron_norm, dtype):
    """However many passes the scratch memory allows, rounding included."""
    shapes = [(8, 12), (3, 8, 12), (20, 6, 6), (12, 8), (7, 16, 8)]

    def result():
        params = [parameter(*s, seed=i, dtype=dtype, device=device) for i, s in enumerate(shapes)]
        opt = dion3.Dion3(params, lr=0.1, neuron_norm=neuron_norm)
        grads = [
            [matrix(*p.shape, seed=t, device=device).to(dtype) for p in params] for t in range(3)
        ]
        steps(opt, params, grads)
        return opt.stats()["passes"], params

    one, expected = result()
    monkeypatch.setattr(plan, "WORKSPACE_LIMIT", limit)
    passes, params = result()
    assert one == 1 and (passes > 1) == (limit < 10**9)
    assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))


@pytest.mark.parametrize("limit", [1, 20_000, 512 * 2**20])
def test_scratch_memory_is_within_its_formula(device, monkeypatch, limit):
    """The formula of dion3.plan, and nothing is held between steps."""
    monkeypatch.setattr(plan, "WORKSPACE_LIMIT", limit)
    shapes = [(48, 64), (64, 48), (6, 40, 40), (100, 10), (10, 100), (33, 65)]
    params = [parameter(*s, seed=i, device=device) for i, s in enumerate(shapes)]
    opt = dion3.Dion3(params, neuron_norm=True)
    steps(opt, params, [[matrix(*p.shape, seed=1, device=device) for p in params]])
    slices = sum(p.numel() // max(p.shape[-2:]) for p in params)
    pieces = [item for d in opt._plans for item in d.items]
    matrices = [i.piece.update_shape for i in pieces]
    itemsize = pieces[0].config.dtype.itemsize
    largest = max(2 * r * c * itemsize for r, c in matrices)
    rows = sum(i.piece.batch * i.piece.update_shape[0] for i in pieces)
    tensors = 8 * len(pieces) + 2 * len(opt._plans[0].work.buckets)
    bound = 24 * slices + max(limit, largest) + 4 * rows + 256 * tensors
    assert 0 < opt.stats()["workspace_bytes"] <= bound
    everything = sum(
        2 * i.piece.batch * r * c * itemsize for i, (r, c) in zip(pieces, matrices, strict=True)
    )
    assert opt.stats()["workspace_bytes"] >= min(everything, largest)
    for device_plan in opt._plans:
        assert device_plan.workspace._storage.nbytes() == 0


def test_the_storage_grows_a_few_times_and_not_with_every_tensor(device):
    space = Workspace(torch.device(device))
    sizes = set()
    for count in range(1, 501):
        tensor = space.take((count, 7), torch.float64)
        assert tensor.shape == (count, 7) and tensor.is_contiguous()
        sizes.add(space._storage.nbytes())
    assert len(sizes) <= 20
    space.release()
    space.acquire()
    assert space._storage.nbytes() == space.size
    assert tensor.fill_(1.0).sum() == 500 * 7


# ---- heads, blocks, kernels ----


@flavours
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_rows_are_a_stack(device, make, dtype):
    """num_heads on (H * d, in) is bitwise the (H, d, in) stack, rounding included."""
    p = parameter(24, 20, dtype=dtype, device=device)
    stack = torch.nn.Parameter(p.detach().view(3, 8, 20).clone())
    grads = [matrix(24, 20, seed=t, device=device).to(dtype) for t in range(3)]
    run(make, [p], [[g] for g in grads], num_heads=3)
    run(make, [stack], [[g.view(3, 8, 20)] for g in grads])
    assert torch.equal(p.detach().view(3, 8, 20), stack)


@flavours
def test_heads_of_columns_are_a_stack(device, make):
    """head_axis=1, for output projections: (out, H * d) as H matrices (out, d)."""
    p = parameter(20, 24, device=device)
    stack = torch.nn.Parameter(p.detach().view(20, 3, 8).transpose(0, 1).contiguous())
    grads = [matrix(20, 24, seed=t, device=device) for t in range(3)]
    opt = run(make, [p], [[g] for g in grads], num_heads=3, head_axis=1)
    run(make, [stack], [[g.view(20, 3, 8).transpose(0, 1)] for g in grads])
    assert torch.equal(p.detach().view(20, 3, 8).transpose(0, 1), stack)
    if "neuron_second_moment" in opt.state[p]:
        assert opt.state[p]["neuron_second_moment"].shape == (3, 20)


def test_the_head_axis_matters(device):
    """A square projection can be split both ways; the results differ."""
    results = []
    for axis in (0, 1):
        p = parameter(24, 24, device=device)
        run(
            FLAVOURS[0], [p], [[matrix(24, 24, seed=1, device=device)]], num_heads=3, head_axis=axis
        )
        results.append(p)
    assert not torch.equal(*results)


@flavours
@pytest.mark.parametrize("sizes", [(16, 4, 4), (5, 7, 12), (24,), (8, 8, 8)])
def test_blocks_of_rows_are_separate_matrices(device, make, sizes):
    """split_sizes: selection, norm and learning-rate scale per block."""
    p = parameter(24, 10, device=device)
    blocks = [torch.nn.Parameter(b.clone()) for b in p.detach().split(sizes)]
    grads = [matrix(24, 10, seed=t, device=device) for t in range(3)]
    opt = run(make, [p], [[g] for g in grads], split_sizes=sizes)
    run(make, blocks, [[b.clone() for b in g.split(sizes)] for g in grads])
    assert torch.equal(p.detach(), torch.cat([b.detach() for b in blocks]))
    assert opt.state[p]["momentum_buffer"].shape == (24, 10)


def test_blocks_have_their_own_count_and_scale(device):
    p = parameter(24, 10, device=device)
    opt = dion3.Dion3([{"params": [p], "split_sizes": [4, 20]}], fraction=0.3)
    steps(opt, [p], [[matrix(24, 10, seed=1, device=device)]])
    first, second = (item.piece for item in opt._plans[0].items)
    assert {(first.axis, first.k), (second.axis, second.k)} == {(0, 2), (1, 3)}
    scales = {shape_scale(None, 4, 10), shape_scale(None, 20, 10)}
    assert {first.scale, second.scale} == scales


@flavours
def test_blocks_of_a_stack(device, make):
    """Fused gate and up projections of experts: (E, 2 f, d) with split_sizes."""
    p = parameter(3, 16, 10, device=device)
    parts = [torch.nn.Parameter(b.clone()) for b in p.detach().split((6, 10), dim=1)]
    grads = [matrix(3, 16, 10, seed=t, device=device) for t in range(3)]
    run(make, [p], [[g] for g in grads], split_sizes=(6, 10))
    run(make, parts, [[b.clone() for b in g.split((6, 10), dim=1)] for g in grads])
    assert torch.equal(p.detach(), torch.cat([b.detach() for b in parts], 1))


@flavours
@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (64, 32, 3), (6, 1, 3, 3), (12, 3, 4, 4), (5, 7)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_flattened_kernels_are_matrices(device, make, shape, count):
    """flatten=True: each kernel is its own (out, rest) matrix, also beside kernels of its shape."""
    params = [parameter(*shape, seed=i, device=device) for i in range(count)]
    flat = [torch.nn.Parameter(p.detach().flatten(1).clone()) for p in params]
    grads = [
        [matrix(*shape, seed=5 * t + i, device=device) for i in range(count)] for t in range(3)
    ]
    run(make, params, grads, flatten=True)
    run(make, flat, [[g.flatten(1) for g in now] for now in grads])
    for p, q in zip(params, flat, strict=True):
        assert torch.equal(p.detach().flatten(1), q)


# ---- strides ----


def _strided(kind, values):
    """The same values with other strides."""
    if kind == "transposed":
        return values.mT.contiguous().mT
    if kind == "sliced":
        wide = torch.full((*values.shape[:-1], values.shape[-1] * 2 + 3), 7.0).to(values)
        wide[..., 1 : 1 + 2 * values.shape[-1] : 2] = values
        return wide[..., 1 : 1 + 2 * values.shape[-1] : 2]
    if kind == "chunk":
        return torch.cat([values + 1, values, values - 1]).chunk(3)[1]
    if kind == "channels_last":
        return values.contiguous(memory_format=torch.channels_last)
    return values.clone()


@flavours
@pytest.mark.parametrize("kind", ["transposed", "sliced", "chunk", "channels_last"])
@pytest.mark.parametrize("grad_kind", ["plain", "transposed", "sliced"])
@pytest.mark.parametrize("flatten", [False, True])
def test_strides_are_honoured(device, make, kind, grad_kind, flatten):
    """In place, whatever the strides of weight and gradient, and nothing beside it is written."""
    shape = (6, 5, 4, 3) if kind == "channels_last" or flatten else (12, 20)
    values = matrix(*shape, device=device)
    storage = _strided(kind, values)
    p, q = torch.nn.Parameter(storage), torch.nn.Parameter(values.clone())
    address, strides = p.data_ptr(), p.stride()
    whole = torch.tensor([], device=device).set_(p.untyped_storage()).clone()
    grads = [matrix(*shape, seed=t, device=device) for t in range(3)]
    options = {"flatten": flatten, "ns_dtype": torch.float32}
    run(make, [p], [[_strided(grad_kind, g)] for g in grads], **options)
    run(make, [q], [[g] for g in grads], **options)
    assert (p.data_ptr(), p.stride()) == (address, strides)
    assert (p - q).abs().max() < 2e-6
    now = torch.tensor([], device=device).set_(p.untyped_storage())
    inside = torch.zeros_like(whole, dtype=torch.bool)
    inside.as_strided(p.shape, p.stride(), p.storage_offset()).fill_(True)
    assert torch.equal(now[~inside], whole[~inside]) and not torch.equal(now[inside], whole[inside])


def test_expanded_gradients(device):
    p, q = parameter(12, 20, device=device), parameter(12, 20, device=device)
    row = matrix(1, 20, seed=1, device=device)
    run(FLAVOURS[0], [p], [[row.expand(12, 20)]])
    run(FLAVOURS[0], [q], [[row.expand(12, 20).contiguous()]])
    assert torch.equal(p, q)


@pytest.mark.parametrize("kind", ["transposed", "sliced", "channels_last"])
def test_adamw_honours_strides(device, kind):
    shape = (6, 5, 4, 3) if kind == "channels_last" else (6, 8)
    values = matrix(*shape, device=device)
    p, q = torch.nn.Parameter(_strided(kind, values)), torch.nn.Parameter(values.clone())
    grads = [matrix(*shape, seed=t, device=device) for t in range(3)]
    opt = run(FLAVOURS[0], [p], [[g] for g in grads], algorithm="adamw")
    run(FLAVOURS[0], [q], [[g] for g in grads], algorithm="adamw")
    assert torch.equal(p, q)
    assert opt.state[p]["exp_avg"].shape == p.shape


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (3, 0, 4), (0, 4, 4)])
def test_empty_parameters_are_no_trouble(device, shape):
    p = torch.nn.Parameter(torch.zeros(shape, device=device))
    q = parameter(8, 8, device=device)
    algorithm = "adamw" if len(shape) == 1 else "dion3"
    opt = dion3.Dion3([{"params": [p], "algorithm": algorithm}, {"params": [q]}])
    before = q.detach().clone()
    steps(opt, [p, q], [[torch.zeros_like(p), matrix(8, 8, seed=1, device=device)]] * 2)
    assert not torch.equal(q, before)
    opt.load_state_dict(opt.state_dict())


# ---- weights without storage of their own ----


class Boxed(torch.Tensor):
    """A stand-in for quantised weights: a wrapper subclass whose values live in another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Boxed(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(x):
            return x.inner if isinstance(x, Boxed) else x

        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            return args[0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Boxed(out)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["dion3", "adamw"])
@pytest.mark.parametrize("boxed_grad", [False, True])
def test_wrapper_subclasses_take_the_dense_detour(device, dtype, algorithm, boxed_grad):
    """They get bitwise what a plain parameter gets: computed in fp32 and written once."""
    values = matrix(12, 20, dtype=dtype, device=device)
    boxed, plain = torch.nn.Parameter(Boxed(values.clone())), torch.nn.Parameter(values.clone())
    opts = [
        dion3.Dion3([{"params": [p], "algorithm": algorithm}], lr=0.1, rounding=r)
        for p, r in ((boxed, "auto"), (plain, "nearest"))
    ]
    for t in range(3):
        g = matrix(12, 20, seed=t, dtype=dtype, device=device)
        boxed.grad = Boxed(g.clone()) if boxed_grad else g.clone()
        plain.grad = g
        for opt in opts:
            opt.step()
    assert torch.equal(boxed.inner, plain)
    assert not torch.equal(plain, values)
    assert [opt.stats()["staged_parameters"] for opt in opts] == [1, 0]
    assert type(opts[0].state[boxed]["momentum_buffer" if algorithm == "dion3" else "exp_avg"]) is (
        torch.Tensor
    )


def test_plain_parameters_take_the_fast_path(device):
    """nothing is copied for them, and the operations get the parameter's own memory."""
    p = parameter(12, 20, device=device)
    opt = dion3.Dion3([p])
    with watch("update_"):
        steps(opt, [p], [[matrix(12, 20, seed=1, device=device)]])
    assert opt._plans[0].weight[0].data_ptr() == p.data_ptr()
    assert opt._plans[0].momentum[0].data_ptr() == opt.state[p]["momentum_buffer"].data_ptr()
