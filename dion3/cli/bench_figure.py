"""The plot of `python -m dion3 bench`: bars of medians, whiskers over the middle half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .plots import COLORS, load_pyplot, style_axes

__all__ = ["draw"]

_STACK_COLORS = {
    "torch.optim.Muon's": "#0072b2",
    "newton_schulz": "#e69f00",
    "gram_ns": "#009e73",
    "torch, nearest": "#0072b2",
    "update_, nearest": "#009e73",
    "torch, stochastic": "#0072b2",
    "update_, stochastic": "#009e73",
}
_TITLES = {
    "step": "Optimizer step",
    "orthogonalizer": "Orthogonalizer, by stack of matrices",
    "update": "Update from a quarter of the rows",
}
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def draw(report: dict[str, Any], title: str, path: Path) -> bool:
    """Write the plot of a report of `dion3.cli.bench` as a PNG.

    Returns:
        False when matplotlib is missing (a sentence on stderr says so).
    """
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    parts = [name for name in _TITLES if name in report]
    # A stack has a line of its own above its bars.
    bars = max(len(report[n]) + len({str(e.get("shape")) for e in report[n]}) for n in parts)
    size = (5.2 * len(parts) + 1.0, 1.6 + 0.27 * bars)
    figure, grid = pyplot.subplots(1, len(parts), figsize=size, squeeze=False)
    for axes, name in zip(grid[0], parts, strict=True):
        (_draw_step if name == "step" else _draw_stacks)(axes, report[name])
        axes.set_title(_TITLES[name])
        axes.set_xlabel("ms (median; whiskers: middle half of the samples)")
        style_axes(axes, "x")
        axes.set_xlim(0, 1.18 * max(entry["high_ms"] for entry in report[name]))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def _bars(axes: Any, places: list[float], entries: list[dict[str, Any]], colors: list[str]) -> None:
    medians = [entry["median_ms"] for entry in entries]
    low = [m - e["low_ms"] for m, e in zip(medians, entries, strict=True)]
    high = [e["high_ms"] - m for m, e in zip(medians, entries, strict=True)]
    axes.barh(
        places,
        medians,
        height=0.7,
        color=colors,
        xerr=[low, high],
        error_kw={"ecolor": "#333333", "elinewidth": 1, "capsize": 2},
    )
    for place, entry in zip(places, entries, strict=True):
        axes.annotate(
            f"{entry['median_ms']:#.3g}".rstrip("."),
            (entry["high_ms"], place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.invert_yaxis()


def _draw_step(axes: Any, entries: list[dict[str, Any]]) -> None:
    places = [float(i) for i in range(len(entries))]
    _bars(axes, places, entries, [COLORS.get(e["name"], "#999999") for e in entries])
    axes.set_yticks(places, [entry["name"] for entry in entries])


def _draw_stacks(axes: Any, entries: list[dict[str, Any]]) -> None:
    places: list[float] = []
    headings: list[tuple[float, str]] = []
    for entry in entries:
        place = places[-1] + 1.0 if places else 0.0
        if entry["name"] == entries[0]["name"]:  # the first contender opens a stack
            headings.append((place, " x ".join(map(str, entry["shape"]))))
            place += 1.0
        places.append(place)
    _bars(axes, places, entries, [_STACK_COLORS.get(e["name"], "#999999") for e in entries])
    names = [f"{entry['name']} ({_SHORT[entry['dtype']]})" for entry in entries]
    ticks = [*headings, *zip(places, names, strict=True)]
    axes.set_yticks([place for place, _ in ticks], [text for _, text in ticks])
    for label in axes.get_yticklabels()[: len(headings)]:
        label.set_fontweight("bold")
    axes.set_ylim(places[-1] + 0.8, headings[0][0] - 0.8)
    axes.tick_params(axis="y", length=0)
