"""The one place that times: interleaved medians on the GPU, a header, an aligned table, a CSV.

Every ratio is taken in one process on the same buffers. The functions under comparison are called
in rotation, each round in another order, so that clocks, temperature and the load before are alike
for all; each call is timed by a pair of CUDA events; the median and the quartiles over the rounds
are reported. The rotation first runs untimed, for a card at rest starts faster than its power limit
allows for long: a product of 8192 x 8192 by cuBLAS took 1.48 ms in the first ten rounds and 1.75
later, and functions in between are not measured alike. Where launches would dominate (`graph=True`) a
function is captured `inner` times in one CUDA graph and the replay is timed.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import pathlib
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SETTLE_SECONDS = 0.5
RESULTS = pathlib.Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median and the quartiles around it, over `rounds` calls."""

    median: float
    low: float
    high: float
    rounds: int

    def ratio(self, other: Timing) -> float:
        """This time over the other's."""
        return self.median / other.median


def _git_commit() -> str:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=pathlib.Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _nvidia_smi(query: str) -> str:
    try:
        out = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
        return out.stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def arguments(
    description: str | None, quick: str = "10 rounds instead of 30"
) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", help="folder for the CSV (default: benchmarks/results)")
    parser.add_argument("--commit", help="commit to record where git cannot tell it")
    return parser


def header(title: str, commit: str | None = None) -> dict[str, str]:
    """Facts about the machine that every result carries; printed and returned."""
    facts = {
        "title": title,
        "gpu": torch.cuda.get_device_name(),
        "driver": _nvidia_smi("driver_version"),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "commit": commit or _git_commit(),
        "date": datetime.date.today().isoformat(),
    }
    print(" | ".join(f"{k} {v}" for k, v in facts.items()), flush=True)
    return facts


def clocks() -> str:
    """SM clock, memory clock and power draw right now."""
    return _nvidia_smi("clocks.sm,clocks.mem,power.draw")


def _timing(samples: list[float]) -> Timing:
    ordered = sorted(samples)
    quarter = len(ordered) // 4
    return Timing(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter], len(ordered))


def captured(function: Callable[[], object], inner: int) -> Callable[[], None]:
    """A replay of `inner` calls of the function in one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what made the operands
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            function()
    return graph.replay


def rotate(
    functions: dict[str, Callable[[], object]],
    rounds: int = 30,
    graph: bool = False,
    inner: int = 10,
    eager: tuple[str, ...] = (),
) -> dict[str, Timing]:
    """Time the functions in rotation; `eager` names those that are never captured in a graph."""
    calls: dict[str, tuple[Callable[[], object], int]] = {}
    for name, function in functions.items():
        function()
        use_graph = graph and name not in eager
        calls[name] = (captured(function, inner), inner) if use_graph else (function, 1)
    torch.cuda.synchronize()
    settled = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < settled:
        for call, _ in calls.values():
            call()
        torch.cuda.synchronize()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {k: [] for k in calls}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            call = calls[name][0]
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            events[name].append((start, stop))
    torch.cuda.synchronize()
    return {
        name: _timing([a.elapsed_time(b) / calls[name][1] for a, b in pairs])
        for name, pairs in events.items()
    }


@dataclass(frozen=True)
class Ceilings:
    """What this card does at best: bytes of a copy and operations of a matrix product."""

    bytes_per_ms: float
    operations_per_ms: float


def ceilings(rounds: int = 30) -> Ceilings:
    """A copy of 2 GiB (read and write) beside a bf16 product of 8192^3, on random data."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    times = rotate(
        {"copy": lambda: target.copy_(source), "product": lambda: torch.mm(a, b, out=product)},
        rounds,
    )
    found = Ceilings(2**32 / times["copy"].median, 2 * 8192**3 / times["product"].median)
    print(
        f"copy {found.bytes_per_ms / 1e6:.0f} GB/s, "
        f"product {found.operations_per_ms / 1e9:.0f} TFLOP/s",
        flush=True,
    )
    return found


def gather_elements(elements: int, chosen: int, size: int, rows: bool) -> float:
    """Elements of `size` bytes that a gather of `chosen` ones reads.

    Rows move alone; of scattered columns move whole pieces of memory, 64 bytes each (docs/kernels.md,
    section 5).
    """
    if rows:
        return float(chosen)
    return elements * (1.0 - (1.0 - chosen / elements) ** (64 // size))


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the exact value, in float64."""
    exact = exact.double()
    return float((result.double() - exact).norm() / exact.norm())


class Table:
    """Rows of one benchmark: printed aligned as they come, written to results/<gpu>_<name>.csv."""

    def __init__(
        self, name: str, facts: dict[str, str], columns: list[str], every: int = 1
    ) -> None:
        """Print the column names; `facts` is what `header` returned. Of the rows every n-th is printed."""
        self.name, self.facts, self.columns, self.every = name, facts, columns, every
        self.rows: list[list[str]] = []
        print(" | ".join(f"{c:>14}" for c in columns), flush=True)

    def add(self, *cells: object) -> None:
        """One row; floats are printed with four significant digits."""
        row = [f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells]
        self.rows.append(row)
        if len(self.rows) % self.every == 0:
            print(" | ".join(f"{c:>14}" for c in row), flush=True)

    def save(self, folder: str | None = None) -> pathlib.Path:
        """Write the CSV with the facts in its first line; the path is returned."""
        target = pathlib.Path(folder) if folder else RESULTS
        target.mkdir(parents=True, exist_ok=True)
        gpu = self.facts["gpu"].lower().replace("nvidia ", "").replace(" ", "_")
        path = target / f"{gpu}_{self.name}.csv"
        with path.open("w", newline="") as file:
            file.write("# " + "; ".join(f"{k}: {v}" for k, v in self.facts.items()) + "\n")
            writer = csv.writer(file)
            writer.writerow(self.columns)
            writer.writerows(self.rows)
        return path
