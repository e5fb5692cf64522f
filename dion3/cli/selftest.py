"""Check the installation in a few seconds.

Every operation runs against its reference, the orthogonalizers run against float64, and each
optimizer takes a few steps.

Prints one line a check. Exit code 0 when all pass, 1 when one fails.
"""

from __future__ import annotations

import argparse
import time

from .checks import CHECKS, Failure
from .common import choose_device, machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run all checks; 0 if every one passes."""
    device = choose_device(arguments.device)
    facts = machine(device)
    print(f"device: {facts.get('gpu', facts['processor'])}, torch {facts['torch']}\n")
    width = max(len(name) for name, _ in CHECKS)
    failed = 0
    for name, check in CHECKS:
        print(f"{name.ljust(width)}  ", end="", flush=True)
        start = time.perf_counter()
        try:
            verdict = f"ok    {check(device)}"
        except Failure as failure:
            failed += 1
            verdict = f"FAIL  {failure}"
        except Exception as error:  # a broken installation may raise anything; go on and report it
            failed += 1
            verdict = f"FAIL  {type(error).__name__}: {error}"
        print(f"{verdict}  ({time.perf_counter() - start:.2f} s)", flush=True)
    print(f"\n{len(CHECKS) - failed} of {len(CHECKS)} checks passed")
    return 1 if failed else 0
