"""The step against the float64 specification, and what follows from Algorithm 4 whatever the
code."""

from __future__ import annotations

import math

import pytest
import torch
from optimizer_helpers import matrix, parameter, reference_of, relative, steps, ulp, watch

import dion3
from dion3.options import selection_count, shape_scale

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(24, 40), (40, 24), (32, 32), (17, 33), (1, 9), (9, 1), (1, 1), (4, 96)]


# ---- against the specification ----


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fraction", ["1/n", 1 / 8, 1 / 4, 1 / 2, 1])
@pytest.mark.parametrize("select", ["auto", "rows", "cols"])
@pytest.mark.parametrize("neuron_norm", [False, True])
def test_step_equals_the_specification(device, shape, fraction, select, neuron_norm):
    """Each of four steps, from the same state, is within a few fp32 roundings of float64."""
    side = {"auto": min(shape), "rows": shape[0], "cols": shape[1]}[select]
    p = parameter(*shape, device=device)
    opt = dion3.Dion3(
        [p],
        lr=0.05,
        weight_decay=0.2,
        fraction=1 / side if fraction == "1/n" else fraction,
        select=select,
        neuron_norm=neuron_norm,
        adjust_lr_fn="spectral",
        newton_schulz="standard",
        ns_dtype=torch.float32,
    )
    for t in range(4):
        p.grad = matrix(*shape, seed=t + 1, decay=0.5, device=device)
        before = p.detach().double()
        weight, momentum, moment = reference_of(opt, opt.param_groups[0], p)
        in_fp32 = reference_of(opt, opt.param_groups[0], p, torch.float32)
        opt.step()
        state = opt.state[p]
        allowed = 2 * (in_fp32[0].double() - weight).abs().max() + 2 * ulp(p).max()
        assert (p - weight).abs().max() <= allowed
        assert (
            weight - before
        ).abs().max() > 100 * allowed  # the step is not lost in the tolerance
        assert (state["momentum_buffer"] - momentum).abs().max() <= 2 * ulp(momentum.float()).max()
        if neuron_norm:
            error = (in_fp32[2].double() - moment).abs().max()
            assert (
                state["neuron_second_moment"] - moment
            ).abs().max() <= 2 * error + 1e-5 * moment.max()
            assert moment.max() > 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("momentum_dtype", DTYPES)
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_every_dtype_rounds_once(device, dtype, grad_dtype, momentum_dtype, fraction):
    """Weights and momentum are the exact values rounded once to their own dtype."""
    p = parameter(20, 36, dtype=dtype, device=device)
    p.grad_dtype = None
    opt = dion3.Dion3(
        [p],
        lr=0.1,
        weight_decay=0.3,
        fraction=fraction,
        momentum_dtype=momentum_dtype,
        rounding="nearest",
        newton_schulz="standard",  # the form of the reference, so that its fp32 errors can be the bar
        ns_dtype=torch.float32,
    )
    for t in range(3):
        p.grad = matrix(20, 36, seed=t + 1, dtype=grad_dtype, device=device)
        weight, momentum, _ = reference_of(opt, opt.param_groups[0], p)
        in_fp32 = reference_of(opt, opt.param_groups[0], p, torch.float32)[0]
        if momentum_dtype != torch.float32 and fraction < 1:
            # the selection is made from the rounded momentum; take it over
            opt.step()
            assert p.isfinite().all()
            continue
        # What is orthogonalized is the momentum as it was rounded: how far does that carry the weight?
        grad, mu = p.grad, opt.param_groups[0]["momentum"]
        exact = momentum / mu  # before the feedback
        p.grad = grad.double() + (exact.to(momentum_dtype).double() - exact) / (1 - mu)
        moved = reference_of(opt, opt.param_groups[0], p)[0] - weight
        p.grad = grad
        opt.step()
        slack = 2 * (in_fp32.double() - weight).abs().max() + 2 * moved.abs().max()
        assert ((p - weight).abs() <= 0.5 * ulp(weight.to(dtype)) + slack).all()
        buffer = opt.state[p]["momentum_buffer"]
        assert buffer.dtype == momentum_dtype
        # two roundings: after the gradient was added, and after the feedback
        assert ((buffer - momentum).abs() <= 1.6 * ulp(buffer) + 1e-7).all()


