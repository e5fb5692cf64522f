"""Wrong calls: each raises the documented error, names what is wrong, and changes nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from optimizer_helpers import matrix, parameter, steps

import dion3

NAN, INF = math.nan, math.inf


# ---- construction ----

ARGUMENTS = [
    ("lr", -0.1, "Learning rate should be >= 0"),
    ("lr", NAN, "not finite"),
    ("lr", INF, "not finite"),
    ("lr", "0.1", "lr='0.1'"),
    ("lr", True, "lr=True"),
    ("lr", None, "lr=None"),
    ("lr", torch.ones(2), "Tensor lr must be 1-element"),
    ("lr", torch.tensor(-1.0), "Learning rate should be >= 0"),
    ("lr", torch.tensor(NAN), "not finite"),
    ("lr", torch.tensor(1j), "complex"),
    ("weight_decay", -0.1, "weight decay should be >= 0"),
    ("weight_decay", INF, "not finite"),
    ("weight_decay", torch.tensor(0.1), "weight_decay"),
    ("momentum", -0.1, "momentum should be >= 0"),
    ("momentum", 1.0, "momentum should be >= 0 and < 1"),
    ("momentum", NAN, "momentum"),
    ("nesterov", 1, "nesterov=1"),
    ("nesterov", None, "nesterov=None"),
    ("ns_coefficients", (1.0, 2.0), "exactly 3 values"),
    ("ns_coefficients", (1.0, 2.0, 3.0, 4.0), "exactly 3 values"),
    ("ns_coefficients", [(1.0, 2.0, 3.0), (1.0, 2.0)], "exactly 3 values"),
    ("ns_coefficients", [(1.0, 2.0, 3.0), 4.0, 5.0], "exactly 3 values"),
    ("ns_coefficients", (1.0, NAN, 3.0), "ns_coefficients"),
    ("ns_coefficients", (), "exactly 3 values"),
    ("ns_coefficients", "polar", "exactly 3 values"),
    ("ns_coefficients", 3.4, "exactly 3 values"),
    ("eps", -1e-7, "eps should be >= 0"),
    ("eps", NAN, "eps"),
    ("ns_steps", 0, "ns_steps=0"),
    ("ns_steps", -5, "ns_steps=-5"),
    ("ns_steps", 2.5, "ns_steps=2.5"),
    ("ns_steps", True, "ns_steps=True"),
    ("ns_steps", 100, "Number of steps must be less than 100"),
    ("adjust_lr_fn", "arbitrary", "Adjust learning rate function arbitrary is not supported"),
    ("adjust_lr_fn", 1, "Adjust learning rate function 1 is not supported"),
    ("fraction", 0.0, "fraction=0.0: should be > 0 and <= 1"),
    ("fraction", 1.5, "fraction=1.5"),
    ("fraction", -0.25, "fraction=-0.25"),
    ("fraction", NAN, "fraction"),
    ("fraction", "1/4", "fraction='1/4'"),
    ("neuron_norm", "yes", "neuron_norm='yes'"),
    ("beta2", 1.0, "beta2=1.0"),
    ("beta2", -0.5, "beta2=-0.5"),
    ("select", "diagonal", "'auto', 'sharded', 'rows', 'cols'"),
    ("select", 0, "select=0"),
    ("scope", "planet", "'local', 'global'"),
    ("newton_schulz", "newton", "'auto', 'gram', 'standard'"),
    ("restarts", "never", "restarts='never'"),
    ("restarts", [0], "iteration numbers >= 1"),
    ("restarts", [3, 2], "ascending"),
    ("restarts", [5], "5"),
    ("restarts", 2, "restarts=2"),
    ("ns_dtype", torch.float64, "ns_dtype=torch.float64"),
    ("ns_dtype", "float16", "ns_dtype='float16'"),
    ("momentum_dtype", torch.int32, "momentum_dtype=torch.int32"),
    ("momentum_dtype", None, "momentum_dtype=None"),
    ("rounding", "up", "'auto', 'nearest', 'stochastic'"),
    ("rounding", [], "rounding=[]"),
    ("seed", -1, "seed=-1"),
    ("seed", 0.5, "seed=0.5"),
    ("seed", 2**63, "seed"),
    ("lr_transfer", 0.5, "lr_transfer=0.5"),
    ("adamw_betas", (0.9,), "adamw_betas"),
    ("adamw_betas", (0.9, 1.0), "adamw_betas"),
    ("adamw_betas", 0.9, "adamw_betas=0.9"),
    ("adamw_eps", -1.0, "adamw_eps=-1.0"),
    ("maximize", "no", "maximize='no'"),
]


@pytest.mark.parametrize(("name", "value", "text"), ARGUMENTS)
def test_wrong_arguments(name, value, text):
    with pytest.raises(ValueError, match=_escaped(text)) as raised:
        dion3.Dion3([parameter(4, 6)], **{name: value})
    assert name in str(raised.value) or "Learning rate" in str(raised.value)


@pytest.mark.parametrize("cls", [dion3.Muon, dion3.NorMuon])
@pytest.mark.parametrize(("name", "value", "text"), [a for a in ARGUMENTS if a[0] in ("lr", "eps")])
def test_wrong_arguments_of_the_other_classes(cls, name, value, text):
    with pytest.raises(ValueError, match=_escaped(text)):
        cls([parameter(4, 6)], **{name: value})


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"nesterov": True, "fraction": 0.25}, "set nesterov=False or fraction=1"),
        ({"nesterov": True}, "nesterov=True with fraction=0.25"),
        ({"restarts": [4], "ns_steps": 3}, "more than the 3 iterations"),
        ({"restarts": [1], "ns_coefficients": [(1.5, -0.5, 0.0)]}, "more than the 1 iterations"),
    ],
)
def test_wrong_combinations(kwargs, text):
    with pytest.raises(ValueError, match=_escaped(text)):
        dion3.Dion3([parameter(4, 6)], **kwargs)


def test_unknown_arguments_are_type_errors():
    with pytest.raises(TypeError, match="momentun"):
        dion3.Dion3([parameter(4, 6)], momentun=0.9)


# ---- groups and parameters ----


def _double():
    p = parameter(4, 6)
    return {"params": [p, p]}


GROUPS = {
    "unknown key": (lambda: {"params": [parameter(4, 6)], "fration": 0.5}, ValueError, "fration"),
    "two unknown keys": (
        lambda: {"params": [], "a": 1, "b": 2},
        ValueError,
        "unknown keys .* a, b",
    ),
    "no params": (lambda: {"lr": 0.1}, ValueError, '"params"'),
    "params a set": (lambda: {"params": {parameter(4, 6)}}, TypeError, "ordered collections"),
    "params a string": (lambda: {"params": "weights"}, TypeError, "params should be tensors"),
    "params a number": (lambda: {"params": 3}, TypeError, "params should be tensors"),
    "not tensors": (lambda: {"params": [1.0]}, TypeError, "can only optimize Tensors"),
    "non-leaf": (lambda: {"params": [parameter(4, 6) * 2]}, ValueError, "non-leaf"),
    "twice": (_double, ValueError, "list a tied parameter once"),
    "half named": (
        lambda: {"params": [("a", parameter(4, 6)), parameter(4, 6)]},
        ValueError,
        "names are missing",
    ),
    "1-D": (lambda: {"params": [parameter(7)]}, ValueError, "dion3.param_groups"),
    "0-D": (
        lambda: {"params": [torch.nn.Parameter(torch.ones(()))]},
        ValueError,
        "dion3.param_groups",
    ),
    "1-D by name": (lambda: {"params": [("head.bias", parameter(7))]}, ValueError, "'head.bias'"),
    "complex": (
        lambda: {"params": [torch.nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))]},
        RuntimeError,
        "does not support complex parameters",
    ),
    "float64": (lambda: {"params": [parameter(4, 6, dtype=torch.float64)]}, ValueError, "float64"),
    "integers": (
        lambda: {"params": [torch.ones(4, 6, dtype=torch.int32)]},
        ValueError,
        "int32",
    ),
    "meta": (
        lambda: {"params": [torch.nn.Parameter(torch.ones(4, 6, device="meta"))]},
        ValueError,
        "device meta",
    ),
    "expanded": (
        lambda: {"params": [torch.nn.Parameter(torch.ones(1, 6).expand(4, 6))]},
        ValueError,
        "share memory",
    ),
    "sparse": (
        lambda: {"params": [torch.eye(4).to_sparse().requires_grad_()]},
        ValueError,
        "only dense",
    ),
    "lazy": (
        lambda: {"params": [torch.nn.LazyLinear(3).weight]},
        ValueError,
        "not initialised",
    ),
    "use_muon contradicts": (
        lambda: {"params": [parameter(4, 6)], "use_muon": True, "algorithm": "adamw"},
        ValueError,
        "contradicts",
    ),
    "use_muon no bool": (
        lambda: {"params": [parameter(4, 6)], "use_muon": 1},
        ValueError,
        "use_muon=1",
    ),
    "algorithm": (
        lambda: {"params": [parameter(4, 6)], "algorithm": "sgd"},
        ValueError,
        "algorithm='sgd'",
    ),
    "adamw_lr of matrices": (
        lambda: {"params": [parameter(4, 6)], "adamw_lr": 0.1},
        ValueError,
        'algorithm="adamw"',
    ),
    "betas of matrices": (
        lambda: {"params": [parameter(4, 6)], "betas": (0.9, 0.9)},
        ValueError,
        "betas",
    ),
    "lr twice": (
        lambda: {"params": [parameter(4)], "use_muon": False, "lr": 0.1, "adamw_lr": 0.1},
        ValueError,
        "give one of them",
    ),
    "group value": (lambda: {"params": [parameter(4, 6)], "lr": -1.0}, ValueError, "lr=-1.0"),
    "group fraction": (
        lambda: {"params": [parameter(4, 6)], "fraction": 2.0},
        ValueError,
        "fraction=2.0",
    ),
    "seed in a group": (lambda: {"params": [parameter(4, 6)], "seed": 3}, ValueError, "seed"),
    "differentiable": (
        lambda: {"params": [parameter(4, 6)], "differentiable": True},
        ValueError,
        "differentiable=True",
    ),
    "num_heads 0": (
        lambda: {"params": [parameter(4, 6)], "num_heads": 0},
        ValueError,
        "num_heads=0",
    ),
    "num_heads -1": (
        lambda: {"params": [parameter(4, 6)], "num_heads": -1},
        ValueError,
        "num_heads=-1",
    ),
    "num_heads 2.0": (
        lambda: {"params": [parameter(4, 6)], "num_heads": 2.0},
        ValueError,
        "num_heads=2.0",
    ),
    "num_heads True": (
        lambda: {"params": [parameter(4, 6)], "num_heads": True},
        ValueError,
        "num_heads=True",
    ),
    "num_heads divides": (
        lambda: {"params": [parameter(4, 6)], "num_heads": 3},
        ValueError,
        "does not divide dimension 0",
    ),
    "num_heads divides columns": (
        lambda: {"params": [parameter(4, 6)], "num_heads": 4, "head_axis": 1},
        ValueError,
        "does not divide dimension 1",
    ),
    "num_heads of a stack": (
        lambda: {"params": [parameter(2, 4, 6)], "num_heads": 2},
        ValueError,
        "needs a 2-D parameter",
    ),
    "head_axis": (
        lambda: {"params": [parameter(4, 6)], "num_heads": 2, "head_axis": 2},
        ValueError,
        "head_axis=2",
    ),
    "head_axis alone": (
        lambda: {"params": [parameter(4, 6)], "head_axis": 1},
        ValueError,
        "without num_heads",
    ),
    "heads and blocks": (
        lambda: {"params": [parameter(4, 6)], "num_heads": 2, "split_sizes": (2, 2)},
        ValueError,
        "exclude each other",
    ),
    "heads and flatten": (
        lambda: {"params": [parameter(4, 6)], "num_heads": 2, "flatten": True},
        ValueError,
        "exclude each other",
    ),
    "split_sizes sum": (
        lambda: {"params": [parameter(4, 6)], "split_sizes": (2, 3)},
        ValueError,
        "adds up to 5, but .* has 4 rows",
    ),
    "split_sizes zero": (
        lambda: {"params": [parameter(4, 6)], "split_sizes": (4, 0)},
        ValueError,
        "split_sizes",
    ),
    "split_sizes empty": (
        lambda: {"params": [parameter(4, 6)], "split_sizes": ()},
        ValueError,
        "split_sizes",
    ),
    "split_sizes number": (
        lambda: {"params": [parameter(4, 6)], "split_sizes": 4},
        ValueError,
        "split_sizes=4",
    ),
    "flatten": (
        lambda: {"params": [parameter(4, 6)], "flatten": "yes"},
        ValueError,
        "flatten='yes'",
    ),
}


@pytest.mark.parametrize("case", GROUPS)
def test_wrong_groups_at_construction_and_later(case):
    """Both ways in raise; a live optimizer keeps its groups, state and weights bit for bit, and the
    caller's dict is not touched."""
    make, error, text = GROUPS[case]
    with pytest.raises(error, match=text):
        dion3.Dion3([make()])
    p = parameter(4, 6)
    opt = dion3.Dion3([p], neuron_norm=True)
    steps(opt, [p], [[matrix(4, 6, seed=1)]])
    before = _snapshot(opt)
    group = make()
    keys = set(group)
    with pytest.raises(error, match=text):
        opt.add_param_group(group)
    assert set(group) == keys
    _same(opt, before)
    opt.step()


