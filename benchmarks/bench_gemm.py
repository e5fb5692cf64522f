"""Matrix products beside cuBLAS (torch.bmm, torch.baddbmm) on the same buffers.

    python -m benchmarks.bench_gemm [--quick] [--out FOLDER]

Rows: symmetric product alpha A B, with beta C, with beta A (what Newton-Schulz uses), X X^T, Q X,
Q X + a X. `ratio` is our time over cuBLAS's full product without C, the figure the bars are
written in.
"""

from __future__ import annotations

import torch

import dion3  # noqa: F401  (registers the operators)
from benchmarks.harness import Table, arguments, clocks, header, relative_error, rotate

# (n, batch): the bars for alpha A B and alpha A B + beta C
SQUARE = {
    (8192, 1): (0.50, 0.51),
    (4096, 8): (0.50, 0.52),
    (2048, 32): (0.53, 0.57),
    (1024, 64): (0.60, 0.67),
    (512, 64): (0.77, 0.91),
}
# (batch, n, m): the bars for X X^T, Q X and Q X + a X
RECTANGULAR = {
    (24, 2048, 7168): (0.55, 0.96, 1.0),
    (9, 1024, 28672): (0.73, 0.88, 0.96),
    (32, 1024, 16384): (0.58, 0.88, 0.97),
    (1, 8192, 28672): (0.495, 0.98, 1.02),
    (32, 1024, 4096): (0.60, 0.92, 0.98),
    (64, 512, 4096): (0.73, 0.89, 1.0),
    (216, 256, 2048): (0.95, 1.0, 1.1),
}
COLUMNS = ["product", "shape", "ms", "low", "high", "cublas ms", "TFLOP/s", "ratio", "bar", "error"]


def _symmetric(n: int, batch: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(batch, n, n, device="cuda", dtype=dtype)
    return ((x + x.mT) / 2).contiguous()


def _report(
    table: Table,
    shape: str,
    times: dict,
    flop: float,
    rows: dict[str, tuple[str, float, float]],
) -> None:
    for name, (base, bar, error) in rows.items():
        ours, theirs = times[name], times[base]
        table.add(
            name,
            shape,
            ours.median,
            ours.low,
            ours.high,
            theirs.median,
            flop / ours.median / 1e9,
            ours.ratio(theirs),
            bar,
            error,
        )


def square(table: Table, n: int, batch: int, bars: tuple[float, float], rounds: int) -> None:
    """A B^T of symmetric commuting operands, without and with beta C."""
    dtype = torch.float16
    a, c = _symmetric(n, batch, dtype) / n**0.5, _symmetric(n, batch, dtype)
    full, full_c = torch.empty_like(a), torch.empty_like(a)
    functions = {
        "cublas": lambda: torch.bmm(a, a.mT, out=full),
        "baddbmm": lambda: torch.baddbmm(c, a, a.mT, out=full_c),
        "symmetric": lambda: torch.ops.dion3.symmetric_mm(a, a, None, 1.0, 0.0),
        "symmetric+C": lambda: torch.ops.dion3.symmetric_mm(a, a, c, 1.0, 1.0),
        "symmetric+A": lambda: torch.ops.dion3.symmetric_mm(a, a, a, 1.0, 1.0),
    }
    times = rotate(functions, rounds, graph=n <= 2048, inner=10 if n <= 512 else 4)
    one = a[:1].double() @ a[:1].double().mT
    errors = (
        relative_error(functions["symmetric"]()[:1], one),
        relative_error(functions["symmetric+C"]()[:1], one + c[:1].double()),
        relative_error(functions["symmetric+A"]()[:1], one + a[:1].double()),
    )
    rows = {
        "symmetric": ("cublas", bars[0], errors[0]),
        "symmetric+C": ("cublas", bars[1], errors[1]),
        "symmetric+A": ("cublas", bars[1], errors[2]),
    }
    _report(table, f"{batch}x{n}", times, batch * n**3, rows)


def rectangular(
    table: Table, shape: tuple[int, int, int], bars: tuple[float, float, float], rounds: int
) -> None:
    """X X^T, Q X and Q X + a X of wide matrices."""
    batch, n, m = shape
    x = torch.randn(batch, n, m, device="cuda", dtype=torch.float16)
    q = _symmetric(n, batch, torch.float16) / n**0.5
    gram, out, out_c = torch.empty_like(q), torch.empty_like(x), torch.empty_like(x)
    functions = {
        "cublas XXt": lambda: torch.bmm(x, x.mT, out=gram),
        "XXt": lambda: torch.ops.dion3.symmetric_mm(x, x, None, 1.0, 0.0),
        "cublas QX": lambda: torch.bmm(q, x, out=out),
        "baddbmm QX+X": lambda: torch.baddbmm(x, q, x, out=out_c),
        "QX": lambda: torch.ops.dion3.gemm_add(q, x, None, 1.0, 0.0),
        "QX+aX": lambda: torch.ops.dion3.gemm_add(q, x, x, 1.0, 1.0),
    }
    times = rotate(functions, rounds, graph=batch * n * n * m < 4e11, inner=4)
    product = q[:1].double() @ x[:1].double()
    xxt = x[:1].double() @ x[:1].double().mT
    errors = (
        relative_error(functions["XXt"]()[:1], xxt),
        relative_error(functions["QX"]()[:1], product),
        relative_error(functions["QX+aX"]()[:1], product + x[:1].double()),
    )
    label = f"{batch}x{n}x{m}"
    _report(table, label, times, batch * n * n * m, {"XXt": ("cublas XXt", bars[0], errors[0])})
    rows = {
        "QX": ("cublas QX", bars[1], errors[1]),
        "QX+aX": ("cublas QX", bars[2], errors[2]),
    }
    _report(table, label, times, 2.0 * batch * n * n * m, rows)


def main() -> None:
    """Run every row and save results/<gpu>_gemm.csv."""
    parser = arguments(__doc__)
    args = parser.parse_args()
    rounds = 10 if args.quick else 30
    table = Table("gemm", header("matrix products, fp16", args.commit), COLUMNS)
    for (n, batch), bars in SQUARE.items():
        square(table, n, batch, bars, rounds)
    for shape, bars3 in RECTANGULAR.items():
        rectangular(table, shape, bars3, rounds)
    print("clocks", clocks())
    print("saved", table.save(args.out))


if __name__ == "__main__":
    main()
