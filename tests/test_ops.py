"""The step operators against dion3.reference, bit for bit: dtype mixes, axes, batches, odd shapes
and strides.

Sums are float64 in an order of the implementation's own, so scores and norms are compared to 2^-46,
and what follows from the neuron's sums to one float32 ulp; everything else must be equal.
"""

from __future__ import annotations

import itertools
import math
import types

import pytest
import torch
from helpers import (
    DTYPES,
    EMPTY_SHAPES,
    LAYOUTS,
    SHAPES_2D,
    SHAPES_3D,
    Guarded,
    adamw_hyper,
    hyper_tensor,
    poisoned,
    randn,
    same_bits,
    seeded,
    unchanged,
    with_layout,
)
from torch import Tensor

from dion3 import build, ops, reference

SHAPES = SHAPES_2D + SHAPES_3D
MIXES = list(itertools.product(DTYPES, DTYPES))
SUM_RTOL = 2.0**-46  # a float64 sum of up to 2^6 roundings of 2^-53, in either order


def absent(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def lead(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:-2]


def batch_of(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 3 else 1


def copy(t: Tensor) -> Tensor:
    """The same values with the same strides, in memory of its own."""
    result = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return result.copy_(t)


def selection(shape: tuple[int, ...], axis: int, k: int, device: torch.device, *key: object):
    """Ascending indices (batch, k) and the slots (batch, n) that belong to them."""
    n, batch = shape[axis - 2], batch_of(shape)
    order = torch.rand(batch, n, generator=seeded(shape, k, *key)).argsort(-1)[:, :k].sort(-1)[0]
    slots = torch.full((batch, n), -1, dtype=torch.int64)
    slots.scatter_(1, order, torch.arange(k).expand(batch, k))
    view = (*lead(shape), -1)
    return order.int().view(view).to(device), slots.int().view(view).to(device)


def part_shape(shape: tuple[int, ...], axis: int, k: int) -> tuple[int, ...]:
    return (*lead(shape), k, shape[-1]) if axis == 0 else (*lead(shape), shape[-2], k)


def counts(n: int) -> list[int]:
    return sorted({1, -(-n // 4), n})


# ---- momentum -----------------------------------------------------------------------------------


def check_momentum(shape, dtypes, axis, device, layouts=("dense", "dense"), **hyper):
    m = with_layout(randn(shape, dtypes[0], device, "m"), layouts[0])
    g = with_layout(randn(shape, dtypes[1], device, "g"), layouts[1])
    h = hyper_tensor(device, {}, hyper)
    n = shape[axis - 2]
    some = selection(shape, axis, -(-n // 4), device, "slots")[1]
    every = absent(device, torch.int32)
    feedback = torch.tensor([0.5, 0.95], device=device)
    for slots, due in ((some, feedback), (every, feedback), (some, absent(device))):
        results = []
        for module in (ops, reference):
            buffer = copy(m)
            sums = [poisoned((*lead(shape), n), torch.float64, device) for _ in range(2)]
            with unchanged(g, h, slots, due):
                module.momentum_([buffer], [g], [slots], due, h, [1], [axis], [sums[0]], [sums[1]])
            results.append((buffer, *sums))
        (m0, a0, b0), (m1, a1, b1) = results
        assert same_bits(m0, m1)
        torch.testing.assert_close(a0, a1, rtol=SUM_RTOL, atol=0)
        torch.testing.assert_close(b0, b1, rtol=SUM_RTOL, atol=0)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_momentum_equals_reference_on_every_shape(shape, axis, device):
    check_momentum(shape, (torch.float32, torch.bfloat16), axis, device, keep=0.95)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtypes", MIXES, ids=str)
def test_momentum_equals_reference_in_every_dtype(dtypes, axis, device):
    check_momentum((33, 129), dtypes, axis, device, keep=0.95, gain=-0.05)
    check_momentum((2, 33, 40), dtypes, axis, device, nesterov=0.95, gain=-0.05)


@pytest.mark.parametrize(
    "layouts", [*itertools.product(LAYOUTS, LAYOUTS), ("dense", "row-expanded")]
)
def test_momentum_equals_reference_with_every_stride(layouts, device):
    for axis, shape in itertools.product((0, 1), ((33, 129), (2, 33, 40))):
        check_momentum(shape, (torch.bfloat16, torch.float16), axis, device, layouts)


def test_momentum_serves_many_matrices_and_absent_sums(device):
    h = hyper_tensor(device, {"keep": 0.5}, {"gain": 0.25})
    shapes = [*SHAPES, *EMPTY_SHAPES]
    m = [randn(s, DTYPES[i % 3], device, "m") for i, s in enumerate(shapes)]
    g = [randn(s, DTYPES[i % 2], device, "g") for i, s in enumerate(shapes)]
    group = [i % 2 for i in range(len(shapes))]
    none = [absent(device, torch.float64) for _ in shapes]
    one_by_one = [copy(t) for t in m]
    every = [absent(device, torch.int32) for _ in shapes]
    no = absent(device)
    ops.momentum_(m, g, every, no, h, group, [0] * len(m), none, none)
    for i, t in enumerate(one_by_one):
        reference.momentum_([t], [g[i]], [every[i]], no, h, [group[i]], [1], [none[i]], [none[i]])
        assert same_bits(m[i], t)


@pytest.mark.parametrize("axis", [0, 1])
def test_feedback_without_sums(axis, device):
    """Which slices were selected says the axis, also where no sums are wanted."""
    none, feedback = absent(device, torch.float64), torch.tensor([0.9], device=device)
    g = torch.zeros(5, 12, device=device)
    slots = selection((5, 12), axis, 3, device)[1]
    for transposed in (False, True):
        m = (
            randn((12, 5), torch.float32, device, "m").T
            if transposed
            else randn((5, 12), torch.float32, device, "m")
        )
        want = torch.where((slots < 0).unsqueeze(1 - axis), m, m * feedback)
        ops.momentum_(
            [m], [g], [slots], feedback, hyper_tensor(device), [0], [axis], [none], [none]
        )
        assert torch.equal(m, want)


def test_feedback_is_rounded_before_the_gradient_is_added(device):
    """As it would be if it had been stored at the end of the last step."""
    m = torch.full((1, 8), 1.0, dtype=torch.bfloat16, device=device)
    g = torch.full((1, 8), 0.0015, dtype=torch.float32, device=device)
    sums = [poisoned((1,), torch.float64, device) for _ in range(2)]
    ops.momentum_(
        [m], [g], [absent(device, torch.int32)], torch.tensor([0.95], device=device),
        hyper_tensor(device, {"gain": 1.0}), [0], [0], [sums[0]], [sums[1]],
    )  # fmt: skip
    stored = torch.tensor(0.95).bfloat16().float()  # 0.94921875, 0.00195 below a tie
    once, twice = (
        (torch.tensor(0.95) + g[0, 0].cpu()).bfloat16(),
        (stored + g[0, 0].cpu()).bfloat16(),
    )
    assert once != twice and bool((m == twice.to(device)).all())


def test_sums_are_of_the_rounded_momentum(device):
    m = torch.full((2, 4), 1.0, dtype=torch.bfloat16, device=device)
    g = torch.full((2, 4), 2.0**-10, device=device)  # below half an ulp: m stays 1
    score, sumsq = (poisoned((2,), torch.float64, device) for _ in range(2))
    every, no = [absent(device, torch.int32)], absent(device)
    h = hyper_tensor(device, {"gain": 1.0})
    ops.momentum_([m], [g], every, no, h, [0], [0], [score], [sumsq])
    assert score.tolist() == [4, 4] and sumsq.tolist() == [4, 4]


# ---- select -------------------------------------------------------------------------------------

SCORES = {
    "distinct": lambda n: torch.rand(2, n, generator=seeded(n), dtype=torch.float64),
    "equal": lambda n: torch.ones(2, n, dtype=torch.float64),
    "ties": lambda n: torch.randint(0, 3, (2, n), generator=seeded(n)).double(),
    "zeros": lambda n: torch.zeros(2, n, dtype=torch.float64) * -1,
    "nan": lambda n: (
        torch.rand(2, n, generator=seeded(n))
        .double()
        .masked_fill_(torch.rand(2, n, generator=seeded(n, 1)) < 0.3, math.nan)
    ),
    "inf": lambda n: (
        torch.rand(2, n, generator=seeded(n))
        .double()
        .masked_fill_(torch.rand(2, n, generator=seeded(n, 1)) < 0.3, math.inf)
    ),
}


def run_select(module, score, sumsq, k, device):
    batch, n = sumsq.shape
    out = (
        poisoned((batch, k), torch.int32, device),
        poisoned((batch, n), torch.int32, device),
        poisoned((batch,), torch.float64, device),
    )
    with unchanged(sumsq):
        module.select_([score], [sumsq], [out[0]], [out[1]], [out[2]], [k])
    return out


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("n", [1, 2, 7, 64, 1000, 4097])
def test_select_equals_reference(n, kind, device):
    score = SCORES[kind](n).to(device)
    sumsq = torch.rand(2, n, generator=seeded(n, 2), dtype=torch.float64).to(device)
    for k in counts(n):
        got, want = (run_select(module, score, sumsq, k, device) for module in (ops, reference))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        torch.testing.assert_close(got[2], want[2], rtol=n * 2.0**-53, atol=0)


def test_select_without_ties_equals_topk(device):
    score = torch.rand(3, 500, generator=seeded("topk"), dtype=torch.float64).to(device)
    indices = run_select(ops, score, score, 125, device)[0]
    assert torch.equal(indices.long(), score.topk(125)[1].sort(-1)[0])


def test_select_breaks_ties_low_and_puts_nan_first(device):
    score = torch.tensor([[1, 2, 2, math.nan, 2, math.inf, 0]], dtype=torch.float64, device=device)
    indices, slots, norm = run_select(ops, score, torch.ones_like(score), 4, device)
    assert indices.tolist() == [[1, 2, 3, 5]]
    assert slots.tolist() == [[-1, 0, 1, 2, -1, 3, -1]] and norm.tolist() == [2]


def test_selecting_all_needs_no_scores(device):
    sumsq = torch.rand(2, 9, generator=seeded("all"), dtype=torch.float64).to(device)
    indices, slots, norm = run_select(ops, absent(device, torch.float64), sumsq, 9, device)
    assert indices.tolist() == slots.tolist() == [list(range(9))] * 2
    torch.testing.assert_close(norm, sumsq.sum(-1).sqrt(), rtol=2.0**-49, atol=0)


# ---- gather -------------------------------------------------------------------------------------


def check_gather(shape, dtypes, axis, device, layouts=("dense", "dense", "dense"), **hyper):
    m = with_layout(randn(shape, dtypes[0], device, "m"), layouts[0])
    g = with_layout(randn(shape, dtypes[1], device, "g"), layouts[1])
    norm = randn((batch_of(shape),), torch.float64, device, "n").abs()
    norm = norm.view(lead(shape)) if lead(shape) else norm
    h = hyper_tensor(device, hyper)
    for k in counts(shape[axis - 2]):
        indices = selection(shape, axis, k, device)[0]
        results = []
        for module in (ops, reference):
            out = with_layout(poisoned(part_shape(shape, axis, k), dtypes[2], device), layouts[2])
            with unchanged(m, g, indices, norm, h):
                module.gather_([m], [g], [indices], [norm], h, [0], [axis], [out])
            results.append(out)
        assert same_bits(*results) and not results[0].isnan().any()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gather_equals_reference_on_every_shape(shape, axis, device):
    check_gather(shape, (torch.float32, torch.float32, torch.float16), axis, device)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)), ids=str)
def test_gather_equals_reference_in_every_dtype(dtypes, axis, device):
    check_gather((33, 130), dtypes, axis, device, nesterov=0.9, gain=-0.1)


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, repeat=3)), ids=str)
def test_gather_equals_reference_with_every_stride(layouts, device):
    for axis in (0, 1):
        check_gather(
            (2, 33, 40), (torch.bfloat16, torch.float32, torch.float16), axis, device, layouts
        )


def test_gather_of_all_slices(device):
    m = randn((20, 30), torch.float32, device, "m")
    norm = m.double().norm().view(1)
    out = poisoned((20, 30), torch.float16, device)
    none = absent(device, torch.int32)
    with unchanged(m):
        ops.gather_(
            [m],
            [absent(device)],
            [none],
            [norm],
            hyper_tensor(device),
            [0],
            [0],
            [out],
        )
    assert torch.equal(out, (m * (1 / norm).float()).half())


def test_gather_divides_by_eps_at_least_and_never_by_zero(device):
    m = torch.tensor([[3.0, 4.0]], device=device)
    for norm, eps, want in (
        (5.0, 1e-7, 1.0),
        (5.0, 10.0, 0.5),
        (0.0, 0.0, 0.0),
        (math.nan, 1e-7, math.nan),
    ):
        out = poisoned((1, 2), torch.float32, device)
        n = torch.tensor([norm], dtype=torch.float64, device=device)
        h = hyper_tensor(device, {"eps": eps})
        ops.gather_([m], [absent(device)], [absent(device, torch.int32)], [n], h, [0], [0], [out])
        expected = torch.tensor([[0.6, 0.8]], device=device) * want
        torch.testing.assert_close(out, expected, equal_nan=True, rtol=2e-7, atol=0)


# ---- neuron -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neuron_equals_reference(shape, dtype, device):
    o = randn(shape, dtype, device, "o", scale=0.1)
    neurons = shape[-2] + 3
    indices = selection((*lead(shape), neurons, 1), 0, shape[-2], device, "neuron")[0]
    second = torch.rand((*lead(shape), neurons), generator=seeded(shape)).to(device)
    h = hyper_tensor(device)
    results = []
    for module in (ops, reference):
        v, factor = Guarded(second), Guarded(poisoned(shape[:-1], torch.float32, device))
        with unchanged(o, indices):
            module.neuron_([o], [v.tensor], [indices], h, [0], [factor.tensor])
        assert v.intact() and factor.intact()
        results.append((v.tensor, factor.tensor))
    one_ulp = 2.0**-22  # of v: an ulp of s and one of each operation that sees it
    torch.testing.assert_close(results[0][0], results[1][0], rtol=one_ulp, atol=0)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=one_ulp, atol=0)
    untouched = torch.ones((batch_of(shape), neurons), dtype=torch.bool, device=device)
    untouched.scatter_(1, indices.view(batch_of(shape), -1).long(), False)
    assert torch.equal(
        results[0][0].view_as(untouched)[untouched], second.view_as(untouched)[untouched]
    )


