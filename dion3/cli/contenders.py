"""What `python -m dion3 bench` times: optimizers, orthogonalizers and updates, ours and torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dion3.hyper import HYPER_COUNT

from .timing import Contender

__all__ = ["MODELS", "OPTIMIZERS", "matrix_shapes", "orthogonalizers", "steppers", "updates"]


@dataclass(frozen=True)
class Model:
    """The hidden matrices of a transformer: `kv` is the width of keys and values together."""

    layers: int
    dim: int
    hidden: int
    kv: int
    gated: bool = False


MODELS = {
    "tiny": Model(2, 64, 256, 128),
    "demo": Model(6, 128, 512, 256),
    "gpt2": Model(12, 768, 3072, 1536),
    "gpt2-medium": Model(24, 1024, 4096, 2048),
    "llama-1b": Model(16, 2048, 8192, 1024, gated=True),
    "llama-8b-layer": Model(1, 4096, 14336, 2048, gated=True),
}


def matrix_shapes(model: Model) -> list[tuple[int, int]]:
    """(out, in) of the matrices of one layer: fused qkv, attention output, up (and gate), down."""
    up = [(model.hidden, model.dim)] * (2 if model.gated else 1)
    return [
        (model.dim + model.kv, model.dim),
        (model.dim, model.dim),
        *up,
        (model.dim, model.hidden),
    ]


def _adamw(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def _torch_muon(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters)


def _muon(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    from dion3 import Muon

    return Muon(parameters)


def _dion3(fraction: float) -> Callable[[list[torch.Tensor]], torch.optim.Optimizer]:
    def build(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        from dion3 import Dion3

        return Dion3(parameters, fraction=fraction)

    return build


OPTIMIZERS: dict[str, tuple[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]]] = {
    "adamw": ("AdamW", _adamw),
    "torch-muon": ("torch.optim.Muon", _torch_muon),
    "muon": ("Muon", _muon),
    "dion3": ("Dion3 f=1", _dion3(1.0)),
    "dion3-1/4": ("Dion3 f=1/4", _dion3(0.25)),
}
"""Name on the command line: label, and what builds it. AdamW is torch's, fused."""


def steppers(
    keys: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    layers: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Contender]:
    """One optimizer for each key: own weights with the same values, shared gradients."""
    generator = torch.Generator(device).manual_seed(0)
    weights, grads = (
        [
            0.02 * torch.randn(shape, generator=generator, device=device, dtype=dtype)
            for _ in range(layers)
            for shape in shapes
        ]
        for _ in range(2)
    )
    contenders = []
    for key in keys:
        label, build = OPTIMIZERS[key]
        parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        optimizer = build(list(parameters))
        contenders.append(Contender(label, optimizer.step, _state_facts(optimizer)))
    return contenders


def _state_facts(optimizer: torch.optim.Optimizer) -> Callable[[], dict[str, Any]]:
    from dion3.demo.train import state_bytes

    return lambda: {"state_bytes": state_bytes([optimizer])}


def orthogonalizers(stack: torch.Tensor) -> list[Contender]:
    """torch.optim.Muon's Newton-Schulz, matrix by matrix as that optimizer runs it, and ours.

    Args:
        stack: (batch, rows, cols) float32.
    """
    from torch.optim._muon import _zeropower_via_newtonschulz

    import dion3

    keller = (3.4445, -4.7750, 2.0315)

    def torchs() -> torch.Tensor:
        return torch.stack([_zeropower_via_newtonschulz(x, keller, 5, 1e-7) for x in stack])

    contenders = []
    for name, call in (
        ("torch.optim.Muon's", torchs),
        ("newton_schulz", lambda: dion3.newton_schulz(stack)),
        ("gram_ns", lambda: dion3.gram_ns(stack)),
    ):
        dtype = str(call().dtype).removeprefix("torch.")
        contenders.append(Contender(name, call, partial(dict, dtype=dtype)))
    return contenders


def updates(shape: tuple[int, int], layers: int, device: torch.device) -> list[Contender]:
    """The update of bf16 weights from a quarter of their rows, in one call and as torch operations.

    Torch's rounds once, as ours does: in fp32, then copied back. Stochastic rounding adds 16 random
    bits below the last one that is kept.
    """
    from dion3 import ops

    rows, cols = shape
    k = (rows + 3) // 4
    weights = [torch.randn(shape, device=device).bfloat16() for _ in range(layers)]
    chosen = [torch.randperm(rows, device=device)[:k].sort().values for _ in weights]
    dtype = torch.float16 if device.type == "cuda" else torch.float32  # of Newton-Schulz there
    update = [torch.randn(k, cols, device=device, dtype=dtype) for _ in weights]
    slots = []
    for indices in chosen:
        slots.append(torch.full((rows,), -1, dtype=torch.int32, device=device))
        slots[-1][indices] = torch.arange(k, dtype=torch.int32, device=device)
    decay, lr = 1.0 - 1e-5, 1e-3
    hyper = torch.zeros(1, HYPER_COUNT, device=device)
    hyper[0, 0], hyper[0, 1] = decay, lr
    absent = [torch.empty(0, device=device)] * layers
    step = [torch.ones((), device=device)] * layers
    zeros = [0] * layers

    def ours(weights: list[torch.Tensor], steps: list[torch.Tensor]) -> None:
        ops.update_(
            weights, update, slots, absent, hyper, zeros, zeros, [1.0] * layers, steps, 0,
            list(range(layers)), zeros, zeros, [cols] * layers,
        )  # fmt: skip

    def torchs(weights: list[torch.Tensor], stochastic: bool) -> None:
        for weight, indices, o in zip(weights, chosen, update, strict=True):
            x = weight.float().mul_(decay).index_add_(0, indices, o.float(), alpha=-lr)
            if stochastic:
                bits = torch.randint(1 << 16, shape, dtype=torch.int32, device=device)
                x = (x.view(torch.int32) + bits).bitwise_and_(-1 << 16).view(torch.float32)
            weight.copy_(x)

    facts: Callable[[], dict[str, Any]] = partial(dict, dtype="bfloat16")
    return [
        Contender("torch, nearest", partial(torchs, weights, False), facts),
        Contender("update_, nearest", partial(ours, weights, absent), facts),
        Contender("torch, stochastic", partial(torchs, weights, True), facts),
        Contender("update_, stochastic", partial(ours, weights, step), facts),
    ]
