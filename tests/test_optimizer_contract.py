"""What frameworks expect of a torch.optim.Optimizer."""

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
import subprocess
import sys
import textwrap

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
    relative,
    steps,
    train,
    weights,
)

import dion3

# ---- copies ----


@classes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pickling_and_deepcopy(device, cls, dtype):
    """A copy, made together with its model in the middle of training, goes on with the same
    bits."""
    net = model(device, dtype)
    opt = cls(groups(net), lr=0.1, seed=5, maximize=True)
    train(net, opt, range(3))
    other, copied = copy.deepcopy((net, opt))
    buffer = io.BytesIO()
    pickle.dump((net, opt), buffer)
    buffer.seek(0)
    third, loaded = pickle.load(buffer)
    for n, o in ((net, opt), (other, copied), (third, loaded)):
        train(n, o, range(3, 6))
        assert o._options == opt._options
    assert equal(weights(net), weights(other)) and equal(weights(net), weights(third))
    copied.add_param_group({"params": [parameter(3, 4, device=device)]})
    assert "Parameter Group 0" in repr(copied)


def test_wrapped_classes(device):
    """Lightning builds a class from a wrapper and ours, and delegates to the inner object: nothing
    of ours may be found on the class that should be found on the object."""
    net = model(device)
    inner = dion3.Dion3(groups(net))

    class Wrapper:
        def __init__(self, optimizer):
            self._optimizer = optimizer

        def __getattr__(self, name):
            return getattr(object.__getattribute__(self, "_optimizer"), name)

        def step(self, closure=None):
            return self._optimizer.step(closure)

    wrapped = type("LightningDion3", (Wrapper, dion3.Dion3), {})(inner)
    assert isinstance(wrapped, torch.optim.Optimizer)
    backward(net)
    wrapped.step(lambda: None)
    for name in vars(inner):
        assert not hasattr(dion3.Dion3, name), name
    assert wrapped._options is inner._options
    assert not hasattr(dion3.Dion3, "__slots__")


@classes
def test_overridden_methods_keep_the_names_of_their_arguments(cls):
    """Distributed checkpointing calls load_state_dict(state_dict=...)."""
    base = torch.optim.Optimizer
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if name == "__init__" or not hasattr(base, name) or name.startswith("__"):
            continue
        ours = [(a.name, a.kind) for a in inspect.signature(method).parameters.values()]
        theirs = [
            (a.name, a.kind) for a in inspect.signature(getattr(base, name)).parameters.values()
        ]
        assert ours == theirs, name


# ---- step ----


@classes
def test_closures(device, cls):
    net = model(device)
    opt = cls(groups(net))
    grad_enabled = []

    def closure():
        grad_enabled.append(torch.is_grad_enabled())
        opt.zero_grad()
        return backward(net)

    before = weights(net)
    with torch.no_grad():
        loss = opt.step(closure)
    assert grad_enabled == [True] and loss.item() > 0
    assert not equal(before, weights(net))
    assert opt.step(closure=None) is None


def test_hooks(device):
    net = model(device)
    opt = dion3.Dion3(groups(net))
    calls = []
    opt.register_step_pre_hook(lambda o, a, k: calls.append("pre"))
    opt.register_step_post_hook(lambda o, a, k: calls.append("post"))
    opt.register_state_dict_post_hook(lambda o, sd: calls.append("saved"))
    opt.register_load_state_dict_pre_hook(lambda o, sd: calls.append("loading"))
    opt.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    backward(net)
    opt.step()
    opt.load_state_dict(opt.state_dict())
    assert calls == ["pre", "post", "saved", "loading", "loaded"]