def test_neuron_norm_keeps_the_norm_of_the_update(device):
    o = (
        randn((40, 64), torch.float32, device, "o")
        * torch.logspace(-3, 0, 40, device=device)[:, None]
    )
    v, factor = torch.zeros(40, device=device), poisoned((40,), torch.float32, device)
    ops.neuron_([o], [v], [absent(device, torch.int32)], hyper_tensor(device), [0], [factor])
    scaled = factor[:, None] * o
    torch.testing.assert_close(scaled.norm(), o.norm(), rtol=1e-6, atol=0)
    rows = scaled.norm(dim=1)  # at the first step every row has the same mean square
    torch.testing.assert_close(rows, rows.mean().expand(40), rtol=1e-3, atol=0)


def test_neuron_survives_no_update_and_rows_without_one(device):
    o = torch.zeros(3, 4, device=device)
    v, factor = torch.zeros(3, device=device), poisoned((3,), torch.float32, device)
    h = hyper_tensor(device, {"neuron_eps": 0.0})
    none = absent(device, torch.int32)
    ops.neuron_([o], [v], [none], h, [0], [factor])
    assert factor.tolist() == [1, 1, 1] and v.tolist() == [0, 0, 0]
    o[1] = 2.0
    ops.neuron_([o], [v], [none], h, [0], [factor])
    assert torch.isfinite(factor).all() and factor[1] == 1


