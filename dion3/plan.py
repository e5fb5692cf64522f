"""What one step does, worked out once: which pieces of which parameters go through which operation.

A plan is built at the first step and again whenever its signature changes: other parameters,
pointers, shapes, state tensors, group options, another set of parameters that have a gradient, or
gradients of another dtype.
Frameworks exchange parameters after construction, so nothing is planned before the first step.

Matrices of equal shape stand together in one stack for Newton-Schulz (a bucket). Stacks are worked
on in passes that reuse the same memory. The scratch memory of a device is therefore at most

  24 bytes per slice                                   sums, norms, indices
  + the weights that cannot be written in place        wrapper subclasses and the like
  + max(WORKSPACE_LIMIT, X and O of the largest matrix)
  + 4 bytes per row of an update with neuron norm
  + 256 bytes per scratch tensor                       alignment

and is held only while a step runs; 4 bytes per slice stay, the slots that the next step needs.
Newton-Schulz needs its own temporaries for one pass besides.

Everything here is pure Python over shapes; `executor` makes the argument lists and runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import build, layout
from .coefficients import normalize_coefficients
from .layout import Piece
from .options import GroupOptions, Options, plan_values
from .restarts import auto_restarts
from .state import State

WORKSPACE_LIMIT = 2 * 2**30
"""The most bytes of Newton-Schulz input and output in one pass, unless one matrix needs more."""

Groups = Sequence[Mapping[str, Any]]


def geometry(tensors: list[Tensor]) -> Any:
    """Address, shape and strides of each, in a form that is quick to compare."""
    if build.native is not None:
        return build.native.geometry(tensors)
    return [(t.data_ptr(), t.shape, t.stride()) for t in tensors]


class Signature:
    """Everything a plan depends on, in a form that is quick to compare with the present."""

    def __init__(
        self, groups: Groups, state: State, options: Options, grads: Sequence[Tensor | None]
    ) -> None:
        self.options = [plan_values(group, options) for group in groups]
        self.params = [list(group["params"]) for group in groups]
        self.grads = [grad if grad is None else grad.dtype for grad in grads]
        self.states = list(state.values())
        pairs = [(entry, key) for entry in self.states for key in entry]
        self.places = [(e, k) for e, k in pairs if isinstance(e[k], Tensor)]
        self.tensors = [entry[key] for entry, key in self.places]
        flat = [p for params in self.params for p in params]
        plain = [p for p in flat if not is_traceable_wrapper_subclass(p)]
        self.watched = plain + self.tensors
        self.geometry = geometry(self.watched)

    def matches(
        self, groups: Groups, state: State, options: Options, grads: Sequence[Tensor | None]
    ) -> bool:
        """Whether a plan built for this signature still holds."""
        return (
            len(groups) == len(self.params)
            and len(state) == len(self.states)
            and all(
                len(group["params"]) == len(params) and all(map(is_, group["params"], params))
                for group, params in zip(groups, self.params, strict=True)
            )
            and [grad if grad is None else grad.dtype for grad in grads] == self.grads
            and all(map(is_, state.values(), self.states))
            and all(map(is_, [entry.get(key) for entry, key in self.places], self.tensors))
            and geometry(self.watched) == self.geometry
            and [plan_values(group, options) for group in groups] == self.options
        )


class NSConfig(NamedTuple):
    """Everything that decides how Newton-Schulz runs: one call of the operation per value."""

    coefficients: tuple[tuple[float, float, float], ...]
    restarts: tuple[int, ...]
    method: str
    dtype: torch.dtype


def ns_config(options: GroupOptions, device: torch.device) -> NSConfig:
    """Resolve a group's Newton-Schulz options on a device.

    `ns_dtype=None` is float16 on CUDA and float32 on CPU: there 16-bit arithmetic is emulated,
    which costs time and gains nothing.
    """
    given = options.ns_coefficients
    if given is not None and not isinstance(given[0], tuple) and len(given) > 3:
        given = tuple(given[i : i + 3] for i in range(0, len(given), 3))
    one_per_step = given is not None and isinstance(given[0], tuple)
    table = normalize_coefficients(given, None if one_per_step else options.ns_steps)
    restarts = options.restarts
    if restarts == "auto":
        restarts = () if options.newton_schulz == "standard" else auto_restarts(table)
    dtype = options.ns_dtype
    if dtype is None:
        dtype = torch.float16 if device.type == "cuda" else torch.float32
    return NSConfig(table, tuple(restarts), options.newton_schulz, dtype)


@dataclass
class Item:
    """One piece of one parameter.

    Attributes:
        group, index: the parameter's group, and its number among all parameters (the key of
            stochastic rounding).
    """

    piece: Piece
    group: int
    index: int
    parameter: Tensor
    options: GroupOptions
    config: NSConfig


@dataclass
class Other:
    """One AdamW parameter."""

    group: int
    index: int
    parameter: Tensor
    options: GroupOptions


@dataclass
class Bucket:
    """Matrices of one shape that Newton-Schulz takes as one stack, within one pass."""

    config: NSConfig
    shape: tuple[int, int]
    items: list[Item] = field(default_factory=list)

    @property
    def matrices(self) -> int:
        """Height of the stack."""
        return sum(item.piece.batch for item in self.items)

    @property
    def bytes(self) -> int:
        """Input and output of the stack."""
        return 2 * self.matrices * self.shape[0] * self.shape[1] * self.config.dtype.itemsize


@dataclass
class DeviceWork:
    """What has to be done on one device."""

    passes: list[list[Bucket]]
    others: list[Other]

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, pass after pass."""
        return [bucket for buckets in self.passes for bucket in buckets]


def divide(
    groups: Groups, checked: Sequence[GroupOptions], present: Sequence[bool]
) -> dict[torch.device, DeviceWork]:
    """Sort the work of a step by device, bucket and pass.

    Args:
        groups: the parameter groups.
        checked: the checked options of each.
        present: for all parameters in order, whether it takes part (has a gradient).
    """
    items: dict[torch.device, list[Item]] = {}
    others: dict[torch.device, list[Other]] = {}
    index = -1
    for number, (group, options) in enumerate(zip(groups, checked, strict=True)):
        for parameter in group["params"]:
            index += 1
            if not present[index] or parameter.numel() == 0:
                continue
            device = parameter.device
            if options.algorithm == "adamw":
                others.setdefault(device, []).append(Other(number, index, parameter, options))
                continue
            config = ns_config(options, device)
            cut = layout.pieces(parameter, options, WORKSPACE_LIMIT, config.dtype.itemsize)
            items.setdefault(device, []).extend(
                Item(piece, number, index, parameter, options, config) for piece in cut
            )
    return {
        device: DeviceWork(make_passes(items.get(device, [])), others.get(device, []))
        for device in dict.fromkeys([*items, *others])
    }


def make_passes(items: Iterable[Item]) -> list[list[Bucket]]:
    """Sort items into buckets, and buckets into passes of at most WORKSPACE_LIMIT bytes."""
    by_shape: dict[Any, list[Item]] = {}
    for item in items:
        by_shape.setdefault((item.config, item.piece.update_shape), []).append(item)
    passes: list[list[Bucket]] = [[]]
    filled = 0
    for (config, shape), members in by_shape.items():
        bucket = Bucket(config, shape)
        for item in members:
            need = Bucket(config, shape, [item]).bytes
            if filled and filled + need > WORKSPACE_LIMIT:
                passes.append([])
                bucket, filled = Bucket(config, shape), 0
            if not bucket.items:
                passes[-1].append(bucket)
            bucket.items.append(item)
            filled += need
    return [buckets for buckets in passes if buckets]