def test_a_load_hook_may_translate_a_foreign_checkpoint(device):
    """The hook runs before anything is checked, and its result is what is loaded."""
    p = parameter(4, 6, device=device)
    opt = dion3.Dion3([p])
    steps(opt, [p], [[matrix(4, 6, seed=1, device=device)]])
    foreign = copy.deepcopy(opt.state_dict())
    foreign["state"][0] = {"exotic": foreign["state"][0]["momentum_buffer"]}

    def hook(optimizer, state_dict):
        entry = state_dict["state"][0]
        return {**state_dict, "state": {0: {"momentum_buffer": entry["exotic"]}}}

    opt.register_load_state_dict_pre_hook(hook)
    before = opt.state[p]["momentum_buffer"].clone()
    opt.load_state_dict(foreign)
    assert torch.equal(opt.state[p]["momentum_buffer"], before)


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
                torch.optim.lr_scheduler.ConstantLR(o, 0.5),
            ],
            [3],
        ),
    ],
    ids=["lambda", "cosine", "onecycle", "sequential"],
)
def test_schedulers(device, make, tensor):
    """Every step uses the learning rate of that moment, be it a float that is replaced or a tensor
    that is filled; the scheduler's keys survive a checkpoint."""
    p, q = parameter(8, 12, device=device), parameter(8, 12, device=device)
    lr = torch.tensor(0.1, device=device) if tensor else 0.1
    opt = dion3.Dion3([p], lr=lr, fraction=1.0)
    scheduler = make(opt)
    if tensor:
        assert opt.param_groups[0]["lr"] is not None
    for t in range(6):
        g = matrix(8, 12, seed=t, device=device)
        fresh = dion3.Dion3([q], lr=0.1, fraction=1.0)
        if t:
            state = {0: {k: v.clone() for k, v in opt.state[p].items()}}
            fresh.load_state_dict(
                {"state": state, "param_groups": fresh.state_dict()["param_groups"]}
            )
        fresh.param_groups[0]["lr"] = float(opt.param_groups[0]["lr"])
        fresh.param_groups[0]["momentum"] = opt.param_groups[0]["momentum"]
        steps(opt, [p], [[g]])
        steps(fresh, [q], [[g]])
        assert torch.equal(p, q), t
        scheduler.step()
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert "initial_lr" in opt.param_groups[0]
    assert isinstance(opt.param_groups[0]["lr"], torch.Tensor) == tensor
    scheduler.step()
    opt.step()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("algorithm", ["dion3", "adamw"])
def test_tensor_learning_rates(device, shape, where, algorithm):
    """0-d or one element, on either device; filled in place between steps."""
    p, q = parameter(8, 12, device=device), parameter(8, 12, device=device)
    lr = torch.full(shape, 0.125, device=where)
    first = dion3.Dion3([{"params": [p], "algorithm": algorithm, "lr": lr, "weight_decay": 0.25}])
    second = dion3.Dion3(
        [{"params": [q], "algorithm": algorithm, "lr": 0.125, "weight_decay": 0.25}]
    )
    for value in (0.125, 0.5, 0.25):
        lr.fill_(value)
        second.param_groups[0]["lr"] = value
        g = matrix(8, 12, seed=3, device=device)
        steps(first, [p], [[g]])
        steps(second, [q], [[g]])
        assert torch.equal(p, q)
    assert first.param_groups[0]["lr"] is lr
    saved = first.state_dict()["param_groups"][0]["lr"]
    assert type(saved) is float and saved == 0.25


def test_per_group_options(device):
    """Two groups with other lr, decay and momentum move as each alone."""
    options = [
        {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.5, "fraction": 1.0},
        {"lr": 0.02, "weight_decay": 0.5, "momentum": 0.9, "adjust_lr_fn": "spectral"},
        {"neuron_norm": True, "beta2": 0.5, "select": "rows", "lr_transfer": False},
        {"ns_steps": 3, "ns_coefficients": (3.4445, -4.775, 2.0315), "restarts": []},
        {"maximize": True, "rounding": "nearest", "momentum_dtype": torch.bfloat16},
        {"algorithm": "adamw", "lr": 0.3, "weight_decay": 0.1, "adamw_betas": (0.5, 0.6)},
    ]
    together = [parameter(8, 12, seed=i, device=device) for i in range(len(options))]
    alone = [torch.nn.Parameter(p.detach().clone()) for p in together]
    opt = dion3.Dion3([{"params": [p], **o} for p, o in zip(together, options, strict=True)])
    grads = [
        [matrix(8, 12, seed=9 * t + i, device=device) for i in range(len(options))]
        for t in range(3)
    ]
    steps(opt, together, grads)
    for i, (p, o) in enumerate(zip(alone, options, strict=True)):
        steps(dion3.Dion3([{"params": [p], **o}]), [p], [[g[i].clone()] for g in grads])
        assert torch.equal(p, together[i]), o
    changes = [
        (p.detach() - parameter(8, 12, seed=i, device=device)).norm()
        for i, p in enumerate(together)
    ]
    assert len({c.item() for c in changes}) == len(options)


@pytest.mark.parametrize("seed", range(3))
def test_live_options_take_effect(device, seed):
    """Any group value may be changed between two steps: it acts as if it had been there all
    along."""
    changes = {"lr": 0.3, "weight_decay": 0.5, "momentum": 0.5, "eps": 100.0, "fraction": 0.5}
    changes |= {
        "select": "cols",
        "adjust_lr_fn": "match_rms_adamw",
        "ns_steps": 2,
        "maximize": True,
    }
    for key, value in changes.items():
        p, q = parameter(8, 12, device=device), parameter(8, 12, device=device)
        opt = dion3.Dion3([p], adjust_lr_fn="none")
        twin = dion3.Dion3([q], adjust_lr_fn="none")
        g = [matrix(8, 12, seed=seed + t, device=device) for t in range(2)]
        steps(opt, [p], [[g[0]]])
        steps(twin, [q], [[g[0]]])
        assert torch.equal(p, q)
        opt.param_groups[0][key] = value
        steps(opt, [p], [[g[1]]])
        steps(twin, [q], [[g[1]]])
        assert not torch.equal(p, q), key


