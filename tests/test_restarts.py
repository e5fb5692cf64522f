"""The restart search against its published answers, and the scalar blow-up that it prevents."""

from __future__ import annotations

import math
import time

import pytest
import torch

from dion3.coefficients import (
    DEFAULT,
    DION_POLAR_EXPRESS,
    KELLER,
    POLAR_EXPRESS,
    POLAR_EXPRESS_8,
    YOU,
    normalize_coefficients,
    scaled,
)
from dion3.restarts import (
    auto_restarts,
    check_restarts,
    find_restarts,
    restart_metric,
    scalar_run,
)

PE8_UNIFORM = scaled(POLAR_EXPRESS_8, 1.05)
PE8_LAST_FREE = scaled(POLAR_EXPRESS_8[:-1], 1.01) + POLAR_EXPRESS_8[-1:]

TABLE = [
    # coefficients, restarts, metric to the digits published
    (DEFAULT, [2], "84.57"),
    (DEFAULT, [1, 2], "60.87"),
    (DEFAULT, [1, 2, 3], "34.33"),
    (scaled(POLAR_EXPRESS, 1.02), [2], "110.2"),
    (scaled(POLAR_EXPRESS, 1.02), [1, 2], "65.07"),
    (scaled(POLAR_EXPRESS, 1.02), [1, 2, 3], "34.33"),
    (scaled(POLAR_EXPRESS, 1.01), [1], "630.7"),
    (scaled(POLAR_EXPRESS, 1.01), [1, 2], "69.29"),
    (scaled(POLAR_EXPRESS, 1.01), [1, 2, 3], None),
    (YOU, [2], "53.24"),
    (YOU, [1, 3], "34.75"),
    (YOU, [1, 2, 3], None),
    ((KELLER,) * 5, [3], "62.52"),
    ((KELLER,) * 5, [2, 3], "19.13"),
    ((KELLER,) * 5, [2, 3, 4], "13.39"),
    (DION_POLAR_EXPRESS, [2], "118.6"),
    (DION_POLAR_EXPRESS, [1, 2], "70.55"),
    (DION_POLAR_EXPRESS, [1, 2, 3], None),
    (PE8_UNIFORM, [2], "6.076e+04"),
    (PE8_UNIFORM, [2, 4], "84.57"),
    (PE8_UNIFORM, [1, 2, 4], "35.27"),
    (PE8_LAST_FREE, [1, 3], "169.7"),
    (PE8_LAST_FREE, [1, 2, 4], "57.45"),
]


@pytest.mark.parametrize(("coefficients", "restarts", "metric"), TABLE)
def test_search_gives_the_published_answers(coefficients, restarts, metric):
    assert find_restarts(coefficients, len(restarts)) == restarts
    if metric is not None:
        assert f"{restart_metric(coefficients, restarts):.4g}" == metric


@pytest.mark.parametrize(
    ("coefficients", "metric"),
    [
        (DEFAULT, 2.7e12),
        (scaled(POLAR_EXPRESS, 1.02), 9.6e13),
        (scaled(POLAR_EXPRESS, 1.01), 3.4e14),
        (YOU, 2.1e8),
        ((KELLER,) * 5, 3.8e6),
        (DION_POLAR_EXPRESS, 1.7e14),
    ],
)
def test_no_restart_is_returned_on_request_and_reported_as_bad(coefficients, metric):
    assert find_restarts(coefficients, 0) == []
    assert restart_metric(coefficients, []) == pytest.approx(metric, rel=0.03)


def test_overflow_without_restarts():
    assert restart_metric(PE8_UNIFORM, []) == restart_metric(PE8_LAST_FREE, []) == math.inf


def test_too_few_restarts_is_an_error():
    with pytest.raises(RuntimeError, match="need more restarts.*num_restarts=2"):
        find_restarts(PE8_LAST_FREE, 1)
    # 60 identical full-speed polynomials leave the floating-point range wherever one restart falls.
    with pytest.raises(RuntimeError, match="need more restarts"):
        find_restarts((KELLER,) * 60, 1)


