"""What a step leaves to the next one, the damping of the momentum that was used (line 9 of Algorithm 4), is done
once, whoever looks at the state, shares it, interrupts a step or looks from another thread."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from optimizer_helpers import matrix, parameter, relative, watch

import dion3


def after_a_step(device):
    """A parameter and its optimizer, whose first step has left something; the gradient stays."""
    p = parameter(16, 40, device=device)
    opt = dion3.Dion3([p], fraction=0.25)
    p.grad = matrix(16, 40, seed=1, device=device)
    opt.step()
    return p, opt


def run_and_look(device, look, **options):
    """Ten steps with all that may come between a step and the feedback it left; `look(optimizer, t)`
    follows each. Returns weights and state."""
    shapes = [(16, 40), (40, 16), (2, 12, 20), (24, 24)]
    params = [
        parameter(*s, dtype=torch.bfloat16, seed=i, device=device) for i, s in enumerate(shapes)
    ]
    opt = dion3.Dion3(params[:3], lr=0.02, momentum_dtype=torch.bfloat16, **options)
    for t in range(10):
        for i, p in enumerate(params):
            p.grad = matrix(*p.shape, seed=10 * t + i, device=device).to(p.dtype)
        if t in (3, 4) and not options.get("cuda_graph"):
            params[t - 3].grad = None
        if t == 5:
            opt.add_param_group({"params": [params[3]], "fraction": 1.0})
        if t == 7:
            params[1].data = params[1].data.clone()
        if t == 8:  # the momentum moves to these strides
            params[0].data = params[0].data.mT.contiguous().mT
        for group in opt.param_groups:
            group["momentum"] = 0.95 - 0.05 * t
        opt.step()
        look(opt, t)
    return params, [opt.state[p] for p in params]


@pytest.mark.parametrize("options", [{}, {"neuron_norm": True}, {"select": "rows"}], ids=str)
def test_looking_at_the_state_changes_no_bit(device, options):
    def save_and_load(opt, t):
        opt.load_state_dict(opt.state_dict())

    saved = []

    def load_what_is_shared(opt, t):
        """The tensors of a state dict are the optimizer's own, so the step after it shows in them."""
        if t == 1:
            saved[:] = [opt.state_dict()]
        if t == 2:
            opt.load_state_dict(saved[0])

    never, states = run_and_look(device, lambda opt, t: None, **options)
    for look in (lambda opt, t: opt.state, save_and_load, load_what_is_shared):
        params, other = run_and_look(device, look, **options)
        assert all(torch.equal(a, b) for a, b in zip(never, params, strict=True))
        for a, b in zip(states, other, strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_what_is_written_into_the_state_counts(device):
    """A buffer is complete when it is handed out, so that what is put there is not damped."""
    p = parameter(16, 40, device=device)
    opt = dion3.Dion3([p], fraction=0.5)
    p.grad = matrix(16, 40, device=device)
    opt.step()
    buffer = opt.state[p]["momentum_buffer"]
    assert buffer is opt.state[p]["momentum_buffer"]
    given = matrix(16, 40, seed=5, device=device)
    buffer.copy_(given)
    with watch("gather_") as seen:
        opt.step()
    (m,) = seen[0][0]
    assert torch.equal(m, given + (p.grad * torch.tensor(1 - 0.95, dtype=torch.float64).float()))


def _with_state_of(opt):
    other = dion3.Dion3(opt.param_groups[0]["params"], fraction=0.25)
    other.state = opt.state
    return other


def _with_dict_of(opt):
    """What a wrapper that delegates nothing becomes."""
    other = dion3.Dion3.__new__(dion3.Dion3)
    other.__dict__.update(opt.__dict__)
    return other


@pytest.mark.parametrize(
    "share",
    [copy.copy, _with_state_of, _with_dict_of],
    ids=["copied", "assigned", "wrapped"],
)
def test_optimizers_that_share_a_state_share_what_is_due(device, share):
    """They take turns, and whoever is asked for the state does what another has left."""

    def run(look):
        params = [parameter(16, 40, device=device), parameter(40, 16, device=device)]
        first = dion3.Dion3(params, fraction=0.25)
        for p in params:
            p.grad = matrix(*p.shape, seed=1, device=device)
        first.step()
        second = share(first)
        for t, opt in enumerate((second, first, first, second, second, first)):
            for p in params:
                p.grad = matrix(*p.shape, seed=2 + t, device=device)
            opt.step()
            look(first if t % 2 else second)
        other = second if opt is first else first
        return params, [other.state_dict()["state"][i]["momentum_buffer"] for i in (0, 1)]

    settled, expected = run(lambda opt: opt.state)
    left, found = run(lambda opt: None)
    assert all(torch.equal(a, b) for a, b in zip(settled + expected, left + found, strict=True))


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("broken", ["momentum_", "after momentum_", "select_", "update_"])
def test_a_step_that_breaks_off_loses_no_feedback_and_leaves_none(
    device, broken, look, monkeypatch
):
    """Line 9 is done once for each step that changed weights, and not for one that did not get there."""
    p = parameter(16, 40, device=device)
    opt = dion3.Dion3([p], fraction=0.25)
    p.grad = matrix(16, 40, seed=1, device=device)
    with watch("update_") as seen:
        opt.step()
    chosen = seen[0][2][0] >= 0
    m = 0.05 * p.grad.double()
    m[chosen] *= 0.95
    with monkeypatch.context() as patch:
        name = broken.removeprefix("after ")
        original = getattr(dion3.ops, name)

        def breaks(*args):
            if broken == name:
                raise MemoryError("for the test")
            original(*args)
            raise KeyboardInterrupt

        patch.setattr(f"dion3.executor.ops.{name}", breaks)
        with pytest.raises(MemoryError if broken == name else KeyboardInterrupt):
            opt.step()
    if broken != "momentum_":
        m = m + 0.05 * p.grad.double()
    if look:
        assert relative(opt.state[p]["momentum_buffer"], m) < 1e-6
    with watch("gather_") as seen:
        opt.step()
    assert relative(seen[0][0][0], m + 0.05 * p.grad.double()) < 1e-6


def test_a_state_that_is_replaced_is_complete(device):
    """Whoever takes the entries of a state over finds what was due done."""

    def run(take):
        p, opt = after_a_step(device)
        before = opt.state
        opt.step()
        opt.state = take(opt, before)
        return opt.state[p]["momentum_buffer"]

    expected = run(lambda opt, before: opt.state)
    for take in (
        lambda opt, before: dict(before),
        lambda opt, before: copy.copy(before),
        lambda opt, before: before,
    ):
        assert torch.equal(run(take), expected)


@pytest.mark.parametrize("first", ["reader", "step"])
def test_another_thread_may_look_at_the_state(device, first, monkeypatch):
    """What is due is done once, by whoever comes first; the other one waits."""
    feed_back, accumulate = dion3.reference.feed_back_, dion3.ops.momentum_

    def run(look):
        p, opt = after_a_step(device)
        reader = threading.Thread(target=lambda: opt.state)
        begun, stepped = threading.Event(), threading.Event()

        def slow_feed_back(*args):
            feed_back(*args)
            begun.set()
            stepped.wait(0.3)

        def accumulate_beside_the_reader(*args):
            reader.start()
            begun.wait(0.3)
            accumulate(*args)

        with monkeypatch.context() as patch:
            if look:
                patch.setattr("dion3.reference.feed_back_", slow_feed_back)
            if look and first == "step":
                patch.setattr("dion3.executor.ops.momentum_", accumulate_beside_the_reader)
            elif look:
                reader.start()
                assert begun.wait(30)
            opt.step()
            stepped.set()
            if look:
                reader.join()
        return p, opt.state[p]["momentum_buffer"]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_a_signal_handler_may_look_at_the_state(device, monkeypatch):
    """Also in the middle of what it asks for, and of a step."""

    def run(look):
        p = parameter(16, 40, device=device)
        opt = dion3.Dion3([p], fraction=0.25)
        with monkeypatch.context() as patch:
            for module, name in (("reference", "feed_back_"), ("executor.ops", "gather_")):
                original = getattr(dion3.reference if name == "feed_back_" else dion3.ops, name)

                def interrupted(*args, original=original):
                    original(*args)
                    look(opt)

                patch.setattr(f"dion3.{module}.{name}", interrupted)
            for t in range(4):
                p.grad = matrix(16, 40, seed=t, device=device)
                opt.step()
                if t % 2:
                    opt.state_dict()
        return p, opt.state[p]["momentum_buffer"]

    for never, seen in zip(run(lambda opt: None), run(lambda opt: opt.state), strict=True):
        assert torch.equal(never, seen)


def test_a_hook_of_load_state_dict_may_make_a_step(device):
    def run(look):
        p, opt = after_a_step(device)

        def hook(opt, state_dict):
            opt.step()
            look(opt)

        opt.register_load_state_dict_pre_hook(hook)
        opt.load_state_dict(opt.state_dict())
        return opt.state[p]["momentum_buffer"]

    assert torch.equal(run(lambda opt: opt.state), run(lambda opt: None))


def test_state_of_a_step_in_inference_mode(device):
    with torch.inference_mode():
        p = matrix(16, 40, device=device).requires_grad_()
        p.grad = matrix(16, 40, seed=1, device=device)
        opt = dion3.Dion3([p], fraction=0.5)
        opt.step()
    assert opt.state[p]["momentum_buffer"].abs().sum() > 0


def test_plans_that_have_left_nothing_are_not_kept(device):
    """A state outlives the optimizers that have worked on it, not their plans."""
    _, first = after_a_step(device)
    second = copy.copy(first)
    second.step()
    plan = weakref.ref(second._plans[0])
    assert first.state
    del second
    gc.collect()
    assert plan() is None


def test_a_plan_whose_making_was_interrupted_is_not_used(device, monkeypatch):
    params = [parameter(16, 40, seed=i, device=device) for i in range(2)]
    opt = dion3.Dion3(params)
    grads = [matrix(16, 40, seed=2 + i, device=device) for i in range(2)]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    opt.step()
    params[0].grad = None
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("dion3.optimizer.Signature", _interrupted)
        opt.step()
    params[0].grad = grads[0]
    before = params[0].detach().clone()
    opt.step()
    assert not torch.equal(params[0], before)


def _interrupted(*args):
    raise KeyboardInterrupt
