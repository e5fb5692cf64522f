"""Every hyper-parameter of the optimizers: what it may be, and what a group that lacks it gets.

All validation lives here, so that construction, `add_param_group`, `load_state_dict` and a value
changed between two steps are judged alike. Every error names the argument, its value and the
remedy.

A parameter group carries the eight keys of `torch.optim.Muon`, plus those options of ours that the
user set in that very group: flat distributed-checkpoint loaders demand each live group key from the
checkpoint, so a key that everybody has would make older and foreign checkpoints unloadable. All
other options live on the optimizer, in `Options`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

NEURON_EPS = 1e-8
"""Added to the square root of the neuron second moment (Algorithm 4, line 5)."""

MUON_KEYS = (
    "lr",
    "weight_decay",
    "momentum",
    "nesterov",
    "ns_coefficients",
    "eps",
    "ns_steps",
    "adjust_lr_fn",
)
"""The group keys of torch.optim.Muon: the ones every group of ours has."""

LAYOUT_KEYS = ("num_heads", "head_axis", "split_sizes", "flatten")
"""Group keys that say how a parameter is made of matrices."""

IGNORED_KEYS = ("fused", "foreach", "capturable", "differentiable")
"""Accepted because frameworks put them into every group; they select nothing here."""

SCHEDULER_KEYS = (
    "initial_lr",
    "max_lr",
    "min_lr",
    "swa_lr",
    "base_momentum",
    "max_momentum",
    "initial_momentum",
)
"""Written into groups by torch.optim.lr_scheduler and torch.optim.swa_utils."""

ADJUST_LR_FNS = ("original", "match_rms_adamw", "spectral", "spectral_unclamped", "none")

Coefficients = tuple[tuple[float, float, float], ...]


# ---- single values ----


def _bad(name: str, value: Any, remedy: str) -> ValueError:
    return ValueError(f"{name}={value!r}: {remedy}")


def _real(name: str, value: Any, remedy: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _bad(name, value, f"{remedy} (a Python number, not {type(value).__name__})")
    if not math.isfinite(value):
        raise _bad(name, value, f"{remedy}; it is not finite")
    return float(value)


def _at_least_zero(name: str, value: Any, what: str) -> float:
    number = _real(name, value, f"{what} should be >= 0")
    if number < 0:
        raise _bad(name, value, f"{what} should be >= 0")
    return number


def _below_one(name: str, value: Any, what: str) -> float:
    number = _at_least_zero(name, value, what)
    if number >= 1:
        raise _bad(name, value, f"{what} should be >= 0 and < 1")
    return number


def check_lr(name: str, value: Any) -> Any:
    """A finite number >= 0, or a tensor with one such element; returned as it came."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"Tensor {name} must be 1-element, but has shape {tuple(value.shape)}: "
                "pass torch.tensor(value)"
            )
        if value.is_complex() or value.dtype == torch.bool:
            raise _bad(name, value, f"the learning rate cannot be a {value.dtype} tensor")
        if type(value) is Tensor and value.is_meta:
            raise _bad(name, value, "the learning rate has no value on the meta device")
        _at_least_zero(name, value.item(), "Learning rate")
        return value
    _at_least_zero(name, value, "Learning rate")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _bad(name, value, "should be True or False")
    return value


def _one_of(choices: Sequence[Any]) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if isinstance(value, torch.dtype | str | None) and value in choices:
            return value
        raise _bad(name, value, "should be one of " + ", ".join(map(repr, choices)))

    return check


def _check_adjust_lr_fn(name: str, value: Any) -> Any:
    if value is None or (isinstance(value, str) and value in ADJUST_LR_FNS):
        return value
    raise ValueError(
        f"Adjust learning rate function {value} is not supported ({name}={value!r}): use None or "
        + ", ".join(map(repr, ADJUST_LR_FNS))
    )


def _check_ns_steps(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _bad(name, value, "should be an integer >= 1")
    if value >= 100:
        raise _bad(
            name, value, "Number of steps must be less than 100 for computational efficiency"
        )
    return value


def _check_ns_coefficients(name: str, value: Any) -> Any:
    """None; 3 numbers; or 3 numbers per step, nested or flat. Returned as (nested) tuples."""
    remedy = (
        "Coefficients must be a tuple of exactly 3 values, a list of such tuples (one per step), "
        "or None for Polar Express"
    )
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) == 0:
        raise _bad(name, value, remedy)
    nested = [isinstance(item, Sequence) and not isinstance(item, str) for item in value]
    if all(nested):
        if any(len(item) != 3 for item in value) or len(value) >= 100:
            raise _bad(name, value, remedy)
        return tuple(tuple(_real(name, x, remedy) for x in item) for item in value)
    if any(nested) or len(value) % 3 or len(value) >= 300:
        raise _bad(name, value, remedy)
    return tuple(_real(name, x, remedy) for x in value)


