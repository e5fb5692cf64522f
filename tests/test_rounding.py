"""Stochastic rounding of the update: independent of sharding, reproducible, uniform, unbiased.

Spec: random bits are keyed by (seed, step, parameter, global element index); csrc/dion3_round.h.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import adamw_hyper, hyper_tensor, randn, same_bits
from torch import Tensor

from dion3 import ops, reference

DTYPES = (torch.bfloat16, torch.float16)


def update(
    weight: Tensor,
    update_: Tensor,
    *,
    step=5.0,
    seed=1,
    param_id=0,
    base=0,
    row_stride=None,
    **hyper,
):
    """weight <- stochastic(decay * weight - step * update), all slices selected."""
    device = weight.device
    none = torch.empty(0, device=device)
    number = torch.tensor([step], device=device) if step is not None else none
    ops.update_(
        [weight],
        [update_],
        [none.int()],
        [none],
        hyper_tensor(device, {"decay": 1.0, "step": 1.0} | hyper),
        [0],
        [0],
        [1.0],
        [number],
        seed,
        [param_id],
        [base],
        [0],
        [row_stride or weight.shape[-1]],
    )
    return weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_and_column_shards_round_as_the_whole(dtype, device):
    w, o = (
        randn((61, 83), dtype, device, "w"),
        randn((61, 83), torch.float32, device, "o", scale=1e-3),
    )
    whole = update(w.clone(), o, base=12345)
    for cuts in ([0, 61], [0, 7, 61], [0, 1, 30, 61], [0, 3, 4, 11, 29, 30, 60, 61]):
        parts = [
            update(w[a:b].clone(), o[a:b], base=12345 + a * 83, row_stride=83)
            for a, b in zip(cuts, cuts[1:], strict=False)
        ]
        assert same_bits(torch.cat(parts), whole)
    for cuts in ([0, 5, 83], [0, 1, 40, 83], [0, 2, 3, 10, 33, 34, 70, 83]):
        parts = [
            update(w[:, a:b].clone(), o[:, a:b], base=12345 + a, row_stride=83)
            for a, b in zip(cuts, cuts[1:], strict=False)
        ]
        assert same_bits(torch.cat(parts, dim=1), whole)


def test_a_stack_rounds_as_its_matrices(device):
    w = randn((3, 17, 19), torch.bfloat16, device, "w")
    o = randn((3, 17, 19), torch.float32, device, "o", scale=1e-3)
    none = torch.empty(0, device=device)
    stack = w.clone()
    ops.update_(
        [stack],
        [o],
        [none.int()],
        [none],
        hyper_tensor(device),
        [0],
        [0],
        [1.0],
        [torch.ones(1, device=device)],
        9,
        [4],
        [1000],
        [17 * 19],
        [19],
    )
    for b in range(3):
        one = w[b].clone()
        ops.update_(
            [one],
            [o[b]],
            [none.int()],
            [none],
            hyper_tensor(device),
            [0],
            [0],
            [1.0],
            [torch.ones(1, device=device)],
            9,
            [4],
            [1000 + b * 17 * 19],
            [0],
            [19],
        )
        assert same_bits(stack[b], one)


def test_indices_beyond_32_bits_matter(device):
    w, o = (
        randn((8, 64), torch.bfloat16, device, "w"),
        randn((8, 64), torch.float32, device, "o", scale=1e-3),
    )
    results = [update(w.clone(), o, base=base) for base in (0, 2**35, 2**36, 2**62)]
    assert all(not torch.equal(results[0], r) for r in results[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_key_same_bits_and_any_other_key_differs(dtype, device):
    w, o = (
        randn((64, 64), dtype, device, "w"),
        randn((64, 64), torch.float32, device, "o", scale=1e-3),
    )
    first = update(w.clone(), o)
    assert same_bits(first, update(w.clone(), o))
    for change in ({"seed": 2}, {"seed": 1 + 2**32}, {"step": 6.0}, {"param_id": 1}, {"base": 8}):
        assert not torch.equal(first, update(w.clone(), o, **change))


def test_random_bits_are_uniform_and_independent_between_neighbours(device):
    bits = reference.random_bits(torch.arange(2**17, device=device), 7, 3, 1).cpu()
    for values, cells in (
        (bits >> 8, 256),
        (bits & 255, 256),
        ((bits[1:] >> 12) * 16 + (bits[:-1] >> 12), 256),
    ):
        observed = torch.bincount(values, minlength=cells).double()
        expected = values.numel() / cells
        chi2 = float(((observed - expected) ** 2 / expected).sum())
        # chi-square with 255 degrees: mean 255, deviation 22.6; neighbours overlap, so a little
        # wider
        assert abs(chi2 - 255) < 6 * math.sqrt(2 * 255)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [1 / 8, 1 / 3, -1 / 5])
def test_updates_below_half_an_ulp_are_unbiased(share, dtype, device):
    n, ulp = 200_000, torch.finfo(dtype).eps
    w = torch.full((100, n // 100), 1.25, dtype=dtype, device=device)
    o = torch.full_like(w, -share * ulp, dtype=torch.float32)
    moved = update(w.clone(), o).double() - w.double()
    p = abs(share)
    sigma = ulp * math.sqrt(p * (1 - p) / n)
    assert abs(float(moved.mean()) - share * ulp) < 5 * sigma
    assert set(moved.unique().tolist()) <= {0.0, math.copysign(ulp, share)}
    assert torch.equal(update(w.clone(), o, step=None), w)  # to nearest nothing ever moves


def test_a_thousand_small_steps_drift_linearly(device):
    ulp = torch.finfo(torch.bfloat16).eps
    w = torch.full((20, 100), 1.0, dtype=torch.bfloat16, device=device)
    o = torch.full((20, 100), -ulp / 50, device=device)
    for t in range(1, 1001):
        update(w, o, step=float(t))
    # 20 ulp on average; binomial deviation of one element sqrt(1000 * 0.02 * 0.98) = 4.4 ulp
    drift = (w.double() - 1).mean() / ulp
    assert abs(float(drift) - 20) < 5 * 4.43 / math.sqrt(2000)


@pytest.mark.parametrize("selected", [True, False])
def test_weight_decay_is_realised_on_every_row(selected, device):
    decay = 1 - 1e-4  # far below half an ulp of bf16
    w = randn((256, 1024), torch.bfloat16, device, "w", scale=0.02)
    k = 256 if selected else 1
    o = torch.zeros(k, 1024, dtype=torch.float16, device=device)
    slots = torch.arange(256, dtype=torch.int32, device=device)
    if not selected:
        slots = torch.full_like(slots, -1)
        slots[0] = 0
    none = torch.empty(0, device=device)
    for step, realised in ((torch.ones(1, device=device), 1.0), (none, 0.0)):
        new = w.clone()
        ops.update_(
            [new],
            [o],
            [slots],
            [none],
            hyper_tensor(device, {"decay": decay}),
            [0],
            [0],
            [1.0],
            [step],
            3,
            [0],
            [0],
            [0],
            [1024],
        )
        weights, change = w.double(), (new.double() - w.double())
        share = float((change * weights).sum() / (weights * weights).sum()) / -1e-4
        # p = a 2^-8 ulp or so moves with probability 1e-4 * |w| / ulp; the deviation of the mean is
        # about sqrt(1e-4 * 2^-8 / N) / 1e-4 with N = 2^18, that is 1.3 %
        assert abs(share - realised) < 0.065


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_representable_values_never_change(dtype, device):
    patterns = (
        torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    )
    w = patterns.view(256, 256).clone()
    zero = torch.zeros(256, 256, device=device)
    for t in range(1, 6):
        assert same_bits(update(w.clone(), zero, step=float(t)).nan_to_num(7.0), w.nan_to_num(7.0))


def test_adamw_shards_round_as_the_whole(device):
    g = randn((1000,), torch.float32, device, "g")
    p = randn((1000,), torch.bfloat16, device, "p")

    def step(part: slice) -> Tensor:
        new, zero = p[part].clone(), torch.zeros_like(g[part])
        ops.adamw_(
            [new],
            [g[part]],
            [zero],
            [zero.clone()],
            [torch.ones(1, device=device)],
            adamw_hyper(device),
            [0],
            [True],
            1,
            [0],
            [part.start],
        )
        return new

    parts = [step(slice(a, b)) for a, b in ((0, 3), (3, 500), (500, 501), (501, 1000))]
    assert same_bits(torch.cat(parts), step(slice(0, 1000)))
