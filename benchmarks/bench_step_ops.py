"""The memory-bound operations of the step, each beside a copy of 2 GiB in the same rotation.

    python -m benchmarks.bench_step_ops [--sets tall small stack] [--operations update ...] [--quick]

`GB/s` counts the bytes that the head of each kernel's file says it must move, `/copy` is that over
what the copy moves in a second. Calls are captured in a CUDA graph, the copy is not. The weight
decay is one that changes bits, so nothing is skipped; gradients, weights and updates are 16-bit.
What an operation moves in `MB` is read from the L2 cache in part where it is no larger than a few
times that: the neuron norm of a small update, and all of the selection, which is bound by latency.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from benchmarks.harness import Table, arguments, clocks, gather_elements, header, rotate
from dion3 import ops

# name: (tensors, shape of each)
SETS = {
    "tall": (16, (16384, 4096)),
    "uneven": (13, (16384, 5120)),
    "small": (200, (1024, 1024)),
    "stack": (1, (16, 4096, 16384)),
}
FRACTIONS = {"1/4": 0.25, "1/8": 0.125}
OPERATIONS = ("momentum", "select", "gather", "neuron", "update", "update sr", "adamw", "adamw sr")
# decay, step, keep, gain, feedback, eps, beta2, neuron eps, nesterov
MATRIX_HYPER = (0.998, 1e-3, 1.0, 0.05, 0.95, 1e-7, 0.95, 1e-8, 1.0)
# decay, step, beta1, 1 - beta1, beta2, 1 - beta2, eps, sign
ADAMW_HYPER = (0.998, 1e-3, 0.9, 0.1, 0.999, 0.001, 1e-8, 1.0)
COPY_BYTES = 2**31
COLUMNS = [
    "set",
    "axis",
    "f",
    "momentum",
    "operation",
    "MB",
    "us",
    "low us",
    "high us",
    "GB/s",
    "/copy",
]


class Case:
    """One set of matrices: the buffers, every operation as a call, and the bytes each must move."""

    def __init__(
        self,
        count: int,
        shape: tuple[int, ...],
        axis: int,
        fraction: float,
        momentum: torch.dtype,
        device: str = "cuda",
    ) -> None:
        """Fill the buffers and run the operations that others need the results of."""
        half = torch.bfloat16
        lead, (rows, cols) = shape[:-2], shape[-2:]
        n = shape[axis - 2]
        k = math.ceil(fraction * n)
        part = (*lead, k, cols) if axis == 0 else (*lead, rows, k)

        def each(like: tuple[int, ...], dtype: torch.dtype, scale: float | None = None) -> list:
            if scale is None:
                return [torch.zeros(like, dtype=dtype, device=device) for _ in range(count)]
            return [torch.randn(like, dtype=dtype, device=device).mul_(scale) for _ in range(count)]

        m, g, w = each(shape, momentum, 1e-3), each(shape, half, 1e-3), each(shape, half, 0.02)
        score, sumsq = each((*lead, n), torch.float64), each((*lead, n), torch.float64)
        indices, slots = each((*lead, k), torch.int32), each((*lead, n), torch.int32)
        norm, gathered = each(lead, torch.float64), each(part, torch.float16)
        update = each(part, torch.float16, 0.02)
        neurons, factor = each((*lead, rows), torch.float32), each(part[:-1], torch.float32)
        moments = [each(shape, momentum, 1e-3), [t.abs_() for t in each(shape, momentum, 1e-6)]]
        flat, flat_g, m1, m2 = ([t.view(-1) for t in ts] for ts in (w, g, *moments))
        step = [torch.ones((), device=device) for _ in range(count)]
        hyper, adamw_hyper = (
            torch.tensor([[*row, *[0.0] * (12 - len(row))]], device=device)
            for row in (MATRIX_HYPER, ADAMW_HYPER)
        )
        feedback = torch.tensor([0.95], device=device)
        absent = [torch.empty(0, device=device)] * count
        zeros, ones = [0] * count, [1.0] * count
        axes, numbers = [axis] * count, list(range(count))
        neuron = indices if axis == 0 else absent

        def update_(steps: list[torch.Tensor]) -> None:
            ops.update_(
                w, update, slots, absent, hyper, zeros, axes, ones, steps, 0, numbers, zeros,
                [rows * cols] * count, [cols] * count,
            )  # fmt: skip

        def adamw_(stochastic: bool) -> None:
            ops.adamw_(
                flat, flat_g, m1, m2, step, adamw_hyper, zeros, [stochastic] * count, 0, numbers,
                zeros,
            )  # fmt: skip

        self.calls: dict[str, Callable[[], object]] = {
            "momentum": lambda: ops.momentum_(
                m, g, slots, feedback, hyper, zeros, axes, score, sumsq
            ),
            "select": lambda: ops.select_(score, sumsq, indices, slots, norm, [k] * count),
            "gather": lambda: ops.gather_(m, absent, indices, norm, hyper, zeros, axes, gathered),
            "neuron": lambda: ops.neuron_(update, neurons, neuron, hyper, zeros, factor),
            "update": lambda: update_(absent),
            "update sr": lambda: update_(step),
            "adamw": lambda: adamw_(False),
            "adamw sr": lambda: adamw_(True),
        }
        elements = count * math.prod(shape)
        chosen, slices = count * math.prod(part), count * math.prod(lead) * n
        size = momentum.itemsize
        read = gather_elements(elements, chosen, size, axis == 0)
        moved = {
            "momentum": (2 * size + 2) * elements,
            "select": 16 * slices + 4 * slices + 4 * slices * k // n,
            "gather": round(size * read) + 2 * chosen,
            "neuron": 2 * chosen,
            "update": 4 * elements + 2 * chosen,
            "adamw": (6 + 4 * size) * elements,
        }
        self.moved = {name: moved[name.removesuffix(" sr")] for name in OPERATIONS}
        self.calls["momentum"]()
        self.calls["select"]()


def one(table: Table, labels: tuple[str, ...], case: Case, names: list[str], rounds: int) -> None:
    """Time the named operations of a case beside the copy and add their rows."""
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    functions = {"copy": lambda: target.copy_(source), **{n: case.calls[n] for n in names}}
    times = rotate(functions, rounds, graph=True, inner=5, eager=("copy",))
    copy = 2 * COPY_BYTES / times["copy"].median
    for name in functions:
        t, moved = times[name], case.moved.get(name, 2 * COPY_BYTES)
        speed = moved / t.median  # bytes a millisecond
        table.add(
            *labels,
            name,
            moved / 1e6,
            1e3 * t.median,
            1e3 * t.low,
            1e3 * t.high,
            speed / 1e6,
            speed / copy,
        )


def main() -> None:
    """Run every case and save results/<gpu>_step_ops.csv."""
    parser = arguments(__doc__)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    args = parser.parse_args()
    rounds = 10 if args.quick else 30
    table = Table("step_ops", header("operations of the step", args.commit), COLUMNS)
    for name in args.sets:
        count, shape = SETS[name]
        for momentum in (torch.bfloat16, torch.float32):
            for axis in (0, 1):
                for label, fraction in FRACTIONS.items():
                    case = Case(count, shape, axis, fraction, momentum)
                    known = set() if label == "1/4" else {"momentum"}
                    if axis or known:
                        known |= {"adamw", "adamw sr"}
                    wanted = [o for o in args.operations if o not in known]
                    dtype = str(momentum).removeprefix("torch.")
                    labels = (name, ("rows", "columns")[axis], label, dtype)
                    one(table, labels, case, wanted, rounds)
                    del case
                    torch.cuda.empty_cache()
    print("clocks", clocks())
    print("saved", table.save(args.out))


if __name__ == "__main__":
    main()
