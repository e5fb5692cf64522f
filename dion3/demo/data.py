"""Text that every Python ships: the sources of the standard library and the topics of `help()`.

About 13 MB of Python and English, without a download. Whole files are held out, never parts of one,
so that the held-out loss does not reward copying.
"""

from __future__ import annotations

import importlib
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Corpus", "load_corpus", "windows"]

_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
_HELD_OUT_EVERY = 10  # one file in ten, by a hash of its name


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and to test on: uint8 tensors of shape (n,); and how many files each."""

    train: torch.Tensor
    held_out: torch.Tensor
    train_files: int
    held_out_files: int


def _documents() -> Iterator[tuple[str, bytes]]:
    """(name, text) of every topic and source file, in an order that does not depend on the disk."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions ship it in another package
        topics = {}
    for name in sorted(topics):
        yield f"topics/{name}", topics[name].encode()
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not _SKIPPED.intersection(parts):
            yield "/".join(parts), path.read_bytes()


def load_corpus() -> Corpus:
    """Read the text and split it by file; a file is held out by the hash of its name alone.

    Raises:
        RuntimeError: this Python has less than 1 MB of readable standard library (a zipped or
            stripped installation).
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name, text in _documents():
        parts[zlib.crc32(name.encode()) % _HELD_OUT_EVERY == 0].append(text)
    train, held_out = (b"\n\n".join(texts) for texts in parts)
    if len(train) < 1_000_000 or len(held_out) < 10_000:
        raise RuntimeError(
            f"only {len(train) + len(held_out)} bytes of standard library sources were found in "
            f"{sysconfig.get_paths()['stdlib']}: use a Python that ships them as .py files"
        )
    tensors = [torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in (train, held_out)]
    return Corpus(tensors[0], tensors[1], len(parts[0]), len(parts[1]))


def windows(data: torch.Tensor, context: int, count: int, seed: int) -> torch.Tensor:
    """`count` random pieces of `context + 1` bytes: inputs are [:, :-1], targets [:, 1:].

    Args:
        data: uint8, shape (n,), n > context.
        context: bytes that the model sees.
        count: how many pieces.
        seed: the same seed gives the same pieces.

    Returns:
        int64 tensor of shape (count, context + 1).
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - context, (count,), generator=generator)
    return data[starts[:, None] + torch.arange(context + 1)].long()
