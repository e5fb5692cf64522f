"""The look of the plots, and matplotlib where it is installed."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["COLORS", "load_pyplot", "style_axes"]

# One colour per optimizer, told apart by readers with any colour vision (after Okabe and Ito).
COLORS = {
    "AdamW": "#6b6b6b",
    "torch.optim.Muon": "#0072b2",
    "Muon": "#56b4e9",
    "Dion3 f=1": "#d55e00",
    "Dion3 f=1/4": "#009e73",
}


def load_pyplot() -> Any:
    """matplotlib.pyplot without a display, or None and a sentence on stderr when it is missing."""
    try:
        import matplotlib
    except ImportError:
        print(
            'no plot: matplotlib is not installed (pip install matplotlib, or "dion3[demo]")',
            file=sys.stderr,
        )
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "font.size": 10,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": "#888888",
            "figure.dpi": 144,
            "savefig.dpi": 144,
            "legend.frameon": False,
        }
    )
    return pyplot


def style_axes(axes: Any, axis: str = "y") -> None:
    """A light grid behind the data, along one axis."""
    axes.grid(axis=axis, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