def test_a_group_that_is_no_dict():
    opt = dion3.Dion3([parameter(4, 6)])
    with pytest.raises(TypeError, match="must be a dict"):
        opt.add_param_group([parameter(4, 6)])
    with pytest.raises(TypeError, match="ordered collections"):
        dion3.Dion3({parameter(4, 6)})


def test_a_parameter_of_another_group():
    p = parameter(4, 6)
    opt = dion3.Dion3([p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": [p], "algorithm": "adamw"})
    assert len(opt.param_groups) == 1


def test_named_and_unnamed_groups_do_not_mix():
    opt = dion3.Dion3([("a", parameter(4, 6))])
    with pytest.raises(ValueError, match="with/without names"):
        opt.add_param_group({"params": [parameter(4, 6)]})
    assert len(opt.param_groups) == 1


def test_no_parameters():
    with pytest.raises(ValueError, match="empty parameter list"):
        dion3.Dion3([])


def test_selection_in_a_muon_group():
    for cls in (dion3.Muon, dion3.NorMuon):
        with pytest.raises(ValueError, match="use dion3.Dion3"):
            cls([{"params": [parameter(4, 6)], "fraction": 0.5}], nesterov=False)


class DTensor(torch.Tensor):
    """Stands in by name; the real one needs a process group."""

    placements = ("Shard(dim=0)",)


class FlatParameter(torch.nn.Parameter):
    """What FSDP1 makes of a layer."""


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: torch.ones(4, 6).as_subclass(DTensor).requires_grad_(),
            r"is a DTensor, .*Shard.dim=0",
        ),
        (lambda: FlatParameter(torch.ones(24)), "fully_shard"),
    ],
)
def test_parameters_of_distributed_wrappers(make, text):
    with pytest.raises(ValueError, match=text) as raised:
        dion3.Dion3([("layer.weight", make())])
    assert "'layer.weight'" in str(raised.value)


