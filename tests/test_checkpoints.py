"""State dicts on one device: round trips without a lost bit, resumption, foreign checkpoints."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from optimizer_helpers import classes, matrix, parameter, relative, steps
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import dion3
from dion3.checkpoints import convert_from_dion

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def through_file(state_dict, **kwargs):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, **kwargs)


def build(cls, device, dtype=torch.float32, **kwargs):
    """A matrix, a stack, fused heads, and an AdamW vector; the optimizer; gradients for any
    step."""
    params = [parameter(8, 12, dtype=dtype), parameter(2, 6, 6, seed=1, dtype=dtype)]
    params += [parameter(12, 8, seed=2, dtype=dtype), parameter(7, seed=3, dtype=dtype)]
    params = [torch.nn.Parameter(p.detach().to(device)) for p in params]
    opt = cls(
        [
            {"params": params[:2]},
            {"params": params[2:3], "num_heads": 2, "head_axis": 1},
            {"params": params[3:], "algorithm": "adamw", "lr": 0.01},
        ],
        lr=0.05,
        **kwargs,
    )
    return params, opt


def grads(params, t):
    return [
        matrix(*p.shape, seed=100 * t + i, dtype=p.dtype, device=p.device)
        for i, p in enumerate(params)
    ]


def same_state(a, b):
    """Two state dicts hold the same tensors, bit for bit and dtype for dtype."""
    assert a["state"].keys() == b["state"].keys()
    for index, entry in a["state"].items():
        assert entry.keys() == b["state"][index].keys()
        for key, value in entry.items():
            other = b["state"][index][key]
            assert value.dtype == other.dtype and torch.equal(value, other.to(value.device)), (
                index,
                key,
            )


# ---- round trips ----


@classes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("momentum_dtype", DTYPES)
def test_round_trip_is_bitwise(device, cls, dtype, momentum_dtype):
    """Loading never casts: torch's own loading would turn fp32 state of bf16 weights into bf16."""
    params, opt = build(cls, device, dtype, momentum_dtype=momentum_dtype)
    steps(opt, params, [grads(params, t) for t in range(3)])
    saved = through_file(opt.state_dict(), map_location="cpu")
    again, other = build(cls, device, dtype, momentum_dtype=momentum_dtype)
    other.load_state_dict(saved)
    same_state(saved, other.state_dict())
    assert other.state[again[0]]["momentum_buffer"].dtype == momentum_dtype
    averages = torch.float32 if momentum_dtype == torch.float16 else momentum_dtype
    assert other.state[again[3]]["exp_avg"].dtype == averages
    assert all(v.device == p.device for p in again for v in other.state[p].values())


@classes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["live", "file"])
def test_a_resumed_run_is_the_uninterrupted_run(device, cls, dtype, where):
    """Five steps, save, load into fresh objects, five more: all bits of ten, rounding included."""
    params, opt = build(cls, device, dtype)
    steps(opt, params, [grads(params, t) for t in range(5)])
    saved = (opt.state_dict(), [p.detach().clone() for p in params])
    saved = through_file(saved, map_location="cpu") if where == "file" else copy.deepcopy(saved)
    steps(opt, params, [grads(params, t) for t in range(5, 10)])

    again, other = build(cls, device, dtype)
    with torch.no_grad():
        for p, value in zip(again, saved[1], strict=True):
            p.copy_(value)
    other.load_state_dict(saved[0])
    steps(other, again, [grads(again, t) for t in range(5, 10)])
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))
    same_state(opt.state_dict(), other.state_dict())


