"""Newton-Schulz orthogonalisation as functions and as torch custom ops.

The functions work on the last two dimensions of a floating-point tensor of any batch shape: wide, tall,
square, strided, empty, on any device. They never write to their input and have no gradient.

Precision. dtype=None means float64 for a float64 input, float32 on a CPU, float16 elsewhere. float16 and
bfloat16 round where the GPU kernels do, on every device: inputs of every product and its result are
16-bit, accumulation and the added terms fp32, symmetric products exactly symmetric. Results do not depend
on the batch or on a matrix's place in it, not by a bit.

The norm is taken in float64, so inputs from 1e-30 to 1e30 give the same result; a zero matrix gives
zeros; NaN and Inf stay within their own matrix.

Source: "Dion3: Full-Stack Orthogonal Updates", Algorithms 1 to 3; dion3.program holds the stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .coefficients import KELLER, Coefficients, normalize_coefficients
from .matrix_ops import BACKENDS, DTYPES, FLOAT16S, has_kernel, orthogonalize_into
from .restarts import auto_restarts, check_restarts

__all__ = ["gemm_add", "gram_ns", "newton_schulz", "orthogonalize", "symmetric_mm"]


# ---- functions --------------------------------------------------------------------------------------


def gram_ns(
    X: Tensor,
    steps: int | None = None,
    coefficients: Iterable[object] | None = None,
    restarts: str | Sequence[int] = "auto",
    dtype: torch.dtype | None = None,
    eps: float = 0.0,
    *,
    backend: str = "auto",
) -> Tensor:
    """Orthogonalise X by restarted Gram Newton-Schulz (Algorithm 3); square matrices by the standard form.

    Args:
        X: (..., rows, cols), floating point, any strides. Not modified.
        steps: iterations; 5, or one per triple of coefficients.
        coefficients: None (Polar Express with safety 1.05), one triple for every iteration, or one
            triple per iteration.
        restarts: "auto" (2 for the default coefficients, else found by find_restarts; every second
            iteration of more than ten), or the iterations after which to restart, each in
            1 .. steps - 1. [2, 4] is as accurate as the standard form.
        dtype: compute dtype; None chooses as the module says.
        eps: the matrix is divided by max(norm, eps). The norm is Frobenius's.
        backend: "auto"; for measurements "sm90" or "generic", one family of CUDA kernels; "reference",
            plain PyTorch that rounds where the kernels do; "cublas", 16-bit torch.baddbmm.

    Returns:
        A new tensor of X's shape and dtype.

    Raises:
        TypeError: X is not a real floating-point tensor, or another argument has a wrong type.
        ValueError: X has fewer than two dimensions, or another argument a wrong value.
        RuntimeError: X requires a gradient and grad mode is on.
    """
    _check_input(X, "X")
    table = _table(coefficients, steps)
    if isinstance(restarts, str):
        if restarts != "auto":
            raise ValueError(f'restarts must be "auto" or a sequence of integers, got {restarts!r}')
        chosen = _default(steps)[1] if coefficients is None else _auto_restarts(table)
    else:
        chosen = list(check_restarts(restarts, len(table)))
    return _apply(X, table, chosen, "auto", dtype, eps, backend)


def newton_schulz(
    X: Tensor,
    steps: int | None = None,
    coefficients: Iterable[object] | None = None,
    dtype: torch.dtype | None = None,
    eps: float = 0.0,
    *,
    backend: str = "auto",
) -> Tensor:
    """Orthogonalise X by the standard Newton-Schulz iteration (Algorithm 1).

    Arguments, result and errors as gram_ns.
    """
    _check_input(X, "X")
    table = _table(coefficients, steps)
    return _apply(X, table, [], "standard", dtype, eps, backend)


def orthogonalize(G: Tensor, steps: int = 5) -> Tensor:
    """Keller Jordan's quintic, `steps` times, on G divided by its Frobenius norm, as bfloat16.

    Same name, arguments and result as the function of the Muon kernel on the Hugging Face hub. The
    iterations run as in gram_ns; only the result is rounded to bfloat16.

    Args:
        G: (..., rows, cols), floating point. Not modified.
        steps: number of iterations, 1 to 99.

    Returns:
        A new bfloat16 tensor of G's shape.

    Raises:
        As gram_ns.
    """
    _check_input(G, "G")
    table, restarts = _keller(steps)
    return _apply(G, table, restarts, "auto", None, 0.0, "auto", torch.bfloat16)


def symmetric_mm(
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
) -> Tensor:
    """alpha * A @ B^T + beta * C, where the caller promises that A @ B^T and C are symmetric.

    Only the lower triangle counts: the result is bitwise symmetric. 16-bit inputs are accumulated in
    fp32, C is added in fp32, one rounding follows.

    Args:
        A: (..., n, k), floating point.
        B: like A; None means A.
        C: (..., n, n), or None. Not read if beta is the number 0.
        alpha, beta: numbers, or tensors of one element or of one element per matrix (no host read).

    Returns:
        A new tensor (..., n, n) of A's dtype.

    Raises:
        TypeError, ValueError: dtypes, devices or shapes do not fit.
        RuntimeError: an input requires a gradient and grad mode is on.
    """
    B = A if B is None else B
    _check_product(A, B, C, transposed=True)
    a, at = _scalar(alpha, "alpha")
    b, bt = _scalar(beta, "beta")
    return torch.ops.dion3.symmetric_mm(A, B, C, a, b, at, bt)


def gemm_add(
    A: Tensor,
    B: Tensor,
    C: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
) -> Tensor:
    """alpha * A @ B + beta * C over a batch, with one rounding.

    Args:
        A: (..., m, k), floating point.
        B: (..., k, n), the same batch shape and dtype.
        C: (..., m, n), or None. Not read if beta is the number 0.
        alpha, beta: as in symmetric_mm.

    Returns:
        A new tensor (..., m, n) of A's dtype.

    Raises:
        As symmetric_mm.
    """
    _check_product(A, B, C, transposed=False)
    a, at = _scalar(alpha, "alpha")
    b, bt = _scalar(beta, "beta")
    return torch.ops.dion3.gemm_add(A, B, C, a, b, at, bt)


def default_dtype(X: Tensor) -> torch.dtype:
    """The compute dtype of dtype=None: float64 stays, else float32 on a CPU and float16 elsewhere."""
    if X.dtype == torch.float64:
        return torch.float64
    return torch.float32 if X.device.type == "cpu" else torch.float16


# ---- arguments --------------------------------------------------------------------------------------


def _check_input(X: Tensor, name: str) -> None:
    if not isinstance(X, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(X).__name__}")
    if not X.dtype.is_floating_point or X.dtype not in DTYPES:
        raise TypeError(
            f"{name} must be float16, bfloat16, float32 or float64, got {X.dtype}"
            + (": orthogonalise the real and imaginary parts yourself" if X.is_complex() else "")
        )
    if X.layout != torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor, got layout {X.layout}: call {name}.to_dense()"
        )
    if X.dim() < 2:
        raise ValueError(f"{name} must have at least two dimensions, got shape {tuple(X.shape)}")
    if X.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} requires a gradient, and this operation has none: call it under torch.no_grad(), "
            f"or pass {name}.detach()"
        )


def _check_product(A: Tensor, B: Tensor, C: Tensor | None, transposed: bool) -> None:
    """Raise unless A @ B, or A @ B^T if transposed, and C fit; B^T must be as wide as A is high."""
    for name, tensor in (("A", A), ("B", B), ("C", C)):
        if tensor is None:
            continue
        _check_input(tensor, name)
        if tensor.dtype != A.dtype or tensor.device != A.device:
            raise TypeError(
                f"{name} must have A's dtype and device, {A.dtype} on {A.device}, "
                f"got {tensor.dtype} on {tensor.device}"
            )
    wanted = A.shape if transposed else A.shape[:-2] + A.shape[-1:] + B.shape[-1:]
    if B.shape != wanted:
        raise ValueError(f"B must have shape {tuple(wanted)} to fit A, got {tuple(B.shape)}")
    shape = A.shape[:-1] + (A.shape[-2:-1] if transposed else B.shape[-1:])
    if C is not None and C.shape != shape:
        raise ValueError(f"C must have shape {tuple(shape)} to fit A and B, got {tuple(C.shape)}")


def _scalar(value: float | Tensor, name: str) -> tuple[float, Tensor | None]:
    """A factor as (number, tensor): the factor used is their product."""
    if isinstance(value, Tensor):
        if not value.dtype.is_floating_point:
            raise TypeError(f"{name} must be a floating-point tensor, got {value.dtype}")
        return 1.0, value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number or a tensor, got {value!r}")
    return float(value), None


def _table(coefficients: Iterable[object] | None, steps: int | None) -> Coefficients:
    return (
        _default(steps)[0] if coefficients is None else normalize_coefficients(coefficients, steps)
    )


# torch.compile(dynamic=True) takes the floats of a module for variables: what a traced function knows of
# our own sets must be the result of one of these.


@torch.compiler.assume_constant_result
def _default(steps: int | None) -> tuple[Coefficients, list[int]]:
    table = normalize_coefficients(None, steps)
    return table, auto_restarts(table)


@torch.compiler.assume_constant_result
def _keller(steps: int) -> tuple[Coefficients, list[int]]:
    table = normalize_coefficients(KELLER, steps)
    return table, auto_restarts(table)


@torch.compiler.assume_constant_result
def _auto_restarts(table: Coefficients) -> list[int]:
    return auto_restarts(table)


def _apply(
    X: Tensor,
    table: Coefficients,
    restarts: list[int],
    method: str,
    dtype: torch.dtype | None,
    eps: float,
    backend: str,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    compute = default_dtype(X) if dtype is None else dtype
    if compute not in DTYPES:
        raise ValueError(
            f"dtype must be None, float16, bfloat16, float32 or float64, got {dtype!r}"
        )
    if not (isinstance(eps, (int, float)) and 0.0 <= eps < float("inf")):
        raise ValueError(f"eps must be a finite number >= 0, got {eps!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if backend not in ("auto", "reference") and compute not in FLOAT16S:
        raise ValueError(f'backend="{backend}" needs dtype float16 or bfloat16, got {compute}')
    flat = list(itertools.chain.from_iterable(table))
    final = X.dtype if out_dtype is None else out_dtype
    if backend == "auto" and not has_kernel(X.device, compute, X.dtype):
        result = torch.ops.dion3.newton_schulz(
            X, flat, restarts, method, compute, False, float(eps)
        )
        return result.to(final)
    # The kernels store any dtype: no pass over the result afterwards.
    result = torch.empty(X.shape, dtype=final, device=X.device)
    if backend == "auto":
        torch.ops.dion3.newton_schulz_out(
            [X], [result], flat, restarts, method, compute, False, float(eps)
        )
    else:
        orthogonalize_into(
            [X], [result], flat, restarts, method, compute, False, float(eps), backend
        )
    return result
