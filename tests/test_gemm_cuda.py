"""The matrix products on the GPU, both families of kernels: every trap that such kernels fall into.

Results are written into NaN, are compared with float64, and must leave everything around them NaN.
"""

from __future__ import annotations

import itertools
import random

import gemm_api as api
import pytest
import torch
from torch import Tensor

from dion3.newton_schulz import gemm_add, symmetric_mm

pytestmark = pytest.mark.gpu

SIZES = (
    1, 2, 7, 8, 9, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 191, 255, 256, 257, 300, 511, 513, 1000,
)  # fmt: skip
LARGE = (1023, 1025, 2047, 2049, 4100)


@pytest.fixture(params=["sm90", "generic"])
def backend(request: pytest.FixtureRequest) -> int:
    """Each family of kernels; on Hopper, AUTO with its copies for what TMA cannot address."""
    api.library()
    if request.param == "generic":
        return api.GENERIC
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the sm_90a kernels need compute capability 9.0")
    return api.AUTO


@pytest.fixture(params=[True, False], ids=["symmetric", "general"])
def symmetric(request: pytest.FixtureRequest) -> bool:
    """The product with its transpose mirrored, and the general one."""
    return request.param


def randn(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    generator = torch.Generator(api.DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=api.DEVICE).to(dtype)


class Product:
    """One product with random operands in given layouts, run and compared with float64."""

    def __init__(
        self,
        symmetric: bool,
        batch: int,
        m: int,
        n: int,
        k: int,
        dtype: torch.dtype = torch.float16,
        layouts: tuple[str, str, str, str] = ("dense",) * 4,
        alpha: float = 1.0,
        beta: float = 0.0,
        factors: bool = False,
        seed: int = 0,
    ) -> None:
        self.symmetric, self.alpha, self.beta = symmetric, alpha, beta
        n = m if symmetric else n
        self.what = (symmetric, batch, m, n, k, dtype, layouts, alpha, beta, factors)
        a, b, c = (randn(batch, *s, dtype=dtype, seed=seed + i)
                   for i, s in enumerate(((m, k), (n, k) if symmetric else (k, n), (m, n))))  # fmt: skip
        if symmetric:
            c = api.mirror(c)
        self.a, _ = api.place(a, layouts[0])
        # X X^T, and every other time a pair whose product's lower triangle alone counts.
        self.b = self.a if symmetric and seed % 2 == 0 else api.place(b, layouts[1])[0]
        self.c, _ = api.place(c, layouts[2])
        self.d, self.buffer = api.poisoned((batch, m, n), dtype, layouts[3])
        self.alphas = randn(batch, dtype=torch.float32, seed=seed + 3) if factors else None
        self.betas = randn(batch, dtype=torch.float32, seed=seed + 4) if factors else None

    def exact(self, dtype: torch.dtype = torch.float64) -> Tensor:
        c = None if self.beta == 0.0 else self.c
        return api.exact_product(
            self.a, self.b, c, self.symmetric, self.alpha, self.beta, self.alphas, self.betas, dtype
        )

    def run(self, backend: int) -> Tensor:
        """D of one call."""
        args = (self.alpha, self.beta, self.alphas, self.betas)
        product = api.gemm(self.d, self.a, self.b, self.c, *args)
        api.run_gemm(product, self.symmetric, backend)
        return self.d

    def check(self, backend: int) -> Tensor:
        """Run, then compare values, symmetry and surroundings."""
        exact, usual = self.exact(), self.exact(torch.float32)
        d = self.run(backend)
        api.assert_close(d, exact, usual, self.what)
        assert api.only_inside_was_written(d, self.buffer), self.what
        if self.symmetric:
            assert torch.equal(d, d.mT), self.what
        return d


# ---- sizes -------------------------------------------------------------------------------------------


def test_all_sizes_up_to_17(backend, symmetric):
    for m, n in itertools.product(range(1, 18), repeat=2):
        k, batch = (1, 8, 17, 3)[(m + n) % 4], (1, 2, 3)[(m + 2 * n) % 3]
        sizes = (m, m, n) if symmetric else (m, n, k)
        Product(symmetric, batch, *sizes, dtype=api.HALVES[m % 2], seed=m + n).check(backend)


def test_sizes_around_powers_of_two(backend, symmetric):
    pick = random.Random(1)
    for i, m in enumerate(SIZES * 2):
        n, k = pick.choice(SIZES), pick.choice(SIZES)
        Product(
            symmetric, pick.choice((1, 2, 3)), m, n, k, api.HALVES[i % 2], beta=i % 3 * 0.5, seed=i
        ).check(backend)


def test_large_odd_sizes(backend, symmetric):
    pick = random.Random(2)
    for i, m in enumerate(LARGE):
        n, k = pick.choice(LARGE), pick.choice((*LARGE, 1))
        Product(symmetric, 1, m, n, k, api.HALVES[i % 2], beta=i % 2 * 1.0, seed=i).check(backend)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(64, 64, 20000), (300, 24, 9000), (24, 5000, 24), (5000, 24, 24), (1, 1, 1000)],
)
def test_long_sums_and_thin_matrices(m, n, k, backend, symmetric):
    Product(symmetric, 2, min(m, 513) if symmetric else m, n, k).check(backend)


