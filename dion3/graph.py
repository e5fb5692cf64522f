"""The CUDA graphs of a step: captured once per plan, replayed with live scalars.

Everything in a graph works on memory that stays where it is: momentum, scratch, weights, and the table of
scalars, which is refreshed before a replay, so that schedules keep working. The gradients may be
elsewhere in every step (`zero_grad(set_to_none=True)`, FSDP). So there are two graphs: one of the whole
step, for gradients that lie where they lay when it was captured, and one of all that comes behind what reads
gradients. A new plan starts without any.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch


class StepGraph:
    """Two captured functions, "whole" and "behind".

    The first call runs its function as it is (kernels are loaded, and the allocator is warm), later ones
    capture theirs and replay. If a capture fails, a warning tells why, and from then on all run as they
    are.
    """

    def __init__(self) -> None:
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._forget()

    def _forget(self) -> None:
        self._warm = self._failed = False
        self._last: Any = None
        self._place: Any = None

    @property
    def captured(self) -> tuple[str, ...]:
        """Which graphs are held."""
        return tuple(self._graphs)

    def stays(self, place: Any) -> bool:
        """Whether the graph of the whole step serves gradients at `place`, or will: they lay there in
        the last step too, and it has no place yet. Asked once a step; None is no place. Before anything
        has run, yes: the first call captures nothing."""
        last, self._last = self._last, place
        if not self._warm:
            return True
        if self._place is None and place is not None and place == last:
            self._place = place
        return self._place is not None and self._place == place

    def run(self, name: str, function: Callable[[], None]) -> None:
        """Do what `function` does; it must be the same at every call of that name and make no new tensor
        that outlives it."""
        if self._failed or not self._warm:
            self._warm = True
            function()
            return
        if name not in self._graphs:
            self._capture(name, function)
        if name in self._graphs:
            self._graphs[name].replay()
        else:
            function()

    def reset(self) -> None:
        """Give the graphs and their memory back; the next call begins anew."""
        graphs, self._graphs = self._graphs, {}
        self._forget()
        if graphs:
            torch.cuda.synchronize()  # a graph must not go while it runs
        for graph in graphs.values():
            graph.reset()

    def _capture(self, name: str, function: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        pool = next(
            (other.pool() for other in self._graphs.values()), None
        )  # they never run at once
        try:
            # "thread_local": other threads (NCCL's watchdog) may use the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                function()
        except Exception as error:
            self._failed = True
            del graph
            _end_generator_capture()
            torch.cuda.empty_cache()
            warnings.warn(
                f"cuda_graph=True: the step could not be captured ({error}); it runs without a graph",
                stacklevel=2,
            )
        else:
            self._graphs[name] = graph


def _end_generator_capture() -> None:
    """Put torch's random number generator right after a failed capture: it still believes that one is
    going on, and only a capture that ends well tells it otherwise."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda")
