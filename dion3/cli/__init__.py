"""`python -m dion3 info | selftest | restarts | demo | bench`.

Every command is a module with `add_arguments(parser)` and `run(arguments) -> int`. Exit codes: 0
all well, 1 a check failed or the work could not be done, 2 wrong usage. Results go to stdout,
progress and complaints to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

__all__ = ["UsageError", "main"]

COMMANDS = {
    "info": "versions, how dion3 was built, and the devices it can use",
    "selftest": "check the installation against float64 references in a few seconds",
    "restarts": "where Gram Newton-Schulz must restart for a set of coefficients",
    "demo": "train a small language model with AdamW, torch.optim.Muon and Dion3",
    "bench": "time the optimizer step, the orthogonalizer and the update beside torch's",
}


class UsageError(Exception):
    """Arguments that contradict each other or this machine: printed, and exit code 2."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dion3",
        description="The Dion3 and Muon optimizers for PyTorch.",
        epilog="exit codes: 0 all well, 1 a check failed or work could not be done, 2 wrong usage",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        module = importlib.import_module(f"dion3.cli.{name}")
        sub = commands.add_parser(
            name,
            help=text,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except UsageError as error:
        print(f"python -m dion3 {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 1
