"""The matrix products and Newton-Schulz of the C API through ctypes, for what the torch operators cannot
express: results in any layout, D that is C, lists of products, a workspace of a given size.

Besides, what their tests share: matrices in awkward layouts with NaN around them, and the comparison
with float64. csrc/dion3.h and csrc/cuda/gemm.h describe the structures.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dion3.build import native

DEVICE = torch.device("cuda")
HALVES = (torch.float16, torch.bfloat16)
AUTO, SM90, GENERIC = 0, 1, 2
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""The largest relative error of one rounding."""

_i32, _i64, _f32, _f64, _void = (
    ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_double, ctypes.c_void_p,
)  # fmt: skip


class CTensor(ctypes.Structure):
    """dion3_tensor"""

    _fields_ = [
        ("data", _void), ("batch_stride", _i64), ("row_stride", _i64), ("col_stride", _i64),
        ("dtype", _i32), ("reserved", _i32),
    ]  # fmt: skip


class CGemm(ctypes.Structure):
    """dion3_gemm"""

    _fields_ = [
        ("d", CTensor), ("a", CTensor), ("b", CTensor), ("c", CTensor),
        ("batch", _i64), ("m", _i64), ("n", _i64), ("k", _i64), ("alpha", _f32), ("beta", _f32),
        ("alpha_device", _void), ("beta_device", _void),
    ]  # fmt: skip


class CGroup(ctypes.Structure):
    """d3_group"""

    _fields_ = [
        ("g", CGemm), ("e", CTensor), ("gamma", _f32), ("delta", _f32), ("d_padded", _i32),
        ("reserved", _i32),
    ]  # fmt: skip


class CProgram(ctypes.Structure):
    """dion3_ns_program"""

    _fields_ = [
        ("coefficients", _void), ("steps", _i32), ("method", _i32), ("restarts", _void),
        ("restart_count", _i32), ("compute_dtype", _i32), ("backend", _i32), ("normalized", _i32),
        ("eps", _f64),
    ]  # fmt: skip


class CStack(ctypes.Structure):
    """dion3_ns_stack"""

    _fields_ = [("x", CTensor), ("out", CTensor), ("batch", _i64), ("rows", _i64), ("cols", _i64)]


@functools.cache
def library() -> ctypes.CDLL:
    """The C API of the extension; skips the test where it has no CUDA kernels."""
    if native is None or not getattr(native, "cuda", False):
        pytest.skip("dion3 was built without CUDA kernels")
    return declare(ctypes.CDLL(native.__file__))


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Argument and result types of what the tests call."""
    size = ctypes.c_size_t
    library.dion3_last_error.restype = ctypes.c_char_p
    for name in ("dion3_symmetric_mm", "dion3_gemm_add"):
        getattr(library, name + "_workspace_size").argtypes = [_void, _i32]
        getattr(library, name + "_workspace_size").restype = size
        getattr(library, name + "_cuda").argtypes = [_void, _i32, _void, size, _void]
    library.d3_gemm.argtypes = [_void, _i64, _i32, _i32, _void]
    library.dion3_newton_schulz_workspace_size.argtypes = [_void, _i64, _void, _void]
    library.dion3_newton_schulz_workspace_size.restype = size
    library.dion3_newton_schulz_cuda.argtypes = [_void, _i64, _void, _void, size, _void]
    return library


def succeed(status: int) -> None:
    """Raise what the C API says about a status."""
    if status:
        raise RuntimeError(library().dion3_last_error().decode())


def stream() -> int:
    """torch's current stream."""
    return torch.cuda.current_stream().cuda_stream


def describe(t: Tensor | None) -> CTensor:
    """A (rows, cols) or (batch, rows, cols) tensor, any strides."""
    if t is None:
        return CTensor()
    three = t if t.dim() == 3 else t.unsqueeze(0)
    return CTensor(t.data_ptr(), *three.stride(), NUMBERS[t.dtype], 0)


# ---- products ----------------------------------------------------------------------------------------


