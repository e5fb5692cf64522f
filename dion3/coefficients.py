"""Coefficient sets of the Newton-Schulz polynomials, and what users may pass instead of one.

One iteration maps every singular value x to a x + b x^3 + c x^5, so a set is a sequence of triples
(a, b, c), one per iteration. All digits are those of the sources; nothing is fitted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch

__all__ = [
    "DION_POLAR_EXPRESS",
    "KELLER",
    "MAX_STEPS",
    "POLAR_EXPRESS",
    "POLAR_EXPRESS_8",
    "SAFETY",
    "YOU",
    "Coefficients",
    "normalize_coefficients",
    "scaled",
]

Triple: TypeAlias = tuple[float, float, float]
Coefficients: TypeAlias = tuple[Triple, ...]

MAX_STEPS = 100
"""The most iterations any function takes (DION3_NS_MAX_STEPS of the C API)."""

SAFETY = 1.05
"""Default safety factor: room for the singular values that rounding pushes above 1."""

POLAR_EXPRESS_8: Coefficients = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""Polar Express (arXiv 2505.16932), unscaled, eight rows; all further rows equal the eighth."""

POLAR_EXPRESS: Coefficients = POLAR_EXPRESS_8[:5]
"""The five rows of Polar Express that dion3 uses by default, before the safety factor."""

YOU: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Jiacheng You's five polynomials, used without a safety factor."""

KELLER: Triple = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's triple, used at every iteration (torch.optim.Muon's default). It does not converge
to 1: singular values end between about 0.7 and 1.2."""

DION_POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""The `dion` package's Polar Express set: 2 % safety is built in, and the package divides by another
1.02 in the norm. Not row by row a multiple of POLAR_EXPRESS; do not mix the two."""


def scaled(coefficients: Sequence[Any], safety: float = SAFETY) -> Any:
    """The polynomials p(x / safety): (a, b, c) becomes (a / s, b / s^3, c / s^5).

    Args:
        coefficients: one triple, or a sequence of triples.
        safety: s, finite and positive; 1.05 suits Gram Newton-Schulz, 1.02 the standard form.

    Returns:
        The same structure: one triple for one triple, else a tuple of triples.

    Raises:
        ValueError: safety is not a positive finite number, or an entry is not a triple.
    """
    if not (isinstance(safety, (int, float)) and math.isfinite(safety) and safety > 0):
        raise ValueError(f"safety must be a positive finite number, got {safety!r}")
    if _is_triple(coefficients):
        a, b, c = _triple(coefficients, 0)
        return (a / safety, b / safety**3, c / safety**5)
    return tuple(scaled(_triple(row, i), safety) for i, row in enumerate(coefficients))


def normalize_coefficients(
    coefficients: Iterable[Any] | None = None, steps: int | None = None
) -> Coefficients:
    """What a user may pass as `coefficients` and `steps`, as one triple per iteration.

    Args:
        coefficients: None for Polar Express with safety 1.05; one triple (a, b, c), used at every
            iteration; or a sequence of triples, one per iteration.
        steps: number of iterations, 1 to 99. None means one per triple of a sequence, and 5 otherwise.
            With None for coefficients, steps beyond 8 repeat the eighth row of POLAR_EXPRESS_8.

    Returns:
        A tuple of `steps` triples of floats.

    Raises:
        TypeError: steps is not an integer, or coefficients is neither None nor a sequence.
        ValueError: steps is out of range, an entry is not three finite numbers, or the number of
            triples differs from steps.
    """
    if steps is not None:
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise TypeError(f"steps must be an integer, got {steps!r}")
        if not 1 <= steps < MAX_STEPS:
            raise ValueError(f"steps must be between 1 and {MAX_STEPS - 1}, got {steps}")
    if coefficients is None:
        count = 5 if steps is None else steps
        if count == 5:
            return DEFAULT
        rows = POLAR_EXPRESS_8[:count]
        rows += (POLAR_EXPRESS_8[-1],) * (count - len(rows))
        return tuple(scaled(rows, SAFETY))
    if isinstance(coefficients, (str, bytes)) or not isinstance(coefficients, Iterable):
        raise TypeError(
            "coefficients must be None, a triple (a, b, c) or a sequence of triples, "
            f"got {coefficients!r}"
        )
    if isinstance(coefficients, torch.Tensor):
        coefficients = coefficients.tolist()
    entries = list(coefficients)
    if not entries:
        raise ValueError(
            "coefficients must hold at least one triple (a, b, c), got an empty sequence"
        )
    if _is_triple(entries):
        return (_triple(entries, 0),) * (5 if steps is None else steps)
    table = tuple(_triple(row, i) for i, row in enumerate(entries))
    if steps is not None and steps != len(table):
        raise ValueError(
            f"coefficients hold {len(table)} triples but steps is {steps}: pass one triple per "
            "iteration, or a single triple (a, b, c) to use it at every iteration"
        )
    if len(table) >= MAX_STEPS:
        raise ValueError(f"coefficients must hold fewer than {MAX_STEPS} triples, got {len(table)}")
    return table


def _is_triple(entry: Sequence[Any]) -> bool:
    """Whether entry looks like one (a, b, c) and not like a sequence of triples."""
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in entry)


def _triple(entry: Any, index: int) -> Triple:
    """Entry `index` as three floats, or a ValueError that names it."""
    values: tuple[float, ...] = ()
    if isinstance(entry, (list, tuple)) and _is_triple(entry):
        values = tuple(float(value) for value in entry)
    if len(values) != 3 or not all(math.isfinite(value) for value in values):
        raise ValueError(
            f"coefficients[{index}] must be three finite numbers (a, b, c), got {entry!r}"
        )
    return (values[0], values[1], values[2])


DEFAULT: Coefficients = scaled(POLAR_EXPRESS, SAFETY)
"""Polar Express, five rows, safety 1.05: the default of every function and optimizer of dion3."""
