"""Figures and tables of docs/benchmarks.md from the CSV files of the benchmarks: `make gpu-plots`.

    python -m benchmarks.plots [NAME ...] [--gpu h200]

NAME is newton_schulz, gemm, step_ops, step or training; all without one. Each reads
benchmarks/results/<gpu>_NAME.csv, writes docs/images/<gpu>_NAME.png and fills the part of the page
between its two comments. A missing CSV is named and leaves both as they are.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dion3.cli.plots import load_pyplot, style_axes

ROOT = Path(__file__).resolve().parent.parent
GREY, BLUE, SKY, ORANGE, GREEN = "#6b6b6b", "#0072b2", "#56b4e9", "#d55e00", "#009e73"

Row = dict[str, str]


@dataclass(frozen=True)
class Results:
    """A CSV of `harness.Table`: the facts of its first line, and its rows by column name."""

    facts: dict[str, str]
    rows: list[Row]

    @property
    def caption(self) -> str:
        """Where and when it was measured."""
        f = self.facts
        return (
            f"{f['gpu']}, torch {f['torch']}, CUDA {f['cuda']}, commit {f['commit']}, {f['date']}"
        )

    def unique(self, column: str) -> list[str]:
        """The values of a column in order of appearance."""
        return list(dict.fromkeys(row[column] for row in self.rows))


def read(path: Path) -> Results:
    """Read a CSV; of columns with the same name the first counts."""
    with path.open(newline="") as file:
        facts = dict(part.split(": ", 1) for part in file.readline()[2:].strip().split("; "))
        columns, *rows = csv.reader(file)
    first = {name: columns.index(name) for name in columns}
    pairs = [{name: row[at] for name, at in first.items()} for row in rows]
    return Results(facts, pairs)


def value(row: Row, column: str) -> float:
    """A number; nan where none was measured."""
    return float(row[column])


def shape_label(shape: str) -> str:
    """24x2048x7168 as 24 x (2048 x 7168)."""
    batch, *sides = shape.split("x")
    return f"{batch} × ({' × '.join(sides if len(sides) > 1 else 2 * sides)})"


# ---- figures -------------------------------------------------------------------------------------


def bars(axes: Any, at: list[float], values: list[float], height: float, **look: Any) -> None:
    """Horizontal bars with their values at the end."""
    drawn = axes.barh(at, [0.0 if v != v else v for v in values], height, **look)
    labels = ["" if v != v else f"{v:.2f}" for v in values]
    for text in axes.bar_label(drawn, labels, padding=2, fontsize=8, color="#333333"):
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})


def rows_down(axes: Any, labels: list[str]) -> None:
    """One label a row, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    style_axes(axes, "x")


def newton_schulz(pyplot: Any, results: Results) -> Any:
    """Speed-up of whole Newton-Schulz calls over eager torch."""
    rows = results.rows
    figure, axes = pyplot.subplots(figsize=(8.0, 0.55 * len(rows) + 1.4))
    series = [
        ("gram-newton-schulz", GREY, [value(r, "eager ms") / value(r, "peer ms") for r in rows]),
        ("dion3", BLUE, [value(r, "eager ms") / value(r, "ours ms") for r in rows]),
        ("dion3, CUDA graph", SKY, [value(r, "eager ms") / value(r, "graph ms") for r in rows]),
    ]
    series = [entry for entry in series if any(v == v for v in entry[2])]
    height = 0.8 / len(series)
    for i, (label, color, values) in enumerate(series):
        at = [row + (i - (len(series) - 1) / 2) * height for row in range(len(rows))]
        bars(axes, at, values, 0.92 * height, color=color, label=label)
    axes.axvline(1.0, color="#333333", linewidth=1.0)
    rows_down(axes, [shape_label(r["shape"]) for r in rows])
    axes.margins(x=0.08)
    axes.set_xlabel("speed-up over standard Newton-Schulz in eager torch, fp16 (= 1)")
    axes.set_title("Whole Newton-Schulz calls, five iterations, bf16 in and out")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
    return figure


