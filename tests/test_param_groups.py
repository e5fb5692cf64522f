"""param_groups: every rule, each in a model where removing it changes the answer."""

import re

import pytest
import torch
from torch import nn

import dion3
from dion3.param_groups import classify, format_table, param_groups


def algorithms(model, **options):
    """{name: algorithm} of every parameter."""
    return {d.name: d.algorithm for d in classify(model, **options)}


def rule(model, name, **options):
    """The decision on one parameter."""
    return next(d for d in classify(model, **options) if d.name == name)


class Mlp(nn.Module):
    """Two hidden matrices, biases and a norm."""

    def __init__(self, dim=8):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)


class Lm(nn.Module):
    """A language model whose output layer has the name `output` and may be tied to the embedding."""

    def __init__(self, dim=8, vocabulary=40, tied=False, output="output", output_first=False):
        super().__init__()
        if output_first:
            self.add_module(output, nn.Linear(dim, vocabulary, bias=False))
        self.tokens = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Mlp(dim) for _ in range(3))
        if not output_first:
            self.add_module(output, nn.Linear(dim, vocabulary, bias=False))
        if tied:
            self.get_submodule(output).weight = self.tokens.weight


# ---- shapes ------------------------------------------------------------------------------------


def test_matrices_biases_and_norms():
    assert algorithms(Mlp()) == {
        "norm.weight": "adamw",
        "norm.bias": "adamw",
        "up.weight": "dion3",
        "up.bias": "adamw",
        "down.weight": "dion3",
        "down.bias": "adamw",
    }


@pytest.mark.parametrize(
    "shape", [(), (5,), (1, 1), (1, 7), (7, 1), (7, 1, 1), (3, 1, 7), (3, 7, 1), (1, 1, 7)]
)
def test_vectors_in_disguise_go_to_adamw(shape):
    model = nn.Module()
    model.gain = nn.Parameter(torch.ones(shape))
    assert algorithms(model) == {"gain": "adamw"}


def test_expert_stacks_are_batches_of_matrices_and_their_biases_are_not():
    model = nn.Module()
    model.gate_up = nn.Parameter(torch.ones(4, 6, 8))
    model.gate_up_bias = nn.Parameter(torch.ones(4, 6))
    model.layers = nn.Parameter(torch.ones(2, 4, 6, 8))
    assert algorithms(model) == {"gate_up": "dion3", "gate_up_bias": "adamw", "layers": "dion3"}
    decision = rule(model, "layers")
    assert not decision.flatten and "8 matrices (6, 8)" in decision.rule


def test_frozen_parameters_are_left_out():
    model = Mlp()
    model.up.weight.requires_grad = False
    groups = param_groups(model, report=False)
    assert "up.weight" not in {name for group in groups for name, _ in group["params"]}
    assert algorithms(model)["up.weight"] == "frozen"


# ---- module types and ties ---------------------------------------------------------------------


@pytest.mark.parametrize("layer", [nn.Embedding(9, 4), nn.EmbeddingBag(9, 4)])
def test_embeddings_by_type_whatever_their_name(layer):
    model = nn.Sequential(layer, nn.Linear(4, 4), nn.Linear(4, 3))
    assert algorithms(model)["0.weight"] == "adamw"


def test_embedding_and_norm_classes_of_other_libraries():
    class VocabParallelEmbedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(9, 4))

    class TableRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4))

    model = nn.Sequential(VocabParallelEmbedding(), TableRMSNorm(), nn.Linear(4, 4))
    assert algorithms(model)["0.weight"] == "adamw"
    assert algorithms(model)["1.weight"] == "adamw"
    assert algorithms(model)["2.weight"] == "dion3"


@pytest.mark.parametrize("output_first", [False, True])
def test_tied_output_layer_in_both_orders_of_registration(output_first):
    model = Lm(tied=True, output="decode", output_first=output_first)
    decisions = [d for d in classify(model) if d.parameter is model.tokens.weight]
    assert len(decisions) == 1
    assert decisions[0].algorithm == "adamw"
    assert {decisions[0].name, *decisions[0].aliases} == {"tokens.weight", "decode.weight"}
    assert "tied to" in decisions[0].note
    groups = param_groups(model, report=False)
    tensors = [id(tensor) for group in groups for _, tensor in group["params"]]
    assert len(tensors) == len(set(tensors)) == len(list(model.parameters()))
    # The output layer is known, so nobody is asked to look for it.
    assert not any(d.warning for d in classify(model))


