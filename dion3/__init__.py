"""Dion3 and Muon optimizers for PyTorch, with handwritten C and CUDA kernels."""

from __future__ import annotations

from . import ops as ops
from .build import build_info
from .coefficients import KELLER, POLAR_EXPRESS, YOU, scaled
from .muon import Muon, NorMuon
from .newton_schulz import gemm_add, gram_ns, newton_schulz, orthogonalize, symmetric_mm
from .optimizer import Dion3
from .param_groups import param_groups
from .restarts import find_restarts

__version__ = "0.1.0"

__all__ = [
    "Dion3",
    "KELLER",
    "Muon",
    "NorMuon",
    "POLAR_EXPRESS",
    "YOU",
    "build_info",
    "find_restarts",
    "gemm_add",
    "gram_ns",
    "newton_schulz",
    "ops",
    "orthogonalize",
    "param_groups",
    "scaled",
    "symmetric_mm",
]