def gemm(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    alphas: Tensor | None = None,
    betas: Tensor | None = None,
) -> CGemm:
    """The arguments of a product, all tensors (batch, ., .)."""
    factors = [None if t is None else t.data_ptr() for t in (alphas, betas)]
    return CGemm(
        describe(d), describe(a), describe(b), describe(c), *d.shape, a.size(2), alpha, beta, *factors
    )  # fmt: skip


def run_gemm(product: CGemm, symmetric: bool, backend: int) -> None:
    """One product with workspace of its own, on the current stream."""
    lib = library()
    name = "dion3_symmetric_mm" if symmetric else "dion3_gemm_add"
    size = getattr(lib, name + "_workspace_size")(ctypes.byref(product), backend)
    workspace = torch.full((size + 1,), 255, dtype=torch.uint8, device=DEVICE)
    pointer = workspace.data_ptr() if size else None
    succeed(getattr(lib, name + "_cuda")(ctypes.byref(product), backend, pointer, size, stream()))
    assert int(workspace[-1]) == 255, "written behind the workspace"


def run_groups(groups: Sequence[CGroup], symmetric: bool, backend: int) -> None:
    """A list of products."""
    array = (CGroup * len(groups))(*groups)
    succeed(library().d3_gemm(array, len(groups), int(symmetric), backend, stream()))


def exact_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    symmetric: bool,
    alpha: float = 1.0,
    beta: float = 0.0,
    alphas: Tensor | None = None,
    betas: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The product in float64, or in float32 by torch; of a symmetric one the lower triangle counts."""
    left, right = a.to(dtype), b.to(dtype)
    result = left @ (right.mT if symmetric else right)
    one = torch.ones(a.size(0), device=a.device)
    result = result * (alpha * (one if alphas is None else alphas)).to(dtype).view(-1, 1, 1)
    if beta != 0.0:
        result = result + c.to(dtype) * (beta * (one if betas is None else betas)).to(dtype).view(
            -1, 1, 1
        )
    return mirror(result) if symmetric else result


def mirror(x: Tensor) -> Tensor:
    """The symmetric matrix with x's lower triangle."""
    return x.tril() + x.tril(-1).mT


def assert_close(d: Tensor, exact: Tensor, torch32: Tensor, what: object) -> None:
    """At most twice the error of torch's float32 result rounded to d's dtype, per element and in norm.

    One rounding of the largest element always passes: on a few elements torch may be exact by luck.
    """
    if d.numel() == 0:
        return
    unit = UNIT[d.dtype]
    got, usual = d.double(), torch32.to(d.dtype).double()
    error, allowed = (got - exact).abs(), (usual - exact).abs()
    largest = float(exact.abs().max())
    bound = 2 * max(float(allowed.max()), unit * largest, 2.0**-25)
    assert float(error.nan_to_num(float("inf")).max()) <= bound, (what, float(error.max()), bound)
    whole = 2 * max(float(allowed.norm()), unit * float(exact.norm()) / 4, 2.0**-25)
    assert float(error.norm()) <= whole, (what, float(error.norm()), whole)


# ---- layouts -----------------------------------------------------------------------------------------

LAYOUTS = ("dense", "padded", "columns", "odd columns", "strided", "offset", "end")
"""Rows without gaps; rows padded to 16 bytes and more; the same two of columns; no unit stride at all;
an address that is no multiple of 16 bytes; rows without gaps up to the last byte of an allocation that
torch rounds up no further, so that nothing need be mapped behind it."""

END_ELEMENTS = 12 * 2**20 // 2


