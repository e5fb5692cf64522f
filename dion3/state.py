"""What the optimizer keeps for a parameter: key, shape and dtype, and how it is made and repaired.

  momentum_buffer       the parameter's shape, `momentum_dtype` (float32 by default)
  neuron_second_moment  float32, one number per output row of each matrix, with neuron_norm
  exp_avg, exp_avg_sq   AdamW parameters: `momentum_dtype`, but float32 where that is float16, whose
                        range is too small for squares
  step                  0-d float32 on the parameter's device: AdamW parameters, and matrices whose
                        weights are rounded stochastically

`step` is a float because checkpoints of torch's optimizers hold one; it counts exactly to 2^24.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .layout import keeps_strides, second_moment_shape
from .options import GroupOptions

MOMENTUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Plan(Protocol):
    """What a state knows of an `executor.DevicePlan`."""

    def settle(self) -> None:
        """Do what the last step left to the next one."""


class State(defaultdict[Any, dict[str, Any]]):
    """Parameter -> key -> tensor, and the plans that may have left something to the next step.

    These go with the state and not with an optimizer, for several may share one state: by
    assignment, by copy.copy, or as a wrapper that has taken over __dict__. `lock` is held while a step
    or `settle` runs, so that any thread may look at the state at any time; a signal handler may, too.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lock = threading.RLock()
        self.plans: Sequence[Plan] = ()

    def settle(self) -> None:
        """Do what the last step left to the next one."""
        with self.lock:
            plans, self.plans = self.plans, ()  # nothing is due any more, nor to be kept alive
            for plan in plans:
                plan.settle()

    @contextmanager
    def worked_on(self, plans: Sequence[Plan]) -> Iterator[None]:
        """A step of `plans`, which know what they themselves have left to be done."""
        if self.plans is not plans:
            self.settle()
        try:
            yield
        finally:
            self.plans = plans


def stochastic(parameter: Tensor, options: GroupOptions) -> bool:
    """Whether the parameter's weights are rounded stochastically.

    "auto" does so for 16-bit weights, except for wrapper subclasses (quantised weights), which do
    their own rounding. A float32 weight is never rounded further.
    """
    if parameter.dtype == torch.float32 or options.rounding == "nearest":
        return False
    return options.rounding == "stochastic" or not is_traceable_wrapper_subclass(parameter)


def state_spec(parameter: Tensor, options: GroupOptions) -> Spec:
    """Key -> (shape, dtype) of everything the optimizer keeps for one parameter."""
    shape = tuple(parameter.shape)
    if options.algorithm == "adamw":
        half = options.momentum_dtype == torch.float16
        dtype = torch.float32 if half else options.momentum_dtype
        return {
            "exp_avg": (shape, dtype),
            "exp_avg_sq": (shape, dtype),
            "step": ((), torch.float32),
        }
    spec: Spec = {"momentum_buffer": (shape, options.momentum_dtype)}
    if options.neuron_norm:
        spec["neuron_second_moment"] = (second_moment_shape(parameter, options), torch.float32)
    if stochastic(parameter, options):
        spec["step"] = ((), torch.float32)
    return spec


def new_state(
    parameter: Tensor, options: GroupOptions, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """A zero state tensor on the parameter's device."""
    strides = state_strides(parameter, options, shape)
    return torch.empty_strided(tuple(shape), strides, dtype=dtype, device=parameter.device).zero_()


def state_strides(
    parameter: Tensor, options: GroupOptions, shape: Sequence[int]
) -> tuple[int, ...]:
    """Those of the parameter where `keeps_strides` says so, so that the step reads both in the same
    order; contiguous otherwise."""
    if tuple(shape) == tuple(parameter.shape) and keeps_strides(parameter, options):
        return parameter.stride()
    return torch.empty(tuple(shape), device="meta").stride()


def convert_state(
    parameter: Tensor,
    options: GroupOptions,
    key: str,
    value: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """A state tensor with the spec's dtype and the parameter's device and strides: `value` itself
    if it is one already, else a copy. `value` may be a plain number where the spec is 0-d.

    Momentum and AdamW's averages keep the dtype they have, whatever `momentum_dtype` says: loading
    never loses bits. The others are float32, which holds all that they may come from.
    """
    if key in ("momentum_buffer", "exp_avg", "exp_avg_sq") and value.dtype in MOMENTUM_DTYPES:
        dtype = value.dtype
    if isinstance(value, Tensor):
        strides = state_strides(parameter, options, shape)
        same_memory = value.shape == tuple(shape) and value.stride() == strides
        if same_memory and value.dtype == dtype and value.device == parameter.device:
            return value
        fresh = new_state(parameter, options, shape, dtype)
        return fresh.copy_(value.detach().reshape(fresh.shape))
    return new_state(parameter, options, shape, dtype).fill_(value)


def ensure_state(parameter: Tensor, options: GroupOptions, state: State) -> None:
    """Create what is missing of a parameter's state, and move or convert what no longer fits it.

    Raises:
        ValueError: a state tensor has another number of elements than the parameter asks for.
    """
    entry = state[parameter]
    for key, (shape, dtype) in state_spec(parameter, options).items():
        value = entry.get(key)
        if value is None:
            entry[key] = new_state(parameter, options, shape, dtype)
            continue
        check_state_value("the optimizer state", key, value, shape)
        entry[key] = convert_state(parameter, options, key, value, shape, dtype)


def check_state_value(where: str, key: str, value: Any, shape: Sequence[int]) -> None:
    """Raise ValueError if a state value cannot have come from a parameter of this spec."""
    wanted = tuple(shape)
    if isinstance(value, Tensor):
        number = value.is_floating_point() or (wanted == () and not value.is_complex())
        if not number:
            raise ValueError(f"{key} of {where} has dtype {value.dtype}, not a real float one")
        same = tuple(value.shape) == wanted or (wanted == () and value.numel() == 1)
        if not same:
            raise ValueError(
                f"{key} of {where} has shape {tuple(value.shape)}, but the parameter needs "
                f"{wanted}: it belongs to another parameter or other group options"
            )
    elif wanted != () or isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} of {where} is {type(value).__name__}, not a tensor")
