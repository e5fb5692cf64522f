"""Scratch memory of the step: views made once, memory held only while a step runs.

All scratch tensors of one device are views of one storage. Between steps that storage has size 0,
so the optimizer keeps nothing but its documented state, while the views (and the lists of them that
a plan holds) stay valid: growing the storage again gives them memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes to which every scratch tensor is aligned: enough for any vector load or TMA descriptor."""


class Workspace:
    """Hands out views of one storage, first come first placed.

    Attributes:
        size: bytes the storage needs while a step runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = 0
        self._top = 0
        self._storage = torch.UntypedStorage(0, device=device)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor without content; it has memory only between acquire and release. After
        the last one release gives back the memory that making them took."""
        itemsize = torch.empty((), dtype=dtype).element_size()
        offset = self._top
        self._top += -(-math.prod(shape) * itemsize // ALIGNMENT) * ALIGNMENT
        self.size = max(self.size, self._top)
        if self._storage.nbytes() < self._top:
            # set_ would grow the storage by every tensor, and copy what is in it each time.
            self.release()
            self._storage.resize_(2 * self._top)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        tensor = torch.empty(0, dtype=dtype, device=self.device)
        return tensor.set_(self._storage, offset // itemsize, tuple(shape), tuple(strides))

    def mark(self) -> int:
        """Where the next tensor would go: pass it to `rewind`."""
        return self._top

    def rewind(self, mark: int) -> None:
        """Place the tensors to come over those taken since `mark`."""
        self._top = mark

    def acquire(self) -> None:
        """Give the views memory, unless they have it. Its content is undefined."""
        if self._storage.nbytes() != self.size:
            self._storage.resize_(self.size)

    def release(self) -> None:
        """Give the memory back (on CUDA to the caching allocator, in the order of the stream)."""
        self._storage.resize_(0)
