"""The table of scalars that the kernels read: one row per parameter group, refreshed before a step.

A schedule may assign a float to `group["lr"]`, fill a tensor in place, or keep the tensor on the
GPU. Floats and CPU tensors are compared with the last step's and written only when they changed. A
learning rate that lives on a GPU is never read back: its two entries are computed there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .options import Options, check_lr, check_scalars, hyper_row, lr_transfer, scalar_values

HYPER_COUNT = 12
"""Length of a row (DION3_HYPER_COUNT)."""

Groups = Sequence[Mapping[str, Any]]


class HyperTable:
    """The scalars of all groups, and their copies on the devices of the parameters."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self._keys: list[tuple[Any, ...]] = []
        self._rows: list[list[float]] = []
        self._tables: dict[torch.device, Tensor] = {}
        self._stale: set[torch.device] = set()

    def refresh(self, groups: Groups, options: Options) -> None:
        """Take over the groups' values of this moment; nothing changes if one of them is refused.

        Raises:
            ValueError: a value is not finite or out of range. (A learning rate on a GPU is not
                looked at: that would make the host wait.)
        """
        keys = []
        for group in groups:
            lr = group["lr"]
            if isinstance(lr, Tensor):
                if lr.numel() != 1:
                    check_lr("lr", lr)  # raises
                lr = None if lr.is_cuda else lr.item()
            keys.append((lr, *scalar_values(group, options)))
        if keys == self._keys:
            return
        rows = []
        for index, (group, key) in enumerate(zip(groups, keys, strict=True)):
            lr = 0.0 if key[0] is None else key[0]
            if isinstance(lr, bool) or not isinstance(lr, int | float) or not math.isfinite(lr):
                raise ValueError(
                    f"lr={group['lr']!r} of parameter group {index} is not a finite number: "
                    "nothing was changed; set a finite learning rate and step again"
                )
            check_scalars(group, options)
            row = hyper_row(group, options, lr, self.rule)
            rows.append(row + [0.0] * (HYPER_COUNT - len(row)))
        self._keys, self._rows = keys, rows
        self._stale = set(self._tables)

    def on(self, device: torch.device, groups: Groups, options: Options) -> Tensor:
        """The float32 table (groups, HYPER_COUNT) on a device, up to date."""
        table = self._tables.get(device)
        if table is None or table.shape[0] != len(self._rows):
            table = torch.empty(len(self._rows), HYPER_COUNT, dtype=torch.float32, device=device)
            self._tables[device] = table
            self._stale.add(device)
        if device in self._stale:
            table.copy_(torch.tensor(self._rows, dtype=torch.float32), non_blocking=True)
            self._stale.discard(device)
        for index, key in enumerate(self._keys):
            if key[0] is None:
                self._compute_on_device(table[index], groups[index], options)
        return table

    def _compute_on_device(self, row: Tensor, group: Mapping[str, Any], options: Options) -> None:
        """The two entries that depend on lr, in float64 and rounded once, like the others."""
        lr = group["lr"].detach().to(row.device, torch.float64).reshape(())
        matrix = group.get("algorithm") != "adamw"
        row[0] = 1.0 - lr * group["weight_decay"]
        row[1] = lr * lr_transfer(group, options) if matrix else lr