# ---- update -------------------------------------------------------------------------------------


def run_update(
    module, weight, update, slots, factor, hyper, axis, step, base=0, param_id=3, seed=2**40 + 5
):
    cols = weight.shape[-1]
    module.update_(
        [weight],
        [update],
        [slots],
        [factor],
        hyper,
        [0],
        [axis],
        [1.7],
        [step],
        seed,
        [param_id],
        [base],
        [weight.shape[-2] * cols],
        [cols],
    )


def check_update(
    shape, dtypes, axis, device, layouts=("dense", "dense"), stochastic=True, base=2**35 + 3
):
    w = with_layout(randn(shape, dtypes[0], device, "w"), layouts[0])
    step = torch.tensor([7.0], device=device) if stochastic else absent(device)
    h = hyper_tensor(device)
    for k in counts(shape[axis - 2]):
        part = part_shape(shape, axis, k)
        o = with_layout(randn(part, dtypes[1], device, "o"), layouts[1])
        factor = torch.rand(part[:-1], generator=seeded(part)).to(device)
        slots = selection(shape, axis, k, device)[1]
        for s, f in ((slots, factor), (slots, absent(device))):
            results = [copy(w), copy(w)]
            with unchanged(o, s, f, h):
                run_update(ops, results[0], o, s, f, h, axis, step, base)
            run_update(reference, results[1], o, s, f, h, axis, step, base)
            assert same_bits(results[0], results[1])


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_update_equals_reference_on_every_shape(shape, axis, stochastic, device):
    check_update(shape, (torch.bfloat16, torch.float16), axis, device, stochastic=stochastic)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtypes", MIXES, ids=str)
