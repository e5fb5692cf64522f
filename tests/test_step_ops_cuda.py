"""What only a GPU can show of the step operators: the CUDA kernels against the C functions of the CPU,
bit for bit and over whole buffers, and how they behave on streams, in graphs and at large sizes.

Sums of scores are float64 in an order of each device's own, so scores and norms are compared to
2^-46, what follows from the neuron's sums to an ulp or two of float32; everything else, stochastic
rounding and the bytes around every tensor included, must be equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import (
    DTYPES,
    adamw_hyper,
    hyper_tensor,
    poisoned,
    randn,
    same_bits,
    seeded,
    with_layout,
)
from test_ops import part_shape, selection
from torch import Tensor

import dion3
from dion3 import build, ops, reference

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
# Wider and taller than a block's share in some direction, odd in others.
SHAPES = (
    (1, 1),
    (3, 5),
    (40, 2056),
    (300, 136),
    (17, 5000),
    (9, 9000),
    (5, 8161),
    (2, 66, 520),
    (3, 130, 37),
)
LAYOUTS = ("dense", "transposed", "sliced", "shifted")
SUM_RTOL = 2.0**-46
FLOAT_RTOL = 2.0**-22


@pytest.fixture(autouse=True)
def native() -> None:
    if not ops.is_native("momentum_", "cuda"):
        pytest.skip("the package was built without its CUDA kernels")


def laid_out(t: Tensor, layout: str) -> Tensor:
    """helpers.with_layout, and "shifted": dense at an address that no vector may start at."""
    if layout != "shifted":
        return with_layout(t, layout)
    buffer = torch.full((t.numel() + 131,), 7, dtype=t.dtype)
    view = buffer[67 : 67 + t.numel()].view(t.shape)
    return view.copy_(t)


def whole(t: Tensor) -> Tensor:
    """Everything in the memory that t is a view of."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())


def to_cuda(value: Any) -> Any:
    """Tensors with their strides, offsets and surroundings; in lists too."""
    if isinstance(value, list):
        return [to_cuda(v) for v in value]
    if not isinstance(value, Tensor):
        return value
    return whole(value).cuda().as_strided(value.shape, value.stride(), value.storage_offset())


def copied(value: Any) -> Any:
    if isinstance(value, list):
        return [copied(v) for v in value]
    if not isinstance(value, Tensor):
        return value
    return whole(value).clone().as_strided(value.shape, value.stride(), value.storage_offset())


def tensors_of(args: Any) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, list):
            yield from tensors_of(value)
        elif isinstance(value, Tensor):
            yield value


def assert_equal_buffers(expected: Any, got: Any, rtol: float = 0.0) -> None:
    """Bit for bit; float64 (sums, norms) and, if rtol is given, float32 within a tolerance."""
    for a, b in zip(tensors_of(expected), tensors_of(got), strict=True):
        a, b = whole(a).cpu(), whole(b).cpu()
        tolerance = (
            SUM_RTOL if a.dtype == torch.float64 else rtol if a.dtype == torch.float32 else 0
        )
        if tolerance:
            torch.testing.assert_close(b, a, rtol=tolerance, atol=0, equal_nan=True)
        else:
            assert same_bits(a, b)


def check(name: str, args: tuple[Any, ...], rtol: float = 0.0) -> None:
    """The CPU function and the kernel leave the same bytes everywhere."""
    on_gpu = tuple(to_cuda(a) for a in args)
    getattr(ops, name)(*args)
    getattr(ops, name)(*on_gpu)
    assert_equal_buffers(args, on_gpu, rtol)


def batch(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:-2]


def momentum_args(shape, dtypes, axis, layouts=("dense", "dense"), **hyper):
    m = laid_out(randn(shape, dtypes[0], CPU, "m"), layouts[0])
    g = laid_out(randn(shape, dtypes[1], CPU, "g"), layouts[1])
    sums = [poisoned((*batch(shape), shape[axis - 2]), torch.float64, CPU) for _ in range(2)]
    slots = selection(shape, axis, quarter(shape[axis - 2]), CPU)[1]
    h, feedback = hyper_tensor(CPU, hyper), torch.tensor([0.95])
    return ([m], [g], [slots], feedback, h, [0], [axis], [sums[0]], [sums[1]])