# ---- between the steps ----


def _live():
    """An optimizer with every kind of group and one step behind it."""
    params = [parameter(8, 12), parameter(6, 6, seed=2), parameter(5, seed=3)]
    opt = dion3.Dion3(
        [{"params": params[:1]}, {"params": params[1:2], "neuron_norm": True}]
        + [{"params": params[2:], "algorithm": "adamw"}]
    )
    steps(opt, params, [[matrix(*p.shape, seed=9) for p in params]])
    return opt, params


def _snapshot(opt):
    tensors = [p for g in opt.param_groups for p in g["params"]]
    state = {i: dict(opt.state.get(p, {})) for i, p in enumerate(tensors)}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]
    return copy.deepcopy(([p.detach().clone() for p in tensors], state, groups)), tensors


def _same(opt, before):
    (weights, state, groups), tensors = before
    now, _ = _snapshot(opt)
    assert [p for g in opt.param_groups for p in g["params"]] == tensors or all(
        a is b
        for a, b in zip((p for g in opt.param_groups for p in g["params"]), tensors, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(now[0], weights, strict=True))
    assert now[1].keys() == state.keys() and repr(now[2]) == repr(groups)
    for index, entry in state.items():
        assert entry.keys() == now[1][index].keys()
        assert all(torch.equal(now[1][index][key], value) for key, value in entry.items())


def _set(key, value, group=0):
    def change(opt, params):
        opt.param_groups[group][key] = value

    return change


def _sparse(opt, params):
    params[0].grad = torch.ones(8, 12).to_sparse()


def _float64_grad(opt, params):
    params[0].grad_dtype = None
    params[0].grad = torch.ones(8, 12, dtype=torch.float64)


def _complex_param(opt, params):
    opt.param_groups[0]["params"][0] = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))


