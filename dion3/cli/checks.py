"""The checks of `python -m dion3 selftest`: each takes a device and says what it saw, or fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CHECKS", "Failure"]

ROWS, COLS = 0, 1
ROW_COUNT, COL_COUNT, K = 37, 53, 10


class Failure(Exception):
    """A check that ran and did not see what it should."""


def _require(good: bool, text: str) -> None:
    if not good:
        raise Failure(text)


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers on the CPU, the same for every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _matrix_hyper() -> torch.Tensor:
    """One row of the table of numbers in dion3.h: decay, step, keep, gain, feedback, eps, ..."""
    row = [0.99, 0.02, 1.0, 0.05, 0.95, 1e-7, 0.95, 1e-8, 1.0, 0.0, 0.0, 0.0]
    return torch.tensor([row])


def _adamw_hyper() -> torch.Tensor:
    row = [0.99, 0.01, 0.9, 0.1, 0.95, 0.05, 1e-8, 1.0, 0.0, 0.0, 0.0, 0.0]
    return torch.tensor([row])


# ---- the operations of a step -------------------------------------------------------------------


def _to(device: torch.device, value: Any) -> Any:
    """Tensors, alone and in lists, copied to a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, list):
        return [_to(device, entry) for entry in value]
    return value


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _run_operation(name: str, arguments: tuple[Any, ...], device: torch.device) -> str:
    """Run an operation and its reference on copies of `arguments` and compare every tensor."""
    from dion3 import ops, reference

    ours = _to(device, list(arguments))
    expected = _to(torch.device("cpu"), list(arguments))
    getattr(ops, name)(*ours)
    getattr(reference, name)(*expected)
    worst = 0.0
    for got, want in zip(_tensors(ours), _tensors(expected), strict=True):
        got = got.cpu()
        if torch.equal(got, want):
            continue
        difference = (got.double() - want.double()).abs().max().item()
        scale = want.double().abs().max().item() or 1.0
        worst = max(worst, difference / scale)
        # Sums may be taken in another order; what is rounded to 16 bits must agree bit for bit.
        unit = torch.finfo(want.dtype).eps if want.dtype in (torch.float32, torch.float64) else 0.0
        _require(difference <= 4 * unit * scale, f"differs from the reference by {difference:.3g}")
    kind = "native" if ops.is_native(name, device) else "plain PyTorch"
    return f"{kind}, " + ("bitwise equal" if worst == 0 else f"relative difference {worst:.1e}")


def _stats() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Scores and squared sums of `_momentum_arguments`' rows."""
    momentum = _random(ROW_COUNT, COL_COUNT, seed=1).double()
    return [momentum.abs().sum(1)], [momentum.square().sum(1)]


def _check_momentum(device: torch.device) -> str:
    sums = [torch.full((ROW_COUNT,), float("nan"), dtype=torch.float64) for _ in range(2)]
    arguments = (
        [_random(ROW_COUNT, COL_COUNT, seed=1)],
        [_random(ROW_COUNT, COL_COUNT, seed=2, dtype=torch.bfloat16)],
        [_selection()[1]],
        torch.tensor([0.95]),
        _matrix_hyper(),
        [0],
        [ROWS],
        [sums[0]],
        [sums[1]],
    )
    return _run_operation("momentum_", arguments, device)


