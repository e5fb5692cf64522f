"""The figures of docs/, made by the functions of this package: `python docs/plots.py [NAME ...]`.

Without a name all are made. Each takes seconds on a CPU and is written to docs/images/NAME.png.
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch

import dion3

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend is chosen first)

IMAGES = Path(__file__).parent / "images"
BLUE, ORANGE, GREEN, RED, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#c53030", "#718096"
POLAR = dion3.scaled(dion3.POLAR_EXPRESS, 1.05)


def _figure(columns: int, width: float, height: float = 3.6):
    return plt.subplots(1, columns, figsize=(width, height), layout="constrained")


def _finish(axes, title: str, x: str, y: str, legend: bool = True) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize=8, frameon=False)


def _spectrum_matrix(singular_values: np.ndarray, cols: int, seed: int = 0) -> torch.Tensor:
    """A float64 (n, cols) matrix with random singular vectors and the given singular values."""
    generator = torch.Generator().manual_seed(seed)
    n = len(singular_values)
    u, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(cols, n, generator=generator, dtype=torch.float64))
    return (u * torch.as_tensor(singular_values)) @ v.mT


def _error(x: torch.Tensor, method: str, dtype: torch.dtype, restarts: list[int]) -> float:
    """Relative Frobenius error of the orthogonalizer against the same polynomials in float64."""
    exact = dion3.newton_schulz(x, coefficients=POLAR)
    if method == "standard":
        result = dion3.newton_schulz(x, coefficients=POLAR, dtype=dtype)
    else:
        result = dion3.gram_ns(x, coefficients=POLAR, restarts=restarts, dtype=dtype)
    error = (torch.linalg.norm(result - exact) / torch.linalg.norm(exact)).item()
    return error if np.isfinite(error) else float("inf")


def _spectra(n: int) -> dict[str, np.ndarray]:
    few = np.zeros(n)
    few[:10] = np.logspace(0, -1, 10)
    half = np.zeros(n)
    half[: n // 2] = np.logspace(0, -2, n // 2)
    noise = np.linalg.svd(np.random.default_rng(0).standard_normal((n, 4 * n)), compute_uv=False)
    return {
        "Gaussian": noise,
        "1 to 1e-3": np.logspace(0, -3, n),
        "1 to 1e-7": np.logspace(0, -7, n),
        "half zeros": half,
        "rank 10": few,
    }


def polynomials() -> None:
    """What five iterations of each coefficient set make of a singular value."""
    x = np.logspace(-4, 0, 800)
    figure, axes = _figure(1, 6.4)
    for label, coefficients, colour in (
        ("Polar Express, safety 1.05 (default)", POLAR, BLUE),
        ("You", dion3.YOU, GREEN),
        ("Keller", [dion3.KELLER] * 5, ORANGE),
    ):
        y = x.copy()
        for a, b, c in coefficients:
            y = y * (a + b * y**2 + c * y**4)
        axes.semilogx(x, y, color=colour, label=label)
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    _finish(axes, "Five iterations", "singular value before", "singular value after")
    figure.savefig(IMAGES / "polynomials.png", dpi=150)


def restarts() -> None:
    """One spurious eigenvalue through the iterations, and the error that it makes."""
    figure, (left, right) = _figure(2, 11.0)
    for label, restart, colour in (("no restart", None, RED), ("restart after 2", 2, BLUE)):
        x, r, q, path = 0.0, -4e-4, 1.0, [4e-4]
        for t, (a, b, c) in enumerate(POLAR):
            if t == restart:
                x, r, q = x * q, -4e-4, 1.0
                path[-1] = abs(r)
            z = a + b * r + c * r * r
            r, q = r * z * z, q * z
            path.append(abs(r))
        left.semilogy(range(len(path)), path, "o-", markersize=4, color=colour, label=label)
    left.axhline(65504, color=GREY, linewidth=0.8, linestyle=":")
    left.text(0, 65504 * 1.6, "largest fp16 number", fontsize=8, color=GREY)
    _finish(left, "An eigenvalue of R that starts at -4e-4", "iteration", "absolute value")

    n = 128
    depths = np.arange(1, 9)
    for label, method, points, dtype, style, colour in (
        ("Gram, no restart, bf16", "gram", [], torch.bfloat16, "s--", RED),
        ("Gram, no restart, fp16", "gram", [], torch.float16, "o-", RED),
        ("Gram, restart after 2, bf16", "gram", [2], torch.bfloat16, "s--", BLUE),
        ("Gram, restart after 2, fp16", "gram", [2], torch.float16, "o-", BLUE),
        ("standard, fp16", "standard", [], torch.float16, "o-", GREEN),
    ):
        errors = [
            _error(_spectrum_matrix(np.logspace(0, -d, n), 4 * n), method, dtype, points)
            for d in depths
        ]
        right.semilogy(10.0**depths, errors, style, markersize=4, color=colour)
        right.annotate(
            label, (10.0 ** depths[-1], errors[-1]), xytext=(7, -9 if method == "standard" else -2),
            textcoords="offset points", fontsize=8, color=colour,
        )  # fmt: skip
    right.set_xscale("log")
    _finish(
        right,
        f"Error for singular values from 1 down, {n} x {4 * n}",
        "largest over smallest singular value",
        "relative error",
        legend=False,
    )
    figure.savefig(IMAGES / "restarts.png", dpi=150)


def dtypes() -> None:
    """The error of each form and dtype on several spectra."""
    n = 128
    spectra = _spectra(n)
    figure, axes = _figure(1, 8.0)
    series = (
        ("standard, bf16", "standard", torch.bfloat16, ORANGE, -0.3),
        ("Gram, restart after 2, bf16", "gram", torch.bfloat16, RED, -0.1),
        ("standard, fp16", "standard", torch.float16, GREEN, 0.1),
        ("Gram, restart after 2, fp16 (default)", "gram", torch.float16, BLUE, 0.3),
    )
    for label, method, dtype, colour, shift in series:
        errors = [
            _error(_spectrum_matrix(values, 4 * n), method, dtype, [2])
            for values in spectra.values()
        ]
        axes.bar(np.arange(len(spectra)) + shift, errors, 0.19, color=colour, label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(len(spectra)), list(spectra))
    _finish(
        axes, f"Error against float64, {n} x {4 * n}", "singular values", "relative error", False
    )
    axes.grid(False, axis="x")
    axes.set_axisbelow(True)
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=4)
    figure.savefig(IMAGES / "dtypes.png", dpi=150)


def _projections(make, dtype: torch.dtype, gradients: bool, decay: float) -> np.ndarray:
    """How much of the first weight is left after each step, by projection, in %."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(192, 192, generator=generator) * 0.02
    weight = torch.nn.Parameter(start.to(dtype))
    start = weight.detach().double()
    optimizer = make([weight], lr=0.01, weight_decay=decay)
    left = [100.0]
    for _ in range(100):
        gradient = torch.randn(start.shape, generator=generator) if gradients else start * 0
        weight.grad = gradient.to(dtype)
        optimizer.step()
        left.append(100 * ((weight.detach().double() * start).sum() / start.square().sum()).item())
    return np.array(left)


