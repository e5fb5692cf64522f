"""The CUDA graph of a step: the same bits as eager steps, live schedules, refusals, memory."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import pathlib
import subprocess
import sys
import warnings

import pytest
import torch

import dion3
from dion3 import executor

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float32]


def model(dtype, matrices=104, seed=0):
    """Matrices of several shapes (wide, tall, square, odd, a stack) and vectors."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(64, 64), (96, 64), (64, 160), (33, 70), (3, 40, 24)]
    params = [
        torch.nn.Parameter(
            torch.randn(shapes[i % len(shapes)], generator=generator).to("cuda", dtype) * 0.1
        )
        for i in range(matrices)
    ]
    vectors = [torch.nn.Parameter(torch.ones(50 + i, device="cuda", dtype=dtype)) for i in range(3)]
    return params, vectors


def set_grads(params, step):
    """New gradient storage at every step, as zero_grad(set_to_none=True) makes it."""
    generator = torch.Generator(device="cuda").manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, device="cuda").to(p.dtype)


def build(cls, dtype, cuda_graph, **options):
    params, vectors = model(dtype)
    groups = [{"params": params}, {"params": vectors, "algorithm": "adamw", "lr": 3e-3}]
    return params + vectors, cls(groups, lr=0.02, cuda_graph=cuda_graph, **options)


def schedule(optimizer, step, steps):
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        group["weight_decay"] = 0.1 + 0.01 * step


def assert_same(one, two):
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


def states(optimizer):
    return [v for entry in optimizer.state.values() for _, v in sorted(entry.items())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (dion3.Dion3, {"fraction": 0.25}),
        (dion3.Dion3, {"fraction": 0.5, "neuron_norm": True, "momentum_dtype": torch.bfloat16}),
        (dion3.Dion3, {"fraction": 1.0}),
        (dion3.Muon, {"rounding": "stochastic"}),
        (dion3.Muon, {"nesterov": False}),
        (dion3.NorMuon, {}),
    ],
)
def test_replay_equals_eager_bitwise(cls, options, dtype):
    eager_params, eager = build(cls, dtype, False, **options)
    graph_params, graph = build(cls, dtype, True, **options)
    for step in range(20):
        for params, optimizer in ((eager_params, eager), (graph_params, graph)):
            set_grads(params, step)
            schedule(optimizer, step, 20)
            optimizer.step()
            optimizer.zero_grad()
        if step == 11:
            for params, optimizer in ((eager_params, eager), (graph_params, graph)):
                saved = copy.deepcopy(optimizer.state_dict())
                set_grads(params, 99)
                optimizer.step()
                optimizer.load_state_dict(saved)
        assert_same(eager_params, graph_params)
    assert graph._plans[0].graph.captured
    assert_same(states(eager), states(graph))


@pytest.mark.parametrize("cls", [dion3.Dion3, dion3.Muon])
def test_gradients_may_stay_or_move(cls):
    """In place for some steps, elsewhere for two, back, and in float32 for one: always as without a
    graph."""
    eager_params, eager = build(cls, torch.bfloat16, False)
    params, optimizer = build(cls, torch.bfloat16, True)
    for p in (*eager_params, *params):
        p.grad_dtype = None
    home, away = ([torch.empty_like(p) for p in params] for _ in range(2))
    held = []
    for step in range(14):
        set_grads(eager_params, step)
        for p, e, here, there in zip(params, eager_params, home, away, strict=True):
            p.grad = (there if step in (5, 6, 9) else here).copy_(e.grad)
            if step == 11:
                e.grad = p.grad = e.grad.float() * 1.001
        for these in (eager, optimizer):
            schedule(these, step, 14)
            these.step()
        assert_same(eager_params, params)
        held.append(optimizer._plans[0].graph.captured)
    assert_same(states(eager), states(optimizer))
    assert held[0] == () and held[1] == held[4] == ("whole",) and held[10] == ("whole", "behind")
    assert held[11] == () and held[13] == ("whole",)  # another dtype: a new plan


def test_gradients_that_never_stay_leave_what_is_behind_them_in_a_graph():
    params, optimizer = build(dion3.Dion3, torch.bfloat16, True)
    kept = []
    for step in range(4):
        set_grads(params, step)
        kept.append([p.grad for p in params])
        optimizer.step()
    assert optimizer._plans[0].graph.captured == ("behind",)


def test_adamw_alone_is_captured():
    results = []
    for cuda_graph in (False, True):
        _, vectors = model(torch.bfloat16)
        optimizer = dion3.Dion3([{"params": vectors, "algorithm": "adamw"}], cuda_graph=cuda_graph)
        grads = [torch.empty_like(p) for p in vectors]
        for step in range(5):
            set_grads(vectors, step)
            for p, g in zip(vectors, grads, strict=True):
                p.grad = g.copy_(p.grad)
            before = vectors[0]._version
            optimizer.step()
            assert vectors[0]._version > before
        results.append([*vectors, *states(optimizer)])
    assert optimizer._plans[0].graph.captured == ("whole",)
    assert_same(*results)


