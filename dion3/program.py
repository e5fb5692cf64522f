"""The Newton-Schulz programs as lists of matrix products: what runs, on which buffers, in which order.

Source: "Dion3: Full-Stack Orthogonal Updates", Algorithms 1 to 3. One stage is one kernel launch; the
launch list of csrc/newton_schulz.c mirrors this file stage by stage.

Restarted Gram Newton-Schulz (n the short side of X, m the long side; all n x n matrices symmetric):

    at the start of a segment    R <- X X^T
    every iteration              Z <- b R + c R R
    first of a segment           Q stays implicit: Q = Z + a I is never rounded, nor stored
    second of a segment          Q <- Z1 Z + a1 Z + a Z1 + a1 a I
    later                        Q <- Q Z + a Q
    all but a segment's last     RZ <- R Z + a R;   R <- Z RZ + a RZ
    at the end of a segment      X <- Q X, or X <- Z X + a X for a segment of one iteration

A segment is what lies between two restarts. The terms with a are added to the fp32 accumulator; a is
never part of a 16-bit matrix. The published form stores the first Q; keeping it implicit saves that pass,
and the rounding of Z + a I after a cancellation (with a in 16 bits that costs a factor of three in the error
on well-conditioned inputs).

The standard iteration is the same program with a restart after every iteration: R = A, Z = B,
X <- Z X + a X. With segments of L iterations the products number 4 L - 3 square ones (1 for L = 1) plus
R <- X X^T and X <- Q X for each segment: 18 for the default five iterations with a restart after 2.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from .coefficients import Coefficients

__all__ = ["RECTANGLES", "SQUARES", "Stage", "build_program"]

RECTANGLES = ("X", "Y")
"""The n x m buffers. The program reads its input from X and leaves the result in the last stage's out."""

SQUARES = ("S0", "S1", "S2", "S3")
"""The n x n buffers; four are enough for any number of iterations."""


@dataclass(frozen=True)
class Stage:
    """One product: out <- alpha * left @ right + beta * add + gamma * add2 + delta * I, rounded once.

    out is neither left nor right; it may be add or add2. kind says what the product is:
    "gram"       left @ left^T of an n x m matrix, symmetric;
    "symmetric"  n x n operands whose product is symmetric in exact arithmetic: only the lower triangle
                 counts, the upper one is its mirror image;
    "general"    an n x n matrix times an n x m one.
    """

    role: str
    kind: str
    out: str
    left: str
    right: str
    alpha: float = 1.0
    add: str | None = None
    beta: float = 0.0
    add2: str | None = None
    gamma: float = 0.0
    delta: float = 0.0


@functools.lru_cache(maxsize=256)
def build_program(coefficients: Coefficients, restarts: tuple[int, ...]) -> tuple[Stage, ...]:
    """The stages for these coefficients, restarting after the iterations in `restarts`.

    Args:
        coefficients: one triple per iteration (normalize_coefficients).
        restarts: ascending, each in 1 .. steps - 1; every iteration but the last for the standard form.
    """
    stages: list[Stage] = []
    source, target = RECTANGLES
    bounds = (0, *restarts, len(coefficients))
    for start, end in itertools.pairwise(bounds):
        stages += _segment(coefficients[start:end], source, target)
        source, target = target, source
    return tuple(stages)


def _segment(rows: Coefficients, source: str, target: str) -> list[Stage]:
    """Gram Newton-Schulz without a restart: target <- (the polynomials of rows)(source)."""
    free = list(SQUARES)
    r = free.pop(0)
    stages = [Stage("R", "gram", r, source, source)]
    first, first_a = "", 0.0
    q = ""
    for t, (a, b, c) in enumerate(rows):
        z = free.pop(0)
        stages.append(Stage("Z", "symmetric", z, r, r, alpha=c, add=r, beta=b))
        if t == 0:
            first, first_a = z, a
        elif t == 1:
            q = free.pop(0)
            stages.append(
                Stage("Q", "symmetric", q, first, z, 1.0, first, a, z, first_a, first_a * a)
            )
            free.append(first)
        else:
            new = free.pop(0)
            stages.append(Stage("Q", "symmetric", new, q, z, add=q, beta=a))
            free.append(q)
            q = new
        if t + 1 < len(rows):
            rz = free.pop(0)
            stages.append(Stage("RZ", "symmetric", rz, r, z, add=r, beta=a))
            stages.append(Stage("R", "symmetric", r, z, rz, add=rz, beta=a))
            free.append(rz)
        if t > 0:
            free.append(z)
    if len(rows) == 1:
        stages.append(Stage("X", "general", target, first, source, add=source, beta=first_a))
    else:
        stages.append(Stage("X", "general", target, q, source))
    return stages