@pytest.mark.parametrize("cls", [dion3.Dion3, dion3.Muon, dion3.NorMuon])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_flavours_equal_the_specification(device, cls, nesterov, maximize):
    p = parameter(18, 30, device=device)
    kwargs = {"fraction": 1.0} if cls is dion3.Dion3 else {}
    opt = cls([p], lr=0.05, nesterov=nesterov, maximize=maximize, ns_dtype=torch.float32, **kwargs)
    for t in range(4):
        p.grad = matrix(18, 30, seed=t + 1, device=device)
        weight, momentum, _ = reference_of(opt, opt.param_groups[0], p)
        exact32 = reference_of(opt, opt.param_groups[0], p, torch.float32)[0].double()
        opt.step()
        assert (p - weight).abs().max() <= 2 * (exact32 - weight).abs().max() + 2 * ulp(p).max()
        assert (opt.state[p]["momentum_buffer"] - momentum).abs().max() <= 4e-7


def test_a_free_run_follows_the_specification(device):
    """Twenty steps without ever copying our state into the reference: feedback accumulates
    right."""
    p = parameter(24, 48, device=device)
    opt = dion3.Dion3([p], lr=0.02, fraction=0.25, neuron_norm=True, ns_dtype=torch.float32)
    from dion3.reference_step import reference_step

    w = p.detach().double()
    m, v = torch.zeros_like(w), torch.zeros(24, dtype=torch.float64, device=device)
    for t in range(20):
        p.grad = matrix(24, 48, seed=t + 1, device=device)
        w, m, v = reference_step(w, p.grad.double(), m, v, lr=0.02, weight_decay=0.1, fraction=0.25)
        opt.step()
    assert relative(p.detach(), w) < 1e-6
    assert relative(opt.state[p]["momentum_buffer"], m) < 1e-6
    assert relative(opt.state[p]["neuron_second_moment"], v) < 1e-5


# ---- Dion3 and Muon ----


@pytest.mark.parametrize("nesterov", [False, True])
def test_dion3_at_fraction_one_sees_bitwise_what_muon_sees(device, nesterov):
    """Over 200 steps the input of Newton-Schulz has the same bits."""
    ours, muon = parameter(16, 24, device=device), parameter(16, 24, device=device)
    kwargs = {"lr": 0.01, "ns_coefficients": None, "nesterov": nesterov}
    first = dion3.Dion3([ours], fraction=1.0, **kwargs)
    second = dion3.Muon([muon], **kwargs)
    for t in range(200):
        ours.grad = matrix(16, 24, seed=t, device=device)
        muon.grad = ours.grad.clone()
        with watch("newton_schulz_out") as seen:
            first.step()
            second.step()
        (a,), (b,) = seen[0][0], seen[1][0]
        assert torch.equal(a, b), t
    assert torch.equal(ours, muon)
    assert not torch.equal(
        first.state[ours]["momentum_buffer"], second.state[muon]["momentum_buffer"]
    )


def test_newton_schulz_sees_undamped_momentum(device):
    """Line 9 acts on what was read in line 3 and on nothing else."""
    p = parameter(8, 16, device=device)
    opt = dion3.Dion3([p], lr=0.0, momentum=0.5, fraction=0.25)
    g = matrix(8, 16, seed=3, device=device)
    with watch("gather_") as seen:
        steps(opt, [p], [[g]])
    momentum = seen[0][0][0]
    chosen = seen[0][2][0].long()
    assert torch.equal(momentum, 0.5 * g)
    kept = opt.state[p]["momentum_buffer"]
    expected = 0.5 * g
    expected[chosen] *= 0.5
    assert torch.equal(kept, expected)
    assert len(chosen) == 2


