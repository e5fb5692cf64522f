"""Where Gram Newton-Schulz must restart: the search of the paper's section on stability.

Rounding X X^T to 16 bits turns some zero eigenvalues slightly negative, and the recurrence
r <- r h(r)^2, h(y) = a + b y + c y^2, then drives them to minus infinity. The search iterates the scalar
recurrence on a spectrum from 1 to 1e-10 whose Gram values are shifted by a small negative number, and
takes the restarts that keep q, the factor that multiplies X, within the smallest range. Plain float64 in
torch: no other dependency, a few milliseconds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .coefficients import DEFAULT, Coefficients, normalize_coefficients

__all__ = ["auto_restarts", "check_restarts", "find_restarts", "restart_metric", "scalar_run"]

PERTURBATION = -4e-4
"""The most negative eigenvalue that rounding a Gram matrix to bf16 was seen to make."""

POINTS = 10_000
WORST_METRIC = 1e8

MOST_COMBINATIONS = 10_000
"""More are refused: the search would take minutes, or years."""

LONGEST_AUTO = 10
"""restarts="auto" searches for no more iterations than this; the number of combinations explodes."""


def find_restarts(
    coefficients: Iterable[Any] | None = None,
    num_restarts: int = 1,
    perturbation: float = PERTURBATION,
    steps: int | None = None,
) -> list[int]:
    """The best `num_restarts` restarts for a coefficient set.

    Every combination of num_restarts out of 1 .. steps - 1 is tried ("r" means: restart after iteration
    r); of equally good ones the first in lexicographic order is taken. The measure is restart_metric.
    More than 10,000 combinations are refused.

    Args:
        coefficients, steps: as in normalize_coefficients.
        num_restarts: how many restarts, 0 to steps - 1. 0 returns [] whatever the metric.
        perturbation: shift of the Gram values, usually negative.

    Returns:
        The restarts, ascending.

    Raises:
        TypeError, ValueError: an argument is wrong, or there are too many combinations.
        RuntimeError: no combination keeps the metric below 1e8: more restarts are needed.
    """
    table = normalize_coefficients(coefficients, steps)
    _check_perturbation(perturbation)
    if isinstance(num_restarts, bool) or not isinstance(num_restarts, int):
        raise TypeError(f"num_restarts must be an integer, got {num_restarts!r}")
    if not 0 <= num_restarts < len(table):
        raise ValueError(
            f"num_restarts must be between 0 and steps - 1 = {len(table) - 1}, got {num_restarts}"
        )
    combinations = math.comb(len(table) - 1, num_restarts)
    if combinations > MOST_COMBINATIONS:
        raise ValueError(
            f"num_restarts={num_restarts} of {len(table)} iterations has {combinations} combinations, more "
            f"than the {MOST_COMBINATIONS} that are tried: restart after every second iteration instead"
        )
    return list(_search(table, num_restarts, float(perturbation)))


def restart_metric(
    coefficients: Iterable[Any] | None,
    restarts: Sequence[int],
    perturbation: float = PERTURBATION,
    steps: int | None = None,
) -> float:
    """max over the iterations of max|q| / min|q| over the spectrum: what find_restarts minimises.

    q is the factor accumulated since the last restart. Smaller is better; inf when the recurrence left
    the floating-point range.

    Args:
        coefficients, steps: as in normalize_coefficients.
        restarts: restart after these iterations, each in 1 .. steps - 1.
        perturbation: shift of the Gram values.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    table = normalize_coefficients(coefficients, steps)
    _check_perturbation(perturbation)
    chosen = check_restarts(restarts, len(table))
    return _metric(table, chosen, float(perturbation))