@pytest.mark.parametrize("m", [1, 24, 65, 128, 200])
def test_batch_of_67(m, backend, symmetric):
    Product(symmetric, 67, m, 72, 130, beta=0.5).check(backend)


def test_70000_tiny_matrices(backend, symmetric):
    Product(symmetric, 70000, 5, 6, 7).check(backend)


def test_integers_are_exact(backend):
    generator = torch.Generator(api.DEVICE).manual_seed(0)
    for m, n, k in [(128, 128, 64), (200, 328, 136), (72, 64, 1000), (513, 129, 65)]:
        a, b = (
            torch.randint(-2, 3, (2, *s), generator=generator, device=api.DEVICE).half()
            for s in ((m, k), (k, n))
        )
        d, _ = api.poisoned((2, m, n), torch.float16)
        api.run_gemm(api.gemm(d, a, b), False, backend)
        assert torch.equal(d.double(), a.double() @ b.double())


# ---- layouts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operand", range(4), ids=["a", "b", "c", "d"])
@pytest.mark.parametrize("layout", api.LAYOUTS)
def test_every_layout_of_every_operand(layout, operand, backend, symmetric):
    layouts = tuple(layout if i == operand else "dense" for i in range(4))
    for i, (m, n, k) in enumerate(
        [(72, 40, 136), (65, 131, 33), (1, 9, 8), (9, 1, 17), (300, 264, 100)]
    ):
        Product(symmetric, 1 + i % 3, m, n, k, layouts=layouts, beta=0.5, seed=i).check(backend)


def test_mixed_layouts(backend, symmetric):
    pick = random.Random(3)
    for i in range(40):
        layouts = tuple(pick.choice(api.LAYOUTS) for _ in range(4))
        m, n, k = (pick.choice(SIZES[:20]) for _ in range(3))
        Product(
            symmetric, pick.choice((1, 2)), m, n, k, api.HALVES[i % 2], layouts, alpha=-0.5,
            beta=pick.choice((0.0, 1.0)), factors=i % 3 == 0, seed=i,
        ).check(backend)  # fmt: skip


def test_a_stride_of_a_single_matrix_or_row_does_not_count(backend, symmetric):
    memory = randn(4096)
    a = memory.as_strided((1, 1, 24), (7, 5, 1))
    b = memory.as_strided((1, 1, 24), (3, 2, 1))
    b = b if symmetric else b.mT
    d, _ = api.poisoned((1, 1, 1), torch.float16)
    api.run_gemm(api.gemm(d, a, b), symmetric, backend)
    exact = api.exact_product(a, b, None, symmetric)
    api.assert_close(d, exact, exact.float(), "strides of single rows")


def test_strides_beyond_2_31_elements(backend):
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of GPU memory")
    stride = (1 << 31) + 64
    memory = torch.empty(2 * stride + 64 * 200, dtype=torch.float16, device=api.DEVICE)
    far = memory.as_strided((3, 130, 64), (stride, 64, 1))
    far.copy_(randn(3, 130, 64))
    d, _ = api.poisoned((3, 130, 130), torch.float16, "padded")
    api.run_gemm(api.gemm(d, far, far), True, backend)
    exact = api.exact_product(far, far, None, True)
    api.assert_close(d, exact, exact.float(), "far operands")
    a = randn(3, 130, 24, seed=1)
    api.run_gemm(api.gemm(far, a, a[:, :64].mT), False, backend)
    exact = a.double() @ a[:, :64].double().mT
    api.assert_close(far, exact, exact.float(), "far result")


