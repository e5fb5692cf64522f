"""Timing several functions in turn on one device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Contender", "time_in_turn"]


@dataclass
class Contender:
    """A function to time: its label, itself, and facts, asked for afterwards, for the result."""

    name: str
    call: Callable[[], object]
    facts: Callable[[], dict[str, Any]] = field(default=dict)


def time_in_turn(
    contenders: Sequence[Contender],
    warmup: int,
    repeats: int,
    device: torch.device,
    progress: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
    """Call each contender `warmup` + `repeats` times, one after the other in rotating order.

    Args:
        contenders: what is timed.
        warmup: rounds that are not counted.
        repeats: rounds that are.
        device: events time a CUDA device, the clock a CPU.
        progress: called with the number of rounds done.

    Returns:
        For each contender, in the order given, a dict with name, median_ms, low_ms and high_ms
        (first and third quartile), host_ms (median time until the call returned), samples_ms, and
        its facts.
    """
    samples: list[list[float]] = [[] for _ in contenders]
    host: list[list[float]] = [[] for _ in contenders]
    for turn in range(warmup + repeats):
        for place in range(len(contenders)):
            index = (place + turn) % len(contenders)
            elapsed, returned = _time_once(contenders[index].call, device)
            if turn >= warmup:
                samples[index].append(1e3 * elapsed)
                host[index].append(1e3 * returned)
        progress(turn + 1)
    results = []
    for contender, times, returns in zip(contenders, samples, host, strict=True):
        low, median, high = _quartiles(times)
        results.append(
            {
                "name": contender.name,
                "median_ms": median,
                "low_ms": low,
                "high_ms": high,
                "host_ms": statistics.median(returns),
                "samples_ms": times,
                **contender.facts(),
            }
        )
    return results


def _time_once(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds on the device, and seconds until the call returned."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        return elapsed, elapsed
    with torch.cuda.device(device):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start = time.perf_counter()
        before.record()
        call()
        after.record()
        returned = time.perf_counter() - start
        torch.cuda.synchronize()
        return before.elapsed_time(after) / 1e3, returned


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