def scalar_run(
    coefficients: Iterable[Any] | None,
    restarts: Sequence[int],
    perturbation: float = PERTURBATION,
    steps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scalar recurrence itself, for plots and tests.

    Args: as restart_metric.

    Returns:
        (r, q), float64 of shape (steps, points): after each iteration the Gram value and the factor
        accumulated since the last restart, for the singular values 1 down to 1e-10.
    """
    table = normalize_coefficients(coefficients, steps)
    _check_perturbation(perturbation)
    chosen = check_restarts(restarts, len(table))
    grams, factors = zip(*_run(table, chosen, float(perturbation)), strict=True)
    return torch.stack(grams), torch.stack(factors)


def auto_restarts(coefficients: Coefficients) -> list[int]:
    """What restarts="auto" means: [2] for the default set, else the fewest restarts that find_restarts
    accepts, at least one; [] for a single iteration. Beyond ten iterations, every second one, or every
    one if that is not safe. Results are cached."""
    if coefficients == DEFAULT:
        return [2]
    return list(_auto(coefficients))


def check_restarts(restarts: Sequence[int], steps: int) -> tuple[int, ...]:
    """restarts as an ascending tuple of distinct integers in 1 .. steps - 1.

    Raises:
        TypeError: restarts is not a sequence of integers.
        ValueError: an entry is out of range or repeated.
    """
    if isinstance(restarts, (str, bytes)) or not isinstance(restarts, Iterable):
        raise TypeError(f'restarts must be "auto" or a sequence of integers, got {restarts!r}')
    chosen = tuple(restarts)
    for entry in chosen:
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise TypeError(f"restarts must hold integers, got {entry!r} in {restarts!r}")
        if not 1 <= entry < steps:
            raise ValueError(
                f"restarts must lie between 1 and steps - 1 = {steps - 1}, got {entry} in {restarts!r}"
            )
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"restarts must not repeat, got {restarts!r}")
    return tuple(sorted(chosen))


def _check_perturbation(perturbation: float) -> None:
    if not (isinstance(perturbation, (int, float)) and math.isfinite(perturbation)):
        raise ValueError(f"perturbation must be a finite number, got {perturbation!r}")


@functools.lru_cache(maxsize=256)
def _auto(table: Coefficients) -> tuple[int, ...]:
    if len(table) == 1:
        return ()
    if len(table) > LONGEST_AUTO:
        second = tuple(range(2, len(table), 2))
        if _metric(table, second, PERTURBATION) < WORST_METRIC:
            return second
    else:
        for count in range(1, len(table)):
            try:
                return _search(table, count, PERTURBATION)
            except RuntimeError:
                continue
    return tuple(range(1, len(table)))


@functools.lru_cache(maxsize=256)
def _search(table: Coefficients, count: int, perturbation: float) -> tuple[int, ...]:
    if count == 0:
        return ()
    best: tuple[int, ...] = ()
    least = math.inf
    for candidate in itertools.combinations(range(1, len(table)), count):
        metric = _metric(table, candidate, perturbation, least)
        if metric < least:
            best, least = candidate, metric
    if not least < WORST_METRIC:
        raise RuntimeError(
            f"need more restarts: with num_restarts={count} the best metric is {least:.3g}, which is "
            f"not below {WORST_METRIC:.0e}; try num_restarts={count + 1}"
        )
    return best


def _metric(
    table: Coefficients, restarts: Sequence[int], perturbation: float, limit: float = math.inf
) -> float:
    """The metric, or any value from limit on as soon as it cannot be less."""
    worst = 0.0
    for _, factor in _run(table, restarts, perturbation):
        size = factor.abs()
        low, high = float(size.min()), float(size.max())
        if not (math.isfinite(low) and math.isfinite(high)) or low == 0.0:
            return math.inf
        worst = max(worst, high / low)
        if worst >= limit:
            break
    return worst


def _run(
    table: Coefficients, restarts: Sequence[int], perturbation: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    # The device is named: a user may have set another default device.
    x = torch.logspace(0, -10, POINTS, dtype=torch.float64, device="cpu")
    one = torch.ones_like(x)
    r, q = x, one
    for t, (a, b, c) in enumerate(table):
        if t == 0 or t in restarts:
            if t > 0:
                x = x * q
            r = x * x + perturbation
            q = one
        z = a + r * (b + r * c)
        q = q * z
        r = r * z * z
        yield r, q