def test_defaults_are_the_default_set_and_one_restart():
    assert find_restarts() == find_restarts(DEFAULT, 1, -4e-4) == [2]
    assert restart_metric(None, [1]) == pytest.approx(456, abs=0.5)  # the runner-up
    assert restart_metric(KELLER, [2]) == pytest.approx(74.1, abs=0.05)


def test_ties_go_to_the_first_combination():
    assert restart_metric(PE8_UNIFORM, [2, 4]) == restart_metric(PE8_UNIFORM, [2, 5])
    assert find_restarts(PE8_UNIFORM, 2) == [2, 4]


def test_the_answer_depends_on_the_perturbation_as_published():
    assert find_restarts(DEFAULT, 1, -2e-3) == [1]
    assert restart_metric(DEFAULT, [2], -2e-3) == pytest.approx(4e8, rel=0.05)
    assert find_restarts(KELLER, 1, -1e-3) == [2]


def test_scalar_recurrence_stays_bounded_with_the_restart_and_not_without():
    r, q = scalar_run(DEFAULT, [2])
    assert r.shape == q.shape == (5, 10_000)
    assert r[1].min().item() == pytest.approx(-0.395, abs=5e-4)
    assert r.min() > -0.4
    assert q.max().item() == pytest.approx(31.4, abs=0.05)
    r, q = scalar_run(DEFAULT, [])
    assert r.min() < -1e6
    assert q.abs().max() > 1e6


def test_search_is_fast():
    from dion3.restarts import _search

    _search.cache_clear()
    used = time.process_time()
    find_restarts(POLAR_EXPRESS)
    assert time.process_time() - used < 1.0


def test_search_ignores_default_dtype_and_device():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        assert restart_metric(None, [2]) == pytest.approx(84.57, abs=0.01)
        with torch.device("meta"):
            assert restart_metric(None, [1]) == pytest.approx(456.3, abs=0.1)
    finally:
        torch.set_default_dtype(before)


def test_auto():
    assert auto_restarts(DEFAULT) == [2]
    assert auto_restarts((KELLER,) * 5) == [3]
    assert auto_restarts(PE8_LAST_FREE) == [1, 3]
    assert auto_restarts((KELLER,)) == []
    assert auto_restarts((KELLER,) * 2) == [1]
    first = auto_restarts((KELLER,) * 5)
    first.append(99)
    assert auto_restarts((KELLER,) * 5) == [3]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("steps", [11, 30, 99])
def test_many_iterations_need_no_search(steps):
    # The combinations of 99 iterations would keep a search busy for ever.
    second = list(range(2, steps, 2))
    for coefficients in (KELLER, None):
        table = normalize_coefficients(coefficients, steps)
        assert auto_restarts(table) == second
        assert restart_metric(table, second) < 100
    # Two of these between restarts are not safe, so each stands alone: the standard form.
    steep = ((30.0, -120.0, 110.0),) * steps
    assert auto_restarts(steep) == list(range(1, steps))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: find_restarts(None, -1), ValueError, "num_restarts"),
        (lambda: find_restarts(None, 5), ValueError, "num_restarts"),
        (lambda: find_restarts(None, 1.0), TypeError, "num_restarts"),
        (lambda: find_restarts(None, True), TypeError, "num_restarts"),
        (lambda: find_restarts(None, 9, steps=60), ValueError, "12565671261 combinations"),
        (lambda: find_restarts(None, 1, math.nan), ValueError, "perturbation"),
        (lambda: find_restarts(None, 1, "x"), ValueError, "perturbation"),
        (lambda: find_restarts([(1.0, 2.0)], 1), ValueError, "coefficients"),
        (lambda: restart_metric(None, [5]), ValueError, "restarts"),
        (lambda: restart_metric(None, [0]), ValueError, "restarts"),
        (lambda: restart_metric(None, [1, 1]), ValueError, "repeat"),
        (lambda: restart_metric(None, 2), TypeError, "restarts"),
        (lambda: restart_metric(None, "2"), TypeError, "restarts"),
        (lambda: check_restarts([1.0], 5), TypeError, "restarts"),
    ],
)
def test_errors(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_order_of_given_restarts_does_not_matter():
    assert check_restarts([4, 2], 5) == (2, 4)
