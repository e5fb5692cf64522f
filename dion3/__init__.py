"""Dion3 and Muon optimizers for PyTorch, with handwritten C and CUDA kernels."""

from __future__ import annotations

from . import ops as ops
from .build import build_info

__version__ = "0.1.0"

__all__ = ["build_info", "ops"]
