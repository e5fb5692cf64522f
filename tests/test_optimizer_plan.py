"""Which parameters take part in a step, when its plan is made anew, and what the optimizer tells of it."""

from __future__ import annotations

import copy

import pytest
import torch
from optimizer_helpers import (
    backward,
    classes,
    equal,
    groups,
    matrix,
    model,
    parameter,
    steps,
    train,
    watch,
    weights,
)

import dion3
from dion3.graph import StepGraph

# ---- gradients that are missing, parameters that come and go ----


@classes
def test_a_missing_gradient_leaves_everything_alone(device, cls):
    """No decay, no momentum decay, no step count; and the others are not disturbed."""
    p, q, b = (
        parameter(8, 12, device=device),
        parameter(8, 12, seed=1, device=device),
        parameter(3, device=device),
    )
    opt = cls([{"params": [p, q]}, {"params": [b], "algorithm": "adamw"}], lr=0.5, weight_decay=0.5)
    g = matrix(8, 12, seed=2, device=device)
    steps(opt, [p, q, b], [[g, g, torch.ones(3, device=device)]])
    before = [copy.deepcopy(dict(opt.state[x])) for x in (p, b)]
    kept = [p.detach().clone(), b.detach().clone()]
    steps(opt, [p, q, b], [[None, g, None]] * 3)
    assert torch.equal(p, kept[0]) and torch.equal(b, kept[1])
    for x, state in zip((p, b), before, strict=True):
        assert all(torch.equal(opt.state[x][k], v) for k, v in state.items())
    alone = parameter(8, 12, seed=1, device=device)
    steps(cls([alone], lr=0.5, weight_decay=0.5), [alone], [[g]] * 4)
    assert torch.equal(q, alone)


def test_no_gradient_at_all(device):
    p = parameter(8, 12, device=device)
    before = p.detach().clone()
    opt = dion3.Dion3([p])
    opt.step()
    assert torch.equal(p, before)


def test_state_exists_for_all_parameters_after_the_first_step(device):
    """Same keys on every rank, whichever gradients it happened to have."""
    params = [
        parameter(8, 12, device=device),
        parameter(4, 4, device=device),
        parameter(3, device=device),
    ]
    frozen = parameter(2, 2, device=device).requires_grad_(False)

    def make():
        return dion3.Dion3(
            [{"params": [*params[:2], frozen]}, {"params": params[2:], "algorithm": "adamw"}],
            neuron_norm=True,
        )

    keys = []
    for present in ([1, 0, 0], [0, 1, 1], [0, 0, 0]):
        opt = make()
        steps(
            opt,
            params,
            [[torch.ones_like(p) if has else None for p, has in zip(params, present, strict=True)]],
        )
        keys.append({i: sorted(s) for i, s in opt.state_dict()["state"].items()})
    early = make()
    early.init_state()
    keys.append({i: sorted(s) for i, s in early.state_dict()["state"].items()})
    assert all(k == keys[0] for k in keys)
    assert keys[0] == {
        0: ["momentum_buffer", "neuron_second_moment"],
        1: ["momentum_buffer", "neuron_second_moment"],
        3: ["exp_avg", "exp_avg_sq", "step"],
    }


def test_frozen_parameters(device):
    p, q = parameter(8, 12, device=device), parameter(8, 12, device=device).requires_grad_(False)
    before = q.detach().clone()
    opt = dion3.Dion3([p, q])
    p.grad = matrix(8, 12, seed=1, device=device)
    opt.step()
    assert torch.equal(q, before) and q not in opt.state
    q.requires_grad_(True)
    steps(opt, [p, q], [[p.grad, p.grad.clone()]])
    assert not torch.equal(q, before)


