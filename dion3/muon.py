"""`Muon` and `NorMuon`: the same step with every slice selected and momentum damped before the
gradient is added, as torch.optim.Muon and the NorMuon paper have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .coefficients import KELLER
from .optimizer import Dion3


class Muon(Dion3):
    """A faster `torch.optim.Muon`: same arguments, same numbers, interchangeable checkpoints.

    The nine positional arguments are torch.optim.Muon's, with its defaults. "Same numbers" means
    the same algorithm; torch runs Newton-Schulz in bfloat16, here `ns_dtype` decides. Weights are
    rounded to nearest by default, as there; with bfloat16 weights and no float32 copy of them,
    `rounding="stochastic"` keeps weight decay and small updates from being rounded away.

    Beyond torch.optim.Muon: stacks of matrices, heads and blocks, AdamW groups, `maximize`, and all
    other keyword arguments and group keys of `Dion3` that do not concern selection; see there.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[Any] | None = KELLER,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        newton_schulz: str = "auto",
        restarts: str | Sequence[int] = "auto",
        ns_dtype: torch.dtype | None = None,
        momentum_dtype: torch.dtype = torch.float32,
        rounding: str = "nearest",
        seed: int = 0,
        adamw_betas: Sequence[float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            weight_decay,
            momentum,
            nesterov,
            ns_coefficients,
            eps,
            ns_steps,
            adjust_lr_fn,
            fraction=1.0,
            newton_schulz=newton_schulz,
            restarts=restarts,
            ns_dtype=ns_dtype,
            momentum_dtype=momentum_dtype,
            rounding=rounding,
            seed=seed,
            adamw_betas=adamw_betas,
            adamw_eps=adamw_eps,
            maximize=maximize,
        )

    def _momentum_rule(self) -> str:
        return "muon"


class NorMuon(Dion3):
    """NorMuon: `Muon` with the neuron norm. Every output row of the orthogonal update is divided by
    the root of its running second moment, and the matrix is brought back to its Frobenius norm.

    Arguments as `Dion3` without those of selection; Polar Express coefficients and no Nesterov
    momentum by default.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = False,
        ns_coefficients: Sequence[Any] | None = None,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        beta2: float = 0.95,
        newton_schulz: str = "auto",
        restarts: str | Sequence[int] = "auto",
        ns_dtype: torch.dtype | None = None,
        momentum_dtype: torch.dtype = torch.float32,
        rounding: str = "auto",
        seed: int = 0,
        adamw_betas: Sequence[float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            weight_decay,
            momentum,
            nesterov,
            ns_coefficients,
            eps,
            ns_steps,
            adjust_lr_fn,
            fraction=1.0,
            neuron_norm=True,
            beta2=beta2,
            newton_schulz=newton_schulz,
            restarts=restarts,
            ns_dtype=ns_dtype,
            momentum_dtype=momentum_dtype,
            rounding=rounding,
            seed=seed,
            adamw_betas=adamw_betas,
            adamw_eps=adamw_eps,
            maximize=maximize,
        )

    def _momentum_rule(self) -> str:
        return "muon"
