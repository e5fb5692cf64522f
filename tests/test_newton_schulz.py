"""The Newton-Schulz functions and products: values, shapes, strides, batches, dtypes, errors, operators."""

from __future__ import annotations

import sys

import ns_reference as ref
import pytest
import torch
from torch.library import opcheck

from dion3.coefficients import DEFAULT, KELLER, YOU, normalize_coefficients
from dion3.newton_schulz import gemm_add, gram_ns, newton_schulz, orthogonalize, symmetric_mm
from dion3.products import CACHE_LINE, at_cache_lines, empty_matrices, product
from dion3.program import build_program

matrix_ops = sys.modules["dion3.matrix_ops"]

FUNCTIONS = (gram_ns, newton_schulz)
FLOAT16S = (torch.float16, torch.bfloat16)
SHAPES = (
    (1, 1), (1, 9), (9, 1), (4, 100), (10, 10), (16, 4), (4, 16), (72, 33), (128, 1), (17, 18), (31, 33),
    (63, 65), (64, 64), (65, 129), (130, 257), (18, 300),
)  # fmt: skip
FLAT = [value for row in DEFAULT for value in row]


def randn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    values = torch.randn(*shape, generator=ref.seeded(seed), dtype=torch.float64)
    return values.to(dtype).to(device)


def batch_invariant(dtype, device):
    """Whether the place of a matrix in its batch is promised to change no bit."""
    return device.type == "cpu" or dtype in (torch.float16, torch.bfloat16)