# ---- selection ----


@pytest.mark.parametrize(
    ("fraction", "n", "k"),
    [(0.07, 100, 7), (0.14, 100, 14), (0.28, 50, 14), (0.55, 100, 55), (0.56, 100, 56)]
    + [(0.25, 5, 2), (1e-9, 7, 1), (1.0, 7, 7), (0.999, 7, 7), (1 / 3, 9, 3), (0.5, 0, 0)],
)
def test_selection_count(fraction, n, k):
    assert selection_count(fraction, n) == k


def test_ties_go_to_the_lower_index(device):
    p = parameter(8, 12, device=device)
    row = matrix(1, 12, seed=2, device=device)
    g = row.expand(8, 12) * torch.tensor([1, 2, 1, 2, 2, 1, 2, 1], device=device).unsqueeze(1)
    opt = dion3.Dion3([p], fraction=3 / 8)
    with watch("gather_") as seen:
        steps(opt, [p], [[g]])
    assert seen[0][2][0].tolist() == [1, 3, 4]


def test_indices_are_ascending_and_the_score_is_l1(device):
    """A row with one large entry has the larger l2 norm, but not the larger l1 norm."""
    g = torch.zeros(4, 16, device=device)
    g[0, 0] = 8.0
    g[3], g[2] = 1.0, 0.9
    p = parameter(4, 16, device=device)
    opt = dion3.Dion3([p], fraction=0.5)
    with watch("gather_") as seen:
        steps(opt, [p], [[g]])
    assert seen[0][2][0].tolist() == [2, 3]


@pytest.mark.parametrize("shape", [(64, 16), (16, 64)])
def test_auto_selects_the_short_side(device, shape):
    p = parameter(*shape, device=device)
    opt = dion3.Dion3([p], fraction=0.25)
    with watch("newton_schulz_out") as seen:
        steps(opt, [p], [[matrix(*shape, seed=1, device=device)]])
    assert seen[0][0][0].shape == ((1, 64, 4) if shape[0] > shape[1] else (1, 4, 64))


def test_no_slice_with_a_gradient_starves(device):
    """Constant gradients g_i. Per step the scores gain (1 - mu) sum(g_i) and lose (1 - mu) k times
    the largest, so the largest settles near s = sum(g_i) / k, and the slowest row gets there, and
    is chosen, within s / ((1 - mu) min(g_i)) steps."""
    sizes = torch.linspace(0.2, 1.0, 16, device=device)
    p = parameter(16, 24, device=device)
    opt = dion3.Dion3([p], lr=0.0, fraction=1 / 8, momentum=0.9)
    chosen = set()
    for _ in range(math.ceil(sizes.sum().item() / 2 / (0.1 * 0.2)) + 16):
        with watch("gather_") as seen:
            steps(opt, [p], [[sizes.unsqueeze(1).expand(16, 24)]])
        chosen.update(seen[0][2][0].tolist())
    assert chosen == set(range(16))


def test_a_starved_slice_keeps_growing(device):
    """Error feedback: what is not selected accumulates without decay."""
    p = parameter(4, 8, device=device)
    g = torch.ones(4, 8, device=device)
    g[0] *= 100
    opt = dion3.Dion3([p], lr=0.0, fraction=0.25, momentum=0.9)
    steps(opt, [p], [[g]] * 5)
    buffer = opt.state[p]["momentum_buffer"]
    assert torch.allclose(buffer[1], torch.full((8,), 0.5, device=device))
    assert buffer[0, 0] < 5 * 10.0 * 0.9  # damped each time


# ---- invariances ----


