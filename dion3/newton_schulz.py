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
from .products import (
    EXACT,
    NATIVE,
    ROUNDED,
    keep_fp32_operands,
    mirror_lower,
    native_bf16,
    one_thread_per_matrix,
    product,
    run_program,
    workspace_bytes,
)
from .program import Stage, build_program
from .restarts import auto_restarts, check_restarts

__all__ = ["gemm_add", "gram_ns", "newton_schulz", "orthogonalize", "symmetric_mm"]

METHODS = ("auto", "standard", "gram")
BACKENDS = ("auto", "reference", "cublas")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 1 << 30}
"""A batch is cut so that its buffers stay below this (but never below one matrix per CPU thread). On a
CPU that keeps them in cache; the result does not depend on it."""

LONE_SUM = 1024
"""oneDNN cuts bf16 sums longer than this in another place for a batch of one matrix than for a larger one:
such a matrix is computed twice, side by side, and the result is that of any other batch."""

_lib = torch.library.Library("dion3", "FRAGMENT")
_lib.define(
    "newton_schulz(Tensor x, float[] coefficients, int[] restarts, str method, "
    "ScalarType compute_dtype, bool normalized, float eps) -> Tensor"
)
_lib.define(
    "newton_schulz_out(Tensor[] x, Tensor(a!)[] out, float[] coefficients, int[] restarts, str method, "
    "ScalarType compute_dtype, bool normalized, float eps) -> ()"
)
_lib.define(
    "symmetric_mm(Tensor a, Tensor b, Tensor? c, float alpha, float beta, "
    "Tensor? alpha_tensor=None, Tensor? beta_tensor=None) -> Tensor"
)
_lib.define(
    "gemm_add(Tensor a, Tensor b, Tensor? c, float alpha, float beta, "
    "Tensor? alpha_tensor=None, Tensor? beta_tensor=None) -> Tensor"
)


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
        restarts: "auto" (2 for the default coefficients, else found by find_restarts), or the iterations
            after which to restart, each in 1 .. steps - 1. [2, 4] is as accurate as the standard form.
        dtype: compute dtype; None chooses as the module says.
        eps: the matrix is divided by max(norm, eps). The norm is Frobenius's.
        backend: "auto"; "reference", plain PyTorch that rounds where the kernels do; "cublas", 16-bit
            torch.baddbmm, a baseline for measurements.

    Returns:
        A new tensor of X's shape and dtype.

    Raises:
        TypeError: X is not a real floating-point tensor, or another argument has a wrong type.
        ValueError: X has fewer than two dimensions, or another argument a wrong value.
        RuntimeError: X requires a gradient and grad mode is on.
    """
    _check_input(X, "X")
    table = normalize_coefficients(coefficients, steps)
    if isinstance(restarts, str):
        if restarts != "auto":
            raise ValueError(f'restarts must be "auto" or a sequence of integers, got {restarts!r}')
        chosen = _auto_restarts(table)
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
    table = normalize_coefficients(coefficients, steps)
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
    table = normalize_coefficients(KELLER, steps)
    return _apply(G, table, _auto_restarts(table), "auto", None, 0.0, "auto", torch.bfloat16)


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
    _check_product(A, B, C, A.shape[:-1] + A.shape[-2:-1], transposed=True)
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
    _check_product(A, B, C, A.shape[:-1] + B.shape[-1:], transposed=False)
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
        raise TypeError(f"{name} must be a dense tensor, got layout {X.layout}: call {name}.to_dense()")
    if X.dim() < 2:
        raise ValueError(f"{name} must have at least two dimensions, got shape {tuple(X.shape)}")
    if X.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} requires a gradient, and this operation has none: call it under torch.no_grad(), "
            f"or pass {name}.detach()"
        )


def _check_product(A: Tensor, B: Tensor, C: Tensor | None, shape: torch.Size, transposed: bool) -> None:
    named = {"A": A, "B": B} if C is None else {"A": A, "B": B, "C": C}
    for name, tensor in named.items():
        _check_input(tensor, name)
        if tensor.dtype != A.dtype or tensor.device != A.device:
            raise TypeError(
                f"{name} must have A's dtype and device, {A.dtype} on {A.device}, "
                f"got {tensor.dtype} on {tensor.device}"
            )
    wanted = A.shape if transposed else A.shape[:-2] + A.shape[-1:] + B.shape[-1:]
    if B.shape != wanted:
        raise ValueError(f"B must have shape {tuple(wanted)} to fit A, got {tuple(B.shape)}")
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
        raise ValueError(f"dtype must be None, float16, bfloat16, float32 or float64, got {dtype!r}")
    if not (isinstance(eps, (int, float)) and 0.0 <= eps < float("inf")):
        raise ValueError(f"eps must be a finite number >= 0, got {eps!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    flat = list(itertools.chain.from_iterable(table))
    if backend == "auto":
        result = torch.ops.dion3.newton_schulz(X, flat, restarts, method, compute, False, float(eps))
    else:
        if backend == "cublas" and compute not in (torch.float16, torch.bfloat16):
            raise ValueError(f'backend="cublas" needs dtype float16 or bfloat16, got {compute}')
        result = torch.empty(X.shape, dtype=compute, device=X.device)
        mode = NATIVE if backend == "cublas" else ROUNDED
        _orthogonalize_into(X, result, flat, restarts, method, compute, False, eps, mode)
    return result.to(X.dtype if out_dtype is None else out_dtype)


# ---- the operations in plain PyTorch ----------------------------------------------------------------


def _program(
    coefficients: Sequence[float], restarts: Sequence[int], method: str, square: bool
) -> tuple[Stage, ...]:
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    if not coefficients or len(coefficients) % 3:
        raise ValueError(f"coefficients must hold 3 numbers per iteration, got {len(coefficients)}")
    steps = len(coefficients) // 3
    table = tuple((coefficients[i], coefficients[i + 1], coefficients[i + 2]) for i in range(0, 3 * steps, 3))
    if method == "standard" or (method == "auto" and square):
        return build_program(table, tuple(range(1, steps)))
    return build_program(table, check_restarts(restarts, steps))


def _orthogonalize_into(
    x: Tensor,
    out: Tensor,
    coefficients: Sequence[float],
    restarts: Sequence[int],
    method: str,
    dtype: torch.dtype,
    normalized: bool,
    eps: float,
    mode16: str | None = None,
) -> None:
    """out <- Newton-Schulz of x; x and out (..., rows, cols), any strides and dtypes.

    mode16: how 16-bit compute dtypes run; None chooses the faster of those that round as the kernels do.
    """
    if x.shape != out.shape or x.dim() < 2:
        raise ValueError(f"x and out must be matrices of one shape, got {x.shape} and {out.shape}")
    rows, cols = x.shape[-2:]
    program = _program(coefficients, restarts, method, rows == cols)
    if x.numel() == 0:
        return
    if dtype in (torch.float32, torch.float64):
        mode = EXACT
    else:
        mode = mode16 or (NATIVE if dtype == torch.bfloat16 and native_bf16(x.device) else ROUNDED)
    x = x.reshape(-1, rows, cols)
    target = out.reshape(-1, rows, cols)
    batch = x.size(0)
    each = workspace_bytes(min(rows, cols), max(rows, cols), mode, dtype)
    threads = torch.get_num_threads() if x.device.type == "cpu" else 1
    chunk = CHUNK_BYTES.get(x.device.type, CHUNK_BYTES["cuda"]) // each // threads * threads
    chunk = min(batch, max(chunk, threads))
    for start in range(0, batch, chunk):
        part, goal = x[start : start + chunk], target[start : start + chunk]
        with one_thread_per_matrix(part.size(0), x.device), keep_fp32_operands(x.device):
            _run_part(part, goal, program, mode, dtype, normalized, eps)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))


def _run_part(
    x: Tensor,
    out: Tensor,
    program: tuple[Stage, ...],
    mode: str,
    dtype: torch.dtype,
    normalized: bool,
    eps: float,
) -> None:
    tall = x.size(1) > x.size(2)
    transpose = tall and mode != EXACT
    work = _normalized(x.mT if transpose else x, mode, dtype, normalized, eps)
    if mode == NATIVE and work.size(0) == 1 and work.size(2) > LONE_SUM:
        work = work.expand(2, -1, -1).contiguous()
    direct = mode == EXACT and out.dtype == dtype and out.is_contiguous()
    result = run_program(
        program,
        work,
        mode=mode,
        dtype=dtype,
        tall=tall and not transpose,
        overwrite=work.data_ptr() != x.data_ptr(),
        result=out if direct else None,
    )
    if not direct:
        result = result[: out.size(0)]
        out.copy_(result.mT if transpose else result)


def _normalized(
    x: Tensor, mode: str, dtype: torch.dtype, normalized: bool, eps: float
) -> Tensor:
    """x (batch, rows, cols) / max(norm, eps), contiguous, in the storage dtype of the mode.

    Rounded once, from fp32, to the compute dtype. A new tensor, but for an x that needs no change at all.
    """
    storage = torch.float32 if mode == ROUNDED else dtype
    if normalized:
        work = x.to(storage).contiguous()
    else:
        wide = torch.float64 if storage == torch.float64 else torch.float32
        # mul into a new tensor, not a cast and mul_: a cast may return x itself.
        work = torch.empty(x.shape, dtype=wide, device=x.device)
        work = torch.mul(x, _inverse_norm(x, eps, wide), out=work).to(storage)
    return work.to(dtype).to(storage) if mode == ROUNDED else work


def _inverse_norm(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """(batch, 1, 1): 1 / max(Frobenius norm, eps) in dtype, 0 where that would divide by zero."""
    # Rows first: a reduction of a whole matrix may be split among threads, that of a row is not.
    norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    norm = torch.linalg.vector_norm(norm, dim=-1).clamp(min=eps)
    inverse = torch.where(norm == 0.0, 0.0, norm.reciprocal())
    # The largest finite factor serves norms whose inverse the dtype does not hold.
    return inverse.clamp(max=torch.finfo(dtype).max).to(dtype).view(-1, 1, 1)


def _newton_schulz_op(
    x: Tensor,
    coefficients: Sequence[float],
    restarts: Sequence[int],
    method: str,
    compute_dtype: torch.dtype,
    normalized: bool,
    eps: float,
) -> Tensor:
    out = torch.empty(x.shape, dtype=compute_dtype, device=x.device)
    _orthogonalize_into(x, out, coefficients, restarts, method, compute_dtype, normalized, eps)
    return out


def _newton_schulz_out_op(
    x: Sequence[Tensor],
    out: Sequence[Tensor],
    coefficients: Sequence[float],
    restarts: Sequence[int],
    method: str,
    compute_dtype: torch.dtype,
    normalized: bool,
    eps: float,
) -> None:
    if len(x) != len(out):
        raise ValueError(f"x and out must have the same length, got {len(x)} and {len(out)}")
    for source, target in zip(x, out, strict=True):
        _orthogonalize_into(
            source, target, coefficients, restarts, method, compute_dtype, normalized, eps
        )


def _product_op(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha: float,
    beta: float,
    alpha_tensor: Tensor | None,
    beta_tensor: Tensor | None,
    symmetric: bool,
) -> Tensor:
    """Both products; b (..., k, n)."""
    shape = (*a.shape[:-1], b.size(-1))
    if c is not None and beta == 0.0:
        c = None
    batch = a.shape[:-2].numel()
    left, right = a.reshape(batch, *a.shape[-2:]), b.reshape(batch, *b.shape[-2:])
    add = None if c is None else c.reshape(batch, *shape[-2:])
    on_device = alpha_tensor is not None or beta_tensor is not None
    wide = a.dtype in (torch.float16, torch.bfloat16)
    if wide and not on_device and a.dtype == torch.bfloat16 and native_bf16(a.device):
        wide = False
    if wide:
        left, right = left.float(), right.float()
        add = None if add is None else add.float()
    d = left.new_empty(batch, *shape[-2:])
    with one_thread_per_matrix(batch, a.device), keep_fp32_operands(a.device):
        if not on_device:
            product(left, right, d, alpha=alpha, add=add, beta=beta)
        else:
            product(left, right, d)
            d.mul_(_factor(alpha, alpha_tensor, d))
            if add is not None:
                d.add_(add * _factor(beta, beta_tensor, d))
    d = d.to(a.dtype)
    if symmetric:
        d = mirror_lower(d)
    return d.view(shape)


def _factor(number: float, tensor: Tensor | None, like: Tensor) -> Tensor:
    """number * tensor as (1 or batch, 1, 1) in the dtype of `like`."""
    if tensor is None:
        return like.new_full((1, 1, 1), number)
    if tensor.numel() not in (1, like.size(0)):
        raise ValueError(
            f"alpha and beta tensors must have one element or one per matrix ({like.size(0)}), "
            f"got {tensor.numel()}"
        )
    return tensor.to(like.dtype).reshape(-1, 1, 1) * number


def _symmetric_mm_op(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha: float,
    beta: float,
    alpha_tensor: Tensor | None = None,
    beta_tensor: Tensor | None = None,
) -> Tensor:
    return _product_op(a, b.mT, c, alpha, beta, alpha_tensor, beta_tensor, symmetric=True)


def _gemm_add_op(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha: float,
    beta: float,
    alpha_tensor: Tensor | None = None,
    beta_tensor: Tensor | None = None,
) -> Tensor:
    return _product_op(a, b, c, alpha, beta, alpha_tensor, beta_tensor, symmetric=False)


# These serve every backend that has no kernel of its own: a kernel registered for CUDA wins over them.
_lib.impl("newton_schulz", _newton_schulz_op, "CompositeExplicitAutograd")
_lib.impl("newton_schulz_out", _newton_schulz_out_op, "CompositeExplicitAutograd")
_lib.impl("symmetric_mm", _symmetric_mm_op, "CompositeExplicitAutograd")
_lib.impl("gemm_add", _gemm_add_op, "CompositeExplicitAutograd")


@torch.library.register_fake("dion3::newton_schulz", lib=_lib)
def _newton_schulz_fake(x, coefficients, restarts, method, compute_dtype, normalized, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=compute_dtype)


@torch.library.register_fake("dion3::newton_schulz_out", lib=_lib)
def _newton_schulz_out_fake(x, out, coefficients, restarts, method, compute_dtype, normalized, eps):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("dion3::symmetric_mm", lib=_lib)
def _symmetric_mm_fake(a, b, c, alpha, beta, alpha_tensor=None, beta_tensor=None):  # type: ignore[no-untyped-def]
    return a.new_empty((*a.shape[:-1], b.size(-2)))


@torch.library.register_fake("dion3::gemm_add", lib=_lib)
def _gemm_add_fake(a, b, c, alpha, beta, alpha_tensor=None, beta_tensor=None):  # type: ignore[no-untyped-def]
    return a.new_empty((*a.shape[:-1], b.size(-1)))