@pytest.mark.parametrize("output_first", [False, True])
def test_the_mark_of_a_tied_parameter_counts_under_each_name(output_first):
    model = Lm(tied=True, output="decode", output_first=output_first)
    assert algorithms(model, exclude="^decode")[classify(model)[0].name] == "adamw"
    included = [d for d in classify(model, include="^decode") if d.algorithm == "dion3"]
    assert model.tokens.weight in {d.parameter for d in included}


@pytest.mark.parametrize("head_first", [False, True])
def test_a_name_counts_wherever_a_tied_parameter_has_it(head_first):
    model = nn.Module()
    for name in ("lm_head", "trunk") if head_first else ("trunk", "lm_head"):
        model.add_module(name, nn.Linear(8, 8, bias=False))
    model.lm_head.weight = model.trunk.weight
    assert list(algorithms(model).values()) == ["adamw"]
    shared = nn.Module()
    shared.trunk = nn.Linear(8, 8, bias=False)
    shared.lm_head = shared.trunk  # the same module under two names
    assert list(algorithms(shared).values()) == ["adamw"]


def test_huggingface_output_embeddings():
    class Fake(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(8, 8)
            self.tables = nn.Linear(8, 40, bias=False)
            self.readout = nn.Linear(8, 40, bias=False)
            self.last = nn.Linear(8, 8)

        def get_input_embeddings(self):
            return self.tables

        def get_output_embeddings(self):
            return self.readout

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Fake()

    got = algorithms(Wrapper())
    assert got["readout.weight"] == got["tables.weight"] == "adamw"
    assert got["body.weight"] == got["last.weight"] == "dion3"
    assert rule(Wrapper(), "readout.weight").rule == "get_output_embeddings()"
    # The output layer is known, so the last matrix raises no question.
    assert not any(d.warning for d in classify(Wrapper()))


def test_huggingface_getters_that_are_not_there():
    class Fake(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(8, 8)

        def get_input_embeddings(self):
            raise NotImplementedError

        def get_output_embeddings(self):
            return None

    assert algorithms(Fake())["body.weight"] == "dion3"


def test_huggingface_conv1d_is_a_matrix_with_a_note():
    class Conv1D(nn.Module):  # of transformers: weight is (in, out)
        def __init__(self, nf, nx):
            super().__init__()
            self.nf = nf
            self.weight = nn.Parameter(torch.ones(nx, nf))
            self.bias = nn.Parameter(torch.zeros(nf))

    decision = rule(nn.Sequential(Conv1D(12, 4), nn.Linear(12, 4)), "0.weight")
    assert decision.algorithm == "dion3" and not decision.flatten
    assert "transposed" in decision.note


# ---- convolutions ------------------------------------------------------------------------------


def test_convolutions_are_flattened():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv1d(8, 6, 5), nn.ConvTranspose2d(6, 4, 2), nn.Linear(4, 4)
    )
    groups = param_groups(model, report=False)
    flattened = [g for g in groups if g.get("flatten")]
    assert len(flattened) == 1
    assert [name for name, _ in flattened[0]["params"]] == ["0.weight", "1.weight", "2.weight"]
    assert "transposed" in rule(model, "2.weight").note
    assert "(8, 27)" in rule(model, "0.weight").rule
    plain = [name for g in groups if g["algorithm"] == "dion3" and not g.get("flatten")
             for name, _ in g["params"]]  # fmt: skip
    assert plain == ["3.weight"]


def test_convolutions_to_adamw():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(4, 4))
    assert algorithms(model, conv="adamw")["0.weight"] == "adamw"
    with pytest.raises(ValueError, match="conv='fold'"):
        classify(model, conv="fold")


def test_depthwise_and_degenerate_kernels_are_vectors():
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 16, 3, groups=8),
        nn.ConvTranspose2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 1, 3),
        nn.Conv2d(8, 8, 1),
        nn.Conv2d(8, 8, 3, groups=2),
    )
    got = algorithms(model)
    assert [got[f"{i}.weight"] for i in range(6)] == ["adamw"] * 4 + ["dion3"] * 2


