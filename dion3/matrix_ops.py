"""The operators newton_schulz, newton_schulz_out, symmetric_mm and gemm_add of torch.ops.dion3.

Their schemas, what runs them, and their fake kernels. CUDA tensors with a 16-bit compute dtype go to the
kernels of the extension, where it has been built with them; everything else runs in plain PyTorch, on
every device. dion3.newton_schulz checks arguments and calls these.

newton_schulz(x, coefficients, restarts, method, compute_dtype, normalized, eps) -> x's shape, compute_dtype
    x (..., rows, cols), any strides; coefficients flat, three per iteration; method "standard", "gram" or
    "auto" (standard for square matrices); normalized: x is divided by its norm already; eps: the least
    divisor otherwise.
newton_schulz_out(x[], out[], ...): the same for a list of stacks, into outputs of any dtype and strides.
symmetric_mm(a, b, c, alpha, beta, alpha_tensor, beta_tensor): alpha a b^T + beta c, bitwise symmetric.
gemm_add(a, b, c, alpha, beta, alpha_tensor, beta_tensor): alpha a b + beta c.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import build
from .products import (
    EXACT,
    NATIVE,
    ROUNDED,
    empty_matrices,
    keep_fp32_operands,
    mirror_lower,
    native_bf16,
    one_thread_per_matrix,
    product,
    run_program,
    stands_alone,
    workspace_bytes,
)
from .program import Stage, build_program
from .restarts import check_restarts

__all__ = [
    "BACKENDS",
    "CHUNK_BYTES",
    "DTYPES",
    "FLOAT16S",
    "METHODS",
    "has_kernel",
    "orthogonalize_into",
]

METHODS = ("auto", "standard", "gram")
KERNELS = {"auto": 0, "sm90": 1, "generic": 2}
"""The backends that are kernels of the extension, and their numbers in the C API."""

BACKENDS = (*KERNELS, "reference", "cublas")
FLOAT16S = (torch.float16, torch.bfloat16)
DTYPES = (*FLOAT16S, torch.float32, torch.float64)

CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 1 << 30}
"""A batch is cut so that its buffers stay below this (but never below one matrix per CPU thread, or one
where matrices stand alone). On a CPU that keeps them in cache; the result does not depend on it."""

LONE_SUM = 1024
"""oneDNN cuts bf16 sums longer than this in another place for a batch of one matrix than for a larger one:
such a matrix, unless it stands alone, is computed twice, side by side, and the result is that of any other
batch."""


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


# ---- Newton-Schulz ----------------------------------------------------------------------------------


def _program(
    coefficients: Sequence[float], restarts: Sequence[int], method: str, square: bool
) -> tuple[Stage, ...]:
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    if not coefficients or len(coefficients) % 3:
        raise ValueError(f"coefficients must hold 3 numbers per iteration, got {len(coefficients)}")
    steps = len(coefficients) // 3
    table = tuple(
        (coefficients[i], coefficients[i + 1], coefficients[i + 2]) for i in range(0, 3 * steps, 3)
    )
    if method == "standard" or (method == "auto" and square):
        return build_program(table, tuple(range(1, steps)))
    return build_program(table, check_restarts(restarts, steps))


def has_kernel(device: torch.device, compute: torch.dtype, *inputs: torch.dtype) -> bool:
    """Whether the extension has a kernel for this compute dtype and tensors of these dtypes there."""
    return (
        device.type == "cuda"
        and compute in FLOAT16S
        and torch.float64 not in inputs
        and build.has_kernels(device)
    )


def orthogonalize_into(
    x: Sequence[Tensor],
    out: Sequence[Tensor],
    coefficients: Sequence[float],
    restarts: Sequence[int],
    method: str,
    dtype: torch.dtype,
    normalized: bool,
    eps: float,
    backend: str = "auto",
) -> None:
    """newton_schulz_out on one of BACKENDS.

    Raises:
        ValueError: shapes, method, coefficients or restarts are wrong.
        RuntimeError: backend names kernels that there are none of for these tensors.
    """
    if len(x) != len(out):
        raise ValueError(f"x and out must have the same length, got {len(x)} and {len(out)}")
    if not x:
        return
    types = {t.dtype for t in (*x, *out)}
    if backend in KERNELS and has_kernel(x[0].device, dtype, *types):
        torch.ops.dion3._newton_schulz_(
            x, out, coefficients, restarts, method, dtype, normalized, eps, KERNELS[backend]
        )
        return
    if backend in ("sm90", "generic"):
        raise RuntimeError(
            f'backend="{backend}" has no kernel for {sorted(map(str, types))} on {x[0].device}, compute '
            f"dtype {dtype}: it takes CUDA tensors on a GPU beside which `python -m dion3 info` writes "
            "dion3's kernels"
        )
    mode16 = {"reference": ROUNDED, "cublas": NATIVE}.get(backend)
    for source, target in zip(x, out, strict=True):
        _stack(source, target, coefficients, restarts, method, dtype, normalized, eps, mode16)


def _stack(
    x: Tensor,
    out: Tensor,
    coefficients: Sequence[float],
    restarts: Sequence[int],
    method: str,
    dtype: torch.dtype,
    normalized: bool,
    eps: float,
    mode16: str | None,
) -> None:
    """One stack in plain PyTorch; mode16: how 16-bit dtypes run, None for the faster of those that round
    as the kernels do."""
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
    n = min(rows, cols)
    each = workspace_bytes(n, max(rows, cols), mode, dtype)
    threads = torch.get_num_threads() if x.device.type == "cpu" else 1
    chunk = CHUNK_BYTES.get(x.device.type, CHUNK_BYTES["cuda"]) // each // threads * threads
    chunk = 1 if stands_alone(n, x.device) else min(batch, max(chunk, threads))
    for start in range(0, batch, chunk):
        part, goal = x[start : start + chunk], target[start : start + chunk]
        with one_thread_per_matrix(part.size(0), n, x.device), keep_fp32_operands(x.device):
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
    work = _normalized(x, transpose, mode, dtype, normalized, eps)
    alone = stands_alone(work.size(1), x.device)
    if mode == NATIVE and not alone and work.size(0) == 1 and work.size(2) > LONE_SUM:
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
    x: Tensor, transpose: bool, mode: str, dtype: torch.dtype, normalized: bool, eps: float
) -> Tensor:
    """x or x^T / max(norm, eps), (batch, rows, cols) with whole rows, in the storage dtype of the mode.

    Rounded once, from fp32, to the compute dtype. A new tensor, but for an x that needs no change at all.
    """
    storage = torch.float32 if mode == ROUNDED else dtype
    source = x.mT if transpose else x
    if normalized:
        work = source.to(storage).contiguous()
    else:
        wide = torch.float64 if storage == torch.float64 else torch.float32
        # mul into a new tensor, not a cast and mul_: a cast may return x itself.
        work = empty_matrices(source.shape, wide, x.device)
        torch.mul(source, _inverse_norm(x, eps, wide), out=work)
    if mode == ROUNDED:
        work = work.to(dtype)
    if work.dtype == storage:
        return work
    return empty_matrices(work.shape, storage, x.device).copy_(work)


def _inverse_norm(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """(batch, 1, 1): 1 / max(Frobenius norm, eps) in dtype, 0 where that would divide by zero."""
    # Contiguous, and rows first: the order of a sum depends on strides, and that over a whole matrix on
    # the threads besides.
    norm = torch.linalg.vector_norm(x.contiguous(), dim=-1, dtype=torch.float64)
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
    orthogonalize_into([x], [out], coefficients, restarts, method, compute_dtype, normalized, eps)
    return out


# ---- products ---------------------------------------------------------------------------------------


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
    d = empty_matrices((batch, *shape[-2:]), left.dtype, left.device)
    n = min(*a.shape[-2:], b.size(-1))
    step = 1 if stands_alone(n, a.device) else max(batch, 1)
    with one_thread_per_matrix(batch, n, a.device), keep_fp32_operands(a.device):
        for start in range(0, batch, step):
            at = slice(start, start + step)
            if on_device:
                product(left[at], right[at], d[at])
            else:
                addend = None if add is None else add[at]
                product(left[at], right[at], d[at], alpha=alpha, add=addend, beta=beta)
        if on_device:
            d.mul_(_factor(alpha, alpha_tensor, d))
            if add is not None:
                d.add_(add * _factor(beta, beta_tensor, d))
    d = d.to(a.dtype)
    if symmetric:
        d = mirror_lower(d)
    return d.contiguous().view(shape)


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
    if has_kernel(a.device, a.dtype):
        return torch.ops.dion3._symmetric_mm(a, b, c, alpha, beta, alpha_tensor, beta_tensor)
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
    if has_kernel(a.device, a.dtype):
        return torch.ops.dion3._gemm_add(a, b, c, alpha, beta, alpha_tensor, beta_tensor)
    return _product_op(a, b, c, alpha, beta, alpha_tensor, beta_tensor, symmetric=False)


# ---- registration -----------------------------------------------------------------------------------

_lib.impl("newton_schulz", _newton_schulz_op, "CompositeExplicitAutograd")
_lib.impl("newton_schulz_out", orthogonalize_into, "CompositeExplicitAutograd")
_lib.impl("symmetric_mm", _symmetric_mm_op, "CompositeExplicitAutograd")
_lib.impl("gemm_add", _gemm_add_op, "CompositeExplicitAutograd")


@torch.library.register_fake("dion3::newton_schulz", lib=_lib)
def _newton_schulz_fake(x, coefficients, restarts, method, compute_dtype, normalized, eps):
    return x.new_empty(x.shape, dtype=compute_dtype)


@torch.library.register_fake("dion3::newton_schulz_out", lib=_lib)
def _newton_schulz_out_fake(x, out, coefficients, restarts, method, compute_dtype, normalized, eps):
    return None


@torch.library.register_fake("dion3::symmetric_mm", lib=_lib)
def _symmetric_mm_fake(a, b, c, alpha, beta, alpha_tensor=None, beta_tensor=None):
    return a.new_empty((*a.shape[:-1], b.size(-2)))


@torch.library.register_fake("dion3::gemm_add", lib=_lib)
def _gemm_add_fake(a, b, c, alpha, beta, alpha_tensor=None, beta_tensor=None):
    return a.new_empty((*a.shape[:-1], b.size(-1)))