def test_loading_copies(device):
    """The loaded dict and the optimizer share no memory."""
    params, opt = build(dion3.Dion3, device)
    steps(opt, params, [grads(params, 0)])
    saved = copy.deepcopy(opt.state_dict())
    kept = copy.deepcopy(saved)
    opt.load_state_dict(saved)
    steps(opt, params, [grads(params, 1)])
    same_state(saved, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_beyond_what_16_bits_count(device, dtype):
    """A bfloat16 counter stops at 256."""
    p, b = parameter(4, 4, dtype=dtype, device=device), parameter(3, dtype=dtype, device=device)
    opt = dion3.Dion3([{"params": [p]}, {"params": [b], "algorithm": "adamw"}], lr=0.0)
    for _ in range(310):
        steps(opt, [p, b], [[torch.ones_like(p), torch.ones_like(b)]])
    opt.load_state_dict(through_file(opt.state_dict()))
    steps(opt, [p, b], [[torch.ones_like(p), torch.ones_like(b)]])
    for x in (p, b):
        assert opt.state[x]["step"].item() == 311 and opt.state[x]["step"].dtype == torch.float32


def test_state_is_saved_whenever_asked(device):
    """Between backward and zero_grad, before any step, after partial gradients, with frozen
    ones."""
    params, opt = build(dion3.Dion3, device)
    assert opt.state_dict()["state"] == {}
    for p, g in zip(params, grads(params, 0), strict=True):
        p.grad = g
    assert opt.state_dict()["state"] == {}
    opt.step()
    full = opt.state_dict()
    assert sorted(full["state"]) == [0, 1, 2, 3]
    params[0].requires_grad_(False)
    again, other = build(dion3.Dion3, device)
    again[0].requires_grad_(False)
    other.load_state_dict(full)
    same_state(full, other.state_dict())  # the state of a parameter frozen later is kept


def test_state_holds_tensors_and_groups_plain_values(device):
    params, opt = build(dion3.Dion3, device, neuron_norm=True)
    opt.param_groups[0]["lr"] = torch.tensor(0.5, device=device)
    steps(opt, params, [grads(params, 0)])
    saved = opt.state_dict()
    assert all(type(v) is torch.Tensor for e in saved["state"].values() for v in e.values())

    def plain(value):
        if isinstance(value, list | tuple):
            return all(map(plain, value))
        return value is None or isinstance(value, bool | int | float | str)

    assert all(plain(v) for group in saved["param_groups"] for v in group.values())
    assert isinstance(opt.param_groups[0]["lr"], torch.Tensor)  # the live one stays


def test_group_values_are_restored(device):
    """Saved values win; keys the checkpoint lacks keep theirs; nothing is lost on the way."""
    params, opt = build(dion3.Dion3, device)
    schedulers = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.5**t)
    steps(opt, params, [grads(params, 0)])
    schedulers.step()
    saved = through_file(opt.state_dict())
    again, other = build(dion3.Dion3, device)
    other.param_groups[0]["fraction"] = 0.5
    for group in other.param_groups:
        group["lr"] = 9.0
    other.load_state_dict(saved)
    assert [g["lr"] for g in other.param_groups] == [0.025, 0.025, 0.005]
    assert [g["initial_lr"] for g in other.param_groups] == [0.05, 0.05, 0.01]
    assert other.param_groups[0]["fraction"] == 0.5
    assert other.param_groups[1]["num_heads"] == 2
    assert other.param_groups[2]["weight_decay"] == 0.0


def test_several_groups_one_of_them_empty(device):
    """Every key of every group survives, the scheduler's included."""
    opts = []
    for lr in (0.1, 0.7):
        p, b = parameter(4, 6, device=device), parameter(3, device=device)
        groups = [{"params": [p], "momentum": 0.5}, {"params": [], "fraction": 0.5}]
        opt = dion3.Dion3([*groups, {"params": [b], "algorithm": "adamw"}], lr=lr)
        opts.append((opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 / (1 + t)), [p, b]))
    (first, schedule, params), (second, _, others) = opts
    steps(first, params, [[torch.ones_like(p) for p in params]])
    schedule.step()
    second.load_state_dict(through_file(first.state_dict()))
    for a, b in zip(first.param_groups, second.param_groups, strict=True):
        assert {k: v for k, v in a.items() if k != "params"} == {
            k: v for k, v in b.items() if k != "params"
        }
    steps(second, others, [[torch.ones_like(p) for p in others]])