def gather_args(shape, dtypes, axis, k, layouts=("dense", "dense", "dense"), **hyper):
    m = laid_out(randn(shape, dtypes[0], CPU, "m"), layouts[0])
    g = laid_out(randn(shape, dtypes[1], CPU, "g"), layouts[1])
    out = laid_out(poisoned(part_shape(shape, axis, k), dtypes[2], CPU), layouts[2])
    norm = randn(batch(shape) or (1,), torch.float64, CPU, "n").abs()
    if hyper.get("nesterov", 1.0) == 1.0:
        g = torch.empty(0)
    indices = selection(shape, axis, k, CPU)[0]
    return ([m], [g], [indices], [norm], hyper_tensor(CPU, hyper), [0], [axis], [out])


def update_args(
    shape, dtypes, axis, k, stochastic, factors, layouts=("dense", "dense"), base=0, row_stride=None
):
    w = laid_out(randn(shape, dtypes[0], CPU, "w"), layouts[0])
    part = part_shape(shape, axis, k)
    o = laid_out(randn(part, dtypes[1], CPU, "o"), layouts[1])
    factor = torch.rand(part[:-1], generator=seeded(part)) if factors else torch.empty(0)
    step = torch.tensor([7.0]) if stochastic else torch.empty(0)
    slots = selection(shape, axis, k, CPU)[1]
    stride = row_stride or shape[-1]
    return (
        [w], [o], [slots], [factor], hyper_tensor(CPU), [0], [axis], [1.7], [step], 2**40 + 5, [3],
        [base], [shape[-2] * stride], [stride],
    )  # fmt: skip


def adamw_args(count, dtypes, stochastic, offset=0, base=0):
    def flat(dtype, key):
        values = randn((count + offset,), dtype, CPU, key)
        return (values.abs() if key == "v" else values)[offset:]

    tensors = [[flat(d, key)] for d, key in zip((*dtypes, dtypes[2]), "pgmv", strict=True)]
    step = [torch.tensor([12.0])]
    return (*tensors, step, adamw_hyper(CPU), [0], [stochastic], 5, [2], [base])


def neuron_args(shape, dtype, layout="dense"):
    o = laid_out(randn(shape, dtype, CPU, "o", scale=0.1), layout)
    neurons = shape[-2] + 3
    indices = selection((*batch(shape), neurons, 1), 0, shape[-2], CPU, "neuron")[0]
    second = torch.rand((*batch(shape), neurons), generator=seeded(shape))
    factor = poisoned(shape[:-1], torch.float32, CPU)
    return ([o], [second], [indices], hyper_tensor(CPU), [0], [factor])


def select_args(batches, n, k, digits=None):
    score = torch.rand(batches, n, generator=seeded(n, k), dtype=torch.float64) + 3
    if digits:
        score = (score * digits).floor()
    outputs = [
        poisoned((batches, k), torch.int32, CPU),
        poisoned((batches, n), torch.int32, CPU),
        poisoned((batches,), torch.float64, CPU),
    ]
    sumsq = torch.rand(batches, n, generator=seeded(n), dtype=torch.float64)
    return ([score], [sumsq], *([t] for t in outputs), [k])


def quarter(n: int) -> int:
    return -(-n // 4)


# ---- the same bits as the CPU functions -----------------------------------------------------------


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=2)), ids=str)
def test_momentum_equals_the_cpu(dtypes):
    for shape, axis, nu in itertools.product(SHAPES, (0, 1), (1.0, 0.9)):
        check("momentum_", momentum_args(shape, dtypes, axis, keep=0.95, gain=-0.05, nesterov=nu))


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, repeat=2)), ids=str)
def test_momentum_equals_the_cpu_with_every_stride(layouts):
    for shape, axis in itertools.product(((40, 2056), (2, 66, 520)), (0, 1)):
        check("momentum_", momentum_args(shape, (torch.bfloat16,) * 2, axis, layouts))
        check("momentum_", momentum_args(shape, (torch.float32, torch.bfloat16), axis, layouts))