def test_a_matrix_of_more_than_2_31_elements(backend):
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of GPU memory")
    n = (1 << 25) + 8
    a, b = randn(1, 72, 8), randn(1, 8, n, seed=1)
    d = torch.full((1, 72, n), float("nan"), dtype=torch.float16, device=api.DEVICE)
    api.run_gemm(api.gemm(d, a, b), False, backend)
    assert not bool(d.isnan().any())
    for start in (0, n // 2, n - 1000):
        part = slice(start, start + 1000)
        exact = a.double() @ b[:, :, part].double()
        api.assert_close(d[:, :, part], exact, exact.float(), start)


# ---- terms -------------------------------------------------------------------------------------------


def test_zero_beta_does_not_read_c(backend, symmetric):
    p = Product(symmetric, 2, 100, 72, 40)
    p.c.fill_(float("nan"))
    p.check(backend)


def test_zero_alpha_reads_neither_operand(backend, symmetric):
    p = Product(symmetric, 2, 100, 72, 40, alpha=0.0, beta=2.0)
    p.a.fill_(float("nan"))
    p.b.fill_(float("inf"))
    assert torch.equal(p.run(backend), 2 * p.c)


def test_no_sum_leaves_the_other_term(backend, symmetric):
    p = Product(symmetric, 2, 40, 24, 0, beta=2.0)
    assert torch.equal(p.run(backend), 2 * p.c)
    p = Product(symmetric, 2, 40, 24, 0)
    assert torch.equal(p.run(backend), torch.zeros_like(p.d))


@pytest.mark.parametrize("sizes", [(0, 8, 8, 8), (2, 0, 8, 8), (2, 0, 0, 0)])
def test_empty(sizes, backend, symmetric):
    p = Product(symmetric, *sizes)
    assert p.run(backend).numel() == 0


def test_factors_on_the_device(backend, symmetric):
    for m in (33, 128, 264):
        Product(symmetric, 3, m, 72, 40, alpha=0.5, beta=-2.0, factors=True).check(backend)
    p = Product(symmetric, 3, 200, 72, 40, alpha=0.5, beta=-2.0, factors=True)
    p.alphas[:2] = torch.tensor([0.0, 1e-9])
    p.check(backend)


@pytest.mark.parametrize("layout", ["dense", "padded", "strided", "offset"])
def test_d_may_be_c(layout, backend, symmetric):
    for m in (40, 129, 264):
        p = Product(symmetric, 2, m, 72, 40, layouts=("dense", "dense", "dense", layout), beta=0.5)
        exact, usual = p.exact(), p.exact(torch.float32)
        p.d.copy_(p.c)
        p.c = p.d
        api.assert_close(p.run(backend), exact, usual, m)
        assert not symmetric or torch.equal(p.d, p.d.mT)
        assert api.only_inside_was_written(p.d, p.buffer)


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("layout", ["dense", "padded", "columns", "offset"])
def test_c_may_be_an_operand(layout, operand, backend, symmetric):
    """D = alpha A B + beta A, or + beta B: what Newton-Schulz is made of."""
    for i, n in enumerate((*SIZES[3:], 1027)):
        other = (72, 136, 8, 264)[i % 4]
        m, k, n = (other, n, n) if operand == "a" else (n, n, other)
        layouts = (layout, layout, "dense", "dense")
        p = Product(
            symmetric, 1 + i % 3, n if symmetric else m, n, n if symmetric else k, api.HALVES[i % 2],
            layouts, alpha=0.5, beta=-1.5, factors=i % 2 == 0, seed=2 * i + 1,
        )  # fmt: skip
        p.a.copy_(api.mirror(p.a) if symmetric else p.a)
        p.b.copy_(api.mirror(p.b) if symmetric else p.b)
        p.c = p.a if operand == "a" else p.b
        p.check(backend)


def test_lists_of_products_with_all_terms(backend):
    """alpha A A^T + beta C + gamma E + delta I for more products than fit into one launch."""
    sizes = [(64, 100, 2), (200, 64, 1), (130, 130, 3), (8, 8, 5), (257, 257, 1), (1, 1, 1)]
    for dtype in api.HALVES:
        groups, rest = [], []
        for i, (n, k, batch) in enumerate(sizes * 4):
            a, c, e = (randn(batch, n, s, dtype=dtype, seed=i + j) for j, s in enumerate((k, n, n)))
            a, c, e = (api.place(t, "padded")[0] for t in (a, api.mirror(c), api.mirror(e)))
            if n == k and i % 4 != 0:
                a = c  # as in b R + c R R
            d, buffer = api.poisoned((batch, n, n), dtype, "padded")
            product = api.gemm(d, a, a, c, 0.5, 1.5)
            groups.append(api.CGroup(product, api.describe(e), -0.75, 3.25, 1, 0))
            rest.append((d, a, c, e, buffer))
        api.run_groups(groups, True, backend)
        for (d, a, c, e, _), group in zip(rest, groups, strict=True):
            exact, usual = (
                api.exact_product(a, a, c, True, 0.5, 1.5, dtype=t)
                - 0.75 * e.to(t)
                + 3.25 * torch.eye(d.size(1), dtype=t, device=api.DEVICE)
                for t in (torch.float64, torch.float32)
            )
            api.assert_close(d, exact, usual, d.shape)
            assert torch.equal(d, d.mT)
            alone = d.clone()
            api.run_groups([group], True, backend)
            assert torch.equal(d, alone), "a list changes bits"


@pytest.mark.parametrize("layout", ["padded", "columns", "odd columns", "offset"])
def test_what_lies_beside_an_operand_does_not_reach_the_result(layout, backend, symmetric):
    """Rows end within 16 bytes that a copy would take whole: NaN and Inf there times zero are NaN."""
    for m, n, k in [(1, 9, 17), (9, 1, 7), (65, 131, 33), (129, 70, 263), (300, 259, 71)]:
        p = Product(symmetric, 2, m, n, k, layouts=(layout,) * 3 + ("dense",), beta=0.5)
        first = p.check(backend).clone()
        for beside in (float("inf"), 0.0):
            p.a, p.b, p.c = (api.place(t, layout, beside=beside)[0] for t in (p.a, p.b, p.c))
            assert torch.equal(p.run(backend), first), (p.what, beside)


# ---- special values ----------------------------------------------------------------------------------


def test_zeros_overflow_nan_and_inf_stay_in_their_matrix(backend, symmetric):
    p = Product(symmetric, 7, 136, 72, 200)
    clean = p.run(backend).clone()
    p.a[1] = 0
    p.a[2] = 6e4
    p.a[3, 5, 6] = float("nan")
    p.a[4, 7, 199] = float("inf")
    p.a[5, 0, 0] = 6e4
    b = p.b
    b[1] = 0
    b[2] = 6e4
    d = p.run(backend)
    assert torch.equal(d[[0, 6]], clean[[0, 6]])
    assert bool((d[1] == 0).all())
    assert bool((d[2] == float("inf")).all())
    assert bool(d[3, 5].isnan().all())
    assert bool((~d[4, 7].isfinite()).all())
    others = [i for i in range(136) if i not in (5, 7)]
    if not symmetric:
        assert torch.equal(d[3, others], clean[3, others])
        assert torch.equal(d[4, others], clean[4, others])
    assert symmetric or torch.equal(d[5, 1:], clean[5, 1:])


# ---- determinism -------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [72, 515, 1408])
def test_50_repeats_are_equal_while_another_stream_is_busy(m, backend, symmetric):
    p = Product(symmetric, 3, m, 392, 777, beta=0.5)
    first = p.run(backend).clone()
    different = torch.zeros((), dtype=torch.int64, device=api.DEVICE)
    with api.Busy():
        for _ in range(50):
            p.d.fill_(float("nan"))
            p.run(backend)
            different += (api.bits(p.d) != api.bits(first)).sum()
    assert int(different) == 0


@pytest.mark.parametrize(
    ("m", "n", "k", "batch"),
    [(m, 136, 200, 67) for m in (17, 64, 130, 264, 512)] + [(1100,) * 3 + (2,)],
)
def test_batch_size_and_place_change_no_bit(m, n, k, batch, backend, symmetric):
    """Of 1100 either one matrix or two have tiles that are computed in halves, on 132 multiprocessors."""
    p = Product(symmetric, batch, m, n, k, beta=0.5, factors=True)
    all_of_them = p.check(backend)
    for i in {0, 1, batch // 2, batch - 1}:
        d, _ = api.poisoned(all_of_them[i : i + 1].shape, torch.float16)
        one = slice(i, i + 1)
        args = (p.a[one], p.b[one], p.c[one], p.alpha, p.beta, p.alphas[one], p.betas[one])
        api.run_gemm(api.gemm(d, *args), symmetric, backend)
        assert torch.equal(d[0], all_of_them[i])


@pytest.mark.slow
def test_soak_of_100000_products(backend):
    """Both products of 512 x 1408 matrices, 100,000 times, bitwise equal."""
    x = randn(8, 512, 1408) / 1408**0.5
    gram, y = (api.poisoned(s, torch.float16)[0] for s in ((8, 512, 512), (8, 512, 1408)))
    products = (
        (api.gemm(gram, x, x), True),
        (api.gemm(y, gram, x, x, 0.5, 1.0), False),
    )
    different = torch.zeros((), dtype=torch.int64, device=api.DEVICE)
    first: list[Tensor] = []
    for turn in range(50_000):
        for product, symmetric in products:
            api.run_gemm(product, symmetric, backend)
        if turn == 0:
            first = [gram.clone(), y.clone()]
        different += (api.bits(gram) != api.bits(first[0])).sum()
        different += (api.bits(y) != api.bits(first[1])).sum()
    assert int(different) == 0


# ---- streams, graphs, devices: the functions of dion3 ------------------------------------------------


def functions(a: Tensor, c: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Both products by dion3's functions."""
    gram = symmetric_mm(a, a, c, alpha=factor, beta=0.5)
    return gram, gemm_add(gram, a, a, alpha=0.5, beta=factor)


def exact_functions(
    a: Tensor, c: Tensor, factor: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What they approximate, each from operands in 16 bit."""
    gram = api.exact_product(a, a, c, True, 1.0, 0.5, factor.expand(a.size(0)), dtype=dtype)
    first = gram.to(a.dtype)
    return gram, 0.5 * first.to(dtype) @ a.to(dtype) + factor.to(dtype) * a.to(dtype)


def operands(n: int = 200, m: int = 301) -> tuple[Tensor, Tensor, Tensor]:
    return (
        randn(3, n, m) / m**0.5,
        api.mirror(randn(3, n, n, seed=1)),
        torch.tensor([1.5], device=api.DEVICE),
    )


def check_functions(results: tuple[Tensor, Tensor], given: tuple[Tensor, Tensor, Tensor]) -> None:
    pairs = zip(
        results,
        exact_functions(*given, dtype=torch.float64),
        exact_functions(*given, dtype=torch.float32),
        strict=True,
    )
    for i, (result, exact, usual) in enumerate(pairs):
        api.assert_close(result, exact, usual, i)


def test_functions_use_the_kernels():
    api.library()
    given = operands()
    check_functions(functions(*given), given)
    gram, _ = functions(*given)
    native = torch.ops.dion3._symmetric_mm(
        given[0], given[0], given[1], 1.0, 0.5, given[2], None, 0
    )
    assert torch.equal(gram, native)


def test_graph_capture_and_replay():
    api.library()
    static = operands()
    functions(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = functions(*static)
    for i in range(20):
        fresh = (
            randn(3, 200, 301, seed=i) / 17,
            static[1],
            torch.tensor([0.1 * i], device=api.DEVICE),
        )
        for to, source in zip(static, fresh, strict=True):
            to.copy_(source)
        graph.replay()
        for replayed, eager in zip(results, functions(*static), strict=True):
            assert torch.equal(replayed, eager)
    check_functions(results, static)


def test_runs_on_the_current_stream():
    api.library()
    given = operands()
    wanted = functions(*given)
    late = torch.full_like(given[0], float("nan"))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what another stream would not wait for
        late.copy_(given[0])
        results = functions(late, *given[1:])
    stream.synchronize()
    for result, expected in zip(results, wanted, strict=True):
        assert torch.equal(result, expected)


def test_runs_on_the_tensors_device():
    api.library()
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given = operands()
    wanted = functions(*given)
    with torch.cuda.device(0):
        results = functions(*(t.to("cuda:1") for t in given))
    for result, expected in zip(results, wanted, strict=True):
        assert result.device == torch.device("cuda:1")
        if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
            assert torch.equal(result.to("cuda:0"), expected)


def test_deterministic_mode_and_reduced_precision_settings_do_not_matter():
    api.library()
    given = operands()
    wanted = functions(*given)
    before = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    torch.use_deterministic_algorithms(True)
    try:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = not before
        results = functions(*given)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = before
    for result, expected in zip(results, wanted, strict=True):
        assert torch.equal(result, expected)