@pytest.fixture(params=[1, 2])
def threads(request):
    """The number of threads torch uses, restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# ---- values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("f", FUNCTIONS)
def test_float64_is_the_exact_polynomial(f, shape, device):
    X = randn(2, *shape, dtype=torch.float64, device=device)
    result = f(X)
    assert result.dtype == torch.float64 and result.shape == X.shape
    # Gram restarts with condition numbers squared: 1e-11 is the float64 image of its 1e-5 in float32.
    assert ref.relative(result, ref.exact(X)) < 1e-11


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-4), (torch.float16, 0.03), (torch.bfloat16, 0.24)]
)
def test_values_in_every_compute_dtype(shape, dtype, bound, device):
    X = randn(3, *shape, device=device)
    exact = ref.exact(X)
    for f in FUNCTIONS:
        result = f(X, dtype=dtype)
        assert result.dtype == torch.float32 and result.shape == X.shape
        assert ref.relative(result, exact) < bound
    # The standard form against what an eager 16-bit code makes of the same matrix.
    if dtype in FLOAT16S:
        usual = torch.stack([ref.eager(x, DEFAULT, dtype) for x in X.cpu()])
        ours = newton_schulz(X, dtype=dtype)
        assert ref.relative(ours, exact) < 2 * ref.relative(usual, exact) + 1e-3


@pytest.mark.parametrize(
    "coefficients", [YOU, KELLER, (DEFAULT[0],), DEFAULT[:2], DEFAULT + DEFAULT[-1:] * 2]
)
@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (24, 24)])
def test_other_coefficients_and_numbers_of_steps(coefficients, shape, device):
    X = randn(*shape, dtype=torch.float64, device=device)
    table = normalize_coefficients(coefficients)
    for f in FUNCTIONS:
        assert ref.relative(f(X, coefficients=coefficients), ref.exact(X, table)) < 1e-11


@pytest.mark.parametrize("restarts", [[], [1], [4], [2, 3], (4, 2), [1, 2, 3, 4]])
def test_restarts_change_nothing_in_exact_arithmetic(restarts, device):
    X = ref.with_spectrum(ref.log_down(-1, 20), 50, 1).to(device)
    assert ref.relative(gram_ns(X, restarts=restarts), ref.exact(X)) < 1e-9


def test_gram_restarted_after_every_iteration_is_the_standard_form(device):
    X = randn(20, 50, device=device)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(
            gram_ns(X, restarts=[1, 2, 3, 4], dtype=dtype), newton_schulz(X, dtype=dtype)
        )


def test_square_matrices_take_the_standard_form(device):
    X = randn(3, 20, 20, device=device)
    assert torch.equal(gram_ns(X), newton_schulz(X))
    assert not torch.equal(gram_ns(X[..., :19]), newton_schulz(X[..., :19]))


def test_short_side_is_the_side_of_the_square_products(monkeypatch):
    """Dropping the transposition of tall matrices leaves the values but not the cost."""
    products = sys.modules["dion3.products"]
    sizes = []
    original = products.product

    def spy(left, right, out, **kwargs):
        sizes.append((out.shape[1:], left.size(-1)))
        return original(left, right, out, **kwargs)

    monkeypatch.setattr(products, "product", spy)
    for dtype in (torch.float32, torch.float16):
        for shape in ((8, 40), (40, 8)):
            sizes.clear()
            gram_ns(randn(*shape), dtype=dtype)
            assert len(sizes) == 18
            flops = sum(out[0] * out[1] * k for out, k in sizes)
            assert flops == 14 * 8**3 + 4 * 8 * 8 * 40


def test_products_of_a_program_are_as_many_as_the_formula_says():
    for restarts in ((), (1,), (2,), (1, 3), (2, 4)):
        program = build_program(DEFAULT, restarts)
        bounds = (0, *restarts, 5)
        lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        assert sum(s.kind == "symmetric" for s in program) == sum(4 * n - 3 for n in lengths)
        assert sum(s.kind == "gram" for s in program) == len(lengths)
        assert sum(s.kind == "general" for s in program) == len(lengths)
        for stage in program:
            assert stage.out not in (stage.left, stage.right)


def test_transposed_input_gives_the_transposed_result(device):
    X = randn(2, 30, 70, device=device)
    for dtype, atol in ((torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 0.1)):
        ours, usual = gram_ns(X.mT, dtype=dtype), gram_ns(X, dtype=dtype).mT
        torch.testing.assert_close(ours, usual, rtol=0, atol=atol)
        # The emulation transposes; kernels multiply from the other side instead.
        assert device.type != "cpu" or dtype == torch.float32 or torch.equal(ours, usual)


def test_orthogonalize_is_kellers_quintic_in_bfloat16(device):
    for shape in ((3, 20, 50), (50, 20), (20, 20)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            G = randn(*shape, dtype=dtype, device=device)
            for steps in (5, 3):
                result = orthogonalize(G, steps)
                assert result.dtype == torch.bfloat16 and result.shape == G.shape
                # One rounding to bfloat16 is 1.7e-3; on a GPU that of the float16 iterations is added.
                bound = 4e-3 if device.type == "cpu" else 8e-3
                assert ref.relative(result, ref.exact(G, (KELLER,) * steps)) < bound


KINDS = {
    "gaussian": lambda n, m, s: randn(n, m, seed=s, dtype=torch.float64),
    "ill-conditioned": lambda n, m, s: ref.with_spectrum(ref.log_down(-6, n), m, s),
    "low rank": lambda n, m, s: ref.with_spectrum(ref.pad(ref.log_down(-1, n // 8), n), m, s),
    "heavy tail": lambda n, m, s: (
        randn(n, m, seed=s, dtype=torch.float64)
        / randn(n, m, seed=s + 1, dtype=torch.float64).abs().clamp(min=1e-2)
    ),
    "large": lambda n, m, s: randn(n, m, seed=s, dtype=torch.float64) * 1e3,
    "small": lambda n, m, s: randn(n, m, seed=s, dtype=torch.float64) * 1e-3,
    "near-orthogonal": lambda n, m, s: ref.with_spectrum(torch.linspace(0.95, 1.05, n), m, s),
}
CASES = ((32, 32), (64, 64), (32, 128), (128, 32), (48, 100), (96, 96), (64, 256))


def test_49_cases_against_the_eager_bfloat16_code(device):
    """Keller's quintic in bfloat16, seven shapes by seven kinds: error beside that of op-by-op bf16."""
    ratios, better = [], []
    for index, (rows, cols) in enumerate(CASES):
        for name, make in KINDS.items():
            n, m = min(rows, cols), max(rows, cols)
            G = make(n, m, 10 * index).float()
            G = (G.T if rows > cols else G).to(device)
            exact = ref.exact(G, (KELLER,) * 5)
            usual = ref.relative(ref.eager(G.cpu(), (KELLER,) * 5, torch.bfloat16), exact)
            fused = newton_schulz(G, coefficients=KELLER, dtype=torch.bfloat16).to(torch.bfloat16)
            ratios.append(ref.relative(fused, exact) / usual)
            best = orthogonalize(G)
            better.append(ref.relative(best, exact) / usual)
            cosine = (best.double().cpu() * exact).sum() / (
                best.double().norm().cpu() * exact.norm()
            )
            assert cosine > 0.978, (rows, cols, name)
            drift = torch.linalg.svdvals(best.double().cpu()) - torch.linalg.svdvals(exact)
            assert drift.abs().max() < 0.17, (rows, cols, name)
    assert len(ratios) == 49
    assert torch.tensor(ratios).median() < 0.65 and max(ratios) < 0.80, max(ratios)
    assert torch.tensor(better).median() < (0.15 if device.type == "cpu" else 0.3)
    assert max(better) < 0.5


