"""The native part: loading it, and saying what it is."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from types import ModuleType
from typing import Any

import torch

_REMEDY = "install a C compiler and run `pip install --no-build-isolation .` again"


def _load() -> tuple[ModuleType | None, str | None]:
    """dion3._C, or why it is not there."""
    if importlib.util.find_spec("dion3._C") is None:
        return None, "it was not built (DION3_BUILD=none, or no compiler when dion3 was installed)"
    try:
        return importlib.import_module("dion3._C"), None
    except (ImportError, OSError) as error:
        return None, f"it did not load: {error}"


native, reason = _load()
"""The extension module dion3._C, and None; or None, and why it is missing."""

if native is None:
    warnings.warn(
        f"dion3 runs without its native part: {reason}. Every operation then runs as slow plain "
        f"PyTorch; to change that, {_REMEDY}.",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _runs_on(index: int) -> bool:
    return bool(native is not None and native.runs_on(index))


@torch.compiler.assume_constant_result  # torch.compile cannot look into the native part
def has_kernels(device: torch.device) -> bool:
    """Whether the native part runs on this device: not on a GPU of an architecture it was not built
    for."""
    if native is None or device.type == "cpu":
        return native is not None
    if device.type != "cuda" or not native.cuda:
        return False
    if device.index is not None:
        return _runs_on(device.index)
    return torch.cuda.is_available() and _runs_on(torch.cuda.current_device())


def build_info() -> dict[str, Any]:
    """Facts of this installation.

    Returns:
        A dict: ``native`` (bool), the C part is loaded; ``cuda`` (bool), it has CUDA kernels;
        ``reason`` (str or None), why it is missing; ``compiler`` and ``torch_built`` (str or None),
        what built it; ``torch`` (str), the torch that runs; ``torch_cuda`` (str or None), the CUDA
        that torch was built for.
    """
    return {
        "native": native is not None,
        "cuda": bool(getattr(native, "cuda", False)),
        "reason": reason,
        "compiler": getattr(native, "compiler", None),
        "torch_built": getattr(native, "torch_version", None),
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
    }