def _check_restarts(name: str, value: Any) -> Any:
    if value is None:
        return ()
    if isinstance(value, str):
        if value == "auto":
            return value
    elif isinstance(value, Sequence) and all(
        isinstance(r, int) and not isinstance(r, bool) and r >= 1 for r in value
    ):
        if all(a < b for a, b in zip(value, value[1:], strict=False)):
            return tuple(value)
    raise _bad(name, value, 'should be "auto" or ascending iteration numbers >= 1, such as [2]')


def _check_fraction(name: str, value: Any) -> float:
    number = _real(name, value, "should be > 0 and <= 1")
    if not 0 < number <= 1:
        raise _bad(name, value, "should be > 0 and <= 1")
    return number


def _check_betas(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise _bad(name, value, "should be two numbers >= 0 and < 1")
    first, second = (_below_one(name, beta, "each beta") for beta in value)
    return first, second


def _check_seed(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise _bad(name, value, "should be an integer >= 0 and < 2**63")
    return value


def _check_num_heads(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _bad(name, value, "should be an integer >= 1, or None")
    return value


def _check_head_axis(name: str, value: Any) -> int:
    if isinstance(value, bool) or value not in (0, 1):
        raise _bad(
            name, value, "should be 0 (heads are blocks of rows) or 1 (heads are blocks of columns)"
        )
    return int(value)


def _check_split_sizes(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    good = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if not good or not all(
        isinstance(s, int) and not isinstance(s, bool) and s >= 1 for s in value
    ):
        raise _bad(name, value, "should be the row counts of the blocks, integers >= 1, or None")
    return tuple(value)


def _check_differentiable(name: str, value: Any) -> Any:
    if value:
        raise _bad(name, value, "the step cannot be differentiated through: leave it False")
    return value


_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "lr": check_lr,
    "weight_decay": lambda n, v: _at_least_zero(n, v, "weight decay"),
    "momentum": lambda n, v: _below_one(n, v, "momentum"),
    "nesterov": _flag,
    "ns_coefficients": _check_ns_coefficients,
    "eps": lambda n, v: _at_least_zero(n, v, "eps"),
    "ns_steps": _check_ns_steps,
    "adjust_lr_fn": _check_adjust_lr_fn,
    "fraction": _check_fraction,
    "neuron_norm": _flag,
    "beta2": lambda n, v: _below_one(n, v, "beta2"),
    "select": _one_of(("auto", "sharded", "rows", "cols")),
    "scope": _one_of(("local", "global")),
    "newton_schulz": _one_of(("auto", "gram", "standard")),
    "restarts": _check_restarts,
    "ns_dtype": _one_of((None, torch.float16, torch.bfloat16, torch.float32)),
    "momentum_dtype": _one_of(_STATE_DTYPES),
    "rounding": _one_of(("auto", "nearest", "stochastic")),
    "seed": _check_seed,
    "lr_transfer": _flag,
    "adamw_betas": _check_betas,
    "adamw_eps": lambda n, v: _at_least_zero(n, v, "adamw_eps"),
    "maximize": _flag,
    "num_heads": _check_num_heads,
    "head_axis": _check_head_axis,
    "split_sizes": _check_split_sizes,
    "flatten": _flag,
    "algorithm": _one_of(("dion3", "adamw")),
    "differentiable": _check_differentiable,
}
"""One check per argument: (name, value) -> the value in canonical form, or ValueError."""


# ---- the options of an optimizer, and of a group ----


@dataclass(frozen=True)
class Options:
    """What `Dion3.__init__` takes beyond the keys of torch.optim.Muon; see there for the
    meanings."""

    fraction: float = 0.25
    neuron_norm: bool = False
    beta2: float = 0.95
    select: str = "auto"
    scope: str = "local"
    newton_schulz: str = "auto"
    restarts: Any = "auto"
    ns_dtype: torch.dtype | None = None
    momentum_dtype: torch.dtype = torch.float32
    rounding: str = "auto"
    seed: int = 0
    lr_transfer: bool = True
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    adamw_eps: float = 1e-8
    maximize: bool = False


OPTION_KEYS = tuple(field.name for field in fields(Options))
GROUP_OPTION_KEYS = tuple(key for key in OPTION_KEYS if key not in ("seed", "adamw_eps"))
_KNOWN_KEYS = frozenset(
    ("params", "param_names", "name", "algorithm", *MUON_KEYS, *GROUP_OPTION_KEYS)
    + LAYOUT_KEYS
    + IGNORED_KEYS
    + SCHEDULER_KEYS
)


def make_options(**values: Any) -> Options:
    """`Options` from unchecked values. Raises ValueError."""
    return Options(**{name: CHECKS[name](name, value) for name, value in values.items()})


@dataclass(frozen=True)
class GroupOptions:
    """All that a plan is built from, for one group: no value in it may change between two plans."""

    algorithm: str
    fraction: float
    neuron_norm: bool
    nesterov: bool
    select: str
    newton_schulz: str
    restarts: Any
    ns_dtype: torch.dtype | None
    ns_coefficients: Any
    ns_steps: int
    momentum_dtype: torch.dtype
    rounding: str
    adjust_lr_fn: str | None
    num_heads: int | None
    head_axis: int
    split_sizes: tuple[int, ...] | None
    flatten: bool


_PLAN_KEYS = tuple(field.name for field in fields(GroupOptions))
_LAYOUT_DEFAULTS = {"num_heads": None, "head_axis": 0, "split_sizes": None, "flatten": False}


def plan_values(group: Mapping[str, Any], options: Options) -> list[Any]:
    """The group's values of `GroupOptions`, unchecked: compared before each step, so kept cheap."""
    get = group.get
    values = [get("algorithm", "dion3")]
    for key in _PLAN_KEYS[1:]:
        value = get(key, _MISSING)
        if value is _MISSING:
            value = _LAYOUT_DEFAULTS[key] if key in _LAYOUT_DEFAULTS else getattr(options, key)
        values.append(value)
    return values


_MISSING = object()


def group_options(group: Mapping[str, Any], options: Options) -> GroupOptions:
    """The checked `GroupOptions` of a group. Raises ValueError."""
    values = dict(zip(_PLAN_KEYS, plan_values(group, options), strict=True))
    checked = GroupOptions(**{key: CHECKS[key](key, value) for key, value in values.items()})
    if checked.algorithm == "dion3":
        _check_combination(group, checked)
    return checked


def _check_combination(group: Mapping[str, Any], options: GroupOptions) -> None:
    if options.nesterov and options.fraction < 1:
        raise ValueError(
            f"nesterov=True with fraction={options.fraction}: error feedback replaces Nesterov "
            "momentum where slices are selected; set nesterov=False or fraction=1"
        )
    heads = options.num_heads or 1
    if heads > 1 and (options.split_sizes or options.flatten):
        other = "split_sizes" if options.split_sizes else "flatten"
        raise ValueError(f"num_heads={heads} and {other} exclude each other: put one in the group")
    if "head_axis" in group and options.num_heads is None:
        raise ValueError(f"head_axis={options.head_axis} without num_heads: set num_heads too")
    if options.restarts != "auto":
        steps = coefficient_steps(options.ns_coefficients, options.ns_steps)
        if options.restarts and options.restarts[-1] >= steps:
            raise ValueError(
                f"restarts={options.restarts!r}: a restart after iteration {options.restarts[-1]} "
                f"needs more than the {steps} iterations there are"
            )


def coefficient_steps(coefficients: Any, steps: int) -> int:
    """How many iterations canonical `ns_coefficients` and `ns_steps` ask for."""
    if coefficients is None:
        return steps
    if isinstance(coefficients[0], tuple):
        return len(coefficients)
    return steps if len(coefficients) == 3 else len(coefficients) // 3


# ---- the groups ----


def normalise_group(
    group: Mapping[str, Any], defaults: Mapping[str, Any], options: Options
) -> dict[str, Any]:
    """A new group dict: aliases translated, every value checked, nothing of the caller's changed.

    `use_muon` becomes `algorithm`. In an AdamW group `adamw_lr` becomes `lr`, `betas` becomes
    `adamw_betas`, `eps` is AdamW's (`adamw_eps` is another name of it), and `weight_decay` defaults
    to 0, as for embeddings, output layers and scales in the paper (section 8).

    Raises:
        ValueError: an unknown key, a contradiction, or a value that its check refuses.
    """
    if not isinstance(group, Mapping):
        raise TypeError(f"param_group must be a dict, but got {type(group)}")
    if "params" not in group:
        raise ValueError('a parameter group needs the key "params"')
    new = dict(group)
    _translate_aliases(new)
    unknown = sorted(str(key) for key in new if key not in _KNOWN_KEYS)
    if unknown:
        raise ValueError(
            f"unknown key{'s' if len(unknown) > 1 else ''} in a parameter group: "
            f"{', '.join(unknown)}. Known: {', '.join(sorted(_KNOWN_KEYS - {'params'}))}"
        )
    if new.get("algorithm") == "adamw":
        new.setdefault("weight_decay", 0.0)
        new.setdefault("eps", options.adamw_eps)
    for key, default in defaults.items():
        new.setdefault(key, default)
    return check_group(new, options)


def check_group(group: dict[str, Any], options: Options) -> dict[str, Any]:
    """Check all values of a complete group, in place; returns it. Raises ValueError."""
    for key in group:
        if key in CHECKS:
            group[key] = CHECKS[key](key, group[key])
    group_options(group, options)
    return group


def _translate_aliases(group: dict[str, Any]) -> None:
    if "use_muon" in group:
        algorithm = "dion3" if _flag("use_muon", group.pop("use_muon")) else "adamw"
        if group.setdefault("algorithm", algorithm) != algorithm:
            raise ValueError(
                f"use_muon={algorithm == 'dion3'} contradicts algorithm={group['algorithm']!r}: "
                "give one of them"
            )
    adamw = group.get("algorithm") == "adamw"
    for alias, key in (("adamw_lr", "lr"), ("betas", "adamw_betas"), ("adamw_eps", "eps")):
        if alias not in group:
            continue
        if not adamw:
            raise ValueError(
                f"{alias}={group[alias]!r} in a matrix group: it belongs to a group with "
                'algorithm="adamw" (or use_muon=False)'
            )
        if key in group:
            raise ValueError(f"{alias} and {key} in one parameter group: give one of them")
        group[key] = group.pop(alias)


# ---- numbers that follow from them ----


def selection_count(fraction: float, n: int) -> int:
    """k = max(1, ceil(fraction * n)), clamped to n; 0 for n = 0.

    The product is lowered by 1e-6 first: in binary 0.07 * 100 is 7.000000000000001, and 7 is meant.
    """
    if n <= 0:
        return 0
    return min(n, max(1, math.ceil(fraction * n - 1e-6)))


def shape_scale(adjust_lr_fn: str | None, rows: int, cols: int) -> float:
    """The factor of the learning rate for a (rows, cols) = (d_out, d_in) matrix.

    None, "original": sqrt(max(1, rows / cols)); "match_rms_adamw": 0.2 sqrt(max(rows, cols));
    "spectral", "spectral_unclamped": sqrt(rows / cols); "none": 1.
    """
    if rows == 0 or cols == 0 or adjust_lr_fn == "none":
        return 1.0
    if adjust_lr_fn is None or adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / cols))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(rows / cols)


def hyper_row(group: Mapping[str, Any], options: Options, lr: float, rule: str) -> list[float]:
    """One row of the table the kernels read: `DION3_HYPER_*`, or `DION3_ADAMW_*` for AdamW.

    `lr` is the group's learning rate as a number. `rule` says where momentum is damped: "muon"
    before the gradient is added, "dion3" after the selected slices were read (Algorithm 4, line 9).
    """
    get = group.get
    sign = -1.0 if get("maximize", options.maximize) else 1.0
    decay = 1.0 - lr * group["weight_decay"]
    if get("algorithm") == "adamw":
        beta1, beta2 = get("adamw_betas", options.adamw_betas)
        return [decay, lr, beta1, 1.0 - beta1, beta2, 1.0 - beta2, group["eps"], sign]
    mu = group["momentum"]
    transfer = lr_transfer(group, options)
    keep, feedback = (mu, 1.0) if rule == "muon" else (1.0, mu)
    nesterov = mu if group["nesterov"] else 1.0
    beta2 = get("beta2", options.beta2)
    gain = sign * (1.0 - mu)
    return [decay, lr * transfer, keep, gain, feedback, group["eps"], beta2, NEURON_EPS, nesterov]


def lr_transfer(group: Mapping[str, Any], options: Options) -> float:
    """1 / sqrt(fraction), or 1: keeps the size of an update that selects fewer slices."""
    if not group.get("lr_transfer", options.lr_transfer):
        return 1.0
    return 1.0 / math.sqrt(group.get("fraction", options.fraction))


def scalar_values(group: Mapping[str, Any], options: Options) -> tuple[Any, ...]:
    """What a row of the table depends on except lr: compared before each step."""
    get = group.get
    return (
        group["weight_decay"],
        group["momentum"],
        group["eps"],
        group["nesterov"],
        get("beta2", options.beta2),
        get("lr_transfer", options.lr_transfer),
        get("fraction", options.fraction),
        get("maximize", options.maximize),
        get("adamw_betas", options.adamw_betas),
    )


def check_scalars(group: Mapping[str, Any], options: Options) -> None:
    """Check the scalars of a live group, changed since the last step. Raises ValueError."""
    for key in ("weight_decay", "momentum", "eps", "nesterov"):
        CHECKS[key](key, group[key])
    for key in ("beta2", "lr_transfer", "fraction", "maximize", "adamw_betas"):
        CHECKS[key](key, group.get(key, getattr(options, key)))
