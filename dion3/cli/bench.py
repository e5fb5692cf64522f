"""Time the optimizer step, the orthogonalizer and the update beside torch's, on the device at hand.

All contenders run in one process on equal weights and gradients, in turn, so that a machine that
slows down slows all of them. Printed are the median and the middle half of the samples; JSON (with
every sample) and a plot are written to --out.

On a GPU "ms" is the time between two events around the call, and "host ms" the time until the call
returns. On a CPU both are the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from . import UsageError
from .common import choose_device, count, machine, natural, output_folder, table
from .progress import Progress

PARTS = ("step", "orthogonalizer", "update")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    from .contenders import MODELS, OPTIMIZERS

    models = ", ".join(MODELS)
    parser.add_argument(
        "--size",
        choices=MODELS,
        help=f"whose matrices are updated: {models} (default: demo on a CPU, gpt2-medium on a GPU)",
    )
    parser.add_argument("--layers", type=count, metavar="N", help="overrides the size's layers")
    parser.add_argument(
        "--optimizers",
        default=",".join(OPTIMIZERS),
        metavar="LIST",
        help="comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of weights and gradients (float32)"
    )
    parser.add_argument(
        "--repeats", type=count, default=15, metavar="N", help="samples of each (default: 15)"
    )
    parser.add_argument(
        "--warmup", type=natural, default=3, metavar="N", help="untimed calls first (default: 3)"
    )
    parser.add_argument("--only", choices=PARTS, help="time one of the three (default: all)")
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        help="folder for bench.json and bench.png (default: out)",
    )
    parser.add_argument("--no-plot", action="store_true", help="write no PNG")


def run(arguments: argparse.Namespace) -> int:
    """Time everything; 0 unless the arguments are wrong."""
    from .contenders import (
        MODELS,
        OPTIMIZERS,
        matrix_shapes,
        orthogonalizers,
        steppers,
        updates,
    )
    from .timing import Contender, time_in_turn

    device = choose_device(arguments.device)
    keys = [key.strip() for key in arguments.optimizers.split(",") if key.strip()]
    if not keys or any(key not in OPTIMIZERS for key in keys):
        known = ", ".join(OPTIMIZERS)
        raise UsageError(f"--optimizers {arguments.optimizers!r}: expected names out of {known}")
    size = arguments.size or ("demo" if device.type == "cpu" else "gpt2-medium")
    layers = arguments.layers or MODELS[size].layers
    shapes = matrix_shapes(MODELS[size])
    folder = output_folder(arguments.out)
    settings = {
        "size": size,
        "layers": layers,
        "shapes": [list(shape) for shape in shapes],
        "dtype": arguments.dtype,
        "repeats": arguments.repeats,
    }
    report: dict[str, Any] = {"machine": machine(device), "settings": settings}
    title = _introduce(report)
    dtype = DTYPES[arguments.dtype]
    parts = (arguments.only,) if arguments.only else PARTS

    def timed(label: str, contenders: list[Contender]) -> list[dict[str, Any]]:
        with Progress(arguments.warmup + arguments.repeats, label) as progress:
            return time_in_turn(
                contenders, arguments.warmup, arguments.repeats, device, progress.update
            )

    if "step" in parts:
        report["step"] = timed("optimizer step", steppers(keys, shapes, layers, dtype, device))
        print(_step_table(report["step"]) + "\n", flush=True)
    for part, name in (("orthogonalizer", "computes in"), ("update", "weights")):
        if part not in parts:
            continue
        report[part] = []
        for shape in dict.fromkeys(shapes):
            if part == "update":
                contenders = updates(shape, layers, device)
            else:
                contenders = orthogonalizers(torch.randn(layers, *shape, device=device))
            found = timed(f"{part} {layers} x {shape[0]} x {shape[1]}", contenders)
            report[part] += [{"shape": [layers, *shape], **entry} for entry in found]
        print(_stack_table(part, name, report[part]) + "\n", flush=True)
    written = [folder / "bench.json"]
    written[0].write_text(json.dumps(report, indent=1) + "\n")
    if not arguments.no_plot:
        from .bench_figure import draw

        if draw(report, title, folder / "bench.png"):
            written.append(folder / "bench.png")
    print("written: " + ", ".join(map(str, written)))
    return 0


def _introduce(report: dict[str, Any]) -> str:
    """Print what is timed where; returns the plot's title."""
    facts, settings = report["machine"], report["settings"]
    elements = settings["layers"] * sum(rows * cols for rows, cols in settings["shapes"])
    device = facts.get("gpu", facts["processor"])
    title = (
        f"{settings['size']}: {settings['layers'] * len(settings['shapes'])} matrices, "
        f"{elements / 1e6:.1f} M elements, {settings['dtype']}"
    )
    threads = "" if "gpu" in facts else f", {facts['threads']} threads"
    print(f"{title}\n{device}{threads}, torch {facts['torch']}\n", flush=True)
    return f"{title}\n{device}{threads}"


def _spread(entry: dict[str, Any]) -> str:
    return f"{entry['low_ms']:.3f} - {entry['high_ms']:.3f}"


def _step_table(entries: list[dict[str, Any]]) -> str:
    header = ("optimizer step", "ms", "middle half", "host ms", "x AdamW", "state MB")
    base = next((e["median_ms"] for e in entries if e["name"] == "AdamW"), None)
    rows = []
    for entry in entries:
        ratio = f"{entry['median_ms'] / base:.2f}" if base else "-"
        rows.append(
            (
                entry["name"],
                f"{entry['median_ms']:.3f}",
                _spread(entry),
                f"{entry['host_ms']:.3f}",
                ratio,
                f"{entry['state_bytes'] / 1e6:.2f}",
            )
        )
    return table(header, rows)


def _stack_table(part: str, dtype: str, entries: list[dict[str, Any]]) -> str:
    """One line per entry; the yardstick is the last of torch's before it."""
    header = ("stack", part, dtype, "ms", "middle half", "x torch")
    rows = []
    base = 1.0
    for entry in entries:
        if entry["name"].startswith("torch"):
            base = entry["median_ms"]
        rows.append(
            (
                " x ".join(map(str, entry["shape"])),
                entry["name"],
                entry["dtype"],
                f"{entry['median_ms']:.3f}",
                _spread(entry),
                f"{entry['median_ms'] / base:.2f}",
            )
        )
    return table(header, rows, left=3)
