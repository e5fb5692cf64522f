"""The CUDA graph of a step: captured once per plan, replayed with live scalars.

The gradients' storage changes from step to step (`zero_grad(set_to_none=True)`, FSDP), so the launch that
reads them, momentum, stays outside; so do the AdamW parameters. Everything behind it works on memory
that stays where it is: momentum, scratch, weights, and the table of scalars, which is refreshed before a
replay, so that schedules keep working. A new plan starts without a graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch


class StepGraph:
    """One captured function.

    The first call runs it as it is (kernels are loaded, and the allocator is warm), the second one
    captures and replays, later ones replay. If the capture fails, a warning tells why, and this and all
    later calls run it as it is.
    """

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = False
        self._failed = False

    @property
    def captured(self) -> bool:
        """Whether a graph is held."""
        return self._graph is not None

    def run(self, function: Callable[[], None]) -> None:
        """Do what `function` does; it must be the same at every call and make no new tensor that
        outlives it."""
        if self._failed or not self._warm:
            self._warm = True
            function()
            return
        if self._graph is None:
            self._capture(function)
        if self._graph is None:
            function()
        else:
            self._graph.replay()

    def reset(self) -> None:
        """Give the graph and its memory back; the next call begins anew."""
        graph, self._graph = self._graph, None
        self._warm = self._failed = False
        if graph is not None:
            torch.cuda.synchronize()  # a graph must not go while it runs
            graph.reset()

    def _capture(self, function: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local": other threads (NCCL's watchdog) may use the device meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
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
            self._graph = graph


def _end_generator_capture() -> None:
    """Put torch's random number generator right after a failed capture: it still believes that one is
    going on, and only a capture that ends well tells it otherwise."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda")