# ---- the batch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(1, 7), (7, 13), (33, 65), (65, 33), (48, 48), (128, 300), (18, 1300)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_grouped_equals_single_bitwise(shape, dtype, threads, device):
    if not batch_invariant(dtype, device):
        pytest.skip("wide arithmetic on CUDA is cuBLAS's, which promises nothing about batches")
    X = randn(7, *shape, device=device)
    for f in FUNCTIONS:
        whole = f(X, dtype=dtype)
        for i in range(7):
            assert torch.equal(f(X[i], dtype=dtype), whole[i])
        assert torch.equal(f(X[2:4], dtype=dtype), whole[2:4])
        assert torch.equal(f(X.flip(0), dtype=dtype), whole.flip(0))
        assert torch.equal(f(X[:6].view(2, 3, *shape), dtype=dtype), whole[:6].view(2, 3, *shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("major", ["rows", "columns"])
def test_matrices_of_a_cpu_begin_at_cache_lines(major, dtype):
    """Not all processors show what depends on it, so the places themselves are looked at."""

    def begins(x):
        return {matrix.data_ptr() % CACHE_LINE for matrix in x}

    assert begins(empty_matrices((5, 7, 13), dtype, torch.device("cpu"))) == {0}
    x = randn(1 + 5 * 7 * 13).to(dtype)[1:].view(5, 7, 13)
    x = x if major == "rows" else x.mT
    assert begins(x) != {0}
    moved = at_cache_lines(x)
    assert begins(moved) == {0} and torch.equal(moved, x)
    assert moved.stride()[1:] == x.stride()[1:] and at_cache_lines(moved) is moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(7, 13), (13, 7), (9, 9)])
def test_products_of_a_cpu_are_given_cache_lines(shape, dtype, monkeypatch):
    """Inputs that begin elsewhere, and a result that should; not all processors show the difference."""
    misplaced = []
    for name in ("bmm", "baddbmm"):
        call = getattr(torch, name)

        def watched(*args, out, call=call, **factors):
            for matrices in (*args[-2:], out):
                misplaced.extend(m for m in matrices if m.data_ptr() % CACHE_LINE)
            return call(*args, out=out, **factors)

        monkeypatch.setattr(torch, name, watched)
    x = randn(1 + 5 * shape[0] * shape[1]).to(dtype)[1:].view(5, *shape)
    gram = symmetric_mm(x)
    gemm_add(gram, x, x, alpha=0.5, beta=2.0)
    for f in FUNCTIONS:
        f(x, dtype=dtype)
    assert not misplaced
    square = torch.full((1 + 5 * shape[0] ** 2,), torch.nan, dtype=dtype)[1:]
    square = square.view(5, shape[0], shape[0])
    assert product(x, x.mT, square) is square and not misplaced
    assert torch.equal(square, product(x, x.mT, torch.empty_like(square)))


