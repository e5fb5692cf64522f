"""The demo's plot: held-out loss by step and by time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from dion3.cli.plots import COLORS, load_pyplot, style_axes

from .train import Result

__all__ = ["draw"]


def draw(results: Sequence[Result], title: str, path: Path) -> bool:
    """Write the plot of all runs as a PNG.

    Args:
        results: finished runs.
        title: line above the plot.
        path: file to write.

    Returns:
        False when matplotlib is missing (a sentence on stderr says so).
    """
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.4), sharey=True)
    for result in results:
        seconds = statistics.median(result.step_seconds)
        steps = [step for step, _ in result.held_out]
        losses = [loss for _, loss in result.held_out]
        look = {
            "color": COLORS.get(result.label),
            "marker": "o",
            "markersize": 3.5,
            "linewidth": 1.8,
        }
        label = f"{result.label}   {losses[-1]:.3f}"
        left.plot(steps, losses, label=label, **look)
        right.plot([seconds * step for step in steps], losses, **look)
    left.set_xlabel("step")
    left.set_ylabel("held-out loss (nats per byte)")
    right.set_xlabel("training time (s): steps x median time of a step")
    left.set_title("By step")
    right.set_title("By time on this machine")
    for axes in (left, right):
        style_axes(axes)
        axes.set_xlim(left=0)
    later = [loss for result in results for _, loss in result.held_out[1:]]
    if later:  # the first value is so much larger that it would flatten the rest
        room = 0.05 * (max(later) - min(later))
        left.set_ylim(min(later) - room, max(later) + room)
    left.legend(title="final held-out loss", alignment="left")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True