@pytest.mark.parametrize("fraction", [0.25, 1.0])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("neuron_norm", [False, True])
def test_permutation_invariance(device, fraction, dim, neuron_norm):
    """Shuffled rows or columns of weight and gradient give the shuffled result."""
    order = torch.randperm((20, 32)[dim], generator=torch.Generator().manual_seed(1)).to(device)
    a = parameter(20, 32, device=device)
    b = torch.nn.Parameter(a.detach().index_select(dim, order).clone())
    kwargs = {"lr": 0.1, "fraction": fraction, "neuron_norm": neuron_norm}
    kwargs["ns_dtype"] = torch.float32
    first, second = dion3.Dion3([a], **kwargs), dion3.Dion3([b], **kwargs)
    start = a.detach().clone()
    for t in range(3):
        a.grad = matrix(20, 32, seed=t + 1, device=device)
        b.grad = a.grad.index_select(dim, order)
        first.step()
        second.step()
    moved = (a - start).abs().max()
    assert (a.detach().index_select(dim, order) - b).abs().max() < 1e-4 * moved


@pytest.mark.parametrize("factor", [1e-3, 1e3, 1e-6, 1e6])
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_scale_invariance(device, factor, fraction):
    """Powers of two change no bit at all; other factors only roundings."""
    exact = 2.0 ** round(math.log2(factor))
    results = []
    for scale in (1.0, exact, factor):
        p = parameter(16, 24, device=device)
        opt = dion3.Dion3([p], lr=0.1, fraction=fraction, eps=0.0, ns_dtype=torch.float32)
        steps(opt, [p], [[matrix(16, 24, seed=t, device=device) * scale] for t in range(1, 4)])
        results.append(p.detach())
    assert torch.equal(results[0], results[1])
    assert (results[0] - results[2]).abs().max() < 1e-5


def test_a_tiny_gradient_is_not_amplified_beyond_eps(device):
    """The divisor is max(norm, eps)."""
    p = parameter(8, 8, device=device)
    opt = dion3.Dion3([p], lr=1.0, weight_decay=0.0, fraction=1.0, eps=1.0, momentum=0.0)
    g = matrix(8, 8, seed=1, device=device)
    before = p.detach().clone()
    steps(opt, [p], [[g * (1e-6 / g.norm())]])
    slope = math.prod(a for a, _, _ in dion3.plan.ns_config(opt._checked_options()[0], p.device)[0])
    assert (p - before).norm().item() == pytest.approx(1e-6 * slope, rel=0.02)


# ---- weight decay ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [1e-4, 1.9e-3])
def test_every_slice_decays(device, dtype, decay):
    """The mean decay of rows that are never selected is lr * weight_decay within 1 %, although one
    step of it is below half an ulp of 16-bit weights."""
    p = torch.nn.Parameter((0.5 + matrix(64, 2048, seed=3).abs()).to(dtype).to(device))
    opt = dion3.Dion3([p], lr=1e-2, weight_decay=decay * 100, fraction=1 / 64)
    g = torch.zeros(64, 2048, device=device, dtype=dtype)
    g[0] = 1.0
    before = p.detach().double()
    count = 20
    steps(opt, [p], [[g]] * count)
    shrink = 1 - (p[1:].double().sum() / before[1:].sum()) ** (1 / count)
    assert shrink.item() == pytest.approx(decay, rel=0.01)


def test_nearest_rounding_loses_the_decay_of_bf16_weights(device):
    """Why "auto" rounds them stochastically: the reason, pinned."""
    p = parameter(8, 64, dtype=torch.bfloat16, device=device)
    before = p.detach().clone()
    opt = dion3.Dion3([p], lr=1e-2, weight_decay=0.1, fraction=1 / 8, rounding="nearest")
    g = torch.zeros_like(p)
    g[0] = 1.0
    steps(opt, [p], [[g]])
    assert torch.equal(p[1:], before[1:])


def test_decay_uses_the_plain_learning_rate(device):
    """Neither the shape scale nor the transfer factor enters the decay."""
    p = parameter(40, 10, device=device)
    before = p.detach().clone()
    opt = dion3.Dion3([p], lr=0.5, weight_decay=0.4, fraction=0.25, adjust_lr_fn="match_rms_adamw")
    steps(opt, [p], [[torch.zeros_like(p)]])
    assert torch.equal(p.detach(), before * torch.tensor(1 - 0.5 * 0.4, device=device))


