"""The printed table of `dion3.param_groups`: what was decided about every parameter, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .param_groups import Decision

__all__ = ["format_table"]


def format_table(decisions: Sequence[Decision], fold: bool = True) -> str:
    """The decisions as aligned text: name, shape, algorithm, rule, then totals and what to check.

    Args:
        decisions: of `classify`.
        fold: whether rows that differ only in a layer number become one: `blocks.{0-11}.fc.weight`.

    Returns:
        The text, without a final newline.
    """
    rows = [("parameter", "shape", "algorithm", "rule")]
    for members in _folded(decisions) if fold else [[d] for d in decisions]:
        first = members[0]
        mark = " (!)" if first.warning else ""
        rule = first.rule + (f"; {first.note}" if first.note and not first.warning else "")
        shape = "x".join(map(str, first.shape)) or "scalar"
        rows.append((_folded_name([d.name for d in members]) + mark, shape, first.algorithm, rule))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    lines.insert(1, "  ".join(["-" * w for w in widths] + ["-" * max(len(row[3]) for row in rows)]))
    totals = []
    for algorithm in ("dion3", "adamw", "frozen"):
        chosen = [d for d in decisions if d.algorithm == algorithm]
        elements = sum(d.parameter.numel() for d in chosen)
        totals.append(f"{algorithm} {len(chosen)} ({elements:,} elements)")
    lines.append("total: " + ", ".join(totals))
    lines += [f"(!) {d.name}: {d.note}" for d in decisions if d.warning]
    return "\n".join(lines)


def _folded(decisions: Sequence[Decision]) -> list[list[Decision]]:
    """Decisions alike but for the numbers in their names, in order of first appearance."""
    rows: dict[tuple[object, ...], list[Decision]] = {}
    for d in decisions:
        aliases = tuple(re.sub(r"\d+", "#", a) for a in d.aliases)
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "#", d.name)
        note = re.sub(r"\d+", "#", d.note)
        key = (pattern, d.shape, d.algorithm, d.rule, note, aliases)
        rows.setdefault(key, []).append(d)
    return list(rows.values())


def _folded_name(names: Sequence[str]) -> str:
    """`a.{0-3}.b` for a.0.b, a.1.b, a.2.b, a.3.b."""
    if len(names) == 1:
        return names[0]
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(_folded_part(list(dict.fromkeys(column))) for column in columns)


def _folded_part(values: Sequence[str]) -> str:
    if len(values) == 1:
        return values[0]
    numbers = sorted(int(v) for v in values)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs) + "}"
