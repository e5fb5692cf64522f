"""600 steps of a byte-level GPT of 19 M parameters: `Muon` beside an eager reference, and Dion3 beside it.

    python -m benchmarks.bench_training [--quick] [--out FOLDER]

The model, text, batches and schedule are the demo's (`python -m dion3 demo`), in fp32 without
autocast, so that the optimizers are the only difference. The reference is Muon as one writes it in
torch: fp32 momentum, Newton-Schulz on stacks of equal shape in plain torch that rounds to fp16 where
the kernels do, and torch.optim.AdamW for the rest. `difference` is |loss - reference| / reference of
a step; the bar is 1.2e-3 at every step. `noise` is the same of a second reference run, whose first
weights are 1 + 2^-22 times the others': training amplifies any difference, the more the larger the
learning rates are, and at the demo's the noise alone exceeds the bar. Hence a quarter of its rate for
the matrices and half of that for the rest. Dion3 takes the same rates and averages gradients over the
same time, as in the demo.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import nn

import dion3
from benchmarks.harness import Table, arguments, clocks, header
from dion3.demo.data import load_corpus, windows
from dion3.demo.gpt import GPT, GPTConfig
from dion3.demo.recipes import BETAS, MOMENTUM, Rates
from dion3.demo.train import schedule

CONFIG = GPTConfig(layers=6, dim=512, heads=8, context=128)
BATCH = 16
BAR = 1.2e-3
RATES = Rates(matrix=0.005, rest=1e-3)
COLUMNS = ["step", "Muon", "reference", "difference", "noise", "Dion3 f=1/4"]

Build = Callable[[nn.Module], list[torch.optim.Optimizer]]


class EagerMuon(torch.optim.Optimizer):
    """torch.optim.Muon's update, with the reference of `gram_ns` as the orthogonalizer."""

    def __init__(self, params: list[torch.Tensor], lr: float, weight_decay: float) -> None:
        """One group of matrices."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.shapes: dict[torch.Size, list[torch.Tensor]] = {}
        for p in params:
            self.shapes.setdefault(p.shape, []).append(p)
        self.momentum = {
            shape: torch.zeros_like(torch.stack(members)) for shape, members in self.shapes.items()
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step for all matrices, stack by stack."""
        group = self.param_groups[0]
        for (rows, cols), members in self.shapes.items():
            grads = torch.stack([p.grad for p in members if p.grad is not None])
            momentum = self.momentum[members[0].shape].lerp_(grads, 1 - MOMENTUM)
            x = grads.lerp(momentum, MOMENTUM)
            o = dion3.gram_ns(x, 5, dion3.KELLER, dtype=torch.float16, backend="reference")
            for p, update in zip(members, o, strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(update, alpha=group["lr"] * math.sqrt(max(1.0, rows / cols)))


def _groups(model: nn.Module) -> list[dict]:
    return dion3.param_groups(
        model,
        lr=RATES.matrix,
        weight_decay=RATES.weight_decay,
        adamw={"lr": RATES.rest},
        report=False,
    )


def reference(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Plain torch."""
    split: dict[str, list] = {"dion3": [], "adamw": []}
    for group in _groups(model):
        split[group["algorithm"]] += [parameter for _, parameter in group["params"]]
    return [
        EagerMuon(split["dion3"], RATES.matrix, RATES.weight_decay),
        torch.optim.AdamW(split["adamw"], lr=RATES.rest, betas=BETAS, weight_decay=0.0),
    ]


def perturbed(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The reference on weights of which each differs by about two bits."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2**-22)
    return reference(model)


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Ours."""
    return [dion3.Muon(_groups(model), momentum=MOMENTUM, adamw_betas=BETAS)]


def quarter(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Ours, a quarter of the slices in a step."""
    return [dion3.Dion3(_groups(model), fraction=0.25, momentum=MOMENTUM**4, adamw_betas=BETAS)]


def losses(
    build: Build, data: torch.Tensor, steps: int, config: GPTConfig, device: str
) -> list[float]:
    """The training loss of every step of a fresh model, in nats a byte."""
    torch.manual_seed(0)
    model = GPT(config).to(device)
    optimizers = build(model)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: schedule(step, steps)) for o in optimizers
    ]
    found = []
    for step in range(steps):
        loss = model.loss(windows(data, config.context, BATCH, step).to(device))
        loss.backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def main() -> None:
    """Train four times and save results/<gpu>_training.csv."""
    parser = arguments(__doc__, quick="100 steps instead of 600")
    args = parser.parse_args()
    steps = 100 if args.quick else 600
    facts = header("training loss of a GPT of 19 M parameters, fp32", args.commit)
    data = load_corpus().train
    runs = []
    for build in (muon, reference, perturbed, quarter):
        begin = time.perf_counter()
        runs.append(losses(build, data, steps, CONFIG, "cuda"))
        last = runs[-1][-50:]
        print(
            f"{build.__name__}: {time.perf_counter() - begin:.1f} s, "
            f"mean loss of the last {len(last)} steps {sum(last) / len(last):.4f}",
            flush=True,
        )
    table = Table("training", facts, COLUMNS, every=50)
    gaps = []
    for step, (ours, theirs, other, part) in enumerate(zip(*runs, strict=True), 1):
        gaps.append((abs(ours - theirs) / theirs, abs(other - theirs) / theirs))
        table.add(step, f"{ours:.6f}", f"{theirs:.6f}", *gaps[-1], f"{part:.6f}")
    difference, noise = (max(column) for column in zip(*gaps, strict=True))
    print(f"largest relative difference {difference:.2e} (bar {BAR}), noise {noise:.2e}")
    print("clocks", clocks())
    print("saved", table.save(args.out))


if __name__ == "__main__":
    main()
