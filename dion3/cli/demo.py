"""Train a byte-level GPT with AdamW, torch.optim.Muon and Dion3 on the text that ships with Python.

Every run starts from the same weights and sees the same batches under the same schedule. At the end
stands a table with the held-out loss (of files that no run was trained on), the median times and
the size of the optimizer state; a plot and all figures as JSON are written to --out.

The default size takes a few minutes on two CPU cores, --quick less than one. A GPU is used when
there is one.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from . import UsageError
from .common import choose_device, count, machine, output_folder, table
from .progress import Progress

# layers, dim, heads, context, batch, steps
SIZES = {
    "quick": (4, 96, 4, 128, 8, 100),
    "small": (6, 128, 4, 128, 16, 300),
    "medium": (8, 384, 6, 256, 32, 1000),
    "large": (12, 768, 12, 512, 64, 2000),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    sizes = ", ".join(
        f"{name}: {layers} layers, {dim} wide, {steps} steps of {batch} x {context} bytes"
        for name, (layers, dim, _, context, batch, steps) in SIZES.items()
    )
    size = parser.add_argument_group("size")
    size.add_argument("--size", choices=SIZES, default="small", help=f"{sizes} (default: small)")
    size.add_argument("--quick", action="store_true", help="the same as --size quick")
    for name in ("layers", "dim", "heads", "context", "batch", "steps"):
        size.add_argument(f"--{name}", type=count, metavar="N", help=f"overrides the size's {name}")
    what = parser.add_argument_group("what is compared")
    what.add_argument(
        "--optimizers",
        default="adamw,muon,dion3,dion3-1/4",
        metavar="LIST",
        help="comma-separated, in this order (default: %(default)s)",
    )
    what.add_argument("--lr-adamw", type=float, metavar="LR", help="AdamW's learning rate")
    what.add_argument(
        "--lr-matrix",
        type=float,
        metavar="LR",
        help="torch.optim.Muon's and Dion3's, of the matrices",
    )
    what.add_argument(
        "--lr-rest",
        type=float,
        metavar="LR",
        help="AdamW's on embeddings, output layer and norms, beside Muon and inside Dion3",
    )
    what.add_argument(
        "--weight-decay", type=float, metavar="WD", help="of the matrices, everywhere"
    )
    what.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    where = parser.add_argument_group("where")
    where.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    where.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        help="folder for demo.png and demo.json (default: out)",
    )
    where.add_argument("--no-plot", action="store_true", help="write no PNG")


def run(arguments: argparse.Namespace) -> int:
    """Train with each optimizer; 0 if every final loss is finite."""
    from dion3.demo.data import load_corpus
    from dion3.demo.figure import draw
    from dion3.demo.recipes import Rates
    from dion3.demo.train import train

    recipes = _recipes(arguments.optimizers)
    settings = _settings(arguments)
    given = {
        "adamw": arguments.lr_adamw,
        "matrix": arguments.lr_matrix,
        "rest": arguments.lr_rest,
        "weight_decay": arguments.weight_decay,
    }
    rates = replace(Rates(), **{name: value for name, value in given.items() if value is not None})
    folder = output_folder(arguments.out)
    try:
        corpus = load_corpus()
    except RuntimeError as error:
        raise UsageError(str(error)) from error
    title = _introduce(settings, rates, corpus)
    start = time.perf_counter()
    results = []
    for recipe in recipes:
        with Progress(settings.steps, f"{recipe.label:<17}") as progress:
            results.append(train(recipe, settings, rates, corpus, progress.update))
    print(f"\n{_table(results)}\n\n{time.perf_counter() - start:.0f} s in all")
    report = {
        "machine": machine(settings.device),
        "settings": {**asdict(settings.model), "steps": settings.steps, "batch": settings.batch},
        "rates": asdict(rates),
        "runs": [result.summary() for result in results],
    }
    (folder / "demo.json").write_text(json.dumps(report, indent=1) + "\n")
    written = [folder / "demo.json"]
    if not arguments.no_plot and draw(results, title, folder / "demo.png"):
        written.insert(0, folder / "demo.png")
    print("written: " + ", ".join(map(str, written)))
    finals = torch.tensor([result.held_out[-1][1] for result in results])
    return 0 if bool(finals.isfinite().all()) else 1


def _recipes(text: str) -> list[Any]:
    from dion3.demo.recipes import RECIPES

    keys = [key.strip() for key in text.split(",") if key.strip()]
    unknown = [key for key in keys if key not in RECIPES]
    if unknown or not keys:
        raise UsageError(f"--optimizers {text!r}: expected names out of {', '.join(RECIPES)}")
    return [RECIPES[key] for key in keys]


def _settings(arguments: argparse.Namespace) -> Any:
    from dion3.demo.gpt import GPTConfig
    from dion3.demo.train import Settings

    names = ("layers", "dim", "heads", "context", "batch", "steps")
    sizes = dict(zip(names, SIZES["quick" if arguments.quick else arguments.size], strict=True))
    given = {name: getattr(arguments, name) for name in names}
    sizes.update({name: value for name, value in given.items() if value is not None})
    if sizes["dim"] % sizes["heads"]:
        raise UsageError(f"--dim {sizes['dim']} is not a multiple of --heads {sizes['heads']}")
    return Settings(
        model=GPTConfig(sizes["layers"], sizes["dim"], sizes["heads"], sizes["context"]),
        steps=sizes["steps"],
        batch=sizes["batch"],
        device=choose_device(arguments.device),
        seed=arguments.seed,
    )


def _introduce(settings: Any, rates: Any, corpus: Any) -> str:
    """Print what is about to be done; returns the plot's title."""
    from dion3.demo.gpt import GPT
    from dion3.param_groups import classify, format_table

    model = GPT(settings.model)
    parameters = sum(p.numel() for p in model.parameters())
    facts = machine(settings.device)
    print(
        f"model: {parameters:,} parameters, {settings.model.layers} layers, "
        f"{settings.model.dim} wide; {settings.steps} steps of "
        f"{settings.batch} x {settings.model.context} bytes"
    )
    print(
        f"text: {len(corpus.train) / 1e6:.1f} MB of {corpus.train_files} files to train on, "
        f"{len(corpus.held_out) / 1e6:.1f} MB of {corpus.held_out_files} other files held out"
    )
    print(
        f"learning rates: AdamW {rates.adamw:g}; torch.optim.Muon and Dion3 {rates.matrix:g} on "
        f"matrices, with AdamW {rates.rest:g} on the rest; weight decay {rates.weight_decay:g} on "
        "matrices"
    )
    print("momentum: 0.95; Dion3 0.95 ** (1 / f), as it damps a slice only when it selects it")
    print(f"device: {facts.get('gpu', facts['processor'])}, torch {facts['torch']}\n")
    print(format_table(classify(model)) + "\n", flush=True)
    return (
        f"Byte-level GPT, {parameters / 1e6:.1f} M parameters, on Python's own text: "
        f"{settings.steps} steps of {settings.batch} x {settings.model.context} bytes"
    )


def _table(results: list[Any]) -> str:
    header = ("optimizer", "held-out loss", "optimizer ms", "step ms", "state MB")
    rows = []
    for result in results:
        figures = result.summary()
        rows.append(
            (
                result.label,
                f"{figures['final_held_out']:.4f}",
                f"{1e3 * figures['optimizer_seconds']:.2f}",
                f"{1e3 * figures['step_seconds']:.1f}",
                f"{result.state_bytes / 1e6:.2f}",
            )
        )
    note = "times are medians; step = forward, backward and optimizer; loss in nats per byte"
    return f"{table(header, rows)}\n{note}"
