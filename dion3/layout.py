"""How one parameter becomes matrices.

A parameter is cut into pieces; a piece is a stack of equal (rows, cols) matrices that the step
treats alike. What a piece is depends on the parameter's shape and its group's layout keys:

  (R, C)                                 one matrix
  (..., R, C)                            a stack of matrices, e.g. experts
  (R, C), num_heads=H, head_axis=0       H matrices (R/H, C): blocks of rows
  (R, C), num_heads=H, head_axis=1       H matrices (R, C/H): blocks of columns
  (..., R, C), split_sizes=(r1, r2, ..)  one stack (ri, C) per block of rows, e.g. fused q, k, v
  (R, a, b, ..), flatten=True            one matrix (R, a*b*..), for convolution kernels

Every piece selects, orthogonalizes and scales by its own shape. `Piece.view` cuts the same piece
out of a weight, its gradient or its momentum, whatever their strides, without copying where that is
possible. Elements are numbered by their place in the contiguous parameter (of a flattened
channels_last kernel: in memory order), which is what stochastic rounding is keyed by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .options import GroupOptions, selection_count, shape_scale

ROWS, COLS = 0, 1
"""`axis` of the step operations: a slice is a row, or a column (DION3_ROWS, DION3_COLS)."""


@dataclass(frozen=True)
class Piece:
    """A stack of `batch` matrices (rows, cols) inside one parameter.

    Attributes:
        form: "plain" (the tensor itself), "stack", "flatten", "heads_rows" or "heads_cols".
        heads: number of heads of the two heads forms.
        order: permutation that makes a channels_last kernel viewable as a matrix, or ().
        batch_start, row_start: where the piece begins in the stack, and in its rows.
        stacked: the view has a leading batch dimension.
        whole: nothing has to be cut off the formed tensor.
        axis, k: which side is selected, and how many slices of it.
        scale: the learning rate's factor for this shape.
        index_base, index_batch_stride, index_row_stride: number of element (b, i, j) is
            base + b * batch_stride + i * row_stride + j.
    """

    form: str
    batch: int
    rows: int
    cols: int
    axis: int
    k: int
    scale: float
    index_base: int
    index_batch_stride: int
    index_row_stride: int
    heads: int = 1
    order: tuple[int, ...] = ()
    batch_start: int = 0
    row_start: int = 0
    stacked: bool = False
    whole: bool = True

    @property
    def selected_side(self) -> int:
        """Number of slices that are selected from: rows or columns."""
        return self.rows if self.axis == ROWS else self.cols

    @property
    def selective(self) -> bool:
        """Whether any slice is left out."""
        return self.k < self.selected_side

    @property
    def update_shape(self) -> tuple[int, int]:
        """Shape of the matrix that Newton-Schulz sees."""
        return (self.k, self.cols) if self.axis == ROWS else (self.rows, self.k)

    def view(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor of the parameter's shape: (batch, rows, cols), or (rows, cols).

        A view where the strides allow it, else a copy; `shares_memory` tells which.
        """
        formed = self._form(tensor)
        if self.whole:
            return formed
        if self.rows != formed.shape[-2]:
            formed = formed.narrow(-2, self.row_start, self.rows)
        if self.stacked and self.batch != formed.shape[0]:
            formed = formed.narrow(0, self.batch_start, self.batch)
        return formed

    def _form(self, tensor: Tensor) -> Tensor:
        if self.form == "plain":
            return tensor
        if self.form == "stack":
            return tensor.flatten(0, -3)
        if self.form == "flatten":
            return (tensor.permute(self.order) if self.order else tensor).flatten(1)
        if self.form == "heads_rows":
            return tensor.unflatten(0, (self.heads, -1))
        return tensor.unflatten(1, (self.heads, -1)).transpose(0, 1)

    def neurons(self, second_moment: Tensor) -> Tensor:
        """The piece's (batch, rows) of a parameter's neuron second moment."""
        if self.form == "heads_cols":
            table = second_moment
        elif self.form == "heads_rows":
            table = second_moment.view(self.heads, -1)
        elif self.form == "flatten":
            table = second_moment.view(1, -1)
        else:
            table = second_moment.view(-1, second_moment.shape[-1])
        return table[
            self.batch_start : self.batch_start + self.batch,
            self.row_start : self.row_start + self.rows,
        ]


