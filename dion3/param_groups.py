"""Which parameters of a model Dion3 updates, which AdamW updates, and why.

A matrix optimizer given an embedding, an output layer or a norm scale trains on without any error,
and trains worse. `param_groups` therefore decides in a fixed order and prints every decision beside
the rule that made it. The first rule that applies wins:

  1. frozen parameters are left out;
  2. the user's word: `exclude`, `include`, then a mark on the parameter (`use_dion3`, `use_muon`,
     `is_embedding_or_output_parameter`);
  3. shape: vectors, vectors in disguise such as (C, 1, 1) or (1, N), and biases go to AdamW;
  4. the type of the modules that hold it: embeddings, norms, a HuggingFace model's
     get_input_embeddings() and get_output_embeddings(), depthwise convolutions;
  5. its names: embed, wte, wpe, lm_head, head, unembed, lora_;
  6. the last matrix of the model with an embedding's shape is an output layer;
  7. what is left is a matrix, a stack of matrices (3-D and higher), or a convolution kernel.

A tied parameter is one tensor with several names: every module that holds it and every name it has
is asked, so the answer does not depend on the order of registration.

The split itself (matrices by the orthogonal update, the rest by AdamW) is that of "Dion3:
Full-Stack Orthogonal Updates", section 8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .group_table import format_table

__all__ = ["Decision", "classify", "format_table", "param_groups"]

Selector = str | re.Pattern[str] | nn.Module | torch.Tensor

_WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
_ADAMW_NAME = re.compile(r"unembed|embed|wte|wpe|lm_head|(?:^|[._])head$|lora_", re.IGNORECASE)
_BIAS_NAME = re.compile(r"(?:^|_)bias(?:es)?(?:_|\d|$)", re.IGNORECASE)
_EMBEDDING_CLASS = re.compile(r"Embedding(?:Bag)?$|Embed$")
_NORM_CLASS = re.compile(r"Norm(?:\dd)?$")
_CONV_CLASS = re.compile(r"Conv(?:Transpose)?\dd$")
_MARKS = ("use_dion3", "use_muon")


@dataclass
class Decision:
    """What was decided about one parameter.

    Attributes:
        name: its first name in the model, without the prefixes of wrappers (DDP, FSDP,
            torch.compile, activation checkpointing).
        parameter: the tensor itself.
        algorithm: "dion3", "adamw", or "frozen" for one that is left out.
        rule: the rule that decided, in words.
        note: what the reader should know or check; "" if nothing.
        warning: whether `note` asks the reader to check something.
        flatten: a convolution kernel, to be seen as a (shape[0], rest) matrix.
        aliases: the further names of a tied parameter.
    """

    name: str
    parameter: torch.Tensor
    algorithm: str = ""
    rule: str = ""
    note: str = ""
    warning: bool = False
    flatten: bool = False
    aliases: list[str] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's (global) shape."""
        return tuple(self.parameter.shape)


@dataclass
class _Use:
    """One place of a parameter in the module tree."""

    name: str  # without wrapper prefixes
    module: nn.Module
    module_name: str