def _vector_param(opt, params):
    opt.param_groups[0]["params"][0] = torch.nn.Parameter(torch.ones(3))


def _wrong_state(opt, params):
    opt.state[params[0]]["momentum_buffer"] = torch.zeros(3, 3)


STEPS = {
    "lr nan": (_set("lr", NAN), ValueError, "finite"),
    "lr inf": (_set("lr", INF), ValueError, "finite"),
    "lr nan of AdamW": (_set("lr", NAN, 2), ValueError, "finite"),
    "lr nan tensor": (_set("lr", torch.tensor(NAN)), ValueError, "finite"),
    "lr text": (_set("lr", "high"), ValueError, "finite number"),
    "lr two": (_set("lr", torch.ones(2)), ValueError, "1-element"),
    "weight_decay nan": (_set("weight_decay", NAN, 1), ValueError, "weight_decay"),
    "momentum": (_set("momentum", 1.5), ValueError, "momentum=1.5"),
    "eps": (_set("eps", -1.0), ValueError, "eps=-1.0"),
    "fraction": (_set("fraction", 3.0), ValueError, "fraction=3.0"),
    "nesterov": (_set("nesterov", True), ValueError, "nesterov"),
    "ns_steps": (_set("ns_steps", 100), ValueError, "less than 100"),
    "ns_coefficients": (_set("ns_coefficients", (1, 2)), ValueError, "exactly 3"),
    "adjust_lr_fn": (_set("adjust_lr_fn", "x"), ValueError, "not supported"),
    "algorithm": (_set("algorithm", "lion"), ValueError, "algorithm='lion'"),
    "num_heads": (_set("num_heads", 5), ValueError, "does not divide"),
    "split_sizes": (_set("split_sizes", (1, 2)), ValueError, "adds up to 3"),
    "betas": (_set("adamw_betas", (2, 0.5), 2), ValueError, "adamw_betas"),
    "sparse gradient": (_sparse, RuntimeError, "sparse gradients"),
    "float64 gradient": (_float64_grad, RuntimeError, "float64 gradient"),
    "wrong state": (_wrong_state, ValueError, "momentum_buffer"),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_that_cannot_be_done_changes_nothing(case):
    change, error, text = STEPS[case]
    opt, params = _live()
    change(opt, params)
    before = _snapshot(opt)
    with pytest.raises(error, match=text):
        opt.step()
    _same(opt, before)


@pytest.mark.parametrize("change", [_complex_param, _vector_param])
def test_parameters_exchanged_for_impossible_ones(change):
    opt, params = _live()
    change(opt, params)
    opt.param_groups[0]["params"][0].grad = torch.ones_like(opt.param_groups[0]["params"][0])
    weights = [p.detach().clone() for p in params]
    with pytest.raises((ValueError, RuntimeError)):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(params, weights, strict=True))