# ---- the learning rate ----


@pytest.mark.parametrize("fraction", [1 / 16, 1 / 4, 1 / 2, 1.0])
@pytest.mark.parametrize("transfer", [False, True])
def test_lr_transfer(device, fraction, transfer):
    """With it the norm of an update is lr * sqrt(n) whatever the fraction (k orthonormal rows have
    the norm sqrt(k)); without it lr * sqrt(k)."""
    p = torch.nn.Parameter(torch.zeros(16, 64, device=device))
    opt = dion3.Dion3([p], lr=0.3, fraction=fraction, lr_transfer=transfer)
    steps(opt, [p], [[matrix(16, 64, seed=1, decay=0.1, device=device)]])
    rows = 16 if transfer else 16 * fraction
    assert p.norm().item() == pytest.approx(0.3 * math.sqrt(rows), rel=0.12)


@pytest.mark.parametrize(
    ("mode", "shape", "scale"),
    [
        (None, (64, 16), 2.0),
        ("original", (16, 64), 1.0),
        ("match_rms_adamw", (64, 16), 1.6),
        ("match_rms_adamw", (16, 64), 1.6),
        ("spectral", (64, 16), 2.0),
        ("spectral", (16, 64), 0.5),
        ("spectral_unclamped", (16, 64), 0.5),
        ("none", (64, 16), 1.0),
    ],
)
def test_shape_scale(device, mode, shape, scale):
    """The documented table, and that it is the full shape which counts, not the selection's."""
    assert shape_scale(mode, *shape) == pytest.approx(scale)
    changes = []
    for how in ("none", mode):
        p = torch.nn.Parameter(torch.zeros(*shape, device=device))
        opt = dion3.Dion3([p], lr=0.1, fraction=0.25, adjust_lr_fn=how)
        steps(opt, [p], [[matrix(*shape, seed=1, device=device)]])
        changes.append(p.detach())
    assert relative(changes[1], changes[0] * scale) < 1e-6


# ---- the neuron norm ----


@pytest.mark.parametrize("shape", [(16, 4), (4, 16), (32, 32), (48, 96)])
@pytest.mark.parametrize("fraction", [0.25, 1.0])
@pytest.mark.parametrize("select", ["rows", "cols"])
def test_neuron_norm_keeps_the_frobenius_norm(device, shape, fraction, select):
    """The update has the norm of the orthogonal factor, on top of which come the scales."""
    p = torch.nn.Parameter(torch.zeros(*shape, device=device))
    opt = dion3.Dion3(
        [p],
        lr=1.0,
        weight_decay=0.0,
        neuron_norm=True,
        fraction=fraction,
        select=select,
        adjust_lr_fn="none",
        lr_transfer=False,
        ns_dtype=torch.float32,
    )
    for t in range(3):
        before = p.detach().double()
        with watch("update_") as seen:
            steps(opt, [p], [[matrix(*shape, seed=t, device=device)]])
        update = seen[0][1][0].double()
        factor = seen[0][3][0]
        assert (p.detach().double() - before).norm().item() == pytest.approx(
            update.norm().item(), rel=1e-6
        )
    assert factor.numel() == 1 or factor.max() / factor.min() > 1.01  # it does something


