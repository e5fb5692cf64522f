"""Whole optimizer steps on the matrices of transformers, bf16 weights and gradients.

    python -m benchmarks.bench_step [--models 1B 7B 14B] [--quick] [--peer] [--profile] [--out FOLDER]

Rows: fused AdamW, torch.optim.Muon (2-D parameters only), and ours: AdamW, Muon, and Dion3 at f = 1,
1/2, 1/4, 1/8, each eager and replayed from a CUDA graph; "neuron" is f = 1/4 with the neuron norm. All
with momentum in bf16 and in fp32. `--peer` adds NorDion2 of the `dion` package. Columns:

    gpu ms, low, high   CUDA events around step(), in rotation: median and quartiles
    /adamw, muon/       that over fused AdamW's; torch.optim.Muon's over that
    host ms             until step() returns, of several in a row
    launches            calls of a step that launch a kernel or a graph, as torch.profiler sees them
    first s             construction and the first step, everything included
    extra MiB           peak of the first three steps (the second captures) beyond weights, gradients
                        and optimizer state
    floor ms            the bytes that the heads of csrc/cuda/*.cu ask for at the speed of a copy of
                        2 GiB, plus the operations of Newton-Schulz at the rate of a bf16 product of
                        8192^3, both measured in this run; what Newton-Schulz itself moves is not in it
    gpu/floor           gpu ms over floor ms

`--profile` prints, for an eager step at f = 1/4 and at f = 1/8, the 20 kernels that take most GPU
time. The state of all rows of a model is held at once: of 14B and MoE-1B about 100 GB with fp32
momentum.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable

import torch

import dion3
from benchmarks.harness import (
    Ceilings,
    Table,
    arguments,
    ceilings,
    clocks,
    gather_elements,
    header,
    rotate,
)
from dion3.demo.train import state_bytes
from dion3.layout import ROWS
from dion3.plan import Item, NSConfig
from dion3.program import build_program

Shapes = list[tuple[int, ...]]
Constructor = Callable[[list], torch.optim.Optimizer]


def layers(count: int, d: int, ff: int, kv: int, query: int | None = None) -> Shapes:
    """The matrices of transformer layers: query, output, key, value, gate, up, down."""
    query = query or d
    return [(query, d), (d, query), (kv, d), (kv, d), (ff, d), (ff, d), (d, ff)] * count


# Embeddings and vectors are left out: they are AdamW's in every row.
MODELS: dict[str, Shapes] = {
    "1B": layers(8, d=2048, ff=8192, kv=512),
    "7B": layers(4, d=4096, ff=16384, kv=1024),
    "14B": layers(3, d=5120, ff=20480, kv=1024),
    # Width, depth and MLP width of the paper's appendix A.1 (Llama, Qwen, Gemma); heads as in the
    # public configurations of the families (Qwen3-0.6B, Gemma 2B).
    "Llama-430M": layers(24, d=1024, ff=4096, kv=1024),
    "Qwen-600M": layers(28, d=1024, ff=3072, kv=1024, query=2048),
    "Gemma-1B": layers(8, d=2048, ff=16384, kv=256),
    # google/gemma-3-1b
    "Gemma-3-1B": layers(26, d=1152, ff=6912, kv=256, query=1024),
    # ibm-granite/granite-3.0-1b-a400m: 32 experts of 512 a layer, as stacks
    "MoE-1B": [
        *[(1024, 1024), (512, 1024), (512, 1024), (1024, 1024)] * 24,
        *[(32, 512, 1024), (32, 512, 1024), (32, 1024, 512)] * 24,
    ],
    # The paper's exposed slice of Kimi-K2 is 216 expert matrices and a dense one. These are its 24
    # experts of one layer, a third, and the dense one, so that the state of all rows fits one card.
    "Kimi-K2": [(2048, 7168), (2048, 7168), (7168, 2048)] * 24 + [(7168, 18432)],
}
DEFAULT = ("1B", "7B", "14B")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cuGraphLaunch")
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
    "launches",
    "first s",
    "extra MiB",
    "floor ms",
    "gpu/floor",
]


def parameters(model: str) -> list[torch.nn.Parameter]:
    """The matrices of a model with gradients filled in."""
    params = []
    for shape in MODELS[model]:
        weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
        params.append(torch.nn.Parameter(weight))
        params[-1].grad = torch.randn_like(weight) * 1e-3
    return params


def optimizers(momentum: torch.dtype, torch_muon: bool, peer: bool) -> dict[str, Constructor]:
    """The constructors of every row."""

    def ours(fraction: float, graph: bool, neuron_norm: bool = False) -> Constructor:
        return lambda p: dion3.Dion3(
            p,
            lr=1e-3,
            fraction=fraction,
            neuron_norm=neuron_norm,
            momentum_dtype=momentum,
            cuda_graph=graph,
        )

    rows: dict[str, Constructor] = {
        "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        "AdamW ours": lambda p: dion3.Dion3(
            [{"params": p, "algorithm": "adamw"}],
            lr=1e-3,
            rounding="nearest",
            momentum_dtype=momentum,
        ),
        "Muon": lambda p: dion3.Muon(p, lr=1e-3, momentum_dtype=momentum),
        "Muon graph": lambda p: dion3.Muon(p, lr=1e-3, momentum_dtype=momentum, cuda_graph=True),
    }
    for label, fraction in (("1", 1.0), ("1/2", 0.5), ("1/4", 0.25), ("1/8", 0.125)):
        rows[f"f={label}"] = ours(fraction, False)
        rows[f"f={label} graph"] = ours(fraction, True)
    rows["f=1/4 neuron"] = ours(0.25, False, neuron_norm=True)
    rows["f=1/4 neuron graph"] = ours(0.25, True, neuron_norm=True)
    if torch_muon:
        rows["torch Muon"] = lambda p: torch.optim.Muon(p, lr=1e-3)
    if peer:
        from dion import NorDion2

        rows["dion NorDion2 f=1/4"] = lambda p: NorDion2(p, lr=1e-3, fraction=0.25, use_triton=True)
    return rows


# ---- the floor -----------------------------------------------------------------------------------


def ns_operations(config: NSConfig, shape: tuple[int, int]) -> int:
    """Floating-point operations of Newton-Schulz on one matrix; a symmetric product counts half."""
    n, m = sorted(shape)
    standard = config.method == "standard" or (config.method == "auto" and n == m)
    restarts = tuple(range(1, len(config.coefficients))) if standard else config.restarts
    cost = {"gram": n * n * m, "symmetric": n**3, "general": 2 * n * n * m}
    return sum(cost[stage.kind] for stage in build_program(config.coefficients, restarts))


def least_bytes(item: Item, momentum: int) -> float:
    """What momentum, gather, neuron norm and update must move for one piece of a parameter."""
    piece, weight = item.piece, item.parameter.element_size()
    elements = piece.batch * piece.rows * piece.cols
    chosen = piece.batch * piece.update_shape[0] * piece.update_shape[1]
    rows = piece.axis == ROWS
    update = chosen * item.config.dtype.itemsize
    gather = momentum * gather_elements(elements, chosen, momentum, rows) + update
    if item.options.nesterov:
        gather += weight * gather_elements(elements, chosen, weight, rows)
    neuron = update if item.options.neuron_norm else 0
    return (2 * momentum + weight) * elements + gather + neuron + 2 * weight * elements + update


def floor_ms(optimizer: torch.optim.Optimizer, limits: Ceilings) -> float:
    """The step's bytes at the speed of a copy and its operations at that of a large product."""
    if isinstance(optimizer, torch.optim.AdamW):
        size = sum(p.numel() * p.element_size() for p in optimizer.param_groups[0]["params"])
        return 7 * size / limits.bytes_per_ms
    if not isinstance(optimizer, dion3.Dion3):
        return float("nan")
    moved, operations = 0.0, 0
    for plan in optimizer._plans:
        for item, buffer in zip(plan.items, plan.momentum, strict=True):
            moved += least_bytes(item, buffer.element_size())
            operations += item.piece.batch * ns_operations(item.config, item.piece.update_shape)
        if plan.adamw is not None:
            for weight, average in zip(plan.adamw.param, plan.adamw.exp_avg, strict=True):
                moved += weight.numel() * (3 * weight.element_size() + 4 * average.element_size())
    return moved / limits.bytes_per_ms + operations / limits.operations_per_ms