def test_parametrized_convolution_is_still_one():
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3)), nn.Linear(4, 4)
    )
    decision = rule(model, "0.parametrizations.weight.original1")
    assert decision.algorithm == "dion3" and decision.flatten
    assert rule(model, "0.parametrizations.weight.original0").algorithm == "adamw"


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["embed_in", "wte", "wpe", "lm_head", "head", "cls_head", "unembed", "lora_A", "LM_Head"],
)
def test_names_of_embeddings_heads_and_adapters(name):
    model = nn.Module()
    model.add_module("trunk", nn.Linear(8, 8, bias=False))
    model.add_module(name, nn.Linear(8, 8, bias=False))
    assert algorithms(model) == {"trunk.weight": "dion3", f"{name}.weight": "adamw"}


@pytest.mark.parametrize("name", ["heads", "headwise", "overhead", "emb", "attention"])
def test_names_that_only_look_alike(name):
    model = nn.Module()
    model.add_module(name, nn.Linear(8, 8, bias=False))
    assert algorithms(model) == {f"{name}.weight": "dion3"}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: nn.Sequential(nn.ModuleDict({"module": model})),
        lambda model: nn.ModuleDict({"_orig_mod": nn.ModuleDict({"module": model})}),
        lambda model: nn.ModuleDict({"_fsdp_wrapped_module": model}),
        lambda model: nn.ModuleDict({"_checkpoint_wrapped_module": model}),
        torch.compile,
    ],
)
def test_wrappers_leave_no_trace_in_names(wrap):
    names = {re.sub(r"^0\.", "", d.name) for d in classify(wrap(Mlp()))}
    assert names == set(dict(Mlp().named_parameters()))


# ---- the output layer --------------------------------------------------------------------------


def test_last_matrix_with_an_embeddings_shape_is_the_output_layer():
    decision = rule(Lm(), "output.weight")
    assert decision.algorithm == "adamw" and decision.warning
    assert "tokens.weight" in decision.rule
    assert algorithms(Lm(), include=r"output\.weight")["output.weight"] == "dion3"


def test_unknown_output_layer_is_pointed_out():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    last = rule(model, "1.weight")
    assert last.algorithm == "dion3" and last.warning
    assert r'exclude="1\.weight"' in last.note
    assert [d.name for d in classify(model) if d.warning] == ["1.weight"]
    assert not any(d.warning for d in classify(model, exclude=r"1\.weight"))


@pytest.mark.parametrize("output", ["lm_head", "head", "unembed"])
def test_a_named_output_layer_raises_no_question(output):
    assert not any(d.warning for d in classify(Lm(output=output)))


# ---- the user's word ---------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["use_dion3", "use_muon"])
def test_marks_win_over_types_and_names(mark):
    model = Lm(output="lm_head")
    setattr(model.lm_head.weight, mark, True)
    setattr(model.blocks[1].up.weight, mark, False)
    got = algorithms(model)
    assert got["lm_head.weight"] == "dion3"
    assert got["blocks.1.up.weight"] == "adamw" and got["blocks.0.up.weight"] == "dion3"


def test_megatron_mark():
    model = Mlp()
    model.up.weight.is_embedding_or_output_parameter = True
    assert algorithms(model)["up.weight"] == "adamw"


def test_a_mark_that_cannot_be_followed():
    model = Mlp()
    model.norm.weight.use_dion3 = True
    with pytest.raises(ValueError, match=r"norm\.weight.*use_dion3=True.*remove the mark"):
        param_groups(model, report=False)


