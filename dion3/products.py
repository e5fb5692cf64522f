"""Batched matrix products in plain PyTorch, with the rounding points of the GPU kernels.

One stage of a program (dion3.program) is computed in one of three ways:

    exact    float32 or float64 throughout: torch.baddbmm, nothing else. The default on a CPU.
    rounded  float16 or bfloat16 by the book: operands hold 16-bit values, product, added terms and sum
             are fp32, one rounding to 16 bits follows, the lower triangle is mirrored. On any device.
    native   torch.baddbmm on 16-bit tensors. With bf16 instructions oneDNN rounds where `rounded` does
             and is several times faster, so it is what a CPU uses for bfloat16; on a GPU it is cuBLAS.

A matrix's result must not depend on the batch around it. The BLAS libraries under torch keep that
promise (as the tests see) but in two cases. Where a batch has fewer matrices than there are threads,
threads share a matrix, and its sums are split in a way that depends on both numbers. So on a CPU a large
matrix is always computed alone, by all threads; of small ones no two threads share one, at the price that
a lone small matrix uses one core. And MKL on processors that are not Intel's adds in another order where a
matrix begins within 16 bytes. So all matrices of a CPU begin at cache lines here, or are copied there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .program import RECTANGLES, SQUARES, Stage

__all__ = [
    "EXACT",
    "NATIVE",
    "ROUNDED",
    "empty_matrices",
    "mirror_lower",
    "native_bf16",
    "one_thread_per_matrix",
    "product",
    "run_program",
    "stands_alone",
    "workspace_bytes",
]

EXACT, ROUNDED, NATIVE = "exact", "rounded", "native"

ALONE = 768
"""The least dimension from which on threads share a matrix of a CPU."""


def native_bf16(device: torch.device) -> bool:
    """Whether torch.baddbmm on bfloat16 tensors of this device is a CPU's bf16 instructions."""
    return device.type == "cpu" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def stands_alone(n: int, device: torch.device) -> bool:
    """Whether matrices of this least dimension are computed one at a time."""
    return device.type == "cpu" and n >= ALONE