def test_grouped_equals_single_for_large_groups(threads, device):
    X = randn(64, 24, 40, device=device)
    whole = orthogonalize(X)
    assert all(torch.equal(orthogonalize(X[i]), whole[i]) for i in range(64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_matrices_stand_alone_and_share_the_threads(dtype, monkeypatch):
    changed = []
    monkeypatch.setattr(torch, "set_num_threads", changed.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    X = randn(3, 771, 769)
    for f in (
        lambda x: newton_schulz(x, 2, dtype=dtype),
        lambda x: gram_ns(x[..., :768], 2, dtype=dtype),
        lambda x: symmetric_mm(x.to(dtype)),
        lambda x: symmetric_mm(x.to(dtype), alpha=torch.tensor(2.0)),
    ):
        whole = f(X)
        assert all(torch.equal(f(X[i]), whole[i]) for i in range(3))
    assert not changed
    gram_ns(X[0, :767], dtype=dtype)
    assert changed[0] == 1 and changed[-1] == 4  # of smaller ones no two threads share one


def test_result_does_not_depend_on_the_number_of_threads_or_on_chunks(monkeypatch):
    X = randn(9, 40, 90)
    before = torch.get_num_threads()
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            results = []
            for count in (1, 2, 4):
                torch.set_num_threads(count)
                results += [
                    gram_ns(X, dtype=dtype),
                    torch.stack([gram_ns(x, dtype=dtype) for x in X]),
                ]
                assert torch.get_num_threads() == count
            monkeypatch.setitem(matrix_ops.CHUNK_BYTES, "cpu", 1)
            results.append(gram_ns(X, dtype=dtype))
            monkeypatch.undo()
            assert all(torch.equal(r, results[0]) for r in results)
    finally:
        torch.set_num_threads(before)


def test_repeatable(device):
    X = randn(3, 33, 70, device=device)
    assert torch.equal(gram_ns(X, dtype=torch.float16), gram_ns(X, dtype=torch.float16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_inf_stay_in_their_matrix(bad, dtype, device):
    X = randn(4, 12, 30, device=device)
    clean = gram_ns(X, dtype=dtype)
    X[2, 3, 4] = bad
    result = gram_ns(X, dtype=dtype)
    keep = [0, 1, 3]
    assert torch.equal(result[keep], clean[keep])
    assert not result[2].isfinite().all()


# ---- scale -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_scale_invariance(dtype, device):
    X = randn(2, 20, 50, device=device)
    result = gram_ns(X, dtype=dtype)
    for power in (-100, -64, 64, 100):  # 2^100 is 1.3e30: a power of two scales exactly
        assert torch.equal(gram_ns(X * 2.0**power, dtype=dtype), result)
    exact = ref.exact(X)
    for scale in (1e-30, 1e-12, 1e12, 1e30):
        assert ref.relative(gram_ns(X * scale, dtype=torch.float32), exact) < 1e-4
    half = X.half() * 500  # squares overflow float16
    assert ref.relative(gram_ns(half, dtype=torch.float32), ref.exact(half)) < 5e-4


def test_zero_and_denormal_matrices(device):
    X = randn(3, 6, 9, device=device)
    X[1] = 0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        result = gram_ns(X, dtype=dtype)
        assert torch.equal(result[1], torch.zeros_like(X[1]))
        if batch_invariant(dtype, device):
            assert torch.equal(result[0], gram_ns(X[0], dtype=dtype))
        assert result.isfinite().all()
    assert torch.equal(orthogonalize(X)[1], torch.zeros(6, 9, dtype=torch.bfloat16, device=device))
    tiny = torch.full((4, 6), 1e-42, device=device)
    assert gram_ns(tiny).isfinite().all() and orthogonalize(tiny).isfinite().all()


def test_eps_is_the_least_divisor(device):
    X = randn(6, 9, device=device, dtype=torch.float64)
    norm = X.norm().item()
    assert torch.equal(gram_ns(X, eps=0.5 * norm), gram_ns(X))
    half = gram_ns(X, eps=2 * norm)
    U, S, Vh = torch.linalg.svd(X / (2 * norm), full_matrices=False)
    for a, b, c in DEFAULT:
        S = a * S + b * S**3 + c * S**5
    assert ref.relative(half, (U @ S.diag() @ Vh).cpu()) < 1e-12


# ---- strides, dtypes, empties --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compute", [None, torch.float32, torch.float16, torch.bfloat16])
def test_views_and_the_input_stays(dtype, compute, device):
    base = randn(3, 40, 60, dtype=dtype, device=device)
    views = {
        "dense": base,
        "transposed": base.mT,
        "sliced": base[:, 1:21:2, 3:50:3],
        "one row": base[:, :1],
        "permuted batch": base.permute(1, 0, 2),
        "expanded": base[:1].expand(3, 40, 60),
        "unit": base.mT.contiguous().mT,
    }
    for name, view in views.items():
        before = base.clone()
        for f in (*FUNCTIONS, orthogonalize):
            options = {} if f is orthogonalize else {"dtype": compute}
            result = f(view, **options)
            assert torch.equal(base, before), name
            assert torch.equal(
                result, f(view.clone(memory_format=torch.contiguous_format), **options)
            ), name
            assert result.dtype == (torch.bfloat16 if f is orthogonalize else dtype)
            assert result.is_contiguous() and result.data_ptr() != view.data_ptr()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 3, 4), (3, 0, 4), (2, 3, 4, 0)])
def test_empty(shape, device):
    X = torch.empty(shape, device=device)
    for f in (*FUNCTIONS, orthogonalize):
        assert f(X).shape == X.shape


def test_small_sizes_all_of_them(device):
    """Every rows x cols up to 17 and around powers of two, in every dtype: no size is special."""
    sizes = [*range(1, 18), 31, 33]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for n in sizes:
            for m in sizes[:: 3 if dtype == torch.float32 else 5]:
                X = torch.ones(n, m, dtype=dtype, device=device)
                exact = ref.exact(torch.ones(n, m))
                error = ref.relative(gram_ns(X).double().cpu(), exact)
                usual = ref.relative(gram_ns(X, backend="reference").double().cpu(), exact)
                assert error < max(0.02, 2 * usual) < 0.3, (n, m, dtype)


def test_normalized_input_is_used_as_it_is_and_never_written(device):
    X = randn(3, 10, 24, device=device)
    X /= X.norm(dim=(-2, -1), keepdim=True)
    for view in (X, X.mT, X.mT.contiguous()):
        for method in ("standard", "gram"):
            before = view.clone()
            result = torch.ops.dion3.newton_schulz(
                view, FLAT, [2], method, torch.float32, True, 0.0
            )
            assert torch.equal(view, before)
            assert ref.relative(result, ref.exact(view)) < 1e-4
    halved = torch.ops.dion3.newton_schulz(X / 2, FLAT, [2], "gram", torch.float32, True, 0.0)
    assert not torch.allclose(halved, gram_ns(X, dtype=torch.float32), atol=1e-3)


def test_grouped_entry_writes_any_output(device):
    xs = [
        randn(2, 8, 20, device=device),
        randn(30, 6, device=device),
        randn(0, 4, 5, device=device),
    ]
    outs = [
        torch.full((2, 20, 8), float("nan"), dtype=torch.float16, device=device).mT,
        torch.full((30, 12), float("nan"), device=device)[:, ::2],
        torch.empty(0, 4, 5, device=device),
    ]
    torch.ops.dion3.newton_schulz_out(xs, outs, FLAT, [2], "auto", torch.float16, False, 0.0)
    for x, out in zip(xs[:2], outs[:2], strict=True):
        torch.testing.assert_close(
            out.float(), gram_ns(x.float(), dtype=torch.float16), rtol=0, atol=1e-3
        )


def test_backends(device):
    X = randn(3, 40, 90, device=device)
    exact = ref.exact(X)
    for dtype in FLOAT16S:
        errors = [
            ref.relative(gram_ns(X, dtype=dtype, backend=backend), exact)
            for backend in ("reference", "auto", "cublas")
        ]
        assert max(errors) < 2 * errors[0], errors
    assert torch.equal(
        gram_ns(X, backend="reference", dtype=torch.float32), gram_ns(X, dtype=torch.float32)
    )


def test_native_bfloat16_rounds_where_the_emulation_does():
    """The fast bf16 products of a CPU: same error as one rounding of fp32, a-terms not rounded."""
    X = ref.accuracy_matrices(64, 256)["Gaussian"]
    exact = ref.exact(X)
    native = ref.relative(newton_schulz(X.float(), dtype=torch.bfloat16), exact)
    book = ref.relative(newton_schulz(X.float(), dtype=torch.bfloat16, backend="reference"), exact)
    assert native == pytest.approx(book, rel=0.05)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_matmul_precision_setting_does_not_reach_the_emulation(precision):
    X = randn(2, 40, 90)
    expected = gram_ns(X, dtype=torch.float16), gram_ns(X)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert torch.equal(gram_ns(X, dtype=torch.float16), expected[0])
        assert torch.equal(gram_ns(X), expected[1])
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


# ---- products ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "size", [(1, 1, 128), (3, 17, 5), (1, 130, 200), (3, 128, 128), (2, 257, 64)]
)
@pytest.mark.parametrize("alpha", [1.0, 2.5])
@pytest.mark.parametrize("beta", [None, 1.0, 0.5])
def test_products_are_as_accurate_as_torch(dtype, size, alpha, beta, device):
    batch, n, k = size
    A = randn(batch, n, k, seed=1, dtype=dtype, device=device)
    B = randn(batch, k, n + 3, seed=2, dtype=dtype, device=device)
    S = randn(batch, n, n, seed=3)
    S = (S + S.mT).to(dtype).to(device)
    G = randn(batch, n, n + 3, seed=4, dtype=dtype, device=device)

    def check(ours, left, right, add):
        wide = alpha * (left.double() @ right.double())
        usual = alpha * (left @ right)
        if beta is not None:
            wide = wide + beta * add.double()
            usual = usual + beta * add
        error = (ours.double() - wide).abs().max()
        assert error <= 2 * (usual.double() - wide).abs().max() + 1e-6 * wide.abs().max()

    factor = 1.0 if beta is None else beta
    gram = symmetric_mm(A, None, None if beta is None else S, alpha, factor)
    assert torch.equal(gram, gram.mT) and gram.dtype == dtype
    check(gram, A, A.mT, S)
    check(gemm_add(A, B, None if beta is None else G, alpha, factor), A, B, G)
    for i in range(batch if batch_invariant(dtype, device) else 0):
        single = symmetric_mm(A[i], None, None if beta is None else S[i], alpha, factor)
        assert torch.equal(single, gram[i])


def test_symmetric_product_takes_the_lower_triangle(device):
    A = randn(2, 5, 7, device=device)
    B = randn(2, 5, 7, seed=1, device=device)
    D = symmetric_mm(A, B)
    assert torch.equal(D, D.mT)
    torch.testing.assert_close(D.tril(), (A @ B.mT).tril())


def test_small_integers_are_exact(device):
    A = torch.randint(-4, 5, (3, 9, 16), generator=ref.seeded(0)).to(device)
    C = torch.randint(-4, 5, (3, 9, 9), generator=ref.seeded(1)).to(device)
    C = C + C.mT
    expected = 2 * (A.double() @ A.mT.double()) - 3 * C
    for dtype in (torch.float16, torch.float32, torch.float64):
        D = symmetric_mm(A.to(dtype), None, C.to(dtype), 2.0, -3.0)
        assert torch.equal(D.double(), expected)
        D = gemm_add(A.to(dtype), A.mT.to(dtype), C.to(dtype), 2.0, -3.0)
        assert torch.equal(D.double(), expected)


def test_one_rounding(device):
    """1 + 2^-8 from the product and 2^-10 from beta C: bf16(1.0049) is 1.0078; two roundings give 1."""
    A = torch.zeros(64, 64, dtype=torch.bfloat16, device=device)
    A[:, 0], A[:, 1] = 1.0, 2.0**-4
    C = torch.full((64, 64), 2.0**-10, dtype=torch.bfloat16, device=device)
    assert torch.equal(symmetric_mm(A, None, C), torch.full_like(C, 1.0078125))
    assert torch.equal(gemm_add(A, A.mT.contiguous(), C), torch.full_like(C, 1.0078125))


def test_zero_beta_does_not_read_c_and_no_sum_is_beta_c(device):
    A = randn(2, 4, 6, device=device)
    C = torch.full((2, 4, 4), float("nan"), device=device)
    assert torch.equal(symmetric_mm(A, None, C, beta=0), symmetric_mm(A))
    assert torch.equal(gemm_add(A, A.mT, C, beta=0), gemm_add(A, A.mT))
    empty = torch.empty(2, 4, 0, device=device)
    C = torch.eye(4, device=device).expand(2, 4, 4)
    assert torch.equal(symmetric_mm(empty, None, C, beta=0.5), 0.5 * C)
    assert torch.equal(gemm_add(empty, empty.mT, C, beta=0.5), 0.5 * C)
    assert symmetric_mm(torch.empty(2, 0, 3, device=device)).shape == (2, 0, 0)
    assert symmetric_mm(torch.empty(0, 2, 3, device=device)).shape == (0, 2, 2)


def test_tensor_factors(device):
    A, C = randn(3, 5, 7, device=device), randn(3, 5, 5, seed=1, device=device)
    C = C + C.mT
    scalar = torch.tensor(1.5, device=device)
    each = torch.tensor([1.0, -2.0, 0.25], device=device)
    for dtype in (torch.float32, torch.float16):
        a, c = A.to(dtype), C.to(dtype)
        torch.testing.assert_close(
            symmetric_mm(a, None, c, scalar, each),
            torch.stack([symmetric_mm(a[i], None, c[i], 1.5, each[i].item()) for i in range(3)]),
        )
        torch.testing.assert_close(
            gemm_add(a, a.mT, c, each, scalar),
            torch.stack([gemm_add(a[i], a[i].mT, c[i], each[i].item(), 1.5) for i in range(3)]),
        )


# ---- operators ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", [torch.float32, torch.float16, torch.bfloat16])
def test_opcheck_newton_schulz(compute, device):
    X = randn(2, 6, 9, device=device)
    for x in (X, X.mT, X[0], X.half(), X[:0]):
        opcheck(torch.ops.dion3.newton_schulz.default, (x, FLAT, [2], "auto", compute, False, 0.0))
    outs = [torch.empty(2, 6, 9, device=device), torch.empty(2, 9, 6, device=device)]
    opcheck(
        torch.ops.dion3.newton_schulz_out.default,
        ([X, X.mT], outs, FLAT, [2], "gram", compute, False, 1e-7),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_opcheck_products(dtype, device):
    A = randn(2, 5, 9, dtype=dtype, device=device)
    C = torch.eye(5, dtype=dtype, device=device).expand(2, 5, 5)
    factor = torch.tensor(2.0, device=device)
    for c in (None, C):
        for options in ({}, {"alpha_tensor": factor, "beta_tensor": factor}):
            opcheck(torch.ops.dion3.symmetric_mm.default, (A, A, c, 1.5, 0.5), options)
            opcheck(torch.ops.dion3.gemm_add.default, (A, A.mT, c, 1.5, 0.5), options)
    opcheck(torch.ops.dion3.symmetric_mm.default, (A[0], A[0], None, 1.5, 0.5))


def test_compiles_without_graph_breaks(device):
    def f(x):
        y = gram_ns(x) + newton_schulz(x, coefficients=KELLER, steps=3)
        y = y + gram_ns(x, coefficients=(KELLER,) * 4, dtype=torch.float16)
        gram = symmetric_mm(x, alpha=2.0) + symmetric_mm(x, beta=torch.tensor(1.0, device=x.device))
        return gemm_add(gram, y, x, 1.0, 0.5), orthogonalize(x)

    x = randn(2, 6, 10, device=device)
    torch._dynamo.reset()
    for ours, eager in zip(
        torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x), strict=True
    ):
        torch.testing.assert_close(ours, eager)


def test_compiles_with_dynamic_shapes(device):
    def f(x):
        return gram_ns(x) + newton_schulz(x, 7), orthogonalize(x)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((6, 10), (9, 4), (5, 5)):
        x = randn(*shape, device=device)
        for ours, eager in zip(compiled(x), f(x), strict=True):
            torch.testing.assert_close(ours, eager)


def test_meta_and_fake_tensors():
    x = torch.empty(3, 5, 8, device="meta")
    assert (
        torch.ops.dion3.newton_schulz(x, FLAT, [2], "gram", torch.float16, False, 0.0).shape
        == x.shape
    )
    assert torch.ops.dion3.symmetric_mm(x, x, None, 1.0, 1.0).shape == (3, 5, 5)


# ---- errors ------------------------------------------------------------------------------------------

X23 = torch.ones(2, 3)


@pytest.mark.parametrize("f", [gram_ns, newton_schulz, orthogonalize])
@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (torch.ones(3), ValueError, "two dimensions"),
        (torch.ones(()), ValueError, "two dimensions"),
        (torch.ones(2, 3, dtype=torch.complex64), TypeError, "real and imaginary"),
        (torch.ones(2, 3, dtype=torch.int64), TypeError, "int64"),
        (torch.ones(2, 3, dtype=torch.bool), TypeError, "bool"),
        (torch.ones(2, 3).to(torch.float8_e4m3fn), TypeError, "float8"),
        (torch.eye(3).to_sparse(), TypeError, "dense"),
        ([[1.0, 2.0]], TypeError, "list"),
        (torch.ones(2, 3, requires_grad=True), RuntimeError, r"torch\.no_grad\(\)"),
    ],
)
def test_input_errors(f, value, error, says):
    with pytest.raises(error, match=says):
        f(value)


