"""One whole Dion3 step of one matrix in a page of plain PyTorch: the specification in code.

"Dion3: Full-Stack Orthogonal Updates", Algorithm 4, with momentum kept as an average ((1 - mu)
times the paper's). Every line runs in the dtype of its arguments, so float64 arguments give the
step without rounding; `Dion3` is tested against that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .coefficients import DEFAULT
from .options import NEURON_EPS, selection_count, shape_scale


def polar(X: Tensor, coefficients: Sequence[Sequence[float]] = DEFAULT) -> Tensor:
    """Newton-Schulz by its definition: every singular value x becomes p_T(... p_1(x)),
    p_t(x) = a x + b x^3 + c x^5 (Algorithm 1). X is (rows, cols) of norm at most 1."""
    for a, b, c in coefficients:
        gram = X @ X.mT
        X = a * X + (b * gram + c * gram @ gram) @ X
    return X


def reference_step(
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    second_moment: Tensor | None = None,
    *,
    lr: float,
    weight_decay: float = 0.0,
    mu: float = 0.95,
    fraction: float = 1.0,
    axis: str = "auto",
    nesterov: bool = False,
    rule: str = "dion3",
    coefficients: Sequence[Sequence[float]] = DEFAULT,
    eps: float = 1e-7,
    adjust_lr_fn: str | None = None,
    lr_transfer: bool = True,
    beta2: float = 0.95,
    maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The step; arguments as those of `dion3.Dion3`, with `mu` for its momentum.

    Args:
        weight, grad, momentum: (rows, cols).
        second_moment: (rows,), or None for no neuron norm.
        axis: "rows", "cols", or "auto" for the short side.
        rule: "dion3" damps the selected momentum last, "muon" all of it first.

    Returns:
        New weight, momentum and second moment; the arguments are not changed.
    """
    rows, cols = weight.shape
    grad = -grad if maximize else grad
    # 1. momentum
    M = (mu if rule == "muon" else 1.0) * momentum + (1 - mu) * grad
    # 2. the k slices with the largest l1 norm, ties to the lower index, in ascending order
    if axis == "auto":
        axis = "rows" if rows <= cols else "cols"
    dim, n = (0, rows) if axis == "rows" else (1, cols)
    order = torch.sort(M.abs().sum(1 - dim), descending=True, stable=True).indices
    S = order[: selection_count(fraction, n)].sort().values
    # 3. orthogonalize them
    X = M.index_select(dim, S)
    if nesterov:
        X = mu * X + (1 - mu) * grad.index_select(dim, S)
    O = polar(X / X.norm().clamp(min=eps), coefficients)
    # 4.-6. the neuron norm: a neuron is a row of the weight
    if second_moment is not None:
        neurons = S if axis == "rows" else torch.arange(rows, device=S.device)
        v = beta2 * second_moment[neurons] + (1 - beta2) * O.square().mean(1)
        second_moment = second_moment.index_copy(0, neurons, v)
        scaled = O / (v.sqrt() + NEURON_EPS).unsqueeze(1)
        O = scaled * (O.norm() / scaled.norm()) if scaled.norm() > 0 else O
    # 7.-8. decay everything, update what was selected
    step = lr * shape_scale(adjust_lr_fn, rows, cols) / (fraction**0.5 if lr_transfer else 1.0)
    weight = ((1 - lr * weight_decay) * weight).index_add(dim, S, O, alpha=-step)
    # 9. error feedback
    if rule == "dion3":
        M = M.index_copy(dim, S, mu * M.index_select(dim, S))
    return weight, M, second_moment