def weight_decay() -> None:
    """Weight decay of 1e-4 a step: with it minus without it, as each kind of rounding has it."""

    def muon(rounding):
        return lambda params, **options: dion3.Muon(params, rounding=rounding, **options)

    figure, panels = _figure(2, 9.6)
    titles = ("Slices without an update", "Slices with an update")
    for axes, gradients, title in zip(panels, (False, True), titles, strict=True):
        exact = 100 * (0.9999 ** np.arange(101) - 1)
        axes.plot(exact, color=GREY, linewidth=6, alpha=0.35, label="exact")
        runs = [
            ("fp32", muon("nearest"), torch.float32, GREEN, "-"),
            ("bf16, stochastic rounding", muon("stochastic"), torch.bfloat16, BLUE, "--"),
            ("bf16, nearest, one rounding", muon("nearest"), torch.bfloat16, ORANGE, "-."),
        ]
        if gradients:
            runs.append(
                ("bf16, nearest, two roundings", torch.optim.Muon, torch.bfloat16, RED, "-")
            )
        for label, make, dtype, colour, style in runs:
            with_decay, without = (
                _projections(make, dtype, gradients, decay) for decay in (0.01, 0.0)
            )
            axes.plot(with_decay - without, style, color=colour, label=label)
        _finish(axes, title, "step", "change of the weights by decay, %")
    figure.savefig(IMAGES / "weight_decay.png", dpi=150)


FIGURES = {figure.__name__: figure for figure in (polynomials, restarts, dtypes, weight_decay)}


def main() -> None:
    """Make the figures named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FIGURES))
    names = parser.parse_args().names or list(FIGURES)
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        parser.error(f"no figure {unknown[0]!r}; there are {', '.join(FIGURES)}")
    IMAGES.mkdir(exist_ok=True)
    for name in names:
        FIGURES[name]()
        print(f"docs/images/{name}.png")


if __name__ == "__main__":
    main()