def test_second_moment_of_unselected_neurons_is_untouched(device):
    p = parameter(12, 20, device=device)
    opt = dion3.Dion3([p], fraction=0.25, neuron_norm=True)
    steps(opt, [p], [[matrix(12, 20, seed=1, device=device)]])
    before = opt.state[p]["neuron_second_moment"].clone()
    with watch("gather_") as seen:
        steps(opt, [p], [[matrix(12, 20, seed=2, device=device)]])
    after = opt.state[p]["neuron_second_moment"]
    chosen = torch.zeros(12, dtype=torch.bool, device=device)
    chosen[seen[0][2][0].long()] = True
    assert torch.equal(after[~chosen], before[~chosen])
    assert (after[chosen] != before[chosen]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_moment_converges_to_a_constant_target(device, dtype):
    """10^4 steps of the same update: an fp32 average arrives, one in bfloat16 would stick."""
    p = parameter(4, 8, dtype=dtype, device=device)
    g = matrix(4, 8, seed=1, dtype=dtype, device=device)
    opt = dion3.Dion3([p], lr=0.0, fraction=1.0, neuron_norm=True, beta2=0.999, momentum=0.0)
    with watch("update_") as seen:
        steps(opt, [p], [[g]])
    target = seen[0][1][0].double().square().mean(1)
    for _ in range(10**4):
        opt.step()
    moment = opt.state[p]["neuron_second_moment"]
    assert moment.dtype == torch.float32
    assert ((moment - target).abs() / target).max() < 1e-3


# ---- special gradients ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "make",
    [
        lambda p: dion3.Dion3(p, lr=0.5, weight_decay=0.5),
        lambda p: dion3.Dion3(p, lr=0.5, weight_decay=0.5, neuron_norm=True),
        lambda p: dion3.Muon(p, lr=0.5, weight_decay=0.5),
        lambda p: dion3.NorMuon(p, lr=0.5, weight_decay=0.5),
    ],
)
def test_zero_gradients_only_decay(device, dtype, make):
    p = parameter(8, 12, dtype=dtype, device=device)
    before = p.detach().clone()
    opt = make([p])
    steps(opt, [p], [[torch.zeros_like(p)]])
    assert torch.equal(p.detach(), before * 0.75) or dtype != torch.float32
    assert (p.double() - before.double() * 0.75).abs().max() <= ulp(before).max()
    assert all(value.isfinite().all() for value in opt.state[p].values())
    steps(opt, [p], [[matrix(8, 12, seed=1, dtype=dtype, device=device)]])
    assert p.isfinite().all()


def test_one_zero_slice_of_a_stack(device):
    p = parameter(3, 8, 12, device=device)
    before = p.detach().clone()
    g = matrix(3, 8, 12, seed=1, device=device)
    g[1] = 0
    opt = dion3.Dion3([p], lr=0.1, weight_decay=0.0, neuron_norm=True)
    steps(opt, [p], [[g]])
    assert torch.equal(p[1], before[1])
    assert (p[0] != before[0]).any() and (p[2] != before[2]).any() and p.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_a_bad_gradient_stays_in_its_own_matrix(device, bad, fraction):
    """Among equal shapes, in one bucket with it."""
    good, broken = parameter(8, 12, device=device), parameter(8, 12, seed=5, device=device)
    alone = torch.nn.Parameter(good.detach().clone())
    g = matrix(8, 12, seed=1, device=device)
    hurt = g.clone()
    hurt[3, 4] = bad
    kwargs = {"lr": 0.1, "fraction": fraction}
    steps(dion3.Dion3([good, broken], **kwargs), [good, broken], [[g, hurt]])
    steps(dion3.Dion3([alone], **kwargs), [alone], [[g]])
    assert torch.equal(good, alone)
    assert not broken.isfinite().all()


@pytest.mark.parametrize("axis", ["rows", "cols"])
def test_one_slice_becomes_the_unit_vector_times_p_of_one(device, axis):
    """k = 1: a single row of norm 1 has the one singular value 1."""
    p = torch.nn.Parameter(torch.zeros(6, 10, device=device))
    g = matrix(6, 10, seed=1, device=device)
    n = 6 if axis == "rows" else 10
    opt = dion3.Dion3(
        [p], lr=1.0, fraction=1 / n, select=axis, lr_transfer=False, adjust_lr_fn="none"
    )
    steps(opt, [p], [[g]])
    x = 1.0
    for a, b, c in dion3.plan.ns_config(opt._checked_options()[0], p.device)[0]:
        x = a * x + b * x**3 + c * x**5
    dim = 0 if axis == "rows" else 1
    best = g.abs().sum(1 - dim).argmax().item()
    slice_, row = -p.detach().select(dim, best), g.select(dim, best)
    tolerance = 1e-5 if device.type == "cpu" else 2e-3
    assert (slice_ - x * row / row.norm()).abs().max() < tolerance
    assert p.count_nonzero() == slice_.numel()