# ---- AMP, compile ----


@classes
def test_grad_scaler(device, cls):
    """Unscaled before the step; a step with an inf is skipped, momentum and all."""
    net = model(device)
    opt = cls(groups(net))
    plain_net = model(device)
    plain = cls(groups(plain_net))
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8)
    for seed in range(3):
        for o in (opt, plain):
            o.zero_grad()
        x = matrix(5, 12, seed=seed, device=device)
        scaler.scale(net(x).square().mean()).backward()
        scaler.step(opt)
        scaler.update()
        backward(plain_net, seed)
        plain.step()
    assert equal(weights(net), weights(plain_net))
    before, state = weights(net), copy.deepcopy(opt.state_dict()["state"])
    next(net.parameters()).grad[0, 0] = float("inf")
    scaler.step(opt)
    scaler.update()
    assert equal(before, weights(net)) and scaler.get_scale() < 2.0**8
    for index, entry in opt.state_dict()["state"].items():
        assert all(torch.equal(entry[k], v) for k, v in state[index].items())


def test_torch_compile(device):
    """The step inside a compiled function: the graph breaks there, the numbers stay."""
    net, plain_net = model(device), model(device)
    opt, plain = dion3.Dion3(groups(net)), dion3.Dion3(groups(plain_net))

    def train_step(x):
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()

    compiled = torch.compile(train_step, backend="eager")
    for seed in range(3):
        compiled(matrix(5, 12, seed=seed, device=device))
    train(plain_net, plain, range(3))
    assert all(relative(a, b) < 1e-6 for a, b in zip(weights(net), weights(plain_net), strict=True))
    step = torch.compile(opt.step, backend="eager")
    backward(net)
    step()


def test_autograd_sees_that_parameters_changed(device):
    p = parameter(4, 6, device=device)
    loss = (p * p).sum()
    loss.backward(retain_graph=True)
    dion3.Dion3([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("key", ["fused", "foreach", "capturable", "differentiable"])
def test_keys_of_other_optimizers_are_accepted(device, key):
    p, q = parameter(4, 6, device=device), parameter(4, 6, device=device)
    opt = dion3.Dion3([{"params": [p], key: key != "differentiable"}])
    g = matrix(4, 6, seed=1, device=device)
    steps(opt, [p], [[g]])
    steps(dion3.Dion3([q]), [q], [[g]])
    assert torch.equal(p, q)


# ---- AdamW ----


@pytest.mark.parametrize(
    "amsgrad_free", [{}, {"weight_decay": 0.3}, {"lr": 0.1, "betas": (0.5, 0.7)}]
)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_groups_equal_torchs(device, amsgrad_free, maximize, dtype):
    """fp32 within 1e-6; bf16 weights as the fp32 run to a few of their own roundings."""
    kwargs = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0, **amsgrad_free}
    p = parameter(6, 8, dtype=dtype, device=device)
    q = torch.nn.Parameter(p.detach().float())
    ours = dion3.Dion3([{"params": [p], "algorithm": "adamw", **kwargs}], maximize=maximize)
    theirs = torch.optim.AdamW([q], eps=1e-8, maximize=maximize, **kwargs)
    for t in range(20):
        g = matrix(6, 8, seed=t, dtype=dtype, device=device)
        steps(ours, [p], [[g]])
        steps(theirs, [q], [[g.float()]])
    bound = 1e-6 if dtype == torch.float32 else 20 * 2.0**-8
    assert (p.float() - q).abs().max() <= bound * q.abs().max()
    assert ours.state[p]["step"].item() == 20


def test_adamw_averages_in_bfloat16(device):
    """momentum_dtype is theirs too, and the error stays within twice that of torch's bf16 AdamW."""
    kwargs = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0}
    start = matrix(30, 40, dtype=torch.bfloat16, device=device)
    params = [
        torch.nn.Parameter(start.to(d)) for d in (torch.bfloat16, torch.bfloat16, torch.float64)
    ]
    ours = dion3.Dion3(
        [{"params": [params[0]], "algorithm": "adamw", **kwargs}],
        momentum_dtype=torch.bfloat16,
        rounding="nearest",
    )
    optimizers = [ours, *(torch.optim.AdamW([p], **kwargs) for p in params[1:])]
    for t in range(20):
        g = matrix(30, 40, seed=t, dtype=torch.bfloat16, device=device)
        for p, optimizer in zip(params, optimizers, strict=True):
            steps(optimizer, [p], [[g.to(p.dtype)]])
    entry = ours.state[params[0]]
    assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == torch.bfloat16
    error, usual = ((p.double() - params[2]).norm().item() for p in params[:2])
    assert 0 < error <= 2 * usual
    ours.load_state_dict(ours.state_dict())
    assert ours.state[params[0]]["exp_avg_sq"].dtype == torch.bfloat16
    half = dion3.Dion3(
        [{"params": [params[0]], "algorithm": "adamw"}], momentum_dtype=torch.float16
    )
    half.init_state()
    assert half.state[params[0]]["exp_avg_sq"].dtype == torch.float32