def place(
    values: Tensor,
    layout: str,
    device: torch.device | None = None,
    beside: float = float("nan"),
) -> tuple[Tensor, Tensor]:
    """values (batch, rows, cols) in that layout, and the whole buffer, `beside` elsewhere."""
    batch, rows, cols = values.shape
    wide, high = (cols + 7) // 8 * 8 + 8, (rows + 7) // 8 * 8
    buffer_shape = {
        "dense": (batch, rows, cols),
        "padded": (batch, rows, wide),
        "columns": (batch, cols, high),
        "odd columns": (batch, cols, rows),
        "strided": (batch, rows, 3, cols, 2),
        "offset": (batch * rows * (cols + 3) + 1,),
        "end": (END_ELEMENTS,),
    }[layout]
    buffer = torch.full(buffer_shape, beside, dtype=values.dtype, device=device or values.device)
    view = {
        "dense": lambda: buffer,
        "padded": lambda: buffer[:, :, :cols],
        "columns": lambda: buffer[:, :, :rows].mT,
        "odd columns": lambda: buffer.mT,
        "strided": lambda: buffer[:, :, 1, :, 1],
        "offset": lambda: buffer[1:].view(batch, rows, cols + 3)[:, :, :cols],
        "end": lambda: buffer[END_ELEMENTS - batch * rows * cols :].view(batch, rows, cols),
    }[layout]()
    view.copy_(values)
    return view, buffer


def poisoned(
    shape: Sequence[int], dtype: torch.dtype, layout: str = "dense"
) -> tuple[Tensor, Tensor]:
    """An output of NaN in that layout, and its buffer."""
    nan = torch.full(tuple(shape), float("nan"), dtype=dtype, device=DEVICE)
    return place(nan, layout)


def only_inside_was_written(view: Tensor, buffer: Tensor) -> bool:
    """Whether everything of the buffer outside of the view is NaN still."""
    outside = torch.ones(buffer.shape, dtype=torch.bool, device=buffer.device)
    outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    return bool((buffer.isnan() | ~outside).all())


def bits(t: Tensor) -> Tensor:
    """The tensor as integers: NaN equals NaN, 0 is not -0."""
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()])


class Busy:
    """Keeps another stream occupied with products while the block runs."""

    def __enter__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.a = torch.ones(1024, 1024, device=DEVICE, dtype=torch.float16)
            for _ in range(400):
                self.d = self.a @ self.a

    def __exit__(self, *_: object) -> None:
        self.stream.synchronize()


# ---- Newton-Schulz -----------------------------------------------------------------------------------


def program(
    table: Sequence[Sequence[float]],
    restarts: Sequence[int] = (2,),
    method: int = 0,
    compute: torch.dtype = torch.float16,
    backend: int = AUTO,
    normalized: bool = False,
) -> CProgram:
    """A program; method 0 chooses the form by the shape, 1 is the standard, 2 the Gram form."""
    flat = [value for row in table for value in row]
    numbers, after = (_f64 * len(flat))(*flat), (_i32 * len(restarts))(*restarts)
    result = CProgram(
        ctypes.addressof(numbers), len(table), method, ctypes.addressof(after), len(restarts),
        NUMBERS[compute], backend, int(normalized), 0.0,
    )  # fmt: skip
    result.keep = (numbers, after)
    return result


def newton_schulz(
    pairs: Sequence[tuple[Tensor, Tensor]], p: CProgram, share: float = 1.0, fill: int = 255
) -> None:
    """Run stacks (x, out), both (batch, rows, cols), with that share of the workspace they ask for, each
    byte of which is `fill` before: NaN, by default."""
    lib = library()
    stacks = (CStack * len(pairs))(*[CStack(describe(x), describe(o), *x.shape) for x, o in pairs])
    least = ctypes.c_size_t()
    size = lib.dion3_newton_schulz_workspace_size(
        stacks, len(pairs), ctypes.byref(p), ctypes.byref(least)
    )
    size = max(least.value, int(share * size))
    workspace = torch.full((size + 64,), fill, dtype=torch.uint8, device=DEVICE)
    succeed(
        lib.dion3_newton_schulz_cuda(
            stacks, len(pairs), ctypes.byref(p), workspace.data_ptr(), size, stream()
        )
    )
    assert bool((workspace[size:] == fill).all()), "written behind the workspace"