@pytest.mark.parametrize("scale", [6e4, 1e-7])
def test_extreme_fp16_gradients(device, scale):
    """Full-scale and subnormal fp16 gradients: the squares are summed in float64."""
    p = parameter(16, 32, dtype=torch.float16, device=device)
    before = p.detach().clone()
    sign = matrix(16, 32, seed=1, device=device).sign()
    opt = dion3.Dion3([p], lr=0.1, fraction=0.5, eps=0.0)
    steps(opt, [p], [[(sign * scale).half()]])
    assert p.isfinite().all() and (p != before).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_restarts_hold_in_16_bits(device, dtype):
    """A wide matrix with a steeply falling spectrum: without the restart the iteration blows up,
    with the default the update keeps the norm of an orthogonal matrix."""
    norms = {}
    for restarts in ("auto", ()):
        p = torch.nn.Parameter(torch.zeros(64, 256, device=device))
        opt = dion3.Dion3(
            [p], lr=1.0, fraction=1.0, newton_schulz="gram", restarts=restarts, ns_dtype=dtype
        )
        steps(opt, [p], [[matrix(64, 256, seed=1, decay=3.0, device=device)]])
        norms[restarts] = torch.linalg.matrix_norm(p.detach(), 2).item()
    assert norms["auto"] < 1.5
    assert not norms[()] < 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_tall_matrix_is_worked_on_from_its_short_side(device, dtype):
    """Its update is the transposed one's, so the small Gram matrix was used: bit for bit on the CPU,
    where both run as one; on a GPU to the rounding of one product."""
    wide = torch.nn.Parameter(torch.zeros(16, 48, device=device))
    tall = torch.nn.Parameter(torch.zeros(48, 16, device=device))
    g = matrix(16, 48, seed=1, decay=1.0, device=device)
    for p, grad in ((wide, g), (tall, g.mT.contiguous())):
        opt = dion3.Dion3([p], lr=1.0, fraction=1.0, ns_dtype=dtype, adjust_lr_fn="none")
        steps(opt, [p], [[grad]])
    assert relative(tall.detach().mT, wide.detach()) <= (0 if device.type == "cpu" else 1e-2)


# ---- momentum ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_muon_momentum_is_an_independent_average(device, dtype, nesterov, lr):
    """Newton-Schulz never writes into the buffer it reads, at no dtype (torch's does for bfloat16
    without Nesterov)."""
    p = parameter(10, 10, dtype=dtype, device=device)
    opt = dion3.Muon([p], lr=lr, nesterov=nesterov)
    average = torch.zeros(10, 10, dtype=torch.float64, device=device)
    for t in range(3):
        g = matrix(10, 10, seed=t, dtype=dtype, device=device)
        average = 0.95 * average + 0.05 * g.double()
        kept = g.clone()
        steps(opt, [p], [[g]])
        assert torch.equal(g, kept)  # nor into the gradient
    assert (opt.state[p]["momentum_buffer"] - average).abs().max() < 1e-6


@pytest.mark.parametrize("cls", [dion3.Dion3, dion3.Muon])
def test_momentum_matters_without_nesterov(device, cls):
    results = []
    for mu in (0.0, 0.9):
        p = parameter(8, 12, device=device)
        opt = cls([p], lr=0.1, momentum=mu, nesterov=False)
        steps(opt, [p], [[matrix(8, 12, seed=t, device=device)] for t in range(2)])
        results.append(p.detach())
    assert relative(results[0], results[1]) > 1e-3


