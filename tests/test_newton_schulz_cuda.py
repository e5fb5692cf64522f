"""Newton-Schulz on the GPU, both families of kernels: the whole programs with norms, casts and workspace."""

from __future__ import annotations

import functools
import itertools
import random

import gemm_api as api
import ns_reference as ref
import pytest
import torch
from torch import Tensor

from dion3.coefficients import DEFAULT, POLAR_EXPRESS_8, scaled
from dion3.matrix_ops import orthogonalize_into
from dion3.newton_schulz import gram_ns, newton_schulz

pytestmark = pytest.mark.gpu

EIGHT = scaled(POLAR_EXPRESS_8)
SHAPES = (
    (1, 1), (1, 9), (9, 1), (7, 7), (24, 1024), (64, 256), (256, 64), (63, 65), (100, 100), (129, 300),
    (300, 129), (513, 1000),
)  # fmt: skip
# steps, method (0 by shape, 1 standard, 2 Gram), restarts
PROGRAMS = (
    (5, 0, (2,)), (5, 1, ()), (1, 2, ()), (2, 2, (1,)), (8, 2, (1, 2, 4)), (6, 2, (1, 2, 3, 4, 5)), (3, 2, ()),
)  # fmt: skip
# dtype and layout of x, compute dtype, dtype and layout of the result
FORMS = (
    (torch.float32, "dense", torch.float16, torch.float16, "dense"),
    (torch.bfloat16, "strided", torch.float16, torch.bfloat16, "padded"),
    (torch.float32, "odd columns", torch.bfloat16, torch.float32, "offset"),
    (torch.float16, "columns", torch.float16, torch.float16, "columns"),
    (torch.bfloat16, "offset", torch.float16, torch.float32, "strided"),
    (torch.float16, "padded", torch.float16, torch.bfloat16, "odd columns"),
)


@pytest.fixture(params=["sm90", "generic"])
def backend(request: pytest.FixtureRequest) -> str:
    """The value of `backend` that runs each family of kernels; "auto" on Hopper."""
    api.library()
    if request.param == "generic":
        return "generic"
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the sm_90a kernels need compute capability 9.0")
    return "auto"


def number(backend: str) -> int:
    return {"auto": api.AUTO, "generic": api.GENERIC}[backend]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator(api.DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=api.DEVICE).to(dtype)


def exact(x: Tensor, table: tuple = DEFAULT) -> Tensor:
    """The polynomials applied one after the other in float64, (batch, rows, cols)."""
    x = x.double()
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = torch.where(norm > 0, x / norm, x)
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    for a, b, c in table:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def error(result: Tensor, wanted: Tensor) -> float:
    return float((result.double() - wanted).norm() / wanted.norm())


# ---- accuracy ----------------------------------------------------------------------------------------