# ---- measurements --------------------------------------------------------------------------------


def start(construct: Constructor, params: list) -> tuple[torch.optim.Optimizer, float, float]:
    """An optimizer after three steps, the seconds of the first, the extra MiB of all."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    optimizer = construct(params)
    optimizer.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    for _ in range(2):  # the second step captures the graph
        optimizer.step()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - state_bytes([optimizer])
    return optimizer, seconds, extra / 2**20


def host_ms(step: Callable[[], object], launches: int, gpu_ms: float) -> float:
    """Median milliseconds until step() returns, of up to 20 in a row: no more than the launch queue
    (1024) holds, where the host would wait for the GPU, and beyond 3 no more than 0.3 s of its time."""
    times = []
    torch.cuda.synchronize()
    for _ in range(max(1, min(20, 900 // max(launches, 1), max(3, int(300 / gpu_ms))))):
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return statistics.median(times)


def profiled(step: Callable[[], object]) -> Iterable:
    """What torch.profiler saw of one step, by name."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    return profile.key_averages()


def print_kernels(title: str, step: Callable[[], object], top: int = 20) -> None:
    """The kernels of one step by GPU time."""
    kernels = [e for e in profiled(step) if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in kernels)
    print(
        f"    {title}: {total / 1e3:.3f} ms in {sum(e.count for e in kernels)} kernels and copies"
    )
    for e in kernels[:top]:
        us, name = e.self_device_time_total, e.key.removeprefix("void ")
        print(f"    {us:10.1f} us {100 * us / total:5.1f} % {e.count:5d} x  {name[:110]}")