def test_update_equals_reference_in_every_dtype(dtypes, axis, stochastic, device):
    check_update((33, 130), dtypes, axis, device, stochastic=stochastic)


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, repeat=2)), ids=str)
def test_update_equals_reference_with_every_stride(layouts, device):
    for axis, stochastic in itertools.product((0, 1), (False, True)):
        check_update(
            (2, 33, 40), (torch.bfloat16, torch.float16), axis, device, layouts, stochastic
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_update_writes_the_weight_only_and_rounds_once(dtype, device):
    w, o = randn((37, 53), dtype, device, "w"), randn((37, 53), torch.float16, device, "o")
    guarded = Guarded(w)
    none = absent(device, torch.int32)
    run_update(
        ops, guarded.tensor, o, none, absent(device), hyper_tensor(device), 0, absent(device)
    )
    assert guarded.intact()
    exact = hyper_tensor(device)[0, 0].double() * w.double()
    exact -= (hyper_tensor(device)[0, 1] * torch.tensor(1.7, device=device)).double() * o.double()
    once = exact.to(dtype).double()
    got = guarded.tensor.double()
    # Three fp32 roundings of terms no larger than |w| + |o|, then the one of dtype.
    slack = 3 * 2.0**-24 * (w.double().abs() + o.double().abs())
    ulp = torch.finfo(dtype).eps * once.abs().clamp(min=torch.finfo(dtype).smallest_normal)
    assert bool(((got - exact).abs() <= 0.5 * ulp + slack).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inf_and_nan_stay_where_they_are(dtype, device):
    for step in (absent(device), torch.ones(1, device=device)):
        w = torch.ones(8, 9, dtype=dtype, device=device)
        o = torch.zeros(8, 9, dtype=torch.float16, device=device)
        o[1, 2], o[3, 4] = math.nan, math.inf
        none = absent(device, torch.int32)
        run_update(ops, w, o, none, absent(device), hyper_tensor(device), 0, step)
        assert w[1, 2].isnan() and w[3, 4] == -math.inf
        assert int(w.isfinite().sum()) == w.numel() - 2


def test_stochastic_rounding_saturates_where_nearest_overflows(device):
    w = torch.full((4, 8), 65504.0, dtype=torch.float16, device=device)
    o = torch.full((4, 8), -1000.0, dtype=torch.float16, device=device)
    args = (o, absent(device, torch.int32), absent(device), hyper_tensor(device, {"decay": 1.0}), 0)
    run_update(ops, w, *args, torch.ones(1, device=device))
    assert bool((w == 65504).all())
    run_update(ops, w, *args, absent(device))
    assert bool(w.isinf().all())


# ---- adamw --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)), ids=str)
def test_adamw_equals_reference(dtypes, stochastic, device):
    for shape, layouts in (
        ((1030,), None),
        ((33, 40), ("dense",) * 3),
        ((33, 40), LAYOUTS),
        ((), None),
    ):
        tensors = [
            randn(shape, dtypes[0], device, "p"),
            randn(shape, dtypes[1], device, "g"),
            randn(shape, dtypes[2], device, "m"),
            randn(shape, dtypes[2], device, "v").abs(),
        ]
        if layouts:
            tensors[:3] = [with_layout(t, name) for t, name in zip(tensors, layouts, strict=False)]
        step = torch.tensor([12.0], device=device)
        results = []
        for module in (ops, reference):
            p, g, m, v = (copy(t) for t in tensors)
            with unchanged(g):
                module.adamw_(
                    [p], [g], [m], [v], [step], adamw_hyper(device), [0], [stochastic], 5, [2], [11]
                )
            results.append((p, m, v))
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("maximize", [False, True])
def test_adamw_equals_torch(maximize, device):
    start = randn((50, 20), torch.float32, device, "p")
    theirs = torch.nn.Parameter(start.clone())
    options = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([theirs], maximize=maximize, **options)
    ours, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    h = adamw_hyper(device, lr=1e-2, sign=-1.0 if maximize else 1.0)
    for t in range(1, 21):
        theirs.grad = randn((50, 20), torch.float32, device, "g", t)
        optimizer.step()
        step = torch.tensor([float(t)], device=device)
        ops.adamw_([ours], [theirs.grad], [m], [v], [step], h, [0], [False], 0, [0], [0])
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)


# ---- all of them --------------------------------------------------------------------------------


def calls(device: torch.device, requires_grad: bool = False, dtype: torch.dtype = torch.bfloat16):
    """One valid call of every operator: name -> arguments."""
    h = hyper_tensor(device, {"nesterov": 0.9})
    m, g = randn((6, 9), torch.float32, device, "m"), randn((6, 9), dtype, device, "g")
    indices, slots = selection((6, 9), 0, 2, device)
    sums = [torch.rand(6, generator=seeded(i), dtype=torch.float64).to(device) for i in range(2)]
    norm = torch.ones(1, dtype=torch.float64, device=device)
    o = randn((2, 9), torch.float16, device, "o")
    w = randn((6, 9), dtype, device, "w").requires_grad_(requires_grad)
    p = randn((5, 3), dtype, device, "p").requires_grad_(requires_grad)
    step, f = torch.ones(1, device=device), torch.ones(2, device=device)
    avg = [torch.rand(5, 3, generator=seeded(i)).to(device) for i in range(3)]
    return {
        "momentum_": ([m], [g], [slots], step, h, [0], [0], [sums[0]], [sums[1]]),
        "select_": ([sums[0]], [sums[1]], [indices], [slots], [norm], [2]),
        "gather_": ([m], [g], [indices], [norm], h, [0], [0], [o]),
        "neuron_": ([o], [sums[0].float()], [indices], h, [0], [f]),
        "update_": ([w], [o], [slots], [f], h, [0], [0], [1.0], [step], 1, [0], [0], [0], [9]),
        "adamw_": (
            [p],
            [avg[0]],
            [avg[1]],
            [avg[2]],
            [step],
            adamw_hyper(device),
            [0],
            [True],
            1,
            [0],
            [0],
        ),
    }


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ops.NAMES)
def test_opcheck(name, requires_grad, device):
    with torch.no_grad():
        torch.library.opcheck(getattr(torch.ops.dion3, name), calls(device, requires_grad)[name])