@functools.cache
def hard_matrices(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The eight matrices of the accuracy table on the GPU, with their exact results."""
    return {
        name: (x.float().to(api.DEVICE), ref.exact(x).to(api.DEVICE))
        for name, x in ref.accuracy_matrices(256, 1024, 20 * seed).items()
    }


@pytest.mark.parametrize("turned", [False, True], ids=["wide", "tall"])
@pytest.mark.parametrize("f", [gram_ns, newton_schulz])
def test_hard_spectra_as_accurate_as_torch_with_the_same_roundings(f, turned, backend):
    worse = {}
    for name in hard_matrices(0):
        errors = {"ours": 0.0, "torch": 0.0, "bf16": 0.0}
        for seed in range(2):
            x = hard_matrices(seed)[name]
            wanted = x[1].mT if turned else x[1]
            given = x[0].mT if turned else x[0]
            errors["ours"] += error(f(given, dtype=torch.float16, backend=backend), wanted)
            errors["torch"] += error(f(given, dtype=torch.float16, backend="reference"), wanted)
            usual = ref.eager(given, DEFAULT, torch.bfloat16)
            errors["bf16"] += error(usual, wanted)
        if errors["ours"] > 1.1 * errors["torch"] or errors["ours"] > errors["bf16"]:
            worse[name] = errors
    assert not worse


@pytest.mark.parametrize("steps_method_restarts", PROGRAMS)
def test_every_shape_layout_dtype_and_program(steps_method_restarts, backend):
    steps, method, restarts = steps_method_restarts
    table = EIGHT[:steps]
    pick = random.Random(steps)
    for (rows, cols), form in itertools.product(SHAPES, FORMS):
        dtype, x_layout, compute, out_dtype, out_layout = form
        if pick.random() < 0.4:
            continue
        batch = pick.choice((1, 2, 3))
        x, _ = api.place(randn(batch, rows, cols, dtype=dtype, seed=rows), x_layout)
        before = x.clone()
        out, buffer = api.poisoned((batch, rows, cols), out_dtype, out_layout)
        p = api.program(table, restarts, method, compute, number(backend))
        api.newton_schulz([(x, out)], p)
        wanted = exact(x, table)
        same = torch.empty_like(x, dtype=torch.float32)
        flat = [value for row in table for value in row]
        name = ("auto", "standard", "gram")[method]
        orthogonalize_into([x], [same], flat, restarts, name, compute, False, 0.0, "reference")
        usual = error(same.to(out_dtype), wanted)
        unit = api.UNIT[compute] + api.UNIT[out_dtype]
        what = (rows, cols, form, batch)
        # With few elements errors are luck: twice torch's, and some roundings are always allowed.
        slack = (16 if min(rows, cols) < 16 else 4) * unit
        assert error(out, wanted) <= 2 * usual + slack, (*what, error(out, wanted), usual)
        assert torch.equal(x, before), (*what, "the input was written")
        assert api.only_inside_was_written(out, buffer), (*what, "written outside")


def test_all_sizes_up_to_17(backend):
    ours, usual = [], []
    for n, m in itertools.product(range(1, 18), repeat=2):
        x = randn(2, n, m, seed=n + m)
        wanted = exact(x)
        ours.append(error(gram_ns(x, dtype=torch.float16, backend=backend), wanted))
        usual.append(error(gram_ns(x, dtype=torch.float16, backend="reference"), wanted))
        assert ours[-1] < 0.05, (n, m)
    assert sum(ours) <= 1.1 * sum(usual)


def test_normalised_input_is_used_in_place_and_not_written(backend):
    x = randn(3, 100, 300)
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x, _ = api.place(x.half(), "padded")
    before = x.clone()
    out, _ = api.poisoned(x.shape, torch.float16)
    api.newton_schulz([(x, out)], api.program(DEFAULT, backend=number(backend), normalized=True))
    assert error(out, exact(x)) < 5e-3
    assert torch.equal(x, before)


# ---- independence of batch, list and workspace -------------------------------------------------------

STACKS = (
    (5, 96, 320),
    (3, 320, 96),
    (4, 130, 130),
    (0, 8, 8),
    (7, 20, 70),
    (1, 257, 600),
    (2, 96, 320),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_equals_single_in_lists_and_in_parts(dtype, backend):
    xs = [randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(STACKS)]
    p = api.program(DEFAULT, backend=number(backend))
    together, parts, alone = (
        [api.poisoned(x.shape, torch.float16)[0] for x in xs] for _ in range(3)
    )
    api.newton_schulz(list(zip(xs, together, strict=True)), p)
    api.newton_schulz(list(zip(xs, parts, strict=True)), p, 0.3)
    for x, out in zip(xs, alone, strict=True):
        for i in range(x.size(0)):
            api.newton_schulz([(x[i : i + 1], out[i : i + 1])], p)
    for x, a, b, c in zip(xs, together, parts, alone, strict=True):
        assert torch.equal(a, c), (x.shape, "a list changes bits")
        assert torch.equal(b, c), (x.shape, "the workspace changes bits")
        assert x.size(0) == 0 or error(a, exact(x)) < 0.02, x.shape


@pytest.mark.parametrize("shape", [(2, 7, 9), (3, 33, 65), (2, 131, 300), (2, 301, 130)])
def test_what_the_workspace_held_does_not_reach_the_result(shape, backend):
    """Rows of workspace are padded and nobody writes the padding: NaN there times zero is NaN."""
    x, p = randn(*shape), api.program(DEFAULT, backend=number(backend))
    poisoned, zeroed = (api.poisoned(shape, torch.float16)[0] for _ in range(2))
    api.newton_schulz([(x, poisoned)], p, fill=255)
    api.newton_schulz([(x, zeroed)], p, fill=0)
    assert torch.equal(poisoned, zeroed)
    assert error(poisoned, exact(x)) < 0.02


@pytest.mark.parametrize("shape", [(24, 100), (65, 200), (300, 700)])
def test_batch_size_and_place_change_no_bit(shape, backend):
    x = randn(67, *shape)
    group = gram_ns(x, backend=backend)
    for i in (0, 1, 33, 66):
        assert torch.equal(gram_ns(x[i], backend=backend), group[i])
        assert torch.equal(gram_ns(x[i : i + 3].clone(), backend=backend)[0], group[i])


def test_50_repeats_are_equal_while_another_stream_is_busy(backend):
    x = randn(5, 300, 1000)
    first = gram_ns(x, backend=backend)
    different = torch.zeros((), dtype=torch.int64, device=api.DEVICE)
    with api.Busy():
        for _ in range(50):
            different += (api.bits(gram_ns(x, backend=backend)) != api.bits(first)).sum()
    assert int(different) == 0


def test_70000_tiny_matrices(backend):
    x = randn(70000, 5, 7)
    result, usual = (gram_ns(x, dtype=torch.float16, backend=b) for b in (backend, "reference"))
    wanted = exact(x)
    assert error(result, wanted) <= 1.1 * error(usual, wanted)
    assert torch.equal(gram_ns(x[69999], dtype=torch.float16, backend=backend), result[69999])


# ---- special values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 30), (300, 512), (2048, 1100)])
def test_zeros_overflow_nan_and_inf_stay_in_their_matrix(shape, backend):
    x = randn(8, *shape)
    clean = gram_ns(x, backend=backend)
    x[1] = 0
    x[2, 3, 4] = float("nan")
    x[3, shape[0] - 1, shape[1] - 1] = float("inf")
    x[4] *= 1e30
    x[5] *= 1e-30
    x[6] = 0
    x[6, 1, 2] = 3e38  # one huge entry
    result = gram_ns(x, backend=backend)
    assert torch.equal(result[[0, 7]], clean[[0, 7]])
    assert bool((result[1] == 0).all())
    assert bool(result[2].isnan().all())
    assert bool((~result[3].isfinite()).any())
    assert error(result[4:6], exact(x[4:6])) < 0.02
    one = exact(torch.ones(1, 1, 1)).item()
    assert abs(float(result[6, 1, 2]) - one) < 2e-3 and int((result[6] != 0).sum()) == 1


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_scale_does_not_matter(scale, backend):
    x = randn(2, 64, 200)
    assert error(gram_ns(x * scale, backend=backend), gram_ns(x, backend=backend).double()) < 5e-3


@pytest.mark.parametrize("shape", [(0, 4, 6), (2, 0, 6), (2, 4, 0)])
def test_empty(shape, backend):
    x = torch.empty(shape, device=api.DEVICE)
    assert gram_ns(x, backend=backend).shape == x.shape


def test_strides_beyond_2_31_elements(backend):
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of GPU memory")
    stride = (1 << 31) + 64
    memory = torch.empty(2 * stride + 64 * 200, dtype=torch.float16, device=api.DEVICE)
    far = memory.as_strided((3, 64, 200), (stride, 200, 1))
    x = randn(3, 64, 200)
    wanted, _ = api.poisoned(x.shape, torch.float16)
    p = api.program(DEFAULT, backend=number(backend))
    api.newton_schulz([(x, wanted)], p)
    api.newton_schulz([(x, far)], p)
    assert torch.equal(far, wanted)
    far.copy_(x)
    out, near = (api.poisoned(x.shape, torch.float32)[0] for _ in range(2))
    api.newton_schulz([(far, out)], p)
    api.newton_schulz([(far.clone(), near)], p)
    assert torch.equal(out, near)


# ---- streams, graphs, devices ------------------------------------------------------------------------


def test_graph_capture_and_replay(backend):
    static = randn(3, 100, 300)
    gram_ns(static, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gram_ns(static, backend=backend)
    for i in range(20):
        static.copy_(randn(3, 100, 300, seed=i))
        graph.replay()
        assert torch.equal(result, gram_ns(static, backend=backend))
    assert error(result, exact(static)) < 0.02


def test_runs_on_the_current_stream(backend):
    x = randn(3, 100, 300)
    wanted = gram_ns(x, backend=backend)
    late = torch.full_like(x, float("nan"))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what another stream would not wait for
        late.copy_(x)
        result = gram_ns(late, backend=backend)
    stream.synchronize()
    assert torch.equal(result, wanted)


def test_runs_on_the_tensors_device(backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = randn(3, 100, 300)
    with torch.cuda.device(0):
        result = gram_ns(x.to("cuda:1"), backend=backend)
    assert result.device == torch.device("cuda:1")
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert torch.equal(result.to("cuda:0"), gram_ns(x, backend=backend))


def test_the_kernels_are_what_gram_ns_runs():
    """Not the plain PyTorch functions: those do not take a backend of the extension."""
    api.library()
    x = randn(2, 70, 130)
    out, _ = api.poisoned(x.shape, torch.float32)
    api.newton_schulz([(x, out)], api.program(DEFAULT))
    assert torch.equal(gram_ns(x), out)