def test_adamw_uses_its_learning_rate_verbatim(device):
    """Neither lr_transfer nor a shape factor, and no decay unless asked for."""
    p = torch.nn.Parameter(torch.ones(64, 4, device=device))
    opt = dion3.Dion3(
        [{"params": [p], "algorithm": "adamw", "lr": 0.25}], adjust_lr_fn="match_rms_adamw"
    )
    assert opt.param_groups[0]["weight_decay"] == 0.0
    steps(opt, [p], [[torch.ones_like(p)]])
    assert torch.allclose(p, torch.full_like(p, 0.75))


def test_the_readme_of_the_muon_kernel_runs_unchanged(device):
    """The group form of the Muon on the Hugging Face hub."""
    net = model(device)
    hidden = [p for p in net.parameters() if p.ndim >= 2]
    others = [p for p in net.parameters() if p.ndim < 2]
    Muon = dion3.Muon
    optimizer = Muon([
        dict(params=hidden, use_muon=True, lr=0.02, weight_decay=0.01),
        dict(params=others, use_muon=False, adamw_lr=3e-4),
    ])  # fmt: skip
    before = weights(net)
    train(net, optimizer, range(2))
    assert all(not torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))
    assert optimizer.param_groups[1]["lr"] == 3e-4
    assert optimizer.param_groups[1]["algorithm"] == "adamw"
    assert optimizer.stats()["matrix_parameters"] == 2


# ---- memory, environment ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_four_bytes_per_weight(device, dtype):
    """One fp32 momentum per matrix, and nothing that grows with the matrix besides."""
    p = parameter(64, 96, dtype=dtype, device=device)
    for cls, extra in ((dion3.Dion3, 0), (dion3.NorMuon, 64 * 4)):
        opt = cls([p])
        steps(opt, [p], [[matrix(64, 96, seed=1, dtype=dtype, device=device)]])
        step = 0 if dtype == torch.float32 else 4
        assert opt.stats()["state_bytes"] == 4 * p.numel() + extra + step
        held = [t for d in opt._plans for t in d.momentum]
        assert held[0].data_ptr() == opt.state[p]["momentum_buffer"].data_ptr()


def test_nothing_is_held_between_steps():
    """Allocated memory after many steps, measured: the state and a little."""
    code = """
        import gc, resource, torch, dion3
        torch.set_num_threads(1)
        p = [torch.nn.Parameter(torch.randn(1024, 1024)) for _ in range(8)]
        opt = dion3.Muon(p)
        def rss():
            gc.collect()
            return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
        for x in p:
            x.grad = torch.randn_like(x)
        before = rss()
        for _ in range(3):
            opt.step()
        print(rss() - before, opt.stats()["state_bytes"], opt.stats()["workspace_bytes"])
    """
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
        # glibc then returns every larger block at once instead of keeping it for later
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    ).stdout.split()
    grown, state, workspace = map(int, out)
    assert state == 8 * 4 * 2**20 and workspace >= 2 * state
    assert grown < state + 24 * 2**20  # the scratch memory alone is 64 MiB


def test_an_error_inside_a_step_can_be_looked_at(device, monkeypatch):
    """The tensors of its traceback still have memory, and the next step works."""
    p = parameter(4, 6, device=device)
    opt = dion3.Dion3([p])
    p.grad = matrix(4, 6, seed=1, device=device)

    def fails(*args):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr("dion3.executor.ops.neuron_", fails)
        patch.setattr("dion3.executor.ops.update_", fails)
        with pytest.raises(RuntimeError, match="out of luck"):
            opt.step()
        (plan,) = opt._plans
        assert "tensor" in repr([plan.score, plan.indices, plan.passes[0].gathered])
    opt.step()
    assert plan.workspace._storage.nbytes() == 0


@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_checks_do_not_depend_on_assert(flag):
    code = """
        import torch, dion3
        for bad in (dict(lr=-1.0), dict(fraction=2.0)):
            try:
                dion3.Dion3([torch.nn.Parameter(torch.ones(2, 3))], **bad)
            except ValueError:
                continue
            raise SystemExit(1)
        try:
            dion3.Dion3([torch.nn.Parameter(torch.ones(3))])
        except ValueError:
            raise SystemExit(0)
        raise SystemExit(1)
    """
    subprocess.run([sys.executable, flag, "-c", textwrap.dedent(code)], check=True)