def _selection() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indices (k,), slots (rows,) and norm (1,) of the ten rows with the largest scores."""
    scores, sums = _stats()
    indices = scores[0].topk(K).indices.sort().values
    slots = torch.full((ROW_COUNT,), -1, dtype=torch.int32)
    slots[indices] = torch.arange(K, dtype=torch.int32)
    return indices.int(), slots, sums[0][indices].sum().sqrt().reshape(1)


def _check_select(device: torch.device) -> str:
    scores, sums = _stats()
    indices = torch.full((K,), -7, dtype=torch.int32)
    slots = torch.full((ROW_COUNT,), -7, dtype=torch.int32)
    norm = torch.full((1,), float("nan"), dtype=torch.float64)
    return _run_operation("select_", (scores, sums, [indices], [slots], [norm], [K]), device)


def _check_gather(device: torch.device) -> str:
    indices, _, norm = _selection()
    out = torch.full((K, COL_COUNT), float("nan"), dtype=torch.float16)
    empty = torch.empty(0)
    arguments = (
        [_random(ROW_COUNT, COL_COUNT, seed=1)],
        [empty],
        [indices],
        [norm],
        _matrix_hyper(),
        [0],
        [ROWS],
        [out],
    )
    return _run_operation("gather_", arguments, device)


def _check_neuron(device: torch.device) -> str:
    indices, _, _ = _selection()
    arguments = (
        [_random(K, COL_COUNT, seed=3, dtype=torch.float16)],
        [_random(ROW_COUNT, seed=4).square()],
        [indices],
        _matrix_hyper(),
        [0],
        [torch.full((K,), float("nan"))],
    )
    return _run_operation("neuron_", arguments, device)


def _check_update(device: torch.device) -> str:
    _, slots, _ = _selection()
    seen = []
    for dtype in (torch.float32, torch.bfloat16):
        step = torch.tensor([3.0]) if dtype == torch.bfloat16 else torch.empty(0)
        arguments = (
            [_random(ROW_COUNT, COL_COUNT, seed=5, dtype=dtype)],
            [_random(K, COL_COUNT, seed=3, dtype=torch.float16)],
            [slots],
            [_random(K, seed=6).abs()],
            _matrix_hyper(),
            [0],
            [ROWS],
            [1.5],
            [step],
            7,
            [1],
            [0],
            [0],
            [COL_COUNT],
        )
        seen.append(_run_operation("update_", arguments, device))
    agreed = "; ".join(dict.fromkeys(seen))
    return f"{agreed} (float32, and bfloat16 with stochastic rounding)"


def _check_adamw(device: torch.device) -> str:
    arguments = (
        [_random(1001, seed=5)],
        [_random(1001, seed=6)],
        [_random(1001, seed=7)],
        [_random(1001, seed=8).square()],
        [torch.tensor([5.0])],
        _adamw_hyper(),
        [0],
        [False],
        7,
        [1],
        [0],
    )
    return _run_operation("adamw_", arguments, device)


# ---- the orthogonalizers ------------------------------------------------------------------------


def _decaying(rows: int, cols: int) -> torch.Tensor:
    """A (2, rows, cols) stack whose singular values fall from 1 to 0.03."""
    left = torch.linalg.qr(_random(2, rows, rows, seed=9).double()).Q
    right = torch.linalg.qr(_random(2, cols, rows, seed=10).double()).Q
    values = torch.logspace(0, -1.5, rows, dtype=torch.float64)
    return ((left * values) @ right.mT).float()


def _polynomials(x: torch.Tensor) -> torch.Tensor:
    """The default coefficients on the singular values of `x`, by an SVD in float64."""
    from dion3.coefficients import DEFAULT

    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    values = values / values.square().sum(-1, keepdim=True).sqrt()
    for a, b, c in DEFAULT:
        values = a * values + b * values**3 + c * values**5
    return (left * values[..., None, :]) @ right


def _check_orthogonalizer(name: str, device: torch.device) -> str:
    """Against float64: the bound is for the dtype that computes, over five iterations."""
    from dion3.newton_schulz import gram_ns, newton_schulz

    function: Callable[..., torch.Tensor] = gram_ns if name == "gram" else newton_schulz
    seen = []
    for dtype, bound in ((torch.float32, 1e-4), (torch.float16, 2e-2)):
        for rows, cols in ((32, 48), (48, 32), (33, 65)):
            x = _decaying(min(rows, cols), max(rows, cols))
            x = x if rows <= cols else x.mT
            got = function(x.to(device), dtype=dtype).double().cpu()
            want = _polynomials(x)
            error = ((got - want).norm() / want.norm()).item()
            _require(error <= bound, f"{rows} x {cols} in {dtype}: relative error {error:.2e}")
            seen.append(error)
    return f"relative error {max(seen[:3]):.1e} in float32, {max(seen[3:]):.1e} in float16"


def _check_products(device: torch.device) -> str:
    from dion3.newton_schulz import gemm_add, symmetric_mm

    a, b = (_random(2, 33, 65, seed=s, dtype=torch.float16).to(device) for s in (11, 12))
    gram = symmetric_mm(a)
    _require(torch.equal(gram, gram.mT), "symmetric_mm is not symmetric")
    square = a @ b.mT
    seen = []
    for got, want in (
        (gram, a.double() @ a.double().mT),
        (gemm_add(square, b, a, 0.5, 2.0), 0.5 * square.double() @ b.double() + 2 * a.double()),
    ):
        error = ((got.double() - want).norm() / want.norm()).item()
        _require(error <= 2e-3, f"relative error {error:.2e}")
        seen.append(error)
    return f"relative error {max(seen):.1e} in float16"


def _check_restarts(device: torch.device) -> str:
    from dion3.coefficients import KELLER, scaled
    from dion3.restarts import find_restarts

    triples = scaled([KELLER] * 5, 1.0)
    found = (find_restarts(), find_restarts(triples), find_restarts(num_restarts=2))
    _require(found == ([2], [3], [1, 2]), f"{found} instead of ([2], [3], [1, 2])")
    return "[2] for Polar Express, [3] for Keller's triple"


# ---- whole steps --------------------------------------------------------------------------------


def _descend(build: Callable[[Any], torch.optim.Optimizer], device: torch.device) -> torch.Tensor:
    """Eight steps on |tanh(W X) - 1|^2, a new X each time; the weights, on the CPU, in float64."""
    weights = [_random(24, 40, seed=13), _random(40, 24, seed=14), _random(24, 24, seed=15)]
    parameters = [torch.nn.Parameter((0.1 * w).to(device)) for w in weights]
    optimizer = build(parameters)
    for step in range(8):
        optimizer.zero_grad()
        for i, parameter in enumerate(parameters):
            inputs = _random(parameter.shape[1], 64, seed=100 * step + i).to(device)
            (parameter @ inputs).tanh().sub(1).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters]).double().cpu()


def _check_muon(device: torch.device) -> str:
    """Ours, told to compute as torch's does, against torch.optim.Muon: in bf16 both err alike."""
    from dion3 import Muon

    ours = _descend(lambda p: Muon(p, lr=0.02), device)
    torchs = _descend(lambda p: torch.optim.Muon(p, lr=0.02), device)
    start = torch.cat([0.1 * _random(*s, seed=n).flatten() for s, n in _START]).double()
    error = ((ours - torchs).norm() / (torchs - start).norm()).item()
    _require(error <= 0.05, f"relative difference of the updates {error:.2e}")
    return f"relative difference of the updates {error:.1e}"


