"""Build of the extension dion3._C: the C library by make, then the torch binding linked with it.

DION3_BUILD=auto|cpu|cuda|none: auto takes CUDA when torch was built for it and nvcc is found; none
installs Python only. DION3_PREBUILT=1 links build/libdion3.a as it is. TORCH_CUDA_ARCH_LIST names
architectures.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
LIBRARY = Path("build/libdion3.a")


def build_kind(torch_cuda: str | None, nvcc: object) -> str:
    """cpu or cuda: what DION3_BUILD asks for and this machine has."""
    asked = os.environ.get("DION3_BUILD", "auto")
    if asked not in ("auto", "cpu", "cuda"):
        sys.exit(f"DION3_BUILD={asked!r} must be auto, cpu, cuda or none")
    if asked == "cuda" and not (torch_cuda and nvcc):
        lacking = "nvcc was not found" if torch_cuda else "this torch was built without CUDA"
        sys.exit(
            f"DION3_BUILD=cuda: {lacking}; use DION3_BUILD=auto or cpu, or install what is missing"
        )
    return "cuda" if asked != "cpu" and torch_cuda and nvcc else "cpu"


def make_library(kind: str) -> None:
    """Run make for the C library; jobs by MAX_JOBS, else one per processor and 3 GB of memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    jobs = os.environ.get("MAX_JOBS") or max(1, min(os.cpu_count() or 1, memory // 3_000_000_000))
    command = ["make", "-sf", "csrc/build.mk", f"-j{jobs}", "lib", f"DION3_BUILD={kind}"]
    archs = re.findall(r"(\d+)\.(\d+)", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    if archs:
        command.append("DION3_CUDA_ARCHS=" + " ".join(sorted({a + b for a, b in archs}, key=int)))
    subprocess.run(command, cwd=ROOT, check=True)


def extension() -> dict:
    """The ext_modules and cmdclass of a build."""
    try:
        import torch
        from torch.utils import cpp_extension as cpp
    except ImportError:
        sys.exit(
            "dion3 is built against the torch you use, and torch is not here: install torch first, "
            "then run `pip install --no-build-isolation .` (DION3_BUILD=none: Python only)"
        )
    prebuilt = os.environ.get("DION3_PREBUILT") == "1"
    kind = build_kind(torch.version.cuda, prebuilt or shutil.which("nvcc") or cpp.CUDA_HOME)
    if not prebuilt:
        make_library(kind)
    config = ROOT / "build" / "ext-config.txt"  # newer than the extension when it must be relinked
    text = f"{kind} torch {torch.__version__} python {sys.version}\n"
    if not config.exists() or config.read_text() != text:
        config.write_text(text)
    make = cpp.CUDAExtension if kind == "cuda" else cpp.CppExtension
    module = make(
        "dion3._C",
        ["csrc/torch_binding.cpp", "csrc/torch_binding_gemm.cpp"],
        define_macros=[("DION3_WITH_CUDA", "1")] if kind == "cuda" else [],
        extra_compile_args=["-O2", "-g0", "-Wall", "-Wextra", "-Wno-unused-parameter"],
        extra_objects=[str(LIBRARY)],
        # The C core uses OpenMP where its compiler has it: the same libgomp that torch has loaded.
        extra_link_args=["-fopenmp"] if b"GOMP_parallel" in (ROOT / LIBRARY).read_bytes() else [],
        depends=["csrc/dion3.h", str(LIBRARY), "build/ext-config.txt"],
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": cpp.BuildExtension}}


BUILDS = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}
wanted = BUILDS & set(sys.argv) and os.environ.get("DION3_BUILD") != "none"
setup(**(extension() if wanted else {}))
