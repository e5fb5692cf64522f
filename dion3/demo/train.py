"""One training run: the same model, data and schedule for every optimizer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .data import Corpus, windows
from .gpt import GPT, GPTConfig
from .recipes import Rates, Recipe

__all__ = ["Result", "Settings", "state_bytes", "train"]

WARMUP, COOLDOWN = 0.1, 0.4  # parts of the run


@dataclass(frozen=True)
class Settings:
    """What all runs of a comparison share."""

    model: GPTConfig
    steps: int
    batch: int
    device: torch.device
    seed: int
    evaluations: int = 10
    held_out_windows: int = 64


@dataclass
class Result:
    """What one run left: losses in nats a byte, times in seconds."""

    label: str
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    state_bytes: int = 0

    def summary(self) -> dict[str, Any]:
        """Everything, with medians, for JSON."""
        return {
            **asdict(self),
            "optimizer_seconds": statistics.median(self.optimizer_seconds),
            "step_seconds": statistics.median(self.step_seconds),
            "final_held_out": self.held_out[-1][1],
        }


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate at `step`, from 0: linear warm-up, constant, linear cool-down."""
    warmup, cooldown = max(1, round(WARMUP * steps)), max(1, round(COOLDOWN * steps))
    return min(1.0, (step + 1) / warmup, (steps - step) / cooldown)


def state_bytes(optimizers: list[torch.optim.Optimizer]) -> int:
    """Bytes of all state tensors."""
    return sum(
        value.numel() * value.element_size()
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def train(
    recipe: Recipe,
    settings: Settings,
    rates: Rates,
    corpus: Corpus,
    progress: Callable[[int, str], None] = lambda step, text: None,
) -> Result:
    """Train a fresh model.

    Args:
        recipe: the optimizer.
        settings: sizes, seed and device; equal settings give the same first weights and batches.
        rates: learning rates at the height of the schedule.
        corpus: the text.
        progress: called after each step with the steps done and a short text.

    Returns:
        The losses, times and state size of the run.
    """
    torch.manual_seed(settings.seed)
    context, device = settings.model.context, settings.device
    model = GPT(settings.model).to(device)
    optimizers = recipe.build(model, rates)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: schedule(step, settings.steps))
        for o in optimizers
    ]
    test = windows(corpus.held_out, context, settings.held_out_windows, seed=1).to(device)
    result = Result(recipe.label)
    every = max(1, settings.steps // settings.evaluations)
    for step in range(settings.steps):
        batch = windows(corpus.train, context, settings.batch, settings.seed * 1_000_003 + step)
        start = _now(device)
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            loss = model.loss(batch.to(device))
        loss.backward()
        before = _now(device)
        for optimizer in optimizers:
            optimizer.step()
        end = _now(device)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            scheduler.step()
        result.losses.append(loss.item())
        result.optimizer_seconds.append(end - before)
        result.step_seconds.append(end - start)
        if (step + 1) % every == 0 or step + 1 == settings.steps:
            result.held_out.append((step + 1, _held_out_loss(model, test)))
        progress(step + 1, f"loss {result.losses[-1]:.3f}")
    result.state_bytes = state_bytes(optimizers)
    return result


@torch.no_grad()
def _held_out_loss(model: GPT, test: torch.Tensor) -> float:
    pieces = test.split(32)
    return sum(model.loss(piece).item() * len(piece) for piece in pieces) / len(test)


def _now(device: torch.device) -> float:
    """The clock, when the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