_START = (((24, 40), 13), ((40, 24), 14), ((24, 24), 15))


def _check_dion3(device: torch.device) -> str:
    """Every setting moves the weights, stays finite, and repeats bit for bit."""
    from dion3 import Dion3, NorMuon

    builds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "f=1": lambda p: Dion3(p, lr=0.02, fraction=1.0),
        "f=1/4": lambda p: Dion3(p, lr=0.02, fraction=0.25),
        "NorMuon": lambda p: NorMuon(p, lr=0.02),
        "AdamW": lambda p: Dion3([{"params": p, "algorithm": "adamw", "lr": 0.01}]),
    }
    start = torch.cat([0.1 * _random(*s, seed=n).flatten() for s, n in _START]).double()
    for name, build in builds.items():
        weights = _descend(build, device)
        _require(bool(weights.isfinite().all()), f"{name}: weights are not finite")
        _require(not torch.equal(weights, start), f"{name}: weights did not move")
        _require(torch.equal(weights, _descend(build, device)), f"{name}: two runs differ")
    return ", ".join(builds) + ": finite, and two runs are bitwise equal"


CHECKS: tuple[tuple[str, Callable[[torch.device], str]], ...] = (
    ("momentum", _check_momentum),
    ("select", _check_select),
    ("gather", _check_gather),
    ("neuron", _check_neuron),
    ("update", _check_update),
    ("adamw", _check_adamw),
    ("symmetric_mm, gemm_add", _check_products),
    ("gram_ns against float64", lambda device: _check_orthogonalizer("gram", device)),
    ("newton_schulz against float64", lambda device: _check_orthogonalizer("standard", device)),
    ("find_restarts", _check_restarts),
    ("Muon against torch.optim.Muon", _check_muon),
    ("Dion3, NorMuon, AdamW groups", _check_dion3),
)