def test_include_and_exclude_take_expressions_modules_and_parameters():
    model = Lm(output="lm_head")
    block = model.blocks[0]
    for selector in (r"blocks\.0\.", re.compile(r"^blocks\.0"), block, [block.up, block.down]):
        got = algorithms(model, exclude=selector)
        assert got["blocks.0.up.weight"] == got["blocks.0.down.weight"] == "adamw"
        assert got["blocks.1.up.weight"] == "dion3"
    assert algorithms(model, exclude=block.up.weight)["blocks.0.down.weight"] == "dion3"
    assert algorithms(model, include=model.lm_head)["lm_head.weight"] == "dion3"
    # include reaches what can be a matrix only, and exclude wins.
    got = algorithms(model, include=block, exclude=block.down.weight)
    assert got["blocks.0.up.bias"] == got["blocks.0.norm.weight"] == "adamw"
    assert got["blocks.0.down.weight"] == "adamw"
    block.up.weight.use_muon = False
    assert algorithms(model, include=block)["blocks.0.up.weight"] == "dion3"


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_selectors_that_match_nothing(argument):
    for selector in ("no_such_layer", nn.Linear(2, 2), torch.ones(2, 2)):
        with pytest.raises(ValueError, match=f"{argument}.*matches no parameter"):
            param_groups(Mlp(), report=False, **{argument: selector})
    with pytest.raises(TypeError, match=f"{argument}.*int"):
        param_groups(Mlp(), report=False, **{argument: [3]})


@pytest.mark.parametrize(
    ("argument", "value"), [("include", "("), ("exclude", ["w", "("]), ("overrides", {"(": {}})]
)
def test_what_is_no_regular_expression(argument, value):
    with pytest.raises(ValueError, match=rf"{argument}: '\(' is no regular expression"):
        param_groups(Mlp(), report=False, **{argument: value})


# ---- what comes back ---------------------------------------------------------------------------


def test_groups_hold_every_trained_parameter_once_with_its_name():
    model = Lm(output="lm_head")
    groups = param_groups(
        model, lr=0.02, weight_decay=0.1, adamw={"lr": 1e-3, "adamw_betas": (0.9, 0.99)},
        fraction=0.5, report=False,
    )  # fmt: skip
    by_name = {name: tensor for group in groups for name, tensor in group["params"]}
    assert by_name == dict(model.named_parameters())
    matrices, rest = groups
    assert {k: v for k, v in matrices.items() if k != "params"} == {
        "algorithm": "dion3", "lr": 0.02, "weight_decay": 0.1, "fraction": 0.5,
    }  # fmt: skip
    assert {k: v for k, v in rest.items() if k != "params"} == {
        "algorithm": "adamw", "lr": 1e-3, "weight_decay": 0.0, "adamw_betas": (0.9, 0.99),
    }  # fmt: skip


def test_defaults_are_left_to_the_optimizer_and_adamw_follows_lr():
    groups = param_groups(Mlp(), report=False)
    assert all("lr" not in group for group in groups)
    assert "weight_decay" not in groups[0] and groups[1]["weight_decay"] == 0.0
    assert [g["lr"] for g in param_groups(Mlp(), lr=0.5, report=False)] == [0.5, 0.5]


def test_adamw_decay_spares_vectors_biases_and_norms():
    model = Lm(output="lm_head")
    model.experts_bias = nn.Parameter(torch.ones(4, 6))
    groups = param_groups(model, adamw={"weight_decay": 0.3}, report=False)
    decays = {name: g["weight_decay"] for g in groups[1:] for name, _ in g["params"]}
    assert {name for name, decay in decays.items() if decay == 0.3} == {
        "tokens.weight", "lm_head.weight",
    }  # fmt: skip
    assert decays["experts_bias"] == decays["blocks.0.norm.weight"] == 0.0


def test_overrides_make_groups_of_their_own():
    overrides = {r"up\.weight$": {"split_sizes": (16, 16), "lr": 0.1}}
    groups = param_groups(Lm(output="lm_head"), lr=0.02, overrides=overrides, report=False)
    special = [g for g in groups if "split_sizes" in g]
    assert len(special) == 1 and special[0]["lr"] == 0.1
    assert [name for name, _ in special[0]["params"]] == [f"blocks.{i}.up.weight" for i in range(3)]
    with pytest.raises(ValueError, match="overrides.*'nothing'.*matches no matrix"):
        param_groups(Mlp(), overrides={"nothing": {}}, report=False)


