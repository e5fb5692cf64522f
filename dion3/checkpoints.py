"""State dicts: what is written, what is read, and where foreign ones come from.

A state dict has torch's form. Two things need care.

The momentum of `Dion3` was damped at the end of the last step, that of `Muon` will be at the
beginning of the next one: Dion3's is mu times Muon's. A state dict must therefore tell which it
holds, by keys that torch.optim.Muon has too (distributed-checkpoint loaders demand from a
checkpoint every key that a live group has, and hand over no other). The form of `ns_coefficients`
tells:

  plain numbers, 3 or 3 per step    momentum as Muon's (torch.optim.Muon has 3 numbers)
  None, or one tuple per step       momentum as Dion3's

Second, torch casts loaded state to the parameters' dtypes; here state keeps its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from .coefficients import KELLER, normalize_coefficients
from .options import GroupOptions, Options, check_group, group_options
from .state import check_state_value, convert_state, state_spec

STATE_KEYS = ("momentum_buffer", "neuron_second_moment", "exp_avg", "exp_avg_sq", "step")
"""Every key that the state of a parameter may have."""

_RULE_KEYS = ("nesterov", "ns_coefficients", "ns_steps")
"""Group keys that keep their live values when momentum comes from the other rule."""


def momentum_rule(group: Mapping[str, Any]) -> str:
    """Whose momentum a saved group holds: "muon" or "dion3"."""
    coefficients = group.get("ns_coefficients")
    if coefficients is None or isinstance(coefficients[0], Sequence):
        return "dion3"
    return "muon"


def make_plain(state_dict: Mapping[str, Any], rule: str) -> None:
    """Write the groups of a fresh state dict as plain values that show `rule`; in place."""
    for group in state_dict["param_groups"]:
        for key, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                group[key] = value.item()
        if momentum_rule(group) == rule:
            continue
        given = group["ns_coefficients"]
        nested = given is None or isinstance(given[0], tuple)
        if not nested and len(given) > 3:
            table = tuple(tuple(given[i : i + 3]) for i in range(0, len(given), 3))
        else:
            per_step = given is not None and nested
            table = normalize_coefficients(given, None if per_step else group["ns_steps"])
        if rule == "dion3":
            group["ns_coefficients"] = table
        else:
            group["ns_coefficients"] = tuple(number for triple in table for number in triple)
            group["ns_steps"] = len(table)


def prepare_load(
    state_dict: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    options: Options,
    rule: str,
) -> tuple[defaultdict[Tensor, dict[str, Any]], list[dict[str, Any]]]:
    """The state and groups that an optimizer has after loading; nothing live is changed, except
    that a learning rate held in a tensor takes its new value once everything was found good.

    Raises:
        ValueError: the dict does not fit.
    """
    saved_groups = _saved_groups(state_dict, groups)
    new_groups, fills = [], []
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        new = _merged_group(number, group, saved, rule)
        if isinstance(group["lr"], Tensor):
            fills.append((group["lr"], new["lr"]))
            check_group({**new}, options)
            new["lr"] = group["lr"]
        new_groups.append(check_group(new, options))
    state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    pending = dict(state_dict["state"])
    for saved, new in zip(saved_groups, new_groups, strict=True):
        checked = group_options(new, options)
        factor = _rescale(saved, rule) if checked.algorithm == "dion3" else 1.0
        for index, parameter in zip(saved["params"], new["params"], strict=True):
            entry = pending.pop(index, None)
            if entry:
                state[parameter] = _loaded(index, parameter, entry, checked, factor)
    if pending:
        raise ValueError(
            f"the state dict has state for parameters {sorted(map(str, pending))} that no group of "
            "it lists: it is damaged or was made for another optimizer"
        )
    for tensor, value in fills:
        tensor.fill_(float(value))
    return state, new_groups


def check_is_dict(state_dict: Any) -> None:
    """Raise ValueError if it is none."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state_dict is a {type(state_dict).__name__}, not a dict")


def _saved_groups(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    check_is_dict(state_dict)
    for key, kind in (("state", Mapping), ("param_groups", Sequence)):
        if not isinstance(state_dict.get(key), kind):
            raise ValueError(
                f'the state dict needs "{key}", as state_dict() of an optimizer returns it'
            )
    saved_groups = deepcopy(list(state_dict["param_groups"]))
    if len(groups) != len(saved_groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups: "
            f"{len(saved_groups)}, but the optimizer has {len(groups)}"
        )
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if not isinstance(saved, Mapping) or not isinstance(saved.get("params"), Sequence):
            raise ValueError(f'group {number} of the state dict is not a dict with "params"')
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                f"optimizer's group: group {number} has {len(saved['params'])} parameters, but "
                f"{len(group['params'])} here"
            )
    return saved_groups


def _merged_group(
    number: int, group: Mapping[str, Any], saved: Mapping[str, Any], rule: str
) -> dict[str, Any]:
    """The saved values over the live ones. Keys that the checkpoint lacks keep their live
    values."""
    algorithm, was = group.get("algorithm", "dion3"), saved.get("algorithm")
    if was is not None and was != algorithm:
        raise ValueError(
            f"group {number} was saved with algorithm={was!r}, but has {algorithm!r} here: "
            "build the optimizer with the groups it was saved with"
        )
    new = {**group, **saved, "params": group["params"]}
    if momentum_rule(saved) != rule:
        new.update({key: group[key] for key in _RULE_KEYS})
    if isinstance(new["lr"], Tensor):
        if new["lr"].numel() != 1:
            raise ValueError(f"lr of saved group {number} has shape {tuple(new['lr'].shape)}")
        new["lr"] = new["lr"].item()
    return new


