"""The operators of the optimizer step, one per function of csrc/dion3.h, as torch custom ops.

The schemas are defined here, once. Where the native part has a kernel for a device, it registers
itself (csrc/torch_binding.cpp); elsewhere the function of the same name in :mod:`dion3.reference`
runs, so every operator runs on every device.

Lists hold one entry per matrix: (rows, cols) or (batch, rows, cols), any strides; float32, float16
or bfloat16 in any mix. What belongs to a matrix (``score``, ``sumsq``, ``indices``, ``slots``,
``norm``, ``factor``, ``second_moment``) has a leading batch dimension if the matrix has one, and is
contiguous. An empty tensor in an optional place means "absent". ``hyper`` is a float32 tensor
(groups, 12) on the same device whose columns csrc/dion3.h names, and ``group[i]`` the row of matrix
i. ``axis``: 0 selects rows, 1 columns. All raise RuntimeError, with the argument's name and value,
before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("dion3", "DEF")
_library.define(
    "momentum_(Tensor(a!)[] momentum, Tensor[] grad, Tensor[] slots, Tensor feedback, Tensor hyper, "
    "int[] group, int[] axis, Tensor(b!)[] score, Tensor(c!)[] sumsq) -> ()"
)
_library.define(
    "select_(Tensor[] score, Tensor[] sumsq, Tensor(a!)[] indices, Tensor(b!)[] slots, "
    "Tensor(c!)[] norm, int[] k) -> ()"
)
_library.define(
    "gather_(Tensor[] momentum, Tensor[] grad, Tensor[] indices, Tensor[] norm, Tensor hyper, "
    "int[] group, int[] axis, Tensor(a!)[] out) -> ()"
)
_library.define(
    "neuron_(Tensor[] update, Tensor(a!)[] second_moment, Tensor[] indices, Tensor hyper, "
    "int[] group, Tensor(b!)[] factor) -> ()"
)
_library.define(
    "update_(Tensor(a!)[] weight, Tensor[] update, Tensor[] slots, Tensor[] factor, Tensor hyper, "
    "int[] group, int[] axis, float[] scale, Tensor[] step, int seed, int[] param_id, "
    "int[] index_base, int[] index_batch_stride, int[] index_row_stride) -> ()"
)
_library.define(
    "adamw_(Tensor(a!)[] param, Tensor[] grad, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, "
    "Tensor[] step, Tensor hyper, int[] group, bool[] stochastic, int seed, int[] param_id, "
    "int[] index_base) -> ()"
)

from . import build, reference  # noqa: E402  (the native part registers itself under these schemas)

NAMES = ("momentum_", "select_", "gather_", "neuron_", "update_", "adamw_")


def _fake(*_: Any, **__: Any) -> None:
    """All results go to arguments, so nothing has to be said about shapes."""


def _register() -> None:
    for name in NAMES:
        torch.library.register_fake(f"dion3::{name}", _fake, lib=_library)
        for key in ("CPU", "CUDA"):
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"dion3::{name}", key):
                _library.impl(name, torch.no_grad()(getattr(reference, name)), key)


_register()


def is_native(name: str, device: torch.device | str) -> bool:
    """Whether the operator has a compiled kernel for the device (else dion3.reference runs)."""
    return name in NAMES and build.has_kernels(torch.device(device))


def _operator(name: str, device: torch.device) -> Callable[..., None]:
    """The operator; on a GPU that the native part was not built for, its plain form."""
    native_cuda = device.type == "cuda" and getattr(build.native, "cuda", False)
    if not native_cuda or build.has_kernels(device):
        return getattr(torch.ops.dion3, name)
    return torch.no_grad()(getattr(reference, name))


def written(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that tensors changed in place."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def momentum_(
    momentum: Sequence[Tensor],
    grad: Sequence[Tensor],
    slots: Sequence[Tensor],
    feedback: Tensor,
    hyper: Tensor,
    group: Sequence[int],
    axis: Sequence[int],
    score: Sequence[Tensor],
    sumsq: Sequence[Tensor],
) -> None:
    """m <- keep * m + gain * g, and per slice the sums of |m| and of squares (Algorithm 4 line 1).

    Before that, m <- feedback * m in the slices that the last step selected (line 9, which would cost
    a pass of its own at the end of that step).

    Args:
        momentum: in/out, any of the three dtypes; rounded to nearest, where feedback is due once more
            before the gradient is added.
        grad: the gradients, of the momentum's shapes.
        slots: int32 (batch, rows or cols) of the last step's select_, or absent: it took all slices.
        feedback: float32 (groups), of the last step; or absent: 1, none is due.
        hyper, group, axis: see the module.
        score: out, float64 (batch, rows or cols), or absent.
        sumsq: out, float64 of the same shape, or absent; with nesterov, of the Newton-Schulz input.
    """
    _operator("momentum_", hyper.device)(
        momentum, grad, slots, feedback, hyper, group, axis, score, sumsq
    )


def select_(
    score: Sequence[Tensor],
    sumsq: Sequence[Tensor],
    indices: Sequence[Tensor],
    slots: Sequence[Tensor],
    norm: Sequence[Tensor],
    k: Sequence[int],
) -> None:
    """The k slices with the largest score (Algorithm 4 line 2).

    NaN counts as the largest, ties go to the lower index, indices come out ascending; k = n is the
    identity.

    Args:
        score: float64 (batch, n); may be absent where k = n.
        sumsq: float64 (batch, n), or absent where norm is.
        indices: out, int32 (batch, k), or absent.
        slots: out, int32 (batch, n): where a slice stands in indices, or -1; or absent.
        norm: out, float64 (batch): the root of the selected sumsq; or absent.
        k: how many to select, 1 .. n.
    """
    if score:  # an empty list has no device to dispatch on
        _operator("select_", score[0].device)(score, sumsq, indices, slots, norm, k)


def gather_(
    momentum: Sequence[Tensor],
    grad: Sequence[Tensor],
    indices: Sequence[Tensor],
    norm: Sequence[Tensor],
    hyper: Tensor,
    group: Sequence[int],
    axis: Sequence[int],
    out: Sequence[Tensor],
) -> None:
    """out <- m[selected] / max(norm, eps) (Algorithm 4 line 3).

    Args:
        momentum: what momentum_ left.
        grad: needed only with nesterov, else absent.
        indices: int32 (batch, k), or absent: all slices.
        norm: float64 (batch), or absent: no division.
        hyper, group, axis: see the module.
        out: out, (batch, k, cols) or (batch, rows, k), any of the three dtypes.
    """
    _operator("gather_", hyper.device)(momentum, grad, indices, norm, hyper, group, axis, out)


def neuron_(
    update: Sequence[Tensor],
    second_moment: Sequence[Tensor],
    indices: Sequence[Tensor],
    hyper: Tensor,
    group: Sequence[int],
    factor: Sequence[Tensor],
) -> None:
    """The neuron second moments, and a factor for each row of the update (Algorithm 4 lines 4-6).

    Args:
        update: the orthogonalized matrices.
        second_moment: in/out, float32 (batch, neurons), one per row of the weight.
        indices: int32 (batch, rows): the neuron of a row of the update; or absent: the identity.
        hyper, group: see the module.
        factor: out, float32 (batch, rows).
    """
    _operator("neuron_", hyper.device)(update, second_moment, indices, hyper, group, factor)


def update_(
    weight: Sequence[Tensor],
    update: Sequence[Tensor],
    slots: Sequence[Tensor],
    factor: Sequence[Tensor],
    hyper: Tensor,
    group: Sequence[int],
    axis: Sequence[int],
    scale: Sequence[float],
    step: Sequence[Tensor],
    seed: int,
    param_id: Sequence[int],
    index_base: Sequence[int],
    index_batch_stride: Sequence[int],
    index_row_stride: Sequence[int],
) -> None:
    """w <- round(a * w - g * o) where selected, round(a * w) elsewhere (Algorithm 4 lines 7-8).

    a is the decay and g = b * scale * factor, with b the learning rate.

    Args:
        weight: in/out, rounded once.
        update: (batch, k, cols) or (batch, rows, k).
        slots: int32 (batch, rows or cols) of select_, or absent: every slice, in order.
        factor: float32 (batch, rows of update) of neuron_, or absent: 1.
        hyper, group, axis: see the module.
        scale: shape scale of the learning rate.
        step: one float32 each, the step's number: round stochastically; or absent: to nearest.
        seed, param_id, index_base, index_batch_stride, index_row_stride: what the random bits of
            element (b, i, j) depend on beside step: its index is base + b * batch_stride + i *
            row_stride + j.
    """
    _operator("update_", hyper.device)(
        weight, update, slots, factor, hyper, group, axis, scale, step, seed, param_id,
        index_base, index_batch_stride, index_row_stride,
    )  # fmt: skip
    written(weight)


def adamw_(
    param: Sequence[Tensor],
    grad: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    step: Sequence[Tensor],
    hyper: Tensor,
    group: Sequence[int],
    stochastic: Sequence[bool],
    seed: int,
    param_id: Sequence[int],
    index_base: Sequence[int],
) -> None:
    """One decoupled AdamW step of tensors of any shape (the formula is in csrc/dion3.h).

    Args:
        param: in/out, rounded once.
        grad, exp_avg, exp_avg_sq: of the parameters' shapes; the latter two in/out and of one
            dtype.
        step: one float32 each: the number of this step, 1 at the first.
        hyper: as in the module, with the columns of an AdamW group.
        group: see the module.
        stochastic: whether to round the parameter stochastically.
        seed, param_id, index_base: what the random bits depend on beside step and the element's
            place.
    """
    _operator("adamw_", hyper.device)(
        param, grad, exp_avg, exp_avg_sq, step, hyper, group, stochastic, seed, param_id, index_base
    )
    written(param)


def newton_schulz_out(*args: Any) -> None:
    """The grouped operator of :mod:`dion3.newton_schulz`, beside the others for the executor."""
    operator: Callable[..., None] = torch.ops.dion3.newton_schulz_out
    operator(*args)