@pytest.mark.parametrize("name", ops.NAMES)
def test_empty_lists_do_nothing(name, device):
    args = [[] if isinstance(a, list) else a for a in calls(device)[name]]
    getattr(ops, name)(*args)


@pytest.mark.parametrize("name", ops.NAMES)
def test_an_operator_repeats_bit_for_bit(name, device):
    results = []
    for _ in range(2):
        args = calls(device)[name]
        getattr(ops, name)(*args)
        results.append([t for a in args if isinstance(a, list) for t in a if isinstance(t, Tensor)])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["update_", "adamw_"])
def test_autograd_notices_that_a_parameter_changed(name, device):
    args = calls(device, requires_grad=True)[name]
    parameter = args[0][0]
    loss = (parameter.float() ** 2).sum()
    version = parameter._version
    with torch.no_grad():
        getattr(ops, name)(*args)
    assert parameter._version > version
    del loss


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_empty_matrices_are_allowed(shape, device):
    h = hyper_tensor(device)
    for axis in (0, 1):
        n = shape[axis - 2]
        m, w, g = (randn(shape, torch.float32, device, i) for i in range(3))
        sums = [poisoned((*lead(shape), n), torch.float64, device) for _ in range(2)]
        none = absent(device, torch.int32)
        no = absent(device)
        ops.momentum_([m], [g], [none], no, h, [0], [axis], [sums[0]], [sums[1]])
        assert not sums[0].any() and not sums[1].any()
        o = torch.zeros(shape, dtype=torch.float16, device=device)
        no_norm = absent(device, torch.float64)
        ops.gather_([m], [absent(device)], [none], [no_norm], h, [0], [axis], [o])
        run_update(ops, w, o, none, absent(device), h, axis, absent(device))