def test_gradients_are_refused_only_with_grad_mode_on():
    x = torch.ones(2, 3, requires_grad=True)
    with torch.no_grad():
        assert not gram_ns(x).requires_grad
    assert not gram_ns(x.detach()).requires_grad


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: gram_ns(X23, steps=0), ValueError, "steps"),
        (lambda: gram_ns(X23, steps=100), ValueError, "steps"),
        (lambda: gram_ns(X23, steps=2.0), TypeError, "steps"),
        (lambda: orthogonalize(X23, steps=-1), ValueError, "steps"),
        (lambda: gram_ns(X23, coefficients=[(1.0, 2.0)]), ValueError, "coefficients"),
        (lambda: gram_ns(X23, restarts="2"), ValueError, "restarts"),
        (lambda: gram_ns(X23, restarts=2), TypeError, "restarts"),
        (lambda: gram_ns(X23, restarts=[5]), ValueError, "restarts"),
        (lambda: gram_ns(X23, restarts=[0]), ValueError, "restarts"),
        (lambda: gram_ns(X23, restarts=[2, 2]), ValueError, "repeat"),
        (lambda: gram_ns(X23, restarts=[1.5]), TypeError, "restarts"),
        (lambda: gram_ns(X23, dtype=torch.int32), ValueError, "dtype"),
        (lambda: gram_ns(X23, dtype="float16"), ValueError, "dtype"),
        (lambda: gram_ns(X23, eps=-1.0), ValueError, "eps"),
        (lambda: gram_ns(X23, eps=float("nan")), ValueError, "eps"),
        (lambda: gram_ns(X23, backend="triton"), ValueError, "backend"),
        (lambda: gram_ns(X23, backend="cublas"), ValueError, "float16 or bfloat16"),
        (lambda: gram_ns(X23, backend="sm90", dtype=torch.float16), RuntimeError, "no kernel"),
        (lambda: symmetric_mm([[1.0]]), TypeError, "list"),
        (lambda: symmetric_mm(X23, torch.ones(2, 4)), ValueError, "B must have shape"),
        (lambda: symmetric_mm(X23, C=torch.ones(3, 3)), ValueError, "C must have shape"),
        (lambda: symmetric_mm(X23, X23.half()), TypeError, "B must have A's dtype"),
        (lambda: symmetric_mm(X23, alpha="1"), TypeError, "alpha"),
        (lambda: symmetric_mm(X23, beta=True), TypeError, "beta"),
        (lambda: symmetric_mm(X23, alpha=torch.tensor(1)), TypeError, "alpha"),
        (lambda: symmetric_mm(X23[None], alpha=torch.ones(3)), ValueError, "alpha"),
        (lambda: symmetric_mm(torch.ones(3)), ValueError, "two dimensions"),
        (lambda: gemm_add(X23, X23), ValueError, "B must have shape"),
        (lambda: gemm_add(X23, torch.ones(3, 4), torch.ones(2, 3)), ValueError, "C must have shape"),
        (lambda: gemm_add(X23[None], torch.ones(2, 3, 4)), ValueError, "B must have shape"),
        (lambda: gemm_add(X23, torch.ones(3, 2, requires_grad=True)), RuntimeError, "no_grad"),
        (
            lambda: torch.ops.dion3.newton_schulz(X23, FLAT, [2], "x", torch.float32, False, 0.0),
            ValueError,
            "method",
        ),
        (
            lambda: torch.ops.dion3.newton_schulz(X23, [1.0], [], "gram", torch.float32, False, 0.0),
            ValueError,
            "coefficients",
        ),
    ],
)  # fmt: skip
def test_argument_errors(call, error, says):
    with pytest.raises(error, match=says):
        call()