def param_groups(
    model: nn.Module,
    lr: float | torch.Tensor | None = None,
    weight_decay: float | None = None,
    *,
    adamw: Mapping[str, Any] | None = None,
    include: Selector | Iterable[Selector] = (),
    exclude: Selector | Iterable[Selector] = (),
    conv: str = "flatten",
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    report: bool | str | Callable[[str], object] = True,
    **matrix: Any,
) -> list[dict[str, Any]]:
    """Split a model's parameters into groups for `dion3.Dion3`, `dion3.Muon` or `dion3.NorMuon`.

    Args:
        model: the model, before or after it was wrapped (DDP, fully_shard, torch.compile).
        lr: learning rate of the matrices; None leaves the optimizer's default.
        weight_decay: weight decay of the matrices; None leaves the optimizer's default.
        adamw: options of the AdamW groups, e.g. `dict(lr=3e-4, adamw_betas=(0.9, 0.95))`. `lr`
            defaults to the matrices' and is used as it is; `weight_decay` defaults to 0 and never
            applies to vectors, biases and norms.
        include: parameters Dion3 must update: regular expressions searched in the full name,
            modules (all parameters below), or parameters. Vectors and biases stay with AdamW.
        exclude: parameters AdamW must update, in the same forms. `exclude` wins over `include`.
        conv: "flatten" updates a convolution kernel as a (shape[0], rest) matrix, "adamw" gives it
            to AdamW.
        overrides: options for some matrices, by regular expression: each entry that matches makes a
            group, e.g. `{r"qkv\\.weight$": dict(split_sizes=(768, 768, 768))}`. The first
            that matches is used.
        report: True prints the table with repeated layers folded; "all" prints every parameter;
            False prints nothing; a callable receives the folded text.
        **matrix: further options of all matrix groups, e.g. `fraction=0.5`.

    Returns:
        Group dicts with `params` as (name, parameter) pairs, `algorithm` ("dion3" or "adamw"), the
        options above, and `flatten=True` in the groups of convolution kernels. Groups that would be
        empty are left out.

    Raises:
        ValueError: a selector that matches nothing or is no regular expression, a mark on a parameter
            that cannot follow it, a flattened FSDP parameter, an uninitialised lazy parameter, or no
            parameter at all.
        TypeError: a selector or option of the wrong type.
    """
    adamw = dict(adamw or {})
    decisions = classify(model, include=include, exclude=exclude, conv=conv)
    groups = _matrix_groups(decisions, lr, weight_decay, matrix, overrides or {})
    groups += _adamw_groups(decisions, lr, adamw)
    if not groups:
        raise ValueError(
            "param_groups: the model has no parameter with requires_grad=True; unfreeze some "
            "before building the optimizer"
        )
    if callable(report):
        report(format_table(decisions))
    elif report:
        print(format_table(decisions, fold=report != "all"))
    return groups


def classify(
    model: nn.Module,
    *,
    include: Selector | Iterable[Selector] = (),
    exclude: Selector | Iterable[Selector] = (),
    conv: str = "flatten",
) -> list[Decision]:
    """Decide for every parameter of `model`, in the order of registration, by the rules above.

    Arguments and errors: as in `param_groups`. A tied parameter gives one `Decision`.
    """
    if conv not in ("flatten", "adamw"):
        raise ValueError(f'conv={conv!r}: expected "flatten" or "adamw"')
    uses, parameters = _collect(model)
    included = _selected("include", include, uses, parameters)
    excluded = _selected("exclude", exclude, uses, parameters)
    hf_inputs, hf_outputs = _huggingface_embeddings(model)
    decisions = []
    for key, places in uses.items():
        parameter = parameters[key]
        decision = Decision(places[0].name, parameter, aliases=[u.name for u in places[1:]])
        _check_parameter(decision)
        if not parameter.requires_grad:
            _settle(decision, "frozen", "requires_grad=False")
        elif key in excluded:
            _settle(decision, "adamw", f"exclude: {excluded[key]}")
        elif not _by_mark_or_shape(decision, places, included.get(key)):
            if not _by_module(decision, places, hf_inputs, hf_outputs) and not _by_name(
                decision, places
            ):
                _as_matrix(decision, places, conv)
        if decision.aliases and not decision.note:
            decision.note = "tied to " + ", ".join(decision.aliases)
        decisions.append(decision)
    _find_output_layer(decisions, uses)
    return decisions


def _settle(
    decision: Decision, algorithm: str, rule: str, note: str = "", warning: bool = False
) -> bool:
    decision.algorithm, decision.rule = algorithm, rule
    decision.note, decision.warning = note, warning
    return True


# ---- the module tree ---------------------------------------------------------------------------