def test_a_learning_rate_tensor_stays_the_same_tensor(device):
    """A captured graph or a scheduler holds on to it; also after a load from the CPU."""
    lr = torch.tensor(0.25, device=device)
    p = parameter(4, 6, device=device)
    opt = dion3.Dion3([p], lr=lr)
    steps(opt, [p], [[matrix(4, 6, seed=1, device=device)]])
    saved = through_file(opt.state_dict(), map_location="cpu")
    lr.fill_(7.0)
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] is lr and lr.item() == 0.25 and lr.device.type == device.type
    saved["param_groups"][0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        opt.load_state_dict(saved)
    assert lr.item() == 0.25


def test_names_are_kept(device):
    p, q = parameter(4, 6, device=device), parameter(4, 6, device=device)
    opt = dion3.Dion3([("layer.weight", p)])
    saved = opt.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["layer.weight"]
    unnamed = dion3.Dion3([q]).state_dict()
    opt.load_state_dict(unnamed)
    assert opt.param_groups[0]["param_names"] == ["layer.weight"]


@pytest.mark.parametrize("change", [{"fraction": 1.0}, {"select": "rows"}, {"neuron_norm": True}])
def test_options_may_change_between_runs(device, change):
    """Momentum has the same layout for all of them; a second moment starts at 0."""
    params, opt = build(dion3.Dion3, device)
    steps(opt, params, [grads(params, t) for t in range(3)])
    again, other = build(dion3.Dion3, device, **change)
    other.load_state_dict(opt.state_dict())
    assert torch.equal(
        other.state[again[0]]["momentum_buffer"], opt.state[params[0]]["momentum_buffer"]
    )
    steps(other, again, [grads(again, 3)])
    assert all(p.isfinite().all() for p in again)


def test_a_stored_state_dict_of_the_first_version_loads(device):
    """Written out: what version 0.1.0 saves must load for ever."""
    stored = {
        "state": {
            0: {
                "momentum_buffer": torch.full((4, 6), 0.5),
                "neuron_second_moment": torch.full((4,), 0.25),
            },
            1: {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3), "step": torch.tensor(3.0)},
        },
        "param_groups": [
            {
                "lr": 0.1,
                "weight_decay": 0.1,
                "momentum": 0.9,
                "nesterov": False,
                "ns_coefficients": None,
                "eps": 1e-7,
                "ns_steps": 5,
                "adjust_lr_fn": None,
                "params": [0],
            },
            {
                "algorithm": "adamw",
                "weight_decay": 0.0,
                "eps": 1e-8,
                "lr": 0.1,
                "momentum": 0.95,
                "nesterov": False,
                "ns_coefficients": None,
                "ns_steps": 5,
                "adjust_lr_fn": None,
                "params": [1],
            },
        ],
    }
    p, b = parameter(4, 6, device=device), parameter(3, device=device)
    opt = dion3.Dion3([{"params": [p]}, {"params": [b], "algorithm": "adamw"}], neuron_norm=True)
    opt.load_state_dict(stored)
    same_state(stored, opt.state_dict())
    assert opt.param_groups[0]["momentum"] == 0.9
    steps(opt, [p, b], [[torch.ones_like(p), torch.ones_like(b)]])
    assert opt.state_dict()["param_groups"][0].keys() == stored["param_groups"][0].keys()


# ---- torch.distributed.checkpoint on one process ----


