"""The Newton-Schulz polynomials in float64 by singular values, the hard spectra, and two error tables.

Nothing here uses the products of dion3: exact() composes the polynomials on the singular values. The
tables compare the functions of dion3 with it; run the file to print them:

    python tests/ns_reference.py                         # accuracy_rows() and a small stress_rows()
    python tests/ns_reference.py --n 768 --draws 5       # the stress test at its published size
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dion3.coefficients import DEFAULT
from dion3.newton_schulz import gram_ns, newton_schulz

Row = dict[str, object]


def seeded(seed: int) -> torch.Generator:
    """A generator of its own for each draw."""
    return torch.Generator().manual_seed(seed)


def exact(X: Tensor, coefficients: Sequence[Sequence[float]] = DEFAULT) -> Tensor:
    """U p(S / |S|) V^T in float64: what every Newton-Schulz function approximates."""
    U, S, Vh = torch.linalg.svd(X.double().cpu(), full_matrices=False)
    norm = torch.linalg.vector_norm(S, dim=-1, keepdim=True)
    S = torch.where(norm > 0, S / norm.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    for a, b, c in coefficients:
        S = a * S + b * S**3 + c * S**5
    return U @ (S.unsqueeze(-1) * Vh)


def eager(X: Tensor, coefficients: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """The standard iteration written op by op in a 16-bit dtype, as most codes have it: every
    operation rounds."""
    x = (X / X.norm()).to(dtype)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if tall else x


def relative(result: Tensor, reference: Tensor) -> float:
    """Relative Frobenius error."""
    return float((result.double().cpu() - reference).norm() / reference.norm())


def with_spectrum(spectrum: Tensor, m: int, seed: int) -> Tensor:
    """A float64 (n, m) matrix with these n singular values and random singular vectors."""
    generator = seeded(seed)
    n = spectrum.numel()
    U = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    V = torch.linalg.qr(torch.randn(m, n, generator=generator, dtype=torch.float64))[0]
    return (U * spectrum.double()) @ V.T


def log_down(exponent: float, count: int, start: float = 0.0) -> Tensor:
    """count values from 10^start down to 10^exponent."""
    return torch.logspace(start, exponent, count, dtype=torch.float64)


def gamma(n: int, seed: int) -> Tensor:
    """n draws of gamma(shape 3, rate 1/2), sums of three exponentials."""
    return -2 * torch.rand(3, n, generator=seeded(seed), dtype=torch.float64).log().sum(0)


def pad(values: Tensor, n: int) -> Tensor:
    """values, then zeros up to n."""
    return torch.cat([values, values.new_zeros(n - values.numel())])


def accuracy_matrices(n: int = 256, m: int = 1024, seed: int = 0) -> dict[str, Tensor]:
    """The eight matrices of the accuracy table, float64."""
    linear = torch.linspace(0, 0.5, n, dtype=torch.float64)
    spectra = {
        "gamma(3, .5)": gamma(n, seed),
        "linear 0..0.5": linear,
        "log 1..1e-3": log_down(-3, n),
        "log 1..1e-7": log_down(-7, n),
        "half zeros": pad(log_down(-2, n // 2), n),
        "rank 10": pad(log_down(-1, 10), n),
        "rank 2 and a tail": torch.cat([log_down(-0.5, 2), log_down(-7, n - 2, -4)]),
    }
    gaussian = torch.randn(n, m, generator=seeded(seed), dtype=torch.float64)
    rest = {name: with_spectrum(s, m, seed + i) for i, (name, s) in enumerate(spectra.items(), 1)}
    return {"Gaussian": gaussian, **rest}


VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "std fp16": lambda X: newton_schulz(X, dtype=torch.float16),
    "std bf16": lambda X: newton_schulz(X, dtype=torch.bfloat16),
    "eager bf16": lambda X: eager(X, DEFAULT, torch.bfloat16),
    "gram[2] fp16": lambda X: gram_ns(X, dtype=torch.float16),
    "gram[2] bf16": lambda X: gram_ns(X, dtype=torch.bfloat16),
    "gram[2,4] fp16": lambda X: gram_ns(X, dtype=torch.float16, restarts=[2, 4]),
    "naive fp16": lambda X: gram_ns(X, dtype=torch.float16, restarts=[]),
    "naive bf16": lambda X: gram_ns(X, dtype=torch.bfloat16, restarts=[]),
}
"""The columns of the accuracy table: functions of a float32 matrix."""


def accuracy_rows(
    n: int = 256, m: int = 1024, seed: int = 0, device: torch.device | str = "cpu"
) -> list[Row]:
    """Relative error against exact(), one row per matrix: {"spectrum": name, variant: error, ...}."""
    rows: list[Row] = []
    for name, X in accuracy_matrices(n, m, seed).items():
        reference, given = exact(X), X.float().to(device)
        errors = {variant: relative(f(given), reference) for variant, f in VARIANTS.items()}
        rows.append({"spectrum": name, **errors})
    return rows


METRICS = ("orth", "residual", "psd", "dual", "bound")


def polar_metrics(A: Tensor, P: Tensor) -> dict[str, float]:
    """How far P (n, m) is from the orthogonal polar factor of A, five ways; all inf if P is not finite."""
    A, P = A.double().cpu(), P.double().cpu()
    if not P.isfinite().all():
        return dict.fromkeys(METRICS, float("inf"))
    n = A.size(0)
    # H = sym(P^T A) is m x m of rank 2 n at most; its spectrum is that of a 2 n x 2 n matrix.
    basis = torch.linalg.qr(torch.cat([A.T, P.T], dim=1))[0]
    core = (P @ basis).T @ (A @ basis)
    H = (core + core.T) / 2
    eigenvalues = torch.linalg.eigvalsh(H)
    scale = eigenvalues.abs().max() * 1e-14
    nuclear = torch.linalg.svdvals(A).sum()
    eye = torch.eye(n, dtype=torch.float64)
    return {
        "orth": float((P @ P.T - eye).norm() / eye.norm()),
        "residual": float(((P @ basis) @ H @ basis.T - A).norm() / A.norm()),
        "psd": float(
            eigenvalues[eigenvalues < -scale].norm() / eigenvalues[eigenvalues > scale].norm()
        ),
        "dual": float((nuclear - (A * P).sum()) / nuclear),
        "bound": max(float(torch.linalg.matrix_norm(P, 2)) - 1.0, 0.0),
    }


def stress_spectra(n: int, seed: int = 0) -> dict[str, Tensor]:
    """The spectra of the stress test."""
    part = n * 10 // 11
    two = log_down(-0.5, 2)
    return {
        "linear": torch.linspace(0, 0.5, n, dtype=torch.float64),
        "log 1e-3": log_down(-3, n),
        "log 1e-5": log_down(-5, n),
        "log 1e-7": log_down(-7, n),
        "log 1e-9": log_down(-9, n),
        "half zero": pad(log_down(-2, n // 2), n),
        "rank 10": pad(log_down(-1, 10), n),
        "rank 2": pad(two, n),
        "rank 2 and a tail": torch.cat([two, log_down(-7, n - 2, -4)]),
        "two scales": torch.cat([log_down(-10, part), log_down(-10, n - part, -4)]),
        "gamma": gamma(n, seed),
    }


def stress_rows(
    n: int = 96, aspect: int = 4, draws: int = 1, device: torch.device | str = "cpu"
) -> list[Row]:
    """The polar metrics of Gram (fp16), two restarts (fp16) and standard (bf16, fp16) for each spectrum.

    Returns one row per spectrum and draw: {"spectrum": name, "draw": d, variant: {metric: value}, ...}.
    """
    variants = ("std bf16", "std fp16", "gram[2] fp16", "gram[2,4] fp16")
    rows: list[Row] = []
    for draw in range(draws):
        for index, (name, spectrum) in enumerate(stress_spectra(n, draw).items()):
            A = with_spectrum(spectrum, aspect * n, 100 * draw + index)
            given = A.float().to(device)
            row: Row = {"spectrum": name, "draw": draw}
            for variant in variants:
                row[variant] = polar_metrics(A, VARIANTS[variant](given))
            rows.append(row)
    return rows


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=96, help="short side of the stress matrices")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print("relative error against the exact polynomials, 256 x 1024")
    for row in accuracy_rows(device=options.device):
        cells = " | ".join(f"{variant} {row[variant]:.3g}" for variant in VARIANTS)
        print(f"{row['spectrum']:>18}: {cells}")
    print(f"polar metrics, n = {options.n}, aspect 4")
    for row in stress_rows(options.n, draws=options.draws, device=options.device):
        for variant, metrics in row.items():
            if isinstance(metrics, dict):
                cells = " ".join(f"{name} {value:.3g}" for name, value in metrics.items())
                print(f"{row['spectrum']:>18} {variant:>15}: {cells}")


if __name__ == "__main__":
    main()