def _strip_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _collect(model: nn.Module) -> tuple[dict[int, list[_Use]], dict[int, torch.Tensor]]:
    """Every place of every parameter, and the parameters, by identity, as they were registered."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    modules = dict(model.named_modules(remove_duplicate=False))
    uses: dict[int, list[_Use]] = {}
    parameters: dict[int, torch.Tensor] = {}
    for path, module in modules.items():
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            owner, owner_path = module, path
            # A parametrized weight hangs below its module: conv.parametrizations.weight.original0.
            if type(module).__name__ == "ParametrizationList":
                owner_path = ".".join(path.split(".")[:-2])
                owner = modules.get(owner_path, module)
            name = _strip_wrappers(f"{path}.{leaf}" if path else leaf)
            places = uses.setdefault(id(parameter), [])
            if all(place.name != name for place in places):
                places.append(_Use(name, owner, _strip_wrappers(owner_path)))
            parameters[id(parameter)] = parameter
    return uses, parameters


def _check_parameter(decision: Decision) -> None:
    parameter, name = decision.parameter, decision.name
    if nn.parameter.is_lazy(parameter):
        raise ValueError(f"parameter '{name}' is not initialised yet: run one forward pass first")
    if type(parameter).__name__ == "FlatParameter" or name.split(".")[-1] == "_flat_param":
        raise ValueError(
            f"parameter '{name}' is a flattened FSDP1 parameter, whose matrices cannot be seen: "
            "use torch.distributed.fsdp.fully_shard"
        )


def _selected(
    argument: str,
    selectors: Selector | Iterable[Selector],
    uses: Mapping[int, Sequence[_Use]],
    parameters: Mapping[int, torch.Tensor],
) -> dict[int, str]:
    """The parameters that one of the selectors names, each with that selector in words."""
    if isinstance(selectors, str | re.Pattern | nn.Module | torch.Tensor):
        selectors = (selectors,)
    chosen: dict[int, str] = {}
    for selector in selectors:
        if isinstance(selector, str | re.Pattern):
            pattern = _regex(argument, selector)
            text = repr(pattern.pattern)
            found = [k for k, places in uses.items() if any(pattern.search(u.name) for u in places)]
        elif isinstance(selector, nn.Module):
            text = type(selector).__name__
            below = {id(p) for p in selector.parameters()}
            found = [k for k in uses if k in below]
        elif isinstance(selector, torch.Tensor):
            text = "the parameter itself"
            found = [k for k in uses if k == id(selector)]
        else:
            raise TypeError(
                f"{argument}: {selector!r} is a {type(selector).__name__}; expected regular "
                "expressions, modules or parameters of the model"
            )
        if not found:
            raise ValueError(f"{argument}: {text} matches no parameter of the model")
        for key in found:
            chosen.setdefault(key, text)
    return chosen


def _regex(argument: str, text: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{argument}: {text!r} is no regular expression: {error}") from error


def _huggingface_embeddings(model: nn.Module) -> tuple[set[int], set[int]]:
    """Identities of the weights of get_input_embeddings() and get_output_embeddings()."""
    found: list[set[int]] = [set(), set()]
    for module in model.modules():
        for weights, getter in zip(
            found, ("get_input_embeddings", "get_output_embeddings"), strict=True
        ):
            try:
                layer = getattr(module, getter)()
            except (AttributeError, NotImplementedError, TypeError):
                continue
            if isinstance(layer, nn.Module):
                weights.update(id(p) for p in layer.parameters())
    return found[0], found[1]


# ---- the rules ---------------------------------------------------------------------------------


def _vector_reason(shape: tuple[int, ...], flat: bool) -> str:
    """Why a parameter of this shape cannot be a matrix, or ""."""
    if len(shape) < 2:
        return f"{len(shape)}-D"
    rows, cols = shape[-2:]
    if flat:
        rows, cols = shape[0], torch.Size(shape[1:]).numel()
    return "a vector by its shape" if min(rows, cols) == 1 else ""


def _by_mark_or_shape(decision: Decision, places: Sequence[_Use], included: str | None) -> bool:
    """Rules 2 and 3: the user's word and what cannot be a matrix."""
    parameter = decision.parameter
    flat = any(_is_convolution(u.module) for u in places)
    vector = _vector_reason(decision.shape, flat)
    if not vector and any(_BIAS_NAME.search(u.name.split(".")[-1]) for u in places):
        vector = "a bias by its name"
    mark = next((m for m in _MARKS if getattr(parameter, m, None) is not None), "")
    if included and not vector:
        decision.flatten = flat
        return _settle(decision, "dion3", f"include: {included}")
    if mark:
        wanted = bool(getattr(parameter, mark))
        if wanted and vector and vector != "a bias by its name":
            raise ValueError(
                f"parameter '{decision.name}' of shape {decision.shape} is marked {mark}=True, but "
                f"is {vector}, not a matrix: remove the mark"
            )
        decision.flatten = flat and wanted
        return _settle(decision, "dion3" if wanted else "adamw", f"marked {mark}={wanted}")
    if getattr(parameter, "is_embedding_or_output_parameter", False):
        return _settle(decision, "adamw", "marked is_embedding_or_output_parameter")
    return _settle(decision, "adamw", vector) if vector else False


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd) or bool(_CONV_CLASS.search(type(module).__name__))


