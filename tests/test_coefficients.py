"""Coefficient sets, the safety factor, and what users may pass as coefficients."""

from __future__ import annotations

import math

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


def test_sets_have_the_published_digits():
    assert len(POLAR_EXPRESS) == 5 and len(POLAR_EXPRESS_8) == 8
    assert POLAR_EXPRESS == POLAR_EXPRESS_8[:5]
    assert POLAR_EXPRESS[0] == (8.28721201814563, -23.595886519098837, 17.300387312530933)
    assert POLAR_EXPRESS[4] == (2.300652019954817, -1.6689039845747493, 0.4188073119525673)
    assert POLAR_EXPRESS_8[7] == (15 / 8, -10 / 8, 3 / 8)
    assert KELLER == (3.4445, -4.7750, 2.0315)
    assert YOU[3] == (2.8769, -3.1427, 1.2046)
    assert [row[0] for row in YOU] == [4.0848, 3.9505, 3.7418, 2.8769, 2.8366]
    assert YOU[4][1:] == (-3.0525, 1.2012)
    assert DION_POLAR_EXPRESS[0][0] == 8.156554524902461


@pytest.mark.parametrize("table", [POLAR_EXPRESS_8, YOU, DION_POLAR_EXPRESS, (KELLER,)])
def test_every_polynomial_has_the_signs_that_the_stability_argument_needs(table):
    assert all(a > 0 > b and c > 0 for a, b, c in table)


def test_safety_factor():
    expected = (7.892582874424408, -20.38301394587957, 13.555306149406924)
    assert scaled(POLAR_EXPRESS, 1.05)[0] == pytest.approx(expected, rel=1e-14)
    assert scaled(POLAR_EXPRESS)[0] == scaled(POLAR_EXPRESS, 1.05)[0] == scaled(POLAR_EXPRESS[0])
    assert DEFAULT == scaled(POLAR_EXPRESS, 1.05)


def test_scaled_polynomial_is_the_polynomial_of_the_scaled_argument():
    x = 0.73
    for row in YOU:
        a, b, c = scaled(row, 1.3)
        p, q, r = row
        y = x / 1.3
        assert a * x + b * x**3 + c * x**5 == pytest.approx(p * y + q * y**3 + r * y**5, rel=1e-14)


@pytest.mark.parametrize("safety", [0, -1.0, math.nan, math.inf, "1.05", None])
def test_safety_must_be_positive_and_finite(safety):
    with pytest.raises(ValueError, match="safety"):
        scaled(KELLER, safety)


def test_default_is_polar_express_with_safety():
    assert normalize_coefficients() == normalize_coefficients(None, 5) == DEFAULT
    assert normalize_coefficients(None, 3) == DEFAULT[:3]
    long = normalize_coefficients(None, 11)
    assert len(long) == 11 and long[8] == long[10] == scaled(POLAR_EXPRESS_8[7])


def test_one_triple_is_used_at_every_step():
    assert normalize_coefficients(KELLER) == (KELLER,) * 5
    assert normalize_coefficients(list(KELLER), 2) == (KELLER,) * 2
    assert normalize_coefficients(torch.tensor([1.0, -2.0, 3.0]), 2) == ((1.0, -2.0, 3.0),) * 2
    assert normalize_coefficients((3, -4, 2), 1) == ((3.0, -4.0, 2.0),)


def test_one_triple_per_step():
    assert normalize_coefficients(YOU) == normalize_coefficients([list(r) for r in YOU], 5) == YOU
    assert normalize_coefficients(iter(YOU)) == YOU
    assert normalize_coefficients(torch.tensor(YOU, dtype=torch.float64)) == YOU
    assert len(normalize_coefficients(POLAR_EXPRESS_8)) == 8


@pytest.mark.parametrize(
    ("coefficients", "steps", "error", "says"),
    [
        (YOU, 4, ValueError, "5 triples but steps is 4"),
        ([], None, ValueError, "at least one triple"),
        ([(1.0, 2.0)], None, ValueError, r"coefficients\[0\]"),
        ((1.0, 2.0), None, ValueError, r"coefficients\[0\]"),
        ([KELLER, (1.0, math.nan, 2.0)], None, ValueError, r"coefficients\[1\]"),
        ((1.0, math.inf, 2.0), None, ValueError, "finite"),
        ([KELLER, 3.0], None, ValueError, r"coefficients\[1\]"),
        ([KELLER, "abc"], None, ValueError, r"coefficients\[1\]"),
        ((True, False, True), None, ValueError, "three finite numbers"),
        ("polar", None, TypeError, "coefficients"),
        (3.0, None, TypeError, "coefficients"),
        (None, 0, ValueError, "steps"),
        (None, -1, ValueError, "steps"),
        (None, 100, ValueError, "steps"),
        (None, 2.5, TypeError, "steps"),
        (None, True, TypeError, "steps"),
        ([KELLER] * 100, None, ValueError, "fewer than 100"),
    ],
)
def test_errors_name_the_argument(coefficients, steps, error, says):
    with pytest.raises(error, match=says):
        normalize_coefficients(coefficients, steps)
