"""Whole Newton-Schulz calls, T = 5, Polar Express, bf16 in and out.

    python -m benchmarks.bench_newton_schulz [--quick] [--peer] [--out FOLDER]

`eager` is standard Newton-Schulz in fp16 written with torch.baddbmm; `--peer` adds gram-newton-
schulz with its own CuTeDSL kernels and its own torch.compile (install gram-newton-schulz 0.1.6
beside this). `graph` is our call captured in a CUDA graph. Errors are relative to the same
polynomials in float64.
"""

from __future__ import annotations

import time

import torch

import dion3
from benchmarks.harness import Table, arguments, clocks, header, relative_error, rotate

# (batch, n, m): bars (time over the peer's, speed-up over eager)
GRAM = {
    (24, 2048, 7168): (0.87, 2.3),
    (1, 7168, 18432): (0.93, 2.0),
    (1, 8192, 28672): (0.99, 2.25),
    (32, 1024, 4096): (0.87, 2.35),
    (8, 4096, 16384): (0.94, 2.4),
    (32, 1024, 16384): (0.83, 3.4),
    (64, 512, 4096): (0.80, 2.75),
    (216, 256, 2048): (0.70, 2.7),
}
STANDARD = {(1, 8192, 8192): 1.64, (64, 1024, 1024): 1.7, (32, 2048, 2048): 1.6}
COLUMNS = [
    "shape",
    "eager ms",
    "peer ms",
    "ours ms",
    "low",
    "high",
    "graph ms",
    "ours/peer",
    "bar",
    "speed-up",
    "bar",
    "error",
    "eager error",
]


def eager_standard(x: torch.Tensor, coefficients: list[tuple[float, ...]]) -> torch.Tensor:
    """Standard Newton-Schulz in fp16 with cuBLAS, as one would write it in torch."""
    y = x.float()
    y = (y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)).half()
    for a, b, c in coefficients:
        gram = torch.bmm(y, y.mT)
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, poly, y, beta=a)
    return y.to(x.dtype)


def exact(x: torch.Tensor, coefficients: list[tuple[float, ...]]) -> torch.Tensor:
    """The same polynomials in float64."""
    y = x.double()
    y = y / y.norm(dim=(-2, -1), keepdim=True)
    for a, b, c in coefficients:
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y


def _peer() -> object | None:
    try:
        from gram_newton_schulz import GramNewtonSchulz
    except ImportError as error:
        print(f"gram-newton-schulz is not importable: {error}")
        return None
    return GramNewtonSchulz(compile_kwargs={"fullgraph": True, "mode": "default"})


def one(
    table: Table,
    shape: tuple[int, int, int],
    bars: tuple[float | None, float],
    peer: object | None,
    rounds: int,
) -> None:
    """Time one stack of matrices and add its row."""
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    coefficients = dion3.scaled(dion3.POLAR_EXPRESS, 1.05)
    functions = {
        "eager": lambda: eager_standard(x, coefficients),
        "ours": lambda: dion3.gram_ns(x),
        "graph": lambda: dion3.gram_ns(x),
    }
    start = time.perf_counter()
    dion3.gram_ns(x)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    if peer is not None:
        functions["peer"] = lambda: peer(x)
    times = rotate(functions, rounds, graph=True, inner=1, eager=("eager", "ours", "peer"))
    truth = exact(x[:1], coefficients)
    nan = float("nan")
    against_peer = times["ours"].ratio(times["peer"]) if peer is not None else nan
    table.add(
        "x".join(map(str, shape)),
        times["eager"].median,
        times["peer"].median if peer is not None else nan,
        times["ours"].median,
        times["ours"].low,
        times["ours"].high,
        times["graph"].median,
        against_peer,
        bars[0] if bars[0] is not None else nan,
        times["eager"].ratio(times["ours"]),
        bars[1],
        relative_error(dion3.gram_ns(x)[:1], truth),
        relative_error(functions["eager"]()[:1], truth),
    )
    more = first * 1e3 - times["ours"].median
    print(
        f"    first call of this shape {first * 1e3:.1f} ms, {more:.1f} more than later ones",
        flush=True,
    )


def grouped(rounds: int) -> None:
    """Two shapes in one call beside eager, and many small matrices beside a loop over them."""
    coefficients = dion3.scaled(dion3.POLAR_EXPRESS, 1.05)
    flat = [value for triple in coefficients for value in triple]
    shapes = [(216, 2048, 7168), (1, 7168, 18432)]
    stacks = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    outs = [torch.empty_like(x) for x in stacks]
    times = rotate(
        {
            "eager": lambda: [eager_standard(x, coefficients) for x in stacks],
            "ours": lambda: torch.ops.dion3.newton_schulz_out(
                stacks, outs, flat, [2], "gram", torch.float16, False, 0.0
            ),
        },
        max(3, rounds // 6),
    )
    print(
        f"216x(2048x7168) + 1x(7168x18432), one call: {times['ours'].median:.1f} ms, "
        f"eager {times['eager'].median:.1f} ms, speed-up {times['eager'].ratio(times['ours']):.2f} "
        "(bar 2.2)"
    )
    small = torch.randn(74, 24, 10240, device="cuda", dtype=torch.bfloat16)
    times = rotate(
        {
            "loop": lambda: [dion3.gram_ns(x) for x in small],
            "batched": lambda: dion3.gram_ns(small),
        },
        rounds,
    )
    print(
        f"74x(24x10240): batched {times['batched'].median:.3f} ms, loop "
        f"{times['loop'].median:.3f} ms, ratio {times['loop'].ratio(times['batched']):.1f} (bar 5)"
    )


def main() -> None:
    """Run every row and save results/<gpu>_newton_schulz.csv."""
    parser = arguments(__doc__)
    parser.add_argument("--peer", action="store_true", help="add gram-newton-schulz")
    args = parser.parse_args()
    rounds = 10 if args.quick else 30
    facts = header("Newton-Schulz, bf16 in and out, fp16 inside", args.commit)
    table = Table("newton_schulz", facts, COLUMNS)
    peer = _peer() if args.peer else None
    for shape, bars in GRAM.items():
        one(table, shape, bars, peer, rounds)
        torch.cuda.empty_cache()
    for shape, bar in STANDARD.items():
        one(table, shape, (None, bar), None, rounds)
        torch.cuda.empty_cache()
    grouped(rounds)
    print("clocks", clocks())
    print("saved", table.save(args.out))


if __name__ == "__main__":
    main()