@pytest.mark.parametrize("n", [1, 31, 1024, 1025, 8192, 8193, 40000])
def test_select_equals_the_cpu(n):
    for k, digits in itertools.product({1, quarter(n), n}, (None, 7)):
        check("select_", select_args(3, n, k, digits))


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)), ids=str)
def test_gather_equals_the_cpu(dtypes):
    for shape, axis, nu in itertools.product(SHAPES, (0, 1), (1.0, 0.9)):
        for k in {1, quarter(shape[axis - 2]), shape[axis - 2]}:
            check("gather_", gather_args(shape, dtypes, axis, k, nesterov=nu, gain=-0.05))


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, repeat=2)), ids=str)
def test_gather_equals_the_cpu_with_every_stride(layouts):
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    for shape, axis, nu in itertools.product(((40, 2056), (2, 66, 520)), (0, 1), (1.0, 0.9)):
        k = quarter(shape[axis - 2])
        placed = (layouts[0], "dense", layouts[1])
        check("gather_", gather_args(shape, dtypes, axis, k, placed, nesterov=nu))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neuron_equals_the_cpu(dtype):
    for shape, layout in itertools.product((*SHAPES, (5000, 8)), LAYOUTS):
        check("neuron_", neuron_args(shape, dtype, layout), FLOAT_RTOL)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=2)), ids=str)
def test_update_equals_the_cpu(dtypes, stochastic):
    for shape, axis, factors in itertools.product(SHAPES, (0, 1), (False, True)):
        for k in {1, quarter(shape[axis - 2]), shape[axis - 2]}:
            check("update_", update_args(shape, dtypes, axis, k, stochastic, factors))


