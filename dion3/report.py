"""`Dion3.describe` and `Dion3.stats`: what a step does, in words and numbers. Never on the hot
path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .layout import ROWS
from .options import GroupOptions
from .plan import Bucket, DeviceWork, Groups, divide
from .state import State, state_spec

if TYPE_CHECKING:
    from .executor import DevicePlan

_COLUMNS = ("device", "group", "matrices", "shape", "dtype", "selected", "update", "newton_schulz")


def describe(groups: Groups, checked: Sequence[GroupOptions]) -> str:
    """The table of `Dion3.describe`, for all parameters that require a gradient."""
    present = [p.requires_grad for group in groups for p in group["params"]]
    work = divide(groups, checked, present)
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for device, part in work.items():
        rows += [row for bucket in part.buckets for row in _bucket_rows(device, bucket)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    for device, part in work.items():
        elements = sum(other.parameter.numel() for other in part.others)
        scratch = max((sum(b.bytes for b in buckets) for buckets in part.passes), default=0)
        lines.append(
            f"{device}: {len(part.buckets)} buckets in {len(part.passes)} passes, "
            f"Newton-Schulz input and output {scratch:,} bytes; "
            f"AdamW {len(part.others)} parameters, {elements:,} elements"
        )
    lines.append(f"optimizer state: {_state_bytes_wanted(groups, checked):,} bytes")
    return "\n".join(lines)


def _bucket_rows(device: torch.device, bucket: Bucket) -> list[tuple[str, ...]]:
    """One row per kind of piece in a bucket: pieces of several shapes may share an update shape."""
    counts: dict[tuple[str, ...], int] = {}
    for item in bucket.items:
        piece, side = item.piece, "rows" if item.piece.axis == ROWS else "cols"
        chosen = f"{piece.k} of {piece.selected_side} {side}" if piece.selective else "all"
        r, c = piece.update_shape
        method = item.config.method
        if method == "auto":
            method = "standard" if r == c else "gram"
        dtype = str(item.config.dtype).removeprefix("torch.")
        restart = f" restart {list(item.config.restarts)}" if method == "gram" else ""
        key = (
            str(item.group),
            f"{piece.rows}x{piece.cols}",
            str(item.parameter.dtype).removeprefix("torch."),
            chosen,
            f"{r}x{c}",
            f"{method} {len(item.config.coefficients)} steps {dtype}{restart}",
        )
        counts[key] = counts.get(key, 0) + piece.batch
    return [(str(device), group, str(n), *rest) for (group, *rest), n in counts.items()]


def _state_bytes_wanted(groups: Groups, checked: Sequence[GroupOptions]) -> int:
    total = 0
    for group, options in zip(groups, checked, strict=True):
        for parameter in group["params"]:
            if parameter.requires_grad:
                for shape, dtype in state_spec(parameter, options).values():
                    total += torch.Size(shape).numel() * dtype.itemsize
    return total


def stats(
    counts: Mapping[str, int],
    plans: Sequence[DevicePlan],
    state: State,
    observed: Sequence[Mapping[str, Tensor]] | None,
) -> dict[str, Any]:
    """The dict of `Dion3.stats`."""
    works: list[DeviceWork] = [plan.work for plan in plans]
    buckets = [bucket for work in works for bucket in work.buckets]
    items = [item for bucket in buckets for item in bucket.items]
    others = [other for work in works for other in work.others]
    result: dict[str, Any] = {
        "steps": counts["steps"],
        "plans_built": counts["plans"],
        "newton_schulz_calls": sum(len(p.calls) for plan in plans for p in plan.passes),
        "buckets": len(buckets),
        "passes": sum(len(work.passes) for work in works),
        "matrices": sum(bucket.matrices for bucket in buckets),
        "matrix_parameters": len({item.index for item in items}),
        "matrix_elements": sum(i.piece.batch * i.piece.rows * i.piece.cols for i in items),
        "staged_parameters": sum(len(plan.staged) for plan in plans),
        "adamw_parameters": len(others),
        "adamw_elements": sum(other.parameter.numel() for other in others),
        "workspace_bytes": sum(plan.workspace.size for plan in plans),
        "state_bytes": sum(
            value.numel() * value.element_size()
            for entry in state.values()
            for value in entry.values()
            if isinstance(value, Tensor)
        ),
    }
    if observed is not None:
        result["observed"] = [
            {key: float(value) for key, value in record.items()} for record in observed
        ]
    return result