def _is_embedding(module: nn.Module) -> bool:
    kind = type(module).__name__
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or bool(_EMBEDDING_CLASS.search(kind))


def _by_module(
    decision: Decision, places: Sequence[_Use], hf_inputs: set[int], hf_outputs: set[int]
) -> bool:
    """Rule 4: the type of a module that holds the parameter."""
    for use in places:
        kind = type(use.module).__name__
        if _is_embedding(use.module):
            return _settle(decision, "adamw", f"embedding ({kind})")
        if _NORM_CLASS.search(kind):
            return _settle(decision, "adamw", f"norm ({kind})")
    if id(decision.parameter) in hf_outputs:
        return _settle(decision, "adamw", "get_output_embeddings()")
    if id(decision.parameter) in hf_inputs:
        return _settle(decision, "adamw", "get_input_embeddings()")
    for use in places:
        groups = getattr(use.module, "groups", 1)
        depth = decision.shape[0] if isinstance(use.module, _ConvTransposeNd) else decision.shape[1]
        if _is_convolution(use.module) and groups > 1 and (depth == 1 or depth == groups):
            return _settle(decision, "adamw", "depthwise convolution: a vector per channel")
    return False


def _by_name(decision: Decision, places: Sequence[_Use]) -> bool:
    """Rule 5: a name by which embeddings, output layers and adapters go."""
    for use in places:
        path, _, leaf = use.name.rpartition(".")
        for text in (path, leaf):
            match = _ADAMW_NAME.search(text)
            if match:
                return _settle(decision, "adamw", f"name has '{match.group().lstrip('._')}'")
    return False


def _as_matrix(decision: Decision, places: Sequence[_Use], conv: str) -> None:
    """Rule 7: what is left is a matrix, a stack of matrices or a convolution kernel."""
    shape = decision.shape
    if any(_is_convolution(u.module) for u in places) and len(shape) > 2:
        if conv == "adamw":
            _settle(decision, "adamw", 'convolution, conv="adamw"')
            return
        rest = torch.Size(shape[1:]).numel()
        note = ""
        if any(isinstance(u.module, _ConvTransposeNd) for u in places):
            note = "dimension 0 is the input's: the shape scale of the lr sees it transposed"
        _settle(decision, "dion3", f"convolution, as ({shape[0]}, {rest})", note)
        decision.flatten = True
        return
    if len(shape) > 2:
        count = torch.Size(shape[:-2]).numel()
        _settle(decision, "dion3", f"stack of {count} matrices {shape[-2:]}")
        return
    _settle(decision, "dion3", "matrix")
    if any(type(u.module).__name__ == "Conv1D" for u in places):
        decision.note = "Conv1D stores (in, out): the shape scale of the lr sees it transposed"


