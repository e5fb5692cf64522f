"""Show versions, how dion3 was built, and the devices it can use.

With --json the same as one JSON object, for bug reports and scripts.
"""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the facts; always 0."""
    facts = gather()
    if arguments.json:
        print(json.dumps(facts, indent=1, default=str))
        return 0
    for title, entries in facts.items():
        print(f"{title}:")
        width = max(map(len, entries), default=0)
        for name, value in entries.items():
            print(f"  {name.ljust(width)}  {_words(value)}")
    return 0


def gather() -> dict[str, dict[str, Any]]:
    """The facts by section: versions, build, devices."""
    import dion3
    from dion3.build import has_kernels

    from .common import machine

    versions: dict[str, Any] = {
        "dion3": dion3.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch CUDA": torch.version.cuda,
        "platform": platform.platform(),
    }
    versions["matplotlib"] = _installed("matplotlib")
    cpu = machine(torch.device("cpu"))
    devices: dict[str, Any] = {"cpu": f"{cpu['processor']}, {cpu['threads']} threads"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB, "
            f"{properties.multi_processor_count} multiprocessors, "
            + ("dion3's kernels" if has_kernels(torch.device("cuda", index)) else "plain PyTorch")
        )
    return {"versions": versions, "build": dict(dion3.build_info()), "devices": devices}


def _installed(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _words(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(str, value)) or "none"
    return str(value)