def test_models_that_cannot_be_split():
    with pytest.raises(ValueError, match="requires_grad"):
        param_groups(Mlp().requires_grad_(False), report=False)
    with pytest.raises(TypeError, match="model.*list"):
        param_groups([nn.Linear(2, 2)], report=False)
    with pytest.raises(ValueError, match=r"0\.weight.*forward pass"):
        param_groups(nn.Sequential(nn.LazyLinear(4)), report=False)
    flat = nn.Module()
    flat._flat_param = nn.Parameter(torch.ones(100))
    with pytest.raises(ValueError, match="_flat_param.*fully_shard"):
        param_groups(flat, report=False)


# ---- with the optimizers ------------------------------------------------------------------------


class Mixed(nn.Module):
    """One parameter for every kind of group."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.first = nn.Conv2d(1, 6, 3)
        self.second = nn.Conv2d(6, 6, 3, bias=False)
        self.third = nn.Conv2d(6, 6, 3, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 8, 5))
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 16)
        self.lm_head = nn.Linear(8, 12, bias=False)
        self.lm_head.weight = self.tokens.weight


def with_gradients(model):
    """`model` with the same random gradients every time."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("name", ["Dion3", "Muon", "NorMuon"])
def test_the_optimizers_take_the_groups(name):
    model = with_gradients(Mixed())
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizer = getattr(dion3, name)(param_groups(model, lr=0.1, report=False))
    optimizer.step()
    named = [key for group in optimizer.param_groups for key in group["param_names"]]
    assert sorted(named) == sorted(before)
    for key, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[key]), f"{key} did not move"


def test_adamw_learning_rate_is_used_as_it_is():
    model = with_gradients(Mixed())
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    groups = param_groups(model, lr=0.5, adamw={"lr": 1e-3, "adamw_eps": 0.0}, report=False)
    dion3.Dion3(groups, fraction=0.25, adjust_lr_fn="match_rms_adamw").step()
    for key in ("tokens.weight", "norm.weight", "norm.bias", "fc.bias", "first.bias"):
        moved = (model.get_parameter(key) - before[key]).abs()
        # The first step of AdamW moves every element by the learning rate: m / sqrt(v) is +-1.
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=1e-3, atol=0)


def test_equal_kernels_are_updated_as_separate_matrices():
    model = with_gradients(Mixed())
    twins = []
    for layer in (model.first, model.second, model.third):
        twin = nn.Parameter(layer.weight.detach().flatten(1).clone())
        twin.grad = layer.weight.grad.flatten(1).clone()
        dion3.Dion3([twin], lr=0.1, fraction=0.5).step()
        twins.append(twin)
    dion3.Dion3(param_groups(model, lr=0.1, report=False), fraction=0.5).step()
    for layer, twin in zip((model.first, model.second, model.third), twins, strict=True):
        torch.testing.assert_close(layer.weight.flatten(1), twin, rtol=1e-6, atol=1e-7)


# ---- the table ---------------------------------------------------------------------------------


def test_table_names_every_parameter_with_its_rule(capsys):
    model = Lm()
    model.blocks[1].up.weight.requires_grad = False
    param_groups(model, report="all")
    lines = capsys.readouterr().out.splitlines()
    for decision in classify(model):
        row = next(line for line in lines if line.startswith(decision.name + " "))
        assert decision.algorithm in row and decision.rule in row
        assert "x".join(map(str, decision.shape)) in row
    columns = {line.index("adamw") for line in lines[2:-2] if " adamw " in line}
    assert len(columns) == 1, "columns are aligned"
    trained = sum(d.parameter.numel() for d in classify(model) if d.algorithm == "dion3")
    assert f"dion3 5 ({trained:,} elements)" in lines[-2] and "frozen 1" in lines[-2]
    assert lines[-1].startswith("(!) output.weight:")


def test_table_folds_layers():
    model = Lm(output="lm_head")
    text = format_table(classify(model))
    assert "blocks.{0-2}.up.weight" in text and "blocks.1" not in text
    model.blocks[1].up.weight.use_muon = False
    text = format_table(classify(model))
    assert "blocks.{0,2}.up.weight" in text and "blocks.1.up.weight" in text


def test_report_goes_where_it_is_sent(capsys):
    texts = []
    param_groups(Mlp(), report=texts.append)
    param_groups(Mlp(), report=False)
    assert capsys.readouterr().out == ""
    assert texts == [format_table(classify(Mlp()))]
