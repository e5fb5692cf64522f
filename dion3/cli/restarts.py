"""Find where Gram Newton-Schulz must restart for a set of coefficients.

Rounding X X^T to 16 bits makes some of its zero eigenvalues slightly negative, and the iteration
drives them to minus infinity. A restart recomputes the Gram matrix. The search runs the scalar
iteration with a perturbed spectrum and takes the restarts with the smallest range of the
accumulated factor; a metric of 1e8 or more is not safe.

Examples:
  python -m dion3 restarts
  python -m dion3 restarts --steps 7
  python -m dion3 restarts --set keller --steps 7
  python -m dion3 restarts --coefficients 3.4,-4.7,2.0 --coefficients 2,-1.5,0.5
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from . import UsageError
from .common import count, table
from .progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "--set",
        choices=_sets(),
        default="polar-express",
        help="a published set (default: polar-express, with --safety 1.05)",
    )
    parser.add_argument(
        "--coefficients",
        action="append",
        metavar="A,B,C",
        help="your own, once for each iteration; one triple alone is repeated --steps times",
    )
    parser.add_argument("--steps", type=count, metavar="N", help="number of iterations")
    parser.add_argument(
        "--safety",
        type=float,
        metavar="S",
        help="divide the argument of every polynomial by S (1.05 for polar-express, else 1)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        metavar="R",
        help="find R restarts; exit code 1 if R are not enough (default: a table for 0 to 3)",
    )
    parser.add_argument(
        "--perturbation",
        type=float,
        metavar="D",
        help="shift of the Gram values (default: -4e-4, the worst seen in bf16)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _sets() -> dict[str, Any]:
    from dion3 import coefficients

    return {
        "polar-express": coefficients.POLAR_EXPRESS,
        "polar-express-8": coefficients.POLAR_EXPRESS_8,
        "you": coefficients.YOU,
        "keller": coefficients.KELLER,
        "dion-package": coefficients.DION_POLAR_EXPRESS,
    }


def run(arguments: argparse.Namespace) -> int:
    """Print the restarts; 1 if the number asked for is not enough."""
    from dion3.restarts import PERTURBATION

    triples = _coefficients(arguments)
    shift = PERTURBATION if arguments.perturbation is None else arguments.perturbation
    if arguments.restarts is None:
        numbers = list(range(min(4, len(triples))))
    elif 0 <= arguments.restarts < len(triples):
        numbers = [arguments.restarts]
    else:
        raise UsageError(
            f"--restarts {arguments.restarts}: expected 0 to {len(triples) - 1} for "
            f"{len(triples)} iterations"
        )
    found = []
    with Progress(len(numbers), "searching") as progress:
        for done, number in enumerate(numbers):
            found.append(_search(triples, number, shift))
            if len(triples) > 10:
                progress.update(done + 1)
    _show(arguments, triples, shift, found)
    return 0 if arguments.restarts is None or found[0]["safe"] else 1


def _coefficients(arguments: argparse.Namespace) -> tuple[tuple[float, float, float], ...]:
    """The triples asked for, one for each iteration, the safety factor applied."""
    from dion3.coefficients import normalize_coefficients, scaled

    chosen: Any = _sets()[arguments.set]
    safety = arguments.safety
    if arguments.coefficients:
        if arguments.set != "polar-express":
            raise UsageError("--set and --coefficients exclude each other")
        chosen = [_triple(text) for text in arguments.coefficients]
        if len(chosen) == 1:
            chosen = chosen[0]
    elif safety is None and arguments.set == "polar-express":
        chosen = None  # what gram_ns takes for this number of iterations, its safety factor in it
    elif safety is None and arguments.set.startswith("polar-express"):
        safety = 1.05
    try:
        triples = normalize_coefficients(chosen, arguments.steps)
        return tuple(triples) if safety is None else tuple(scaled(triples, safety))
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def _triple(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != 3:
        raise UsageError(f"--coefficients {text}: expected three numbers A,B,C without blanks")
    return values


def _search(
    triples: tuple[tuple[float, float, float], ...], number: int, shift: float
) -> dict[str, Any]:
    """The best restarts of a number, None if there are none that are safe, and their metric, None if it
    is not finite: JSON has no infinity."""
    from dion3.restarts import WORST_METRIC, find_restarts, restart_metric

    entry = {"count": number, "restarts": None, "metric": None, "safe": False}
    try:
        restarts = find_restarts(triples, number, shift)
    except RuntimeError as error:
        return {**entry, "error": str(error)}
    except ValueError as error:
        raise UsageError(str(error)) from error
    metric = restart_metric(triples, restarts, shift)
    finite = metric if math.isfinite(metric) else None
    return {**entry, "restarts": restarts, "metric": finite, "safe": metric < WORST_METRIC}


def _show(
    arguments: argparse.Namespace,
    triples: tuple[tuple[float, float, float], ...],
    shift: float,
    found: list[dict[str, Any]],
) -> None:
    if arguments.json:
        report = {"coefficients": triples, "perturbation": shift, "results": found}
        print(json.dumps(report, indent=1))
        return
    rows = [(str(t + 1), *(f"{value:.6g}" for value in triple)) for t, triple in enumerate(triples)]
    print(table(("iteration", "a", "b", "c"), rows) + "\n")
    rows = []
    for entry in found:
        if entry["restarts"] is None:
            rows.append((str(entry["count"]), "none is safe", "", "no"))
            continue
        rows.append(
            (
                str(entry["count"]),
                " ".join(map(str, entry["restarts"])) or "-",
                "inf" if entry["metric"] is None else f"{entry['metric']:.4g}",
                "yes" if entry["safe"] else "no",
            )
        )
    print(table(("restarts", "after iterations", "metric", "safe"), rows, left=2))