def gemm(pyplot: Any, results: Results) -> Any:
    """Time of the products over cuBLAS's full product."""
    panels = [
        ("Symmetric product of square matrices", [("symmetric", "A B", BLUE),
                                                  ("symmetric+C", "A B + c C", SKY)]),
        ("Products with wide matrices X", [("XXt", "X Xᵀ (symmetric)", BLUE),
                                           ("QX", "Q X", ORANGE), ("QX+aX", "Q X + a X", GREEN)]),
    ]  # fmt: skip
    figure, axes = pyplot.subplots(1, 2, figsize=(11.0, 5.2))
    for ax, (title, series) in zip(axes, panels, strict=True):
        chosen = [r for r in results.rows if r["product"] in dict((s[0], 0) for s in series)]
        shapes = list(dict.fromkeys(r["shape"] for r in chosen))
        height = 0.8 / len(series)
        for i, (product, label, color) in enumerate(series):
            ratios = {r["shape"]: value(r, "ratio") for r in chosen if r["product"] == product}
            at = [y + (i - (len(series) - 1) / 2) * height for y in range(len(shapes))]
            values = [ratios.get(s, float("nan")) for s in shapes]
            bars(ax, at, values, 0.92 * height, color=color, label=label)
        ax.axvline(1.0, color="#333333", linewidth=1.0)
        ax.axvline(0.5, color="#333333", linewidth=1.0, linestyle=":")
        rows_down(ax, [shape_label(s) for s in shapes])
        ax.set_xlim(0, max(1.25, 1.12 * max(value(r, "ratio") for r in chosen)))
        ax.set_xlabel("time over cuBLAS's full product (= 1)")
        ax.set_title(title)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    return figure


def step_ops(pyplot: Any, results: Results) -> Any:
    """Bandwidth of the memory-bound operations over that of a copy."""
    titles = {
        "tall": "16 × (16384 × 4096)",
        "uneven": "13 × (16384 × 5120)",
        "small": "200 × (1024 × 1024)",
        "stack": "16 × (4096 × 16384), one stack",
    }
    rows = [r for r in results.rows if r["f"] == "1/4" and r["operation"] not in ("copy", "select")]
    names = list(dict.fromkeys(r["operation"] for r in rows))
    sets = list(dict.fromkeys(r["set"] for r in rows))
    figure, axes = pyplot.subplots(
        1, len(sets), figsize=(3.6 * len(sets) + 1.2, 4.4), sharex=True, sharey=True, squeeze=False
    )
    for ax, name in zip(axes[0], sets, strict=True):
        for axis, marker, shift in (("rows", "o", -0.12), ("columns", "s", 0.12)):
            for momentum, color in (("bfloat16", BLUE), ("float32", ORANGE)):
                these = [
                    r
                    for r in rows
                    if (r["set"], r["axis"], r["momentum"]) == (name, axis, momentum)
                ]
                ax.plot(
                    [value(r, "/copy") for r in these],
                    [names.index(r["operation"]) + shift for r in these],
                    marker,
                    color=color,
                    markersize=6,
                    label=f"{axis}, {momentum.replace('bfloat', 'bf').replace('float', 'fp')}",
                )
        ax.axvline(1.0, color="#333333", linewidth=1.0)
        ax.set_title(titles.get(name, name))
        ax.set_xlabel("bytes per second over a copy's (= 1)")
        ax.tick_params(axis="y", length=0)
        style_axes(ax, "both")
    shares = [value(r, "/copy") for r in rows]
    axes[0][0].set_xlim(min(0.6, min(shares) - 0.05), max(1.05, max(shares) + 0.05))
    rows_down(axes[0][0], names)
    axes[0][0].legend(fontsize=8, loc="lower left")
    return figure


STEP_ROWS = [
    ("torch Muon", "torch.optim.Muon"),
    ("Muon", "+ kernels (dion3.Muon)"),
    ("Muon graph", "+ CUDA graph"),
    ("f=1/2 graph", "+ f = 1/2 (dion3.Dion3)"),
    ("f=1/4 graph", "+ f = 1/4"),
    ("f=1/8 graph", "+ f = 1/8"),
    ("AdamW fused", "AdamW, fused"),
]