def _is_output_layer(decision: Decision, places: Sequence[_Use]) -> bool:
    """Whether a parameter is surely the output layer, by rules 4 and 5."""
    rule = decision.rule
    if rule.startswith("embedding"):  # tied to a layer that is no embedding
        return any(not _is_embedding(use.module) for use in places)
    by_name = re.search(r"'(?:lm_)?head'|'unembed'", rule) is not None
    return by_name or "output" in rule


def _find_output_layer(decisions: Sequence[Decision], uses: Mapping[int, Sequence[_Use]]) -> None:
    """Rule 6, and a warning where the output layer cannot be told from a hidden one.

    An output layer that is tied, named, marked or reported by HuggingFace has been found by now.
    Otherwise the last matrix of the model is the suspect: with an embedding's shape it is taken for
    the output layer; without one it stays a matrix and the table says so, unless the user already
    gave a parameter of an embedding's shape to AdamW.
    """
    if any(_is_output_layer(d, uses[id(d.parameter)]) for d in decisions if d.algorithm == "adamw"):
        return
    embeddings = {d.shape: d.name for d in decisions if d.rule.startswith("embedding (")}
    skip = ("embedding", "norm", "a bias")
    matrices = [d for d in decisions if len(d.shape) >= 2 and not d.rule.startswith(skip)]
    if not matrices or matrices[-1].rule != "matrix":
        return
    last = matrices[-1]
    if last.shape in embeddings:
        note = f'pass include="{re.escape(last.name)}" if it is a hidden matrix'
        rule = f"last matrix, shape of {embeddings[last.shape]}"
        _settle(last, "adamw", rule, note, warning=True)
    elif not any(
        d.rule.startswith(("exclude", "marked")) and d.shape in embeddings for d in matrices
    ):
        last.note = f'last matrix: if it is the output layer, pass exclude="{re.escape(last.name)}"'
        last.warning = True


# ---- the groups --------------------------------------------------------------------------------


def _matrix_groups(
    decisions: Sequence[Decision],
    lr: float | torch.Tensor | None,
    weight_decay: float | None,
    matrix: Mapping[str, Any],
    overrides: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    common = {"algorithm": "dion3", **matrix}
    regexes = {pattern: _regex("overrides", pattern) for pattern in overrides}
    if lr is not None:
        common["lr"] = lr
    if weight_decay is not None:
        common["weight_decay"] = weight_decay
    buckets: dict[tuple[str, bool], list[tuple[str, torch.Tensor]]] = {}
    for decision in decisions:
        if decision.algorithm == "dion3":
            pattern = next((p for p, r in regexes.items() if r.search(decision.name)), "")
            key = (pattern, decision.flatten)
            buckets.setdefault(key, []).append((decision.name, decision.parameter))
    for pattern in overrides:
        if all(key[0] != pattern for key in buckets):
            raise ValueError(f"overrides: {pattern!r} matches no matrix of the model")
    groups = []
    for (pattern, flatten), params in sorted(buckets.items(), key=lambda item: item[0][1]):
        group = {"params": params, **common, **overrides.get(pattern, {})}
        if flatten:
            group["flatten"] = True
        groups.append(group)
    return groups


def _adamw_groups(
    decisions: Sequence[Decision], lr: float | torch.Tensor | None, adamw: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One group without weight decay and, if decay was asked for, one with."""
    options = {"algorithm": "adamw", "weight_decay": 0.0, **adamw}
    if lr is not None:
        options.setdefault("lr", lr)
    decayed: list[tuple[str, torch.Tensor]] = []
    plain: list[tuple[str, torch.Tensor]] = []
    for decision in decisions:
        if decision.algorithm != "adamw":
            continue
        bare = len(decision.shape) < 2 or decision.rule.startswith(("a vector", "a bias", "norm"))
        target = plain if bare or not options["weight_decay"] else decayed
        target.append((decision.name, decision.parameter))
    groups = [{"params": decayed, **options}] if decayed else []
    if plain:
        groups.append({"params": plain, **options, "weight_decay": 0.0})
    return groups