def second_moment_shape(parameter: Tensor, options: GroupOptions) -> tuple[int, ...]:
    """Shape of a parameter's neuron second moment: one number per output row of each matrix."""
    heads = options.num_heads or 1
    if heads > 1 and options.head_axis == 1:
        return (heads, parameter.shape[0])
    if options.flatten:
        return (parameter.shape[0],)
    return tuple(parameter.shape[:-1])


def shares_memory(view: Tensor, tensor: Tensor) -> bool:
    """Whether writing into `view` writes into `tensor`."""
    return view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions from outermost to innermost in memory; None if the memory has gaps."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda d: (-strides[d], d)))
    return order if tensor.permute(order).is_contiguous() else None


def keeps_strides(parameter: Tensor, options: GroupOptions) -> bool:
    """Whether state with the parameter's strides serves: memory without gaps, in which the pieces
    of a matrix parameter can be seen. Otherwise its state is contiguous."""
    if is_traceable_wrapper_subclass(parameter) or memory_order(parameter) is None:
        return False
    if options.algorithm == "adamw" or parameter.numel() == 0:
        return True
    plain = parameter.detach()
    return shares_memory(pieces(plain, options, 2**62, 1)[0].view(plain), plain)


def check_parameter(name: str, parameter: Tensor, options: GroupOptions) -> None:
    """Raise ValueError or RuntimeError, naming the parameter, if it cannot be optimised."""
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(f"parameter {name} is not initialised yet: run one forward pass first")
    shape = tuple(parameter.shape)
    kind = type(parameter).__name__
    if _is_dtensor(parameter):
        raise ValueError(
            f"parameter {name} is a DTensor, {getattr(parameter, 'placements', '')}: "
            "distributed tensors are not supported yet; build the optimizer on plain parameters"
        )
    if kind == "FlatParameter" or name.endswith("_flat_param'"):
        raise ValueError(
            f"parameter {name} of shape {shape} is a flattened FSDP1 parameter, whose matrices "
            "cannot be seen: use torch.distributed.fsdp.fully_shard"
        )
    if parameter.is_complex():
        raise RuntimeError(
            f"dion3 does not support complex parameters: {name} is {parameter.dtype}; "
            "optimise torch.view_as_real(parameter) instead"
        )
    if parameter.layout != torch.strided:
        raise ValueError(f"parameter {name} is {parameter.layout}: only dense ones are supported")
    if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"parameter {name} is {parameter.dtype}: float32, bfloat16 and float16 are supported; "
            "convert it"
        )
    if parameter.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"parameter {name} is on device {parameter.device}: cpu and cuda are supported; "
            "materialise or move it first"
        )
    if _overlaps_itself(parameter):
        raise ValueError(
            f"parameter {name} has elements that share memory (strides {parameter.stride()}): "
            "call .contiguous() on it before it becomes a parameter"
        )
    if options.algorithm == "dion3":
        _check_matrices(name, shape, options)


def _check_matrices(name: str, shape: tuple[int, ...], options: GroupOptions) -> None:
    if len(shape) < 2:
        raise ValueError(
            f"parameter {name} has shape {shape}, but Muon and Dion3 update matrices (2-D, or "
            'stacks of them): put it into a group with algorithm="adamw"; '
            "dion3.param_groups(model) makes such groups"
        )
    heads = options.num_heads or 1
    if heads > 1:
        if len(shape) != 2:
            raise ValueError(
                f"num_heads={heads} needs a 2-D parameter, but {name} has shape {shape}: "
                "leave num_heads out, a stack is orthogonalized matrix by matrix anyway"
            )
        if shape[options.head_axis] % heads:
            raise ValueError(
                f"num_heads={heads} does not divide dimension {options.head_axis} of {name}, "
                f"shape {shape}: give the true number of heads, or another head_axis"
            )
    rows = shape[0] if options.flatten else shape[-2]
    if options.split_sizes and sum(options.split_sizes) != rows:
        raise ValueError(
            f"split_sizes={options.split_sizes!r} adds up to {sum(options.split_sizes)}, but "
            f"{name} of shape {shape} has {rows} rows"
        )


def _is_dtensor(parameter: Tensor) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__)