class Net(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.a = torch.nn.Linear(6, 8, device=device)
        self.b = torch.nn.Linear(8, 4, device=device)

    def groups(self):
        return [
            {"params": [("a.weight", self.a.weight), ("b.weight", self.b.weight)]},
            {"params": [("a.bias", self.a.bias), ("b.bias", self.b.bias)], "algorithm": "adamw"},
        ]


def _net(cls, device, seed=0, **kwargs):
    torch.manual_seed(0)
    net = Net(device)
    return net, cls(net.groups(), lr=0.1, **kwargs)


def _train(net, opt, seeds):
    for seed in seeds:
        opt.zero_grad()
        net.b(net.a(matrix(3, 6, seed=seed, device=net.a.weight.device))).square().mean().backward()
        opt.step()


@classes
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_distributed_checkpoint_round_trip(device, cls, flat, tensor_lr):
    """get and set_optimizer_state_dict, flattened or not, into an optimizer that never stepped."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    net, opt = _net(cls, device)
    _train(net, opt, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(net, opt, options=options))
    other_net, other = _net(cls, device)
    if tensor_lr:
        other.param_groups[0]["lr"] = torch.tensor(5.0)
    start = [p.detach().clone() for p in other_net.parameters()]
    set_optimizer_state_dict(other_net, other, saved, options=options)
    assert all(torch.equal(a, b) for a, b in zip(start, other_net.parameters(), strict=True))
    same_state(opt.state_dict(), other.state_dict())
    with torch.no_grad():
        for a, b in zip(net.parameters(), other_net.parameters(), strict=True):
            b.copy_(a)
    _train(net, opt, range(3, 6))
    _train(other_net, other, range(3, 6))
    assert all(
        torch.equal(a, b) for a, b in zip(net.parameters(), other_net.parameters(), strict=True)
    )


@pytest.mark.parametrize("target", [dion3.Muon, dion3.Dion3])
def test_a_flat_checkpoint_of_torchs_muon_loads(device, target):
    """Its keys are all that a flat loader looks for: no live group key is missing from it."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    p, q = torch.nn.Linear(6, 8, bias=False), torch.nn.Linear(6, 8, bias=False)
    theirs = torch.optim.Muon(p.to(device).parameters(), lr=0.125)
    steps(theirs, [p.weight], [[matrix(8, 6, seed=1, device=device)]])
    saved = get_optimizer_state_dict(p, theirs, options=options)
    ours = target(q.to(device).parameters())
    set_optimizer_state_dict(q, ours, saved, options=options)
    buffer = ours.state[q.weight]["momentum_buffer"]
    factor = 0.95 if target is dion3.Dion3 else 1.0
    assert relative(buffer, factor * theirs.state[p.weight]["momentum_buffer"]) < 1e-6
    assert ours.param_groups[0]["lr"] == 0.125


# ---- the dion package ----


def _dion_dict(algorithm, adamw=True, step_dev=True):
    """As the package writes it; a parameter of (4, 6) and one of (3,)."""
    scale = torch.full((), 1 / (1 - 0.9))
    matrix_group = {
        "lr": 0.02,
        "mu": 0.9,
        "muon_beta2": 0.95,
        "weight_decay": 0.01,
        "epsilon": 1e-8,
    }
    matrix_group |= {"algorithm": algorithm, "step": 4, "adjust_lr": "rms_norm", "fraction": 0.25}
    state = {0: {"momentum": (torch.arange(24.0).view(4, 6) * scale).bfloat16()}}
    if algorithm in ("nordion2", "normuon"):
        state[0]["variance_neuron"] = torch.full((4, 1), 0.125, dtype=torch.bfloat16)
    groups = [{**matrix_group, "params": [0]}]
    if adamw:
        groups.append(
            {**matrix_group, "algorithm": "adamw", "beta1": 0.8, "beta2": 0.9, "params": [1]}
        )
        state[1] = {"momentum": torch.ones(3), "variance": torch.full((3,), 2.0)}
        if step_dev:
            state[1]["step_dev"] = torch.tensor(4)
    return {"state": state, "param_groups": groups}


@pytest.mark.parametrize("algorithm", ["nordion2", "dion2", "muon", "normuon"])
@pytest.mark.parametrize("step_dev", [False, True])
def test_a_checkpoint_of_the_dion_package(device, algorithm, step_dev):
    source = _dion_dict(algorithm, step_dev=step_dev)
    kept = copy.deepcopy(source)
    p, b = parameter(4, 6, device=device), parameter(3, device=device)
    neuron_norm = algorithm in ("nordion2", "normuon")
    opt = dion3.Dion3(
        [{"params": [p]}, {"params": [b], "algorithm": "adamw"}], neuron_norm=neuron_norm
    )
    opt.load_state_dict(convert_from_dion(source))
    assert repr(source) == repr(kept)
    late = 1.0 if algorithm in ("nordion2", "dion2") else 0.9  # Muon there damps first, as here
    expected = kept["state"][0]["momentum"].double() * (1 - 0.9) * late
    assert relative(opt.state[p]["momentum_buffer"].cpu(), expected) < 1e-6
    assert opt.state[p]["momentum_buffer"].dtype == torch.float32
    if neuron_norm:
        assert opt.state[p]["neuron_second_moment"].tolist() == [0.125] * 4
    assert opt.state[b]["step"].item() == 4 and opt.state[b]["exp_avg_sq"].tolist() == [2.0] * 3
    first, second = opt.param_groups
    assert (first["lr"], first["momentum"], first["weight_decay"]) == (0.02, 0.9, 0.01)
    assert first["adjust_lr_fn"] == "match_rms_adamw" and second["adamw_betas"] == (0.8, 0.9)
    steps(opt, [p, b], [[torch.ones_like(p), torch.ones_like(b)]])


def test_the_next_step_continues_the_dion_package(device):
    """Sum momentum M there, (1 - mu) M here: the next Newton-Schulz input has the same
    direction."""
    p = parameter(4, 6, device=device)
    m, g = matrix(4, 6, seed=1, device=device), matrix(4, 6, seed=2, device=device)
    source = {
        "state": {0: {"momentum": m}},
        "param_groups": [
            {"params": [0], "algorithm": "dion2", "mu": 0.9, "lr": 0.1, "weight_decay": 0.0}
        ],
    }
    opt = dion3.Dion3([p], fraction=1.0)
    opt.load_state_dict(convert_from_dion(source))
    steps(opt, [p], [[g]])
    assert relative(opt.state[p]["momentum_buffer"], 0.9 * 0.1 * (m + g)) < 1e-6


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda sd: sd["param_groups"][0].update(algorithm="lion"), "algorithm='lion'"),
        (lambda sd: sd["param_groups"][0].update(algorithm=None), "algorithm=None"),
        (lambda sd: sd["state"][0].update(Q=torch.ones(2)), "state Q of parameter 0"),
    ],
)
def test_what_the_dion_package_has_and_we_have_not(change, text):
    source = _dion_dict("nordion2")
    change(source)
    with pytest.raises(ValueError, match=text):
        convert_from_dion(source)