def test_accumulated_gradients_give_the_same_step(device):
    """One step on the summed gradient: eight micro-batches or four times two."""
    results = []
    for chunks in (8, 4):
        p = parameter(8, 12, device=device)
        opt = dion3.Muon([p], lr=0.1, ns_dtype=torch.float32)
        x = matrix(8, 12, seed=9, device=device)
        for part in x.chunk(chunks):
            (part @ p.T).square().sum().backward()
        opt.step()
        results.append(p.detach())
    assert (results[0] - results[1]).abs().max() < 1e-5


# ---- stochastic rounding ----


def _rounded(device, seed=0, count=3, dtype=torch.bfloat16, extra=0, first_step=0):
    p = parameter(32, 64, dtype=dtype, device=device)
    others = [parameter(32, 64, seed=7 + i, dtype=dtype, device=device) for i in range(extra)]
    opt = dion3.Dion3([p, *others], lr=1e-3, weight_decay=0.0, seed=seed)
    opt.init_state()
    opt.state[p]["step"] += first_step
    grads = [
        [matrix(32, 64, seed=t + i, device=device).to(dtype) for i in range(1 + extra)]
        for t in range(count)
    ]
    steps(opt, [p, *others], grads)
    return p.detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_depends_on_seed_and_step_only(device, dtype):
    base = _rounded(device, dtype=dtype)
    assert torch.equal(base, _rounded(device, dtype=dtype))
    assert torch.equal(base, _rounded(device, dtype=dtype, extra=3))  # not on what is beside it
    assert not torch.equal(base, _rounded(device, dtype=dtype, seed=1))
    assert not torch.equal(base, _rounded(device, dtype=dtype, first_step=5))


def test_equal_parameters_round_differently(device):
    """The parameter is part of the key."""
    a, b = (parameter(32, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    opt = dion3.Dion3([a, b], lr=1e-3)
    g = matrix(32, 64, seed=1, dtype=torch.bfloat16, device=device)
    steps(opt, [a, b], [[g, g.clone()]])
    assert not torch.equal(a, b)
    assert (a.float() - b.float()).abs().max() <= ulp(a).max() * 1.01


def test_equal_matrices_of_a_stack_round_differently(device):
    """So is the place of the matrix in its parameter, and of the block in its matrix."""
    one = matrix(1, 16, 32, dtype=torch.bfloat16, device=device)
    g = matrix(1, 16, 32, seed=1, dtype=torch.bfloat16, device=device)
    stack = torch.nn.Parameter(one.repeat(2, 1, 1))
    fused = torch.nn.Parameter(one[0].repeat(2, 1))
    opt = dion3.Dion3([{"params": [stack]}, {"params": [fused], "split_sizes": (16, 16)}], lr=1e-3)
    steps(opt, [stack, fused], [[g.repeat(2, 1, 1), g[0].repeat(2, 1)]])
    assert not torch.equal(stack[0], stack[1])
    assert not torch.equal(fused[:16], fused[16:])


@pytest.mark.parametrize("part", [1 / 8, 1 / 3, 1 / 5])
def test_changes_below_an_ulp_accumulate(device, part):
    """A decay by part of an ulp: right in the mean within 5 sigma at once, and linear over 100
    steps; rounding to nearest would lose all of it."""
    spacing = 2.0**-8  # of bfloat16 below 1
    p = torch.nn.Parameter(torch.ones(200, 1000, dtype=torch.bfloat16, device=device))
    opt = dion3.Dion3([p], lr=0.5, weight_decay=2 * part * spacing)
    steps(opt, [p], [[torch.zeros_like(p)]])
    shift = (1 - p.double()).mean().item()
    sigma = spacing * math.sqrt(part * (1 - part) / p.numel())
    assert abs(shift - part * spacing) < 5 * sigma
    for _ in range(99):
        opt.step()
    expected = 1 - (1 - part * spacing) ** 100
    assert (1 - p.double()).mean().item() == pytest.approx(expected, rel=0.01)
