"""Whole optimizer steps on the matrices of transformer layers.

    python -m benchmarks.bench_step [--models 1B 7B 14B] [--quick] [--out FOLDER]

A layer is two d x d matrices, two kv x d, two ff x d and one d x ff. Rows: fused AdamW,
torch.optim.Muon, ours at f = 1, 1/2, 1/4, 1/8. GPU time by CUDA events around step() in rotation,
host time by a clock around the call, memory as the peak beyond what was allocated before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import dion3
from benchmarks.harness import Table, clocks, header, rotate

# name: (d, ff, kv, layers)
MODELS = {
    "1B": (2048, 8192, 512, 8),
    "7B": (4096, 16384, 1024, 4),
    "14B": (5120, 20480, 1024, 3),
}
COLUMNS = [
    "model",
    "optimizer",
    "momentum",
    "gpu ms",
    "low",
    "high",
    "/adamw",
    "muon/",
    "host ms",
    "first s",
    "extra MiB",
]


def parameters(model: str, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """The matrices of a model with gradients filled in."""
    d, ff, kv, layers = MODELS[model]
    shapes = [(d, d), (d, d), (kv, d), (kv, d), (ff, d), (ff, d), (d, ff)] * layers
    params = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype) * 0.02)
        p.grad = torch.randn_like(p) * 1e-3
        params.append(p)
    return params


def optimizers(momentum: torch.dtype) -> dict[str, Callable[[list], torch.optim.Optimizer]]:
    """The constructors of every row."""

    def ours(fraction: float) -> Callable[[list], torch.optim.Optimizer]:
        return lambda p: dion3.Dion3(p, lr=1e-3, fraction=fraction, momentum_dtype=momentum)

    return {
        "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        "dion3.Muon": lambda p: dion3.Muon(p, lr=1e-3, momentum_dtype=momentum),
        "Dion3 f=1": ours(1.0),
        "Dion3 f=1/2": ours(0.5),
        "Dion3 f=1/4": ours(0.25),
        "Dion3 f=1/8": ours(0.125),
    }


def _host_ms(step: Callable[[], object]) -> float:
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


def one(table: Table, model: str, momentum: torch.dtype, rounds: int, with_muon: bool) -> None:
    """All rows of one model."""
    params = parameters(model, torch.bfloat16)
    made: dict[str, torch.optim.Optimizer] = {}
    first: dict[str, float] = {}
    extra: dict[str, float] = {}
    constructors = optimizers(momentum)
    if with_muon:
        constructors["torch Muon"] = lambda p: torch.optim.Muon(p, lr=1e-3)
    for name, construct in constructors.items():
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer = construct(params)
        optimizer.step()
        torch.cuda.synchronize()
        first[name] = time.perf_counter() - start
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        extra[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        made[name] = optimizer
    times = rotate({name: opt.step for name, opt in made.items()}, rounds)
    nan = float("nan")
    for name, optimizer in made.items():
        t = times[name]
        table.add(
            model,
            name,
            str(momentum).removeprefix("torch."),
            t.median,
            t.low,
            t.high,
            t.ratio(times["AdamW fused"]),
            times["torch Muon"].ratio(t) if with_muon else nan,
            _host_ms(optimizer.step),
            first[name],
            extra[name],
        )


def main() -> None:
    """Run every row and save results/<gpu>_step.csv."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="10 rounds instead of 30")
    parser.add_argument("--out", help="folder for the CSV (default: benchmarks/results)")
    parser.add_argument("--commit", help="commit to record where git cannot tell it")
    args = parser.parse_args()
    rounds = 10 if args.quick else 30
    table = Table("step", header("optimizer step, bf16 weights", args.commit), COLUMNS)
    for model in args.models:
        one(table, model, torch.bfloat16, rounds, with_muon=True)
        torch.cuda.empty_cache()
        one(table, model, torch.float32, rounds, with_muon=False)
        torch.cuda.empty_cache()
    print("clocks", clocks())
    print("saved", table.save(args.out))


if __name__ == "__main__":
    main()
