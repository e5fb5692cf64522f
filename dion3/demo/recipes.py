"""The optimizers that the demo compares, and the learning rates it gives them.

All of them split the model in the same way (`dion3.param_groups`). The matrices of torch.optim.Muon
and of Dion3 get one learning rate: `lr_transfer` multiplies it by 1 / sqrt(fraction), so that what
was tuned for Muon carries over. Embeddings, output layer and norms are AdamW's in every recipe.

Dion3 damps the momentum of a slice only when the slice is selected, about every 1 / fraction steps. The
recipes keep the time over which gradients are averaged, 0.95 a step, with 0.95 ** (1 / fraction).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dion3.param_groups import param_groups

__all__ = ["RECIPES", "Rates", "Recipe"]

BETAS = (0.9, 0.95)
MOMENTUM = 0.95  # torch.optim.Muon's default


@dataclass(frozen=True)
class Rates:
    """Learning rates and weight decay.

    The defaults come from sweeps over factors of two at the demo's default size. AdamW's is the best
    of 5e-4 to 4e-3. For torch.optim.Muon's matrices 0.02 is within 0.03 nats of the best of 0.01 to
    0.04, and the rate of the rest hardly matters. Dion3's rates were not tuned: it takes Muon's.

    Attributes:
        adamw: AdamW on everything, the baseline.
        matrix: torch.optim.Muon and Dion3 on the matrices.
        rest: AdamW on what is not a matrix, beside Muon and inside Dion3.
        weight_decay: of the matrices, in every recipe.
    """

    adamw: float = 2e-3
    matrix: float = 0.02
    rest: float = 2e-3
    weight_decay: float = 0.1


@dataclass(frozen=True)
class Recipe:
    """A way to train: its name on the command line, its label in tables, and what builds it."""

    key: str
    label: str
    build: Callable[[nn.Module, Rates], list[torch.optim.Optimizer]]


def _split(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The matrices, and the rest."""
    split: dict[str, list[torch.Tensor]] = {"dion3": [], "adamw": []}
    for group in param_groups(model, report=False):
        split[group["algorithm"]] += [parameter for _, parameter in group["params"]]
    return split["dion3"], split["adamw"]


def _adamw(model: nn.Module, rates: Rates) -> list[torch.optim.Optimizer]:
    matrices, rest = _split(model)
    groups = [
        {"params": matrices, "weight_decay": rates.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, lr=rates.adamw, betas=BETAS, fused=True)]


def _muon(model: nn.Module, rates: Rates) -> list[torch.optim.Optimizer]:
    matrices, rest = _split(model)
    return [
        torch.optim.Muon(
            matrices, lr=rates.matrix, weight_decay=rates.weight_decay, momentum=MOMENTUM
        ),
        torch.optim.AdamW(rest, lr=rates.rest, betas=BETAS, weight_decay=0.0, fused=True),
    ]


def _dion3(fraction: float) -> Callable[[nn.Module, Rates], list[torch.optim.Optimizer]]:
    def build(model: nn.Module, rates: Rates) -> list[torch.optim.Optimizer]:
        from dion3 import Dion3

        groups = param_groups(
            model,
            lr=rates.matrix,
            weight_decay=rates.weight_decay,
            adamw={"lr": rates.rest},
            report=False,
        )
        momentum = MOMENTUM ** (1 / fraction)
        return [Dion3(groups, fraction=fraction, momentum=momentum, adamw_betas=BETAS)]

    return build


RECIPES = {
    recipe.key: recipe
    for recipe in (
        Recipe("adamw", "AdamW", _adamw),
        Recipe("muon", "torch.optim.Muon", _muon),
        Recipe("dion3", "Dion3 f=1", _dion3(1.0)),
        Recipe("dion3-1/4", "Dion3 f=1/4", _dion3(0.25)),
    )
}