def one(
    table: Table,
    model: str,
    momentum: torch.dtype,
    rounds: int,
    limits: Ceilings,
    peers: tuple[bool, bool],
    profile: bool,
) -> None:
    """All rows of one model; `peers`: with torch.optim.Muon, with NorDion2."""
    params = parameters(model)
    started = {
        name: start(construct, params) for name, construct in optimizers(momentum, *peers).items()
    }
    times = rotate({name: entry[0].step for name, entry in started.items()}, rounds)
    for name, (optimizer, seconds, extra) in started.items():
        t, least = times[name], floor_ms(optimizer, limits)
        launches = sum(e.count for e in profiled(optimizer.step) if e.key.startswith(LAUNCHES))
        host = host_ms(optimizer.step, launches, t.median)
        table.add(
            model,
            name,
            str(momentum).removeprefix("torch."),
            t.median,
            t.low,
            t.high,
            t.ratio(times["AdamW fused"]),
            times["torch Muon"].ratio(t) if "torch Muon" in times else float("nan"),
            host,
            launches,
            seconds,
            extra,
            least,
            t.median / least,
        )
    if profile:
        for name in ("f=1/4", "f=1/8"):
            print_kernels(f"{model} {name} {momentum}", started[name][0].step)


def main() -> None:
    """Run every row and save results/<gpu>_step.csv."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=list(DEFAULT), choices=list(MODELS))
    parser.add_argument("--peer", action="store_true", help="add NorDion2 of the dion package")
    parser.add_argument("--profile", action="store_true", help="print the kernels of two steps")
    args = parser.parse_args()
    rounds = 10 if args.quick else 30
    table = Table("step", header("optimizer step, bf16 weights", args.commit), COLUMNS)
    limits = ceilings(rounds)
    for model in args.models:
        flat = all(len(shape) == 2 for shape in MODELS[model])
        for momentum in (torch.bfloat16, torch.float32):
            bf16 = momentum == torch.bfloat16  # the peers keep momentum in the gradients' dtype
            peers = (flat and bf16, args.peer and bf16)
            one(table, model, momentum, rounds, limits, peers, args.profile)
            gc.collect()
            torch.cuda.empty_cache()
    print("clocks", clocks())
    print("saved", table.save(args.out))


if __name__ == "__main__":
    main()