def step(pyplot: Any, results: Results) -> Any:
    """From torch.optim.Muon to Dion3, each contribution added, beside AdamW."""
    models = results.unique("model")
    across = min(3, len(models))
    down = -(-len(models) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(3.5 * across + 1.6, 2.9 * down + 0.5), sharey=True, squeeze=False
    )
    for ax in axes.flat[len(models) :]:
        ax.set_visible(False)
    colors = [GREY, *[BLUE] * 2, *[GREEN] * 3, ORANGE]
    for ax, model in zip(axes.flat, models, strict=False):
        rows = {
            r["optimizer"]: r
            for r in results.rows
            if r["model"] == model and r["momentum"] == "bfloat16"
        }
        found = [rows.get(name) for name, _ in STEP_ROWS]
        ms = [value(r, "gpu ms") if r else float("nan") for r in found]
        drawn = ax.barh(range(len(ms)), [0.0 if v != v else v for v in ms], 0.7, color=colors)
        labels = [
            f" {value(r, 'gpu ms'):.3g} ms  {value(r, '/adamw'):.2g}×" if r else " not measured"
            for r in found
        ]
        ax.bar_label(drawn, labels, fontsize=8, color="#333333")
        for y, r in enumerate(found):
            if r and value(r, "floor ms") == value(r, "floor ms"):
                floor = value(r, "floor ms")
                ax.plot([floor, floor], [y - 0.35, y + 0.35], color="black", linewidth=1.4)
        ax.axvline(ms[-1], color=ORANGE, linewidth=1.0, linestyle=":")
        ax.set_xlim(0, 1.42 * max(v for v in ms if v == v))
        ax.set_title(model)
        ax.set_xlabel("GPU time of a step, ms")
        ax.tick_params(axis="y", length=0)
        style_axes(ax, "x")
    rows_down(axes[0][0], [label for _, label in STEP_ROWS])
    return figure


def smooth(values: list[float], width: int = 20) -> list[float]:
    """The mean of the last `width` values."""
    return [
        sum(values[max(0, i + 1 - width) : i + 1]) / min(width, i + 1) for i in range(len(values))
    ]