def _overlaps_itself(parameter: Tensor) -> bool:
    """Some element of memory is seen twice, as in an expanded tensor."""
    if is_traceable_wrapper_subclass(parameter):
        return False
    reach = 1
    dims = [(st, n) for st, n in zip(parameter.stride(), parameter.shape, strict=True) if n > 1]
    for stride, size in sorted(dims):
        if stride < reach:
            return parameter.numel() > 0
        reach = stride * (size - 1) + reach
    return False


def pieces(parameter: Tensor, options: GroupOptions, limit: int, itemsize: int) -> list[Piece]:
    """Cut a matrix parameter.

    Args:
        parameter: only its shape and strides are looked at.
        options: the group's; checked by `check_parameter`.
        limit: the most bytes of Newton-Schulz input and output that one piece may need; a stack
            is cut into several pieces, but a matrix never is.
        itemsize: bytes per element of those.

    Returns:
        The pieces in the order of the elements; none for an empty parameter.
    """
    if parameter.numel() == 0:
        return []
    form, order, batch, rows, cols, heads, strides = _form(parameter, options)
    sizes = options.split_sizes or (rows,)
    found = []
    row_start = 0
    for size in sizes:
        axis, k = _selection(options, size, cols)
        piece = Piece(
            form=form,
            batch=batch,
            rows=size,
            cols=cols,
            axis=axis,
            k=k,
            scale=shape_scale(options.adjust_lr_fn, size, cols),
            index_base=row_start * strides[1],
            index_batch_stride=strides[0],
            index_row_stride=strides[1],
            heads=heads,
            order=order,
            row_start=row_start,
            stacked=form not in ("flatten",) and (form != "plain" or parameter.ndim == 3),
            whole=size == rows,
        )
        found += _chunks(piece, limit, itemsize)
        row_start += size
    return found


def _form(
    parameter: Tensor, options: GroupOptions
) -> tuple[str, tuple[int, ...], int, int, int, int, tuple[int, int]]:
    """(form, order, batch, rows, cols, heads, (batch stride, row stride) of the numbering)."""
    shape = parameter.shape
    heads = options.num_heads or 1
    if heads > 1:
        rows, cols = shape
        if options.head_axis == 0:
            return "heads_rows", (), heads, rows // heads, cols, heads, (rows // heads * cols, cols)
        return "heads_cols", (), heads, rows, cols // heads, heads, (cols // heads, cols)
    if options.flatten and len(shape) > 2:
        rest = math.prod(shape[1:])
        return "flatten", _flatten_order(parameter), 1, shape[0], rest, 1, (shape[0] * rest, rest)
    rows, cols = shape[-2:]
    form = "plain" if len(shape) <= 3 else "stack"
    return form, (), math.prod(shape[:-2]), rows, cols, 1, (rows * cols, cols)


def _flatten_order(parameter: Tensor) -> tuple[int, ...]:
    """The dimensions after the first, outermost in memory first, if that makes the parameter a
    matrix without copying (channels_last kernels); () if nothing has to be, or can be,
    rearranged."""
    if is_traceable_wrapper_subclass(parameter) or parameter.is_contiguous():
        return ()
    strides = parameter.stride()
    order = (0, *sorted(range(1, parameter.ndim), key=lambda d: (-strides[d], d)))
    plain = parameter.detach()
    return order if shares_memory(plain.permute(order).flatten(1), plain) else ()


def _selection(options: GroupOptions, rows: int, cols: int) -> tuple[int, int]:
    """(axis, k). The short side is selected unless the group says otherwise; ties go to rows."""
    axis = ROWS if rows <= cols else COLS
    if options.select in ("rows", "cols"):
        axis = ROWS if options.select == "rows" else COLS
    return axis, selection_count(options.fraction, rows if axis == ROWS else cols)


def _chunks(piece: Piece, limit: int, itemsize: int) -> list[Piece]:
    """The piece, or its stack in as few even parts as the limit allows."""
    r, c = piece.update_shape
    most = max(1, limit // (2 * r * c * itemsize))
    if piece.batch <= most or not piece.stacked:
        return [piece]
    parts = math.ceil(piece.batch / most)
    edges = [piece.batch * i // parts for i in range(parts + 1)]
    return [
        replace(
            piece,
            batch=stop - start,
            batch_start=start,
            index_base=piece.index_base + start * piece.index_batch_stride,
            whole=False,
        )
        for start, stop in zip(edges, edges[1:], strict=False)
    ]