def _rescale(saved: Mapping[str, Any], rule: str) -> float:
    """What the saved momentum must be multiplied by."""
    was = momentum_rule(saved)
    mu = saved.get("momentum", 0.0)
    if was == rule or not mu:
        return 1.0
    return mu if rule == "dion3" else 1.0 / mu


def _loaded(
    index: Any, parameter: Tensor, entry: Mapping[str, Any], options: GroupOptions, factor: float
) -> dict[str, Any]:
    """New state for one parameter. Keys that its options do not ask for are left out."""
    spec = state_spec(parameter, options)
    where = f"saved parameter {index}"
    unknown = [key for key in entry if key not in STATE_KEYS]
    if unknown:
        raise ValueError(
            f"{where} has state {', '.join(map(repr, unknown))}, which no optimizer here keeps; "
            "for checkpoints of the dion package use dion3.checkpoints.convert_from_dion"
        )
    moments = {"momentum_buffer", "exp_avg"}
    if not moments & set(spec) & set(entry) and moments & set(entry):
        raise ValueError(
            f"{where} has the state {sorted(entry)} of another algorithm, not {sorted(spec)}: "
            "build the optimizer with the groups it was saved with"
        )
    loaded = {}
    for key, (shape, dtype) in spec.items():
        if key not in entry:
            continue
        value = entry[key]
        check_state_value(where, key, value, shape)
        if key == "momentum_buffer" and factor != 1.0:
            value = (value.float() * factor).to(value.dtype)
        fresh = convert_state(parameter, options, key, value, shape, dtype)
        loaded[key] = fresh.clone() if fresh is entry[key] else fresh
    return loaded


# ---- the dion package ----

_DION_LR = {"spectral_norm": "spectral", "rms_norm": "match_rms_adamw", None: "none"}
_DION_RULES = {"dion2": "dion3", "nordion2": "dion3", "muon": "muon", "normuon": "muon"}


def convert_from_dion(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of the `dion` package's Dion2, Dion3 (NorDion2), Muon or NorMuon as one of ours.

    There momentum sums gradients, here it averages them: matrix momentum is multiplied by 1 - mu,
    in float32. `momentum`, `variance_neuron` (..., rows, 1), `variance` and `step_dev` (in older
    checkpoints the group's `step`) become `momentum_buffer`, `neuron_second_moment` (..., rows),
    `exp_avg` or `exp_avg_sq`, and `step`.

    Args:
        state_dict: as returned there by `optimizer.state_dict()`; it is not changed.

    Returns:
        A dict for `Dion3.load_state_dict` (or Muon's, NorMuon's) of an optimizer with the same
        groups.

    Raises:
        ValueError: an algorithm or state key that has no counterpart here.
    """
    state: dict[Any, dict[str, Any]] = {}
    groups = []
    for saved in state_dict["param_groups"]:
        algorithm = saved.get("algorithm")
        if algorithm != "adamw" and algorithm not in _DION_RULES:
            raise ValueError(
                f"algorithm={algorithm!r} of the dion package has no counterpart here; known: "
                f"adamw, {', '.join(_DION_RULES)}"
            )
        groups.append(_dion_group(saved, algorithm))
        for index in saved["params"]:
            entry = state_dict["state"].get(index)
            if entry:
                state[index] = _dion_state(index, entry, saved, algorithm)
    return {"state": state, "param_groups": groups}


def _dion_group(saved: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    rule = _DION_RULES.get(algorithm, "dion3")
    group = {
        "params": list(saved["params"]),
        "lr": float(saved["lr"]),
        "weight_decay": float(saved["weight_decay"]),
        "ns_coefficients": KELLER if rule == "muon" else None,
    }
    for key in ("initial_lr", "param_names"):
        if key in saved:
            group[key] = saved[key]
    if algorithm == "adamw":
        betas = (float(saved.get("beta1", 0.9)), float(saved.get("beta2", 0.95)))
        return {
            **group,
            "algorithm": "adamw",
            "adamw_betas": betas,
            "eps": float(saved.get("epsilon", 1e-8)),
        }
    group["momentum"] = float(saved["mu"])
    if saved.get("adjust_lr", "spectral_norm") in _DION_LR:
        group["adjust_lr_fn"] = _DION_LR[saved.get("adjust_lr", "spectral_norm")]
    return group


def _dion_state(
    index: Any, entry: Mapping[str, Any], group: Mapping[str, Any], algorithm: str
) -> dict[str, Any]:
    known = {"momentum", "variance_neuron", "variance", "step_dev", "step"}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise ValueError(f"state {', '.join(unknown)} of parameter {index} has no counterpart here")
    if algorithm == "adamw":
        step = entry.get("step_dev", entry.get("step", group.get("step", 0)))
        return {
            "exp_avg": entry["momentum"].float(),
            "exp_avg_sq": entry["variance"].float(),
            "step": torch.as_tensor(step, dtype=torch.float32).reshape(()).clone(),
        }
    state = {"momentum_buffer": entry["momentum"].float() * (1.0 - float(group["mu"]))}
    if "variance_neuron" in entry:
        state["neuron_second_moment"] = entry["variance_neuron"].float().squeeze(-1)
    return state
