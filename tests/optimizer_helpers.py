"""What the optimizer tests share: inputs, the reference run beside ours, and error measures."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import dion3
from dion3 import executor
from dion3.plan import ns_config
from dion3.reference_step import reference_step

BITS = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
CLASSES = [dion3.Dion3, dion3.Muon, dion3.NorMuon]
classes = pytest.mark.parametrize("cls", CLASSES)


def matrix(*shape, seed=0, decay=0.0, rank=None, dtype=torch.float32, device="cpu"):
    """Gaussian, or with singular values i^-decay, or of a given rank; rows of different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if decay or rank:
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        s = torch.arange(1, s.shape[-1] + 1, dtype=torch.float64) ** -decay
        if rank:
            s = torch.where(torch.arange(s.shape[-1]) < rank, s, 0.0)
        x = u @ (s.unsqueeze(-1) * vh) * s.numel() ** 0.5
    if len(shape) > 1:
        rows, cols = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
        for sizes in (rows, cols):
            x = x * (0.5 + torch.rand(*sizes, generator=generator, dtype=torch.float64))
    return x.to(dtype=dtype, device=device)


def parameter(*shape, **kwargs):
    return torch.nn.Parameter(matrix(*shape, **kwargs))


def ulp(x):
    """The distance between x and its neighbours away from zero, in float64."""
    exponent = torch.frexp(x.double().abs().clamp(min=torch.finfo(x.dtype).tiny)).exponent - 1
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - BITS[x.dtype])


def relative(a, b):
    """|a - b|_F / |b|_F in float64."""
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()


@contextmanager
def watch(name):
    """Record (copies of tensors in) the arguments of one operation of the step."""
    seen = []
    original = getattr(executor.ops, name)

    def copy(value):
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        return [copy(v) for v in value] if isinstance(value, list | tuple) else value

    def spy(*args, **kwargs):
        seen.append([copy(a) for a in args])
        return original(*args, **kwargs)

    setattr(executor.ops, name, spy)
    try:
        yield seen
    finally:
        setattr(executor.ops, name, original)


def steps(optimizer, params, grads):
    """One step per entry of `grads`, a list with one gradient per parameter each."""
    for now in grads:
        for p, g in zip(params, now, strict=True):
            p.grad = g
        optimizer.step()


def reference_of(optimizer, group, p, dtype=torch.float64):
    """What reference_step makes of a 2-D parameter's present weight, gradient and state."""
    options = {**vars(optimizer._options), **group}
    config = ns_config(optimizer._checked_options()[0], p.device)
    state = optimizer.state[p]
    zero = torch.zeros_like(p, dtype=dtype)
    moment = state.get("neuron_second_moment")
    if moment is None and options["neuron_norm"]:
        moment = torch.zeros(p.shape[0], device=p.device)
    return reference_step(
        p.detach().to(dtype),
        p.grad.to(dtype),
        state["momentum_buffer"].to(dtype) if "momentum_buffer" in state else zero,
        None if moment is None else moment.to(dtype),
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        mu=group["momentum"],
        fraction=options["fraction"],
        axis="auto" if options["select"] in ("auto", "sharded") else options["select"],
        nesterov=group["nesterov"],
        rule=optimizer._momentum_rule(),
        coefficients=config.coefficients,
        eps=group["eps"],
        adjust_lr_fn=group["adjust_lr_fn"],
        lr_transfer=options["lr_transfer"],
        beta2=options["beta2"],
        maximize=options["maximize"],
    )


def model(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.ReLU(), torch.nn.Linear(24, 8))
    return net.to(device=device, dtype=dtype)


def groups(net, **matrices):
    return [
        {"params": [p for p in net.parameters() if p.ndim == 2], **matrices},
        {"params": [p for p in net.parameters() if p.ndim == 1], "algorithm": "adamw"},
    ]


def backward(net, seed=0):
    p = next(net.parameters())
    x = matrix(5, 12, seed=seed, dtype=p.dtype, device=p.device)
    loss = net(x).square().mean()
    loss.backward()
    return loss.detach()


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def train(net, opt, seeds):
    for seed in seeds:
        opt.zero_grad()
        backward(net, seed)
        opt.step()