def test_a_failed_first_step_leaves_no_state():
    p = parameter(4, 6)
    opt = dion3.Dion3([p], lr=0.1)
    opt.param_groups[0]["lr"] = NAN
    p.grad = matrix(4, 6, seed=1)
    with pytest.raises(ValueError, match="finite"):
        opt.step()
    assert not opt.state
    opt.param_groups[0]["lr"] = 0.1
    opt.step()


# ---- state dicts ----


def _edit(*path, value):
    def change(sd):
        target = sd
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change


def _drop(*path):
    def change(sd):
        target = sd
        for key in path[:-1]:
            target = target[key]
        del target[path[-1]]

    return change


LOADS = {
    "no state": (_drop("state"), '"state"'),
    "no groups": (_drop("param_groups"), '"param_groups"'),
    "groups a number": (_edit("param_groups", value=3), '"param_groups"'),
    "fewer groups": (lambda sd: sd["param_groups"].pop(), "different number of parameter groups"),
    "more parameters": (
        lambda sd: sd["param_groups"][0]["params"].append(7),
        "doesn't match the size of optimizer's group",
    ),
    "group without params": (_drop("param_groups", 1, "params"), '"params"'),
    "another algorithm": (
        _edit("param_groups", 0, "algorithm", value="adamw"),
        "algorithm='adamw'",
    ),
    "lr nan": (_edit("param_groups", 1, "lr", value=NAN), "not finite"),
    "lr negative": (_edit("param_groups", 1, "lr", value=-1.0), "lr=-1.0"),
    "lr vector": (_edit("param_groups", 1, "lr", value=torch.ones(2)), "lr of saved group 1"),
    "momentum": (_edit("param_groups", 0, "momentum", value=2.0), "momentum=2.0"),
    "ns_steps": (_edit("param_groups", 0, "ns_steps", value=100), "less than 100"),
    "other shape": (
        _edit("state", 0, "momentum_buffer", value=torch.ones(3, 3)),
        r"shape \(3, 3\)",
    ),
    "transposed": (
        _edit("state", 0, "momentum_buffer", value=torch.ones(12, 8)),
        r"shape \(12, 8\)",
    ),
    "other dtype": (
        _edit("state", 0, "momentum_buffer", value=torch.ones(8, 12, dtype=torch.int64)),
        "dtype torch.int64",
    ),
    "complex": (
        _edit("state", 0, "momentum_buffer", value=torch.ones(8, 12, dtype=torch.complex64)),
        "complex64",
    ),
    "not a tensor": (_edit("state", 0, "momentum_buffer", value=None), "NoneType"),
    "neurons": (
        _edit("state", 1, "neuron_second_moment", value=torch.ones(5)),
        "neuron_second_moment",
    ),
    "step": (_edit("state", 2, "step", value=torch.ones(2)), "step"),
    "foreign key": (_edit("state", 0, "variance_neuron", value=torch.ones(8)), "convert_from_dion"),
    "other algorithm's state": (
        _edit("state", 0, value={"exp_avg": torch.ones(8, 12)}),
        "another algorithm",
    ),
    "unknown parameter": (
        _edit("state", 77, value={"step": torch.ones(())}),
        "no group of it lists",
    ),
}


@pytest.mark.parametrize("case", LOADS)
def test_state_dicts_that_do_not_fit_change_nothing(case):
    change, text = LOADS[case]
    opt, params = _live()
    sd = copy.deepcopy(opt.state_dict())
    change(sd)
    steps(opt, params, [[matrix(*p.shape, seed=10) for p in params]])
    before = _snapshot(opt)
    with pytest.raises(ValueError, match=text):
        opt.load_state_dict(sd)
    _same(opt, before)
    opt.step()


def test_a_state_dict_that_is_no_dict():
    opt, _ = _live()
    before = _snapshot(opt)
    with pytest.raises(ValueError, match="not a dict"):
        opt.load_state_dict([1, 2])
    _same(opt, before)


def test_the_table_is_long_enough():
    assert len(ARGUMENTS) + len(GROUPS) + len(STEPS) + len(LOADS) >= 60


def _escaped(text):
    for character in "()[].*'<>=":
        text = text.replace(character, "." if character in "()[].*" else character)
    return text