def test_tied_parameters_are_one(device):
    """A module that holds one weight twice gives it once; its gradient is the sum."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6, bias=False))
    net = net.to(device)
    net[1].weight = net[0].weight
    opt = dion3.Dion3(net.parameters())
    assert len(opt.param_groups[0]["params"]) == 1
    net(matrix(3, 6, device=device)).sum().backward()
    opt.step()
    assert net[0].weight is net[1].weight
    with pytest.raises(ValueError, match="list a tied parameter once"):
        dion3.Dion3([net[0].weight, net[1].weight])


def test_parameters_exchanged_after_construction(device):
    """accelerate's FSDP2 path replaces every parameter, by dummies first; nothing may be planned
    yet."""
    net = model(device)
    opt = dion3.Dion3(groups(net))
    twin_net = model(device)
    twin = dion3.Dion3(groups(twin_net))
    kept = [list(g["params"]) for g in opt.param_groups]
    for g in opt.param_groups:
        g["params"] = [torch.empty(1) for _ in g["params"]]
    for g, params in zip(opt.param_groups, kept, strict=True):
        g["params"][:] = params
    train(net, opt, range(3))
    train(twin_net, twin, range(3))
    assert equal(weights(net), weights(twin_net))


@pytest.mark.parametrize("how", ["data", "param", "state", "state entry", "in place"])
def test_the_plan_notices_exchanged_memory(device, how):
    """New storage of a parameter or of state between two steps, by any of the usual ways."""
    p, q = parameter(8, 12, device=device), parameter(8, 12, device=device)
    opt, twin = dion3.Dion3([p]), dion3.Dion3([q])
    grads = [matrix(8, 12, seed=t, device=device) for t in range(3)]
    steps(opt, [p], [[grads[0]]])
    steps(twin, [q], [[g] for g in grads])
    old = p
    if how == "data":
        p.data = p.data.clone()
    elif how == "param":
        p = torch.nn.Parameter(p.detach().clone())
        opt.param_groups[0]["params"][0] = p
        opt.state[p] = opt.state.pop(old)
    elif how == "state":
        opt.state[p] = {k: v.clone() for k, v in opt.state[p].items()}
    elif how == "state entry":
        opt.state[p]["momentum_buffer"] = opt.state[p]["momentum_buffer"].clone()
    else:
        opt.state[p]["momentum_buffer"].data = opt.state[p]["momentum_buffer"].data.clone()
    steps(opt, [p], [[g] for g in grads[1:]])
    assert torch.equal(p, q)
    assert opt.stats()["plans_built"] == 2


def test_a_plan_is_built_once(device):
    """New gradient storage, a new learning rate: neither is a reason for a new plan."""
    net = model(device)
    opt = dion3.Dion3(groups(net))
    for seed in range(5):
        opt.zero_grad(set_to_none=True)
        backward(net, seed)
        opt.param_groups[0]["lr"] = 0.1 / (seed + 1)
        opt.step()
    assert opt.stats()["plans_built"] == 1 and opt.stats()["steps"] == 5
    next(net.parameters()).grad = None
    opt.step()
    assert opt.stats()["plans_built"] == 2


def test_state_on_another_dtype_or_stride_is_taken_over(device):
    """Whoever moves or converts state by hand gets it back in the documented form."""
    p, q = parameter(8, 12, device=device), parameter(8, 12, device=device)
    opts = [dion3.Dion3([x], neuron_norm=True) for x in (p, q)]
    for opt, x in zip(opts, (p, q), strict=True):
        steps(opt, [x], [[matrix(8, 12, seed=1, device=device)]])
    entry = opts[0].state[p]
    entry["momentum_buffer"] = entry["momentum_buffer"].mT.contiguous().mT
    entry["neuron_second_moment"] = entry["neuron_second_moment"].double()
    for opt, x in zip(opts, (p, q), strict=True):
        steps(opt, [x], [[matrix(8, 12, seed=2, device=device)]])
    assert torch.equal(p, q)
    assert entry["neuron_second_moment"].dtype == torch.float32


def test_one_call_per_operation(device):
    """However many matrices of whatever shapes: the host cost does not grow with calls."""
    params = [
        parameter(*s, seed=i, device=device) for i, s in enumerate([(8, 12), (12, 8), (6, 6)] * 5)
    ]
    opt = dion3.Dion3(params, neuron_norm=True)
    names = ["momentum_", "select_", "gather_", "newton_schulz_out", "neuron_", "update_"]
    for name in names:
        with watch(name) as seen:
            steps(opt, params, [[matrix(*p.shape, seed=1, device=device) for p in params]])
        assert len(seen) == 1, name
    stats = opt.stats()
    assert stats["newton_schulz_calls"] == 1 and stats["matrices"] == 15 and stats["buckets"] == 3


def test_a_matrix_optimizer_that_does_nothing_would_be_seen(device):
    """The counter that tells a Muon which runs as AdamW."""
    net = model(device)
    opt = dion3.Dion3(groups(net))
    assert opt.stats()["newton_schulz_calls"] == 0
    train(net, opt, [0])
    stats = opt.stats()
    assert stats["newton_schulz_calls"] == 1
    assert (stats["matrix_parameters"], stats["adamw_parameters"]) == (2, 2)
    assert stats["matrix_elements"] == 12 * 24 + 24 * 8 and stats["adamw_elements"] == 24 + 8


def test_describe_and_observe(device):
    net = model(device)
    opt = dion3.Dion3(groups(net), lr=0.1, weight_decay=0.0, adjust_lr_fn="none")
    text = opt.describe()
    assert "3 of 12 cols" in text and "24x3" in text and "AdamW 2 parameters, 32 elements" in text
    opt.observe()
    before = weights(net)
    train(net, opt, [0])
    observed = opt.stats()["observed"]
    assert len(observed) == 2
    expected = sorted(
        ((a - b).square().mean().sqrt().item())
        for a, b in zip(weights(net), before, strict=True)
        if a.ndim == 2
    )
    assert sorted(r["update_rms"] for r in observed) == pytest.approx(expected, rel=1e-3)
    assert all(0 <= r["orthogonality_error"] < 0.5 for r in observed)
    opt.observe(False)
    assert "observed" not in opt.stats()


def test_which_graph_serves_the_gradients():
    """The whole step is captured for the first place where gradients stayed for a step, and for no
    other; the first call captures nothing."""
    graph = StepGraph()
    assert graph.stays("home")
    ran = []
    graph.run("whole", lambda: ran.append(True))
    assert ran == [True] and graph.captured == ()
    places = ["away", "home", "home", "away", "away", None, None, "home"]
    assert [graph.stays(p) for p in places] == [False] * 2 + [True] + [False] * 4 + [True]
    graph.reset()
    assert graph.stays("away")