@contextlib.contextmanager
def one_thread_per_matrix(batch: int, n: int, device: torch.device) -> Iterator[None]:
    """Within it, the threads of a CPU never share a matrix of a batch of `batch` matrices, of least
    dimension n, unless these stand alone."""
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    if batch >= threads or n >= ALONE:
        yield
        return
    torch.set_num_threads(max(batch, 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def keep_fp32_operands(device: torch.device) -> Iterator[None]:
    """Within it, oneDNN does not shorten fp32 operands, whatever set_float32_matmul_precision said."""
    flags: Any = torch.backends.mkldnn
    flags = flags.matmul
    before = flags.fp32_precision
    if device.type != "cpu" or before in ("none", "ieee"):
        yield
        return
    flags.fp32_precision = "ieee"
    try:
        yield
    finally:
        flags.fp32_precision = before


CACHE_LINE = 64
"""Bytes, to which torch aligns what it allocates on a CPU."""


def empty_matrices(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised (batch, rows, cols). On a CPU its matrices begin at cache lines."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    batch, rows, cols = shape
    line = CACHE_LINE // dtype.itemsize
    apart = -(-rows * cols // line) * line
    x = torch.empty(batch * apart, dtype=dtype, device=device)
    return x.as_strided(shape, (apart, cols, 1))


def at_cache_lines(x: Tensor) -> Tensor:
    """x (batch, rows, cols), or a copy of the same major if not all matrices of a CPU begin at cache lines."""
    apart = x.stride(0) * x.itemsize if x.size(0) > 1 else 0
    if x.device.type != "cpu" or (x.data_ptr() % CACHE_LINE == 0 and apart % CACHE_LINE == 0):
        return x
    if x.stride(2) != 1 and x.stride(1) == 1:
        return at_cache_lines(x.mT).mT
    return empty_matrices(x.shape, x.dtype, x.device).copy_(x)


_masks: dict[tuple[int, torch.device], Tensor] = {}


def mirror_lower(d: Tensor, out: Tensor | None = None) -> Tensor:
    """d (..., n, n) with its upper triangle replaced by the mirror image of the lower one."""
    key = (d.size(-1), d.device)
    lower = _masks.get(key)
    if lower is None:
        if len(_masks) >= 16:
            _masks.clear()
        lower = torch.ones(key[0], key[0], dtype=torch.bool, device=d.device).tril_()
        _masks[key] = lower
    return torch.where(lower, d, d.mT, out=out)


def product(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    *,
    alpha: float = 1.0,
    add: Tensor | None = None,
    beta: float = 0.0,
    add2: Tensor | None = None,
    gamma: float = 0.0,
    delta: float = 0.0,
    symmetric: bool = False,
    round_to: torch.dtype | None = None,
) -> Tensor:
    """out <- alpha * left @ right + beta * add + gamma * add2 + delta * I over a batch.

    Args:
        left, right, out: (batch, m, k), (batch, k, n), (batch, m, n), one dtype; out may be add. On a CPU
            those that do not begin at cache lines are copied.
        add, add2: (batch, m, n) or None, left out of the sum when its factor is 0 as well.
        symmetric: mirror the lower triangle of the result.
        round_to: 16-bit dtype that the fp32 result is rounded to, once; out stays fp32.
    """
    left, right, goal, out = at_cache_lines(left), at_cache_lines(right), out, at_cache_lines(out)
    if add is not None and beta != 0.0:
        torch.baddbmm(add, left, right, beta=beta, alpha=alpha, out=out)
    elif alpha == 1.0:
        torch.bmm(left, right, out=out)
    else:
        torch.baddbmm(out, left, right, beta=0.0, alpha=alpha, out=out)
    if add2 is not None and gamma != 0.0:
        out.add_(add2, alpha=gamma)
    if delta != 0.0:
        out.diagonal(dim1=-2, dim2=-1).add_(delta)
    if round_to is not None:
        rounded = out.to(round_to)
        out.copy_(mirror_lower(rounded) if symmetric else rounded)
    elif symmetric:
        out.copy_(mirror_lower(out))
    return out if out is goal else goal.copy_(out)


def run_program(
    program: tuple[Stage, ...],
    x: Tensor,
    *,
    mode: str,
    dtype: torch.dtype,
    tall: bool = False,
    overwrite: bool = False,
    result: Tensor | None = None,
) -> Tensor:
    """Run a program on a batch that is already divided by its norms.

    Args:
        program: of dion3.program.build_program.
        x: (batch, n, m), n <= m, or (batch, m, n) if tall; in the storage dtype of the mode: dtype
            itself for exact and native, float32 holding dtype values for rounded.
        mode: EXACT, ROUNDED or NATIVE.
        dtype: the compute dtype.
        tall: x is given transposed (EXACT only).
        overwrite: x may serve as a buffer.
        result: where the last stage goes, shape and dtype of x, or None for a buffer of our own.

    Returns:
        The result, shape and dtype of x.
    """
    round_to = dtype if mode == ROUNDED else None
    given, x = x, at_cache_lines(x)
    overwrite = overwrite or x is not given
    buffers = {RECTANGLES[0]: x}
    last = len(program) - 1
    for index, stage in enumerate(program):
        left, right = buffers[stage.left], buffers[stage.right]
        if stage.kind == "gram":
            left, right = (left.mT, left) if tall else (left, left.mT)
        elif stage.kind == "general" and tall:
            left, right = right, left.mT
        out = buffers.get(stage.out)
        if index == last and result is not None:
            out = result
        elif out is None or (out is x and not overwrite):
            out = empty_matrices((x.size(0), left.size(1), right.size(2)), x.dtype, x.device)
        add = buffers[stage.add] if stage.add is not None else None
        add2 = buffers[stage.add2] if stage.add2 is not None else None
        if mode == NATIVE and add2 is not None:
            _native_sum(stage, left, right, out, add, add2)
        else:
            product(
                left,
                right,
                out,
                alpha=stage.alpha,
                add=add,
                beta=stage.beta,
                add2=add2,
                gamma=stage.gamma,
                delta=stage.delta,
                symmetric=_needs_mirror(stage, mode),
                round_to=round_to,
            )
        buffers[stage.out] = out
    return buffers[program[-1].out]


def _needs_mirror(stage: Stage, mode: str) -> bool:
    """Rounded mirrors every n x n product, as the kernels do. Exact never needs it: its asymmetry is of
    the size of fp32 rounding. Native needs it where left @ right is not symmetric term by term."""
    if stage.kind != "symmetric" or mode == EXACT:
        return stage.kind == "gram" and mode == ROUNDED
    return mode == ROUNDED or stage.left != stage.right


def _native_sum(
    stage: Stage, left: Tensor, right: Tensor, out: Tensor, add: Tensor | None, add2: Tensor
) -> None:
    """A stage with two added matrices and 16-bit buffers: no 16-bit call sums them before it rounds."""
    wide = empty_matrices(out.shape, torch.float32, out.device)
    product(
        left.float(),
        right.float(),
        wide,
        alpha=stage.alpha,
        add=None if add is None else add.float(),
        beta=stage.beta,
        add2=add2.float(),
        gamma=stage.gamma,
        delta=stage.delta,
        symmetric=True,
    )
    out.copy_(wide)


def workspace_bytes(n: int, m: int, mode: str, dtype: torch.dtype) -> int:
    """Bytes of buffers that run_program and its caller keep for one n x m matrix, at most."""
    size = 4 if mode == ROUNDED else dtype.itemsize
    lines = CACHE_LINE * (len(SQUARES) + len(RECTANGLES))
    # The rounded copies and the fp32 sums of the other modes come to two squares more.
    return size * (len(SQUARES) * n * n + len(RECTANGLES) * n * m) + (
        lines if mode == EXACT else lines + 12 * n * n
    )