@pytest.mark.parametrize("name", ops.NAMES)
def test_native_kernels_are_used_on_the_cpu(name):
    from dion3 import build

    if build.native is None:
        pytest.skip(f"no native part: {build.reason}")
    assert ops.is_native(name, "cpu")


def replaced(args: tuple, place: int, value: object) -> list:
    return [value if i == place else a for i, a in enumerate(args)]


BAD_CALLS = {
    "grad list too short": ("momentum_", 1, [], "grad has 0 entries, must have 1"),
    "grad shape": (
        "momentum_",
        1,
        lambda d: [torch.zeros(6, 8, device=d)],
        r"grad\[0\] has shape \[6, 8\]",
    ),
    "grad dtype": (
        "momentum_",
        1,
        lambda d: [torch.zeros(6, 9, dtype=torch.float64, device=d)],
        "Double",
    ),
    "momentum of one dimension": (
        "momentum_",
        0,
        lambda d: [torch.zeros(9, device=d)],
        "2 or 3 dimensions",
    ),
    "complex momentum": (
        "momentum_",
        0,
        lambda d: [torch.zeros(6, 9, dtype=torch.complex64, device=d)],
        "has dtype",
    ),
    "hyper of another width": (
        "momentum_",
        4,
        lambda d: torch.zeros(1, 9, device=d),
        "hyper must be",
    ),
    "hyper in float64": (
        "momentum_",
        4,
        lambda d: torch.zeros(1, 12, device=d).double(),
        "hyper must be",
    ),
    "feedback in float64": (
        "momentum_",
        3,
        lambda d: torch.ones(1, device=d).double(),
        "feedback must be empty or",
    ),
    "slots dtype": (
        "momentum_",
        2,
        lambda d: [torch.zeros(6, dtype=torch.int64, device=d)],
        r"slots\[0\] has dtype",
    ),
    "slots length": (
        "momentum_",
        2,
        lambda d: [torch.zeros(9, dtype=torch.int32, device=d)],
        r"slots\[0\] has 9 elements, must have 6",
    ),
    "group out of range": ("momentum_", 5, [1], r"group\[0\]=1 must be 0 .. 0"),
    "negative group": ("momentum_", 5, [-1], r"group\[0\]=-1"),
    "axis": ("momentum_", 6, [2], "axis=2 must be 0"),
    "score dtype": ("momentum_", 7, lambda d: [torch.zeros(6, device=d)], r"score\[0\] has dtype"),
    "score length": (
        "momentum_",
        7,
        lambda d: [torch.zeros(5, dtype=torch.float64, device=d)],
        "5 elements, must have 6",
    ),
    "k of zero": ("select_", 5, [0], "2 elements, must have 0"),
    "indices dtype": (
        "select_",
        2,
        lambda d: [torch.zeros(2, dtype=torch.int64, device=d)],
        r"indices\[0\] has dtype",
    ),
    "index list": (
        "gather_",
        2,
        lambda d: [torch.zeros(3, dtype=torch.int32, device=d)],
        "indices",
    ),
    "out shape": ("gather_", 7, lambda d: [torch.zeros(2, 8, device=d)], r"out\[0\] has shape"),
    "no second moment": (
        "neuron_",
        1,
        lambda d: [torch.empty(0, device=d)],
        "neurons=0 must be rows=2",
    ),
    "factor absent": (
        "neuron_",
        5,
        lambda d: [torch.empty(0, device=d)],
        r"factor\[0\] must not be empty",
    ),
    "update shape": (
        "update_",
        1,
        lambda d: [torch.zeros(2, 8, device=d)],
        r"update\[0\] has shape",
    ),
    "slots absent": (
        "update_",
        2,
        lambda d: [torch.empty(0, dtype=torch.int32, device=d)],
        "must equal n=6 when slots",
    ),
    "scale list": ("update_", 7, [], "scale has 0 entries"),
    "step of two numbers": (
        "update_",
        8,
        lambda d: [torch.zeros(2, device=d)],
        "2 elements, must have 1",
    ),
    "negative base": ("update_", 11, [-1], "index_base=-1"),
    "state of two dtypes": (
        "adamw_",
        2,
        lambda d: [torch.zeros(5, 3, device=d).half()],
        "of one dtype",
    ),
    "state shape": (
        "adamw_",
        3,
        lambda d: [torch.zeros(3, 5, device=d)],
        r"exp_avg_sq\[0\] has shape",
    ),
    "no step": ("adamw_", 4, lambda d: [torch.empty(0, device=d)], r"step\[0\] must not be empty"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_wrong_call_says_what_is_wrong_and_changes_nothing(case, device):
    name, place, value, text = BAD_CALLS[case]
    if not ops.is_native(name, device):
        pytest.skip("the reference does not check its arguments")
    args = replaced(calls(device)[name], place, value(device) if callable(value) else value)
    with unchanged(*[t for a in args if isinstance(a, list) for t in a if isinstance(t, Tensor)]):
        with pytest.raises(RuntimeError, match=text):
            getattr(ops, name)(*args)


def test_indices_outside_are_refused_on_the_cpu():
    cpu = torch.device("cpu")
    for name, place in (("gather_", 2), ("neuron_", 2), ("update_", 2)):
        args = calls(cpu)[name]
        if not ops.is_native(name, cpu):
            pytest.skip("the reference does not check its arguments")
        args[place][0][1] = 99
        with pytest.raises(RuntimeError, match="=99 must be"):
            getattr(ops, name)(*args)


def test_kernels_for_other_gpus_are_not_for_this_one(monkeypatch):
    native = types.SimpleNamespace(cuda=True, runs_on=lambda index: index == 1)
    monkeypatch.setattr(build, "native", native)
    build._runs_on.cache_clear()
    try:
        found = [build.has_kernels(torch.device("cuda", index)) for index in range(3)]
        assert found == [False, True, False] and build.has_kernels(torch.device("cpu"))
        assert not ops.is_native("update_", "cuda:0") and ops.is_native("update_", "cuda:1")
    finally:
        build._runs_on.cache_clear()


@pytest.mark.gpu
def test_tensors_of_two_devices_are_refused():
    for name in ops.NAMES:
        args = list(calls(torch.device("cuda"))[name])
        args[1] = [t.cpu() for t in args[1]]
        with pytest.raises(RuntimeError, match="is on cpu, must be on cuda"):
            getattr(ops, name)(*args)