def peaks(values: list[float], width: int = 20) -> list[float]:
    """The largest of the last `width` values."""
    return [max(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def training(pyplot: Any, results: Results) -> Any:
    """Losses of Muon and Dion3, and the distance between Muon and its reference."""
    rows = results.rows
    steps = [int(r["step"]) for r in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11.0, 4.2))
    for column, color in (("Muon", BLUE), ("Dion3 f=1/4", GREEN)):
        losses = [value(r, column) for r in rows]
        left.plot(steps, losses, color=color, alpha=0.18, linewidth=0.8)
        left.plot(steps, smooth(losses), color=color, linewidth=1.8, label=column)
    left.set_ylabel("training loss, nats a byte (mean of 20 steps)")
    left.set_title("19 M parameters, byte-level GPT")
    left.set_ylim(top=max(value(r, "Muon") for r in rows[len(rows) // 30 :]))
    left.legend()
    looks = {
        "difference": (BLUE, "-", "dion3.Muon and the reference"),
        "noise": (GREY, "--", "the reference and itself, two bits aside"),
    }
    for column, (color, style, label) in looks.items():
        gaps = [gap or float("nan") for gap in peaks([value(r, column) for r in rows])]
        right.semilogy(steps, gaps, style, color=color, linewidth=1.8, label=label)
    right.axhline(1.2e-3, color="#333333", linewidth=1.0, linestyle=":")
    right.annotate("1.2e-3", (steps[-1], 1.2e-3), xytext=(0, 3), textcoords="offset points",
                   ha="right", fontsize=8)  # fmt: skip
    right.set_title("Relative difference of the losses (largest of 20 steps)")
    right.legend(loc="lower right")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_xlim(0, steps[-1])
        style_axes(axes)
    return figure


# ---- tables --------------------------------------------------------------------------------------


def markdown(rows: list[Row], columns: list[str]) -> str:
    """The columns of the rows as a table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join("" if row[c] == "nan" else row[c] for c in columns) + " |")
    return "\n".join(lines)


def no_table(results: Results) -> str:
    """The figure says it all."""
    return ""


def gemm_table(results: Results) -> str:
    """All products."""
    return markdown(
        results.rows, ["product", "shape", "ms", "cublas ms", "ratio", "TFLOP/s", "error"]
    )


def newton_schulz_table(results: Results) -> str:
    """All shapes."""
    return markdown(
        results.rows,
        ["shape", "eager ms", "peer ms", "ours ms", "graph ms", "speed-up", "error", "eager error"],
    )


def step_table(results: Results) -> str:
    """The baselines and what is replayed from a graph."""
    rows = [
        r
        for r in results.rows
        if r["optimizer"].endswith("graph")
        or r["optimizer"].startswith(("torch", "dion ", "AdamW"))
    ]
    dropped = ("low", "high")
    return markdown(rows, [c for c in results.rows[0] if c not in dropped])


@dataclass(frozen=True)
class Part:
    """A figure of the page: how it is drawn, what it shows, a note to it, and the table below."""

    draw: Callable[[Any, Results], Any]
    alt: str
    note: str
    table: Callable[[Results], str]


PARTS = {
    "newton_schulz": Part(
        newton_schulz, "Speed-up of Newton-Schulz by shape", "Medians.", newton_schulz_table
    ),
    "gemm": Part(
        gemm,
        "Time of the products over cuBLAS's",
        "Medians, fp16. Dotted: half of the operations.",
        gemm_table,
    ),
    "step_ops": Part(
        step_ops,
        "Bandwidth of the step's operations over a copy's",
        "Medians. Rows or columns are selected, f = 1/4; momentum in bf16 or fp32.",
        no_table,
    ),
    "step": Part(
        step,
        "Time of a step, from torch.optim.Muon to Dion3",
        "Medians, bf16 momentum; × AdamW's time (dotted). Black: the floor.",
        step_table,
    ),
    "training": Part(
        training, "Losses of Muon, its reference and Dion3", "One run each, fp32.", no_table
    ),
}


def fill(page: Path, name: str, text: str) -> None:
    """Put text between the page's comments `NAME` and `end of NAME`."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    old = page.read_text()
    new, count = re.subn(
        f"({re.escape(start)}\n).*?({re.escape(end)})",
        lambda found: f"{found[1]}\n{text}\n\n{found[2]}",
        old,
        flags=re.DOTALL,
    )
    if count != 1:
        raise SystemExit(f"{page} must have {start} and {end} once, in this order")
    page.write_text(new)


def main() -> None:
    """Draw the named figures and fill the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--gpu", default="h200", help="how the names of the CSV files begin")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in PARTS]
    if unknown:
        parser.error(f"no figure {unknown[0]!r}; there are {', '.join(PARTS)}")
    pyplot = load_pyplot()
    if pyplot is None:
        sys.exit(1)
    for name in args.names or PARTS:
        source = f"benchmarks/results/{args.gpu}_{name}.csv"
        if not (args.root / source).exists():
            print(f"{name}: skipped, there is no {source} (make gpu-bench writes it)")
            continue
        results, part = read(args.root / source), PARTS[name]
        figure = part.draw(pyplot, results)
        caption = f"{part.note} {results.caption}."
        foot = 0.25 / figure.get_figheight()
        figure.tight_layout(rect=(0, foot, 1, 1))
        figure.text(0.01, 0.3 * foot, caption, fontsize=7.5, color=GREY)
        image = f"images/{args.gpu}_{name}.png"
        figure.savefig(args.root / "docs" / image)
        pyplot.close(figure)
        text = f"![{part.alt}]({image})\n\n{caption} All columns: `{source}`."
        table = part.table(results)
        fill(args.root / "docs/benchmarks.md", name, f"{text}\n\n{table}".rstrip())
        print(f"{name}: docs/{image}")


if __name__ == "__main__":
    main()