def test_looking_at_the_state_between_replays_changes_no_bit():
    results = []
    for look in (False, True):
        params, optimizer = build(dion3.Dion3, torch.bfloat16, True, fraction=0.25)
        for step in range(8):
            set_grads(params, step)
            schedule(optimizer, step, 8)
            optimizer.step()
            if look:
                states(optimizer)
        assert optimizer._plans[0].graph.captured
        results.append([*params, *states(optimizer)])
    assert_same(*results)


def test_the_state_is_complete_on_another_stream():
    """As if the step had done all of its work: what waits for the step's stream waits for it."""
    side = torch.cuda.Stream()
    results = []
    for stream in (torch.cuda.current_stream(), side):
        params, optimizer = build(dion3.Dion3, torch.bfloat16, False, fraction=0.25)
        set_grads(params, 0)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            optimizer.step()
        results.append([v.clone() for v in states(optimizer)])
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            optimizer.step()
        results[-1] += [v.clone() for v in states(optimizer)]
    assert_same(*results)


def test_scheduler_and_tensor_lr_are_live():
    results = []
    for cuda_graph in (False, True):
        params, optimizer = build(dion3.Dion3, torch.bfloat16, cuda_graph)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.02, device="cuda")
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        for step in range(12):
            set_grads(params, step)
            optimizer.step()
            scheduler.step()
        results.append(params)
    assert_same(*results)


def test_autograd_sees_replayed_writes():
    params, optimizer = build(dion3.Dion3, torch.float32, True)
    for step in range(4):
        set_grads(params, step)
        before = params[0]._version
        optimizer.step()
        assert params[0]._version > before


def test_failed_capture_leaves_an_eager_optimizer(monkeypatch):
    eager_params, eager = build(dion3.Dion3, torch.bfloat16, False)
    params, optimizer = build(dion3.Dion3, torch.bfloat16, True)
    original = executor.ops.select_

    def select_(score, *args):
        original(score, *args)
        if torch.cuda.is_current_stream_capturing():
            score[0].sum().item()

    monkeypatch.setattr(executor.ops, "select_", select_)
    for step in range(5):
        for these, opt in ((eager_params, eager), (params, optimizer)):
            set_grads(these, step)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                opt.step()
            if opt is optimizer and step == 1:
                assert any("could not be captured" in str(w.message) for w in caught)
        assert_same(eager_params, params)
    assert not optimizer._plans[0].graph.captured


def test_missing_gradient_is_refused_by_name():
    w = torch.nn.Parameter(torch.randn(16, 16, device="cuda"))
    idle = torch.nn.Parameter(torch.randn(16, 16, device="cuda"))
    optimizer = dion3.Dion3([("w", w), ("idle", idle)], cuda_graph=True)
    w.grad = torch.randn_like(w)
    before = w.clone()
    with pytest.raises(RuntimeError, match="'idle'"):
        optimizer.step()
    assert torch.equal(before, w) and not optimizer.state
    idle.requires_grad_(False)
    for _ in range(3):
        optimizer.step()
    assert optimizer._plans[0].graph.captured


def test_graphs_are_released_and_captured_again():
    params, optimizer = build(dion3.Dion3, torch.bfloat16, True)
    set_grads(params, 0)
    optimizer.step()
    optimizer.release_graphs()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    for _ in range(3):
        optimizer.step()
    assert torch.cuda.memory_allocated() > base
    optimizer.release_graphs()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == base
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(8, 8, device="cuda"))]})
    set_grads([p for g in optimizer.param_groups for p in g["params"]], 1)
    for _ in range(3):
        optimizer.step()
    assert optimizer._plans[0].graph.captured


def test_no_host_synchronisation():
    params, optimizer = build(dion3.Dion3, torch.bfloat16, True)
    set_grads(params, 0)
    for _ in range(3):
        optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            schedule(optimizer, step, 3)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- the allocator -----------------------------------------------------------------------------


def digest_of_a_run():
    """Six steps whose gradients go, and are overwritten, while the step may still run."""
    params, optimizer = build(dion3.Dion3, torch.bfloat16, True, fraction=0.5)
    for step in range(6):
        set_grads(params, step)
        optimizer.step()
        for p in params:
            p.grad = None
        for p in params:
            torch.full_like(p, float("nan"))
    tensors = [*params, *states(optimizer)]
    return hashlib.sha256(
        b"".join(t.detach().float().cpu().numpy().tobytes() for t in tensors)
    ).hexdigest()


def print_digest_on_a_side_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        print(digest_of_a_run())


@pytest.mark.parametrize("setting", ["expandable_segments:True", "expandable_segments:False"])
def test_side_stream_under_either_allocator(setting):
    call = "import test_cuda_graph; test_cuda_graph.print_digest_on_a_side_stream()"
    inherited = {k: v for k, v in os.environ.items() if k != "PYTORCH_ALLOC_CONF"}
    done = subprocess.run(
        [sys.executable, "-c", call],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parent,
        env={
            **inherited,
            "PYTORCH_CUDA_ALLOC_CONF": setting,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == digest_of_a_run()