def chosen_columns(cols: int, which: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Indices and slots of a batch whose matrices select the given columns, equally many each."""
    indices = torch.tensor(which, dtype=torch.int32)
    slots = torch.full((len(which), cols), -1, dtype=torch.int32)
    for row, columns in zip(slots, which, strict=True):
        row[columns] = torch.arange(len(columns), dtype=torch.int32)
    return indices, slots


def check_columns(rows: int, cols: int, pitch: int, which: list[list[int]], pad: int = 0) -> None:
    """gather_ and update_ of given columns of row-major matrices whose rows lie `pitch` apart, against
    a compact side whose rows lie `pad` beyond its columns apart."""
    batches, k = len(which), len(which[0])
    indices, slots = chosen_columns(cols, which)
    absent = torch.empty(0)

    def padded(width: int, stride: int, dtype: torch.dtype, key: str) -> Tensor:
        return randn((batches, rows, stride), dtype, CPU, key, which)[..., :width]

    for dtype, compact in ((torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)):
        norm = torch.rand(batches, dtype=torch.float64, generator=seeded(k)) + 0.5
        m, out = padded(cols, pitch, dtype, "m"), padded(k, k + pad, compact, "o")
        h = hyper_tensor(CPU)
        check("gather_", ([m], [absent], [indices], [norm], h, [0], [1], [out]))
        for decay, step in ((0.99, absent), (0.99, torch.tensor([7.0])), (1.0, absent)):
            w, o = padded(cols, pitch, dtype, "w"), padded(k, k + pad, compact, "o")
            factor = torch.rand(batches, rows, generator=seeded(rows))
            h = hyper_tensor(CPU, {"decay": decay})
            for factors in (absent, factor):
                check(
                    "update_",
                    ([copied(w)], [o], [slots], [factors], h, [0], [1], [1.7], [step], 5, [3], [0],
                     [rows * pitch], [pitch]),
                )  # fmt: skip


@pytest.mark.parametrize("cols", [120, 255, 256, 257, 264, 511, 513])
def test_columns_at_the_edges_of_a_tile(cols):
    """A tile is 256 columns of 16-bit elements, 128 of fp32; rows are padded to whole vectors."""
    pitch = -(-cols // 8) * 8
    places = {0, 7, 8, 127, 128, 254, 255, 256, 257, cols - 1}
    edges = sorted(c for c in places if c < cols)
    for c in edges:
        check_columns(9, cols, pitch, [[c]])
    first = list(range(min(cols, 256)))
    check_columns(17, cols, pitch, [first, first])  # a whole tile and none of the next
    check_columns(5, cols, pitch, [list(range(cols - 1))])
    check_columns(3, cols, pitch, [edges, list(range(len(edges)))])


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 31, 33, 63, 65, 119, 121, 127, 129, 300])
def test_columns_at_the_edges_of_a_strip(rows):
    cols = 520
    spread = [list(range(b, cols, 4 + b)) for b in range(2)]
    k = min(len(s) for s in spread)
    for count in {1, k - 1, k}:
        for pad in (0, 1, 3):
            check_columns(rows, cols, cols, [s[:count] for s in spread], pad)


@pytest.mark.parametrize("share", [2, 3, 4, 8, 15, 17, 100])
def test_columns_of_every_density(share):
    for cols in (264, 776):
        check_columns(11, cols, cols + 8, [list(range(0, cols, share))] * 3, 1)


@pytest.mark.parametrize("rows", [1, 8, 31, 33, 512, 513, 1100])
def test_momentum_columns_at_the_edges(rows):
    for cols, dtype in itertools.product((120, 128, 130, 255, 257, 520), DTYPES):
        grad = torch.bfloat16 if dtype == torch.float32 else dtype
        pitch = -(-cols // 8) * 8
        m = randn((2, rows, pitch), dtype, CPU, "m")[..., :cols]
        g = randn((2, rows, pitch), grad, CPU, "g")[..., :cols]
        sums = [poisoned((2, cols), torch.float64, CPU) for _ in range(2)]
        slots = selection((2, rows, cols), 1, quarter(cols), CPU)[1]
        for nu, feedback in ((1.0, 0.95), (0.9, 0.95), (1.0, 1.0)):
            h, due = hyper_tensor(CPU, {"keep": 0.95, "nesterov": nu}), torch.tensor([feedback])
            check("momentum_", ([m], [g], [slots], due, h, [0], [1], [sums[0]], [sums[1]]))


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, repeat=2)), ids=str)
def test_update_equals_the_cpu_with_every_stride(layouts, stochastic):
    dtypes = (torch.bfloat16, torch.float16)
    for shape, axis in itertools.product(((40, 2056), (2, 66, 520)), (0, 1)):
        k = quarter(shape[axis - 2])
        for factors in (False, True):
            check("update_", update_args(shape, dtypes, axis, k, stochastic, factors, layouts))


@pytest.mark.parametrize("base, row_stride", [(8, 2064), (3, 2056), (2**35, 2**33 + 1), (4, 2059)])
def test_random_bits_follow_the_global_index(base, row_stride):
    for dtype, axis in itertools.product((torch.bfloat16, torch.float16), (0, 1)):
        dtypes = (dtype, torch.float16)
        args = update_args(
            (40, 2056), dtypes, axis, 10, True, False, base=base, row_stride=row_stride
        )
        check("update_", args)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)), ids=str)
def test_adamw_equals_the_cpu(dtypes, stochastic):
    for count, offset in itertools.product((1, 7, 4096, 9001), (0, 1, 4)):
        for base in (0, 4, 2**34 + 3):
            check("adamw_", adamw_args(count, dtypes, stochastic, offset, base))


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e30])
def test_adamw_divides_exactly_at_any_size(eps):
    """Moments within and beyond the range of the short division, and at its ends; no bit hides in a weight."""
    args = adamw_args(2**20, (torch.float32,) * 3, False)
    args[0][0].zero_()
    args[1][0].zero_()
    for moment, tensors in enumerate(args[2:4]):
        exponent = torch.randint(-140, 40, (2**18, 1), generator=seeded(moment))
        exponent[::2] = torch.randint(-92, 32, (2**17, 1), generator=seeded(moment, 2))
        tensors[0].view(-1, 4).mul_(2.0 ** exponent.double())
        tensors[0][:: 997 + moment] = torch.tensor([0.0, torch.inf, torch.nan]).repeat(400)[
            : len(tensors[0][:: 997 + moment])
        ]
    hyper = adamw_hyper(CPU, eps=eps)
    check("adamw_", (*args[:5], hyper, *args[6:]))


@pytest.mark.parametrize("step", [0, 1, 2, 1000, 54321])
def test_bias_corrections_equal_the_cpu(step):
    args = adamw_args(1000, (torch.float32,) * 3, False)
    args[4][0].fill_(step)
    check("adamw_", args)


# ---- many, and large ------------------------------------------------------------------------------


def joined(calls: list[tuple[Any, ...]], hyper_at: int) -> tuple[Any, ...]:
    """One call for the matrices of several, which share hyper and the scalars."""
    result: list[Any] = []
    for i, values in enumerate(zip(*calls, strict=True)):
        lists = isinstance(values[0], list) and i != hyper_at
        result.append([x for v in values for x in v] if lists else values[0])
    return tuple(result)


def many(count: int) -> dict[str, tuple[Any, ...]]:
    """A call of every operator for more matrices than one table of items holds, of mixed kinds."""
    shapes = [(1 + i % 7, 8 + i % 5) for i in range(count)]
    pairs = list(itertools.product(DTYPES, repeat=2))
    kinds = [pairs[i % 9] for i in range(count)]
    each = range(count)
    return {
        "momentum_": joined([momentum_args(shapes[i], kinds[i], i % 2) for i in each], 4),
        "select_": joined([select_args(1, 5 + i % 40, 1 + i % 5) for i in each], -1),
        "gather_": joined(
            [gather_args(shapes[i], (*kinds[i], kinds[i][1]), i % 2, 1) for i in each], 4
        ),
        "neuron_": joined([neuron_args(shapes[i], kinds[i][0]) for i in each], 3),
        "update_": joined(
            [update_args(shapes[i], kinds[i], i % 2, 1, i % 3 == 0, False) for i in each], 4
        ),
        "adamw_": joined(
            [adamw_args(1 + i, (*kinds[i], kinds[i][0]), i % 2 == 0) for i in each], 5
        ),
    }


@pytest.mark.parametrize("name", ops.NAMES)
def test_hundreds_of_matrices_in_one_call(name):
    check(name, many(700)[name], FLOAT_RTOL if name == "neuron_" else 0.0)


@pytest.mark.parametrize("name", ops.NAMES)
def test_a_matrix_does_not_depend_on_the_others(name):
    together = to_cuda(list(many(40)[name]))
    alone = copied(together)
    getattr(ops, name)(*together)
    for i in range(40):
        single = [v[i : i + 1] if isinstance(v, list) and len(v) == 40 else v for v in alone]
        getattr(ops, name)(*single)
    for a, b in zip(tensors_of(together), tensors_of(alone), strict=True):
        assert same_bits(a, b)


def test_a_batch_of_seventy_thousand():
    shape = (70000, 2, 3)
    for axis in (0, 1):
        check("momentum_", momentum_args(shape, (torch.float32, torch.bfloat16), axis))
        check("gather_", gather_args(shape, (torch.float32,) * 3, axis, 1))
        check("update_", update_args(shape, (torch.bfloat16,) * 2, axis, 1, True, True))
    check("select_", select_args(70000, 3, 2))
    check("neuron_", neuron_args(shape, torch.bfloat16), FLOAT_RTOL)


@pytest.mark.parametrize("axis", [0, 1])
def test_offsets_beyond_two_to_the_31(axis):
    rows, cols, tail = 65600, 32776, 64  # 2.15e9 elements
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GB of GPU memory")
    n = (rows, cols)[axis]
    k = quarter(n)
    indices, slots = (t.cuda() for t in selection((rows, cols), axis, k, CPU))
    h = hyper_tensor(CPU)
    w = torch.ones(rows, cols, dtype=torch.bfloat16, device="cuda")
    last = randn((tail, cols), torch.bfloat16, CPU, "last")
    w[-tail:] = last.cuda()
    g = randn((1, cols), torch.bfloat16, CPU, "g")
    sums = [poisoned((n,), torch.float64, torch.device("cuda")) for _ in range(2)]
    grad = g.cuda().expand(rows, cols)
    feedback = torch.tensor([0.95])
    ops.momentum_(
        [w], [grad], [slots], feedback.cuda(), h.cuda(), [0], [axis], [sums[0]], [sums[1]]
    )
    none = [torch.empty(0, dtype=torch.float64)]
    last_slots = [(slots[-tail:] if axis == 0 else slots).cpu()]
    ops.momentum_([last], [g.expand(tail, cols)], last_slots, feedback, h, [0], [axis], none, none)
    assert same_bits(w[-tail:], last)
    if axis == 0:
        expected = last.double().abs().sum(1)
        torch.testing.assert_close(sums[0][-tail:].cpu(), expected, rtol=SUM_RTOL, atol=0)
    assert bool(torch.isfinite(sums[0]).all()) and bool(torch.isfinite(sums[1]).all())

    out = poisoned(part_shape((rows, cols), axis, k), torch.float16, torch.device("cuda"))
    no_norm = [torch.empty(0, dtype=torch.float64, device="cuda")]
    no_grad = [torch.empty(0, device="cuda")]
    before = last.cuda()
    ops.gather_([w], no_grad, [indices], no_norm, h.cuda(), [0], [axis], [out])
    chosen = (slots[-tail:] if axis == 0 else slots) >= 0
    part = before[chosen] if axis == 0 else before[:, chosen]
    got = out[-part.shape[0] :] if axis == 0 else out[-tail:]
    assert same_bits(got, part.half())

    weight = w[-tail:].cpu()
    step = torch.tensor([3.0])
    no_factor = torch.empty(0)
    options = ([0], [axis], [1.0])
    tail_slots = slots.cpu()
    if axis == 0:
        tail_slots = torch.where(chosen, chosen.cumsum(0) - 1, -1).int().cpu()
    tail_update = got.cpu().contiguous()
    ops.update_(
        [w], [out], [slots], [no_factor.cuda()], h.cuda(), *options, [step.cuda()], 9, [1], [0],
        [rows * cols], [cols],
    )  # fmt: skip
    ops.update_(
        [weight], [tail_update], [tail_slots], [no_factor], h, *options, [step], 9, [1],
        [(rows - tail) * cols], [tail * cols], [cols],
    )  # fmt: skip
    assert same_bits(w[-tail:], weight)


# ---- streams, graphs, synchronisation ---------------------------------------------------------------


def every_call() -> dict[str, tuple[Any, ...]]:
    """A call of each operator that takes its vector kernels."""
    shape, half = (300, 136), (torch.bfloat16, torch.bfloat16)
    return {
        "momentum_": momentum_args(shape, half, 1),
        "select_": select_args(2, 1000, 250),
        "gather_": gather_args(shape, (*half, torch.float16), 1, 34),
        "neuron_": neuron_args(shape, torch.bfloat16),
        "update_": update_args(shape, half, 1, 34, True, True),
        "adamw_": adamw_args(9001, (*half, torch.float32), True),
    }


def result_of(name: str, run: Callable[[str, tuple[Any, ...]], None]) -> list[Tensor]:
    args = tuple(to_cuda(a) for a in every_call()[name])
    run(name, args)
    torch.cuda.synchronize()
    return list(tensors_of(args))


def plainly(name: str, args: tuple[Any, ...]) -> None:
    getattr(ops, name)(*args)


@pytest.mark.parametrize("name", ops.NAMES)
def test_repeats_bit_for_bit(name):
    first = result_of(name, plainly)
    for _ in range(3):
        assert all(same_bits(a, b) for a, b in zip(first, result_of(name, plainly), strict=True))


@pytest.mark.parametrize("name", ops.NAMES)
def test_runs_on_the_current_stream(name):
    def on_a_stream(name, args):
        inputs = [t.clone() for t in tensors_of(args)]
        for t in tensors_of(args):
            t.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            for t, values in zip(tensors_of(args), inputs, strict=True):
                t.copy_(values)  # on any other stream the operator would see zeros
            getattr(ops, name)(*args)
        stream.synchronize()

    expected, got = result_of(name, plainly), result_of(name, on_a_stream)
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("name", ops.NAMES)
def test_replays_from_a_graph_with_the_hyper_of_the_moment(name):
    def captured(name, args):
        values = [t.clone() for t in tensors_of(args)]
        hypers = [a for a in args if isinstance(a, Tensor)]
        for h in hypers:
            h.mul_(0.5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            getattr(ops, name)(*args)
        graph.replay()
        for t, v in zip(tensors_of(args), values, strict=True):
            t.copy_(v)  # hyper too: the replay must see it
        graph.replay()

    expected, got = result_of(name, plainly), result_of(name, captured)
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("name", ops.NAMES)
def test_never_synchronises(name):
    args = tuple(to_cuda(a) for a in every_call()[name])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        getattr(ops, name)(*args)
        torch.cuda._sleep(200_000_000)
        after = torch.cuda.Event()
        getattr(ops, name)(*args)
        after.record()
        assert not after.query(), "the call waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
@pytest.mark.parametrize("name", ops.NAMES)
def test_runs_on_the_device_of_its_tensors(name):
    def elsewhere(name, args):
        moved = [
            [t.to("cuda:1") for t in a] if isinstance(a, list) and isinstance(a[0], Tensor)
            else a.to("cuda:1") if isinstance(a, Tensor) else a
            for a in args
        ]  # fmt: skip
        getattr(ops, name)(*moved)
        for t, result in zip(tensors_of(args), tensors_of(moved), strict=True):
            t.copy_(result)

    expected, got = result_of(name, plainly), result_of(name, elsewhere)
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


# ---- a GPU that dion3 was not built for --------------------------------------------------------------


def test_a_gpu_without_kernels_runs_plain_torch(monkeypatch):
    def train(device):
        generator = torch.Generator().manual_seed(0)
        shapes = [(33, 70), (96, 64), (64, 64), (50,)]
        params = [
            torch.nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in shapes
        ]
        groups = [{"params": params[:3]}, {"params": params[3:], "algorithm": "adamw"}]
        optimizer = dion3.Dion3(groups, lr=0.02, fraction=0.25, ns_dtype=torch.float32)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(device)
            optimizer.step()
        return [p.detach().cpu() for p in params]

    used = []
    monkeypatch.setattr(build, "has_kernels", lambda device: device.type == "cpu")
    for name in ops.NAMES:
        plain = getattr(reference, name)
        monkeypatch.setattr(
            reference, name, lambda *args, name=name, plain=plain: (used.append(name), plain(*args))
        )
    for on_gpu, on_cpu in zip(train("cuda"), train("cpu"), strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-4, atol=1e-5)
    assert set(used) == set(ops.NAMES) - {"neuron_"}
    x = torch.randn(40, 90, device="cuda")
    torch.testing.assert_close(
        dion3.gram_ns(x).float().cpu(), dion3.gram_ns(x.cpu()).float(), rtol=0, atol=0.02
    )
