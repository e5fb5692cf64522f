"""The optimizer class `Dion3`: arguments, groups, state, checkpoints, and the call of the plan.

The update rule is Algorithm 4 of "Dion3: Full-Stack Orthogonal Updates"; `reference_step` is the
same in a page of plain PyTorch. Momentum is kept as an exponential average, (1 - mu) times the
paper's, so that the buffers of torch.optim.Muon are of the same scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from . import checkpoints, layout, report
from .executor import DevicePlan
from .hyper import HyperTable
from .options import (
    CHECKS,
    MUON_KEYS,
    GroupOptions,
    Options,
    group_options,
    make_options,
    normalise_group,
)
from .plan import Signature, divide
from .state import State, ensure_state

_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Dion3(Optimizer):
    """Dion3: orthogonalizes the momentum of a fraction of each matrix's rows or columns per step.

    The first nine arguments are those of `torch.optim.Muon`, by name, order and meaning.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts. Matrices are 2-D, or stacks of
            matrices (3-D and higher); `dion3.param_groups(model)` makes the groups. A group may set
            any argument below except `seed` and `cuda_graph`, besides: `algorithm` ("dion3", or
            "adamw" for parameters that are no hidden matrices; `use_muon` and `adamw_lr` are aliases),
            `num_heads` with `head_axis`, `split_sizes`, `flatten` (see `dion3.layout`). In an AdamW
            group `lr` is used as it is, `betas` and `eps` are AdamW's, and `weight_decay` defaults
            to 0.
        lr: learning rate, a float or a tensor with one element.
        weight_decay: decoupled; every weight is multiplied by 1 - lr * weight_decay.
        momentum: mu, 0 <= mu < 1.
        nesterov: only with fraction=1.
        ns_coefficients: None for Polar Express with safety 1.05, one (a, b, c) used `ns_steps`
            times, or one triple per step.
        eps: the least norm that is divided by.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: how the learning rate depends on the shape (rows, cols) of a matrix. None or
            "original": sqrt(max(1, rows / cols)); "match_rms_adamw": 0.2 sqrt(max(rows, cols));
            "spectral" (also "spectral_unclamped"): sqrt(rows / cols); "none": 1.
        fraction: the part of the slices that a step updates; k = max(1, ceil(fraction * n)).
        neuron_norm: scale each output row by a running second moment, as NorMuon does.
        beta2: of that second moment.
        select: "auto" selects along the short side, "rows" and "cols" as named; "sharded" differs
            from "auto" for sharded parameters only.
        scope: "local" or "global" selection; they differ for sharded parameters only.
        newton_schulz: "auto" (standard for square matrices, Gram otherwise), "gram" or "standard".
        restarts: iterations after which Gram Newton-Schulz starts anew; "auto" finds them.
        ns_dtype: arithmetic of Newton-Schulz: torch.float16, torch.bfloat16, torch.float32. None is
            float16 on CUDA, and float32 on CPU, where 16 bits would be emulated.
        momentum_dtype: of the momentum buffers, and of AdamW's averages (these in float32 where it is
            float16).
        rounding: of the weights: "auto" is stochastic for 16-bit weights and nearest for float32.
        seed: of stochastic rounding, which depends on (seed, step, parameter, element) only.
        lr_transfer: multiply the matrices' learning rate (not the decay) by 1 / sqrt(fraction), so
            that one tuned for Muon carries over.
        adamw_betas, adamw_eps: defaults of the AdamW groups.
        maximize: ascend.
        cuda_graph: replay the step from a CUDA graph (see `dion3.graph`); without effect on the CPU.
            Learning rate, weight decay and momentum stay live. Every parameter that requires a
            gradient must have one. The scratch memory is then held between steps, and with nesterov
            a copy of gradients that move; `release_graphs` gives both back.

    Raises:
        ValueError: at construction and in `add_param_group`, for a wrong value, an unknown group
            key or a parameter that cannot be served; nothing has been changed then.
        RuntimeError: for complex parameters, and in `step` for sparse gradients.

    A parameter whose gradient is None is left alone entirely: no decay, no momentum decay. State is
    made at the first step for all parameters that require a gradient (`init_state` makes it
    earlier).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = False,
        ns_coefficients: Sequence[Any] | None = None,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        fraction: float = 0.25,
        neuron_norm: bool = False,
        beta2: float = 0.95,
        select: str = "auto",
        scope: str = "local",
        newton_schulz: str = "auto",
        restarts: str | Sequence[int] = "auto",
        ns_dtype: torch.dtype | None = None,
        momentum_dtype: torch.dtype = torch.float32,
        rounding: str = "auto",
        seed: int = 0,
        lr_transfer: bool = True,
        adamw_betas: Sequence[float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        maximize: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        values = (
            lr,
            weight_decay,
            momentum,
            nesterov,
            ns_coefficients,
            eps,
            ns_steps,
            adjust_lr_fn,
        )
        defaults = {k: CHECKS[k](k, v) for k, v in zip(MUON_KEYS, values, strict=True)}
        self._options = make_options(
            fraction=fraction,
            neuron_norm=neuron_norm,
            beta2=beta2,
            select=select,
            scope=scope,
            newton_schulz=newton_schulz,
            restarts=restarts,
            ns_dtype=ns_dtype,
            momentum_dtype=momentum_dtype,
            rounding=rounding,
            seed=seed,
            lr_transfer=lr_transfer,
            adamw_betas=adamw_betas,
            adamw_eps=adamw_eps,
            maximize=maximize,
            cuda_graph=cuda_graph,
        )
        group_options(defaults, self._options)
        self._state = State(dict)
        self._forget()
        self._counts = {"steps": 0, "plans": 0}
        self._observed = None
        _refuse_sets(params)
        super().__init__(params, defaults)

    # Annotations only: a value on the class would hide the object's from a wrapper around it.
    _options: Options
    _state: State
    _signature: Signature | None
    _plans: list[DevicePlan]
    _hyper: HyperTable
    _counts: dict[str, int]
    _observed: list[Any] | None

    def _momentum_rule(self) -> str:
        """Where momentum is damped: "dion3" after the selected slices were read, "muon" before the
        gradient is added."""
        return "dion3"

    # ---- groups --------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `torch.optim.Optimizer.add_param_group`, with all checks made first.

        Raises:
            ValueError, RuntimeError, TypeError: see the class; the optimizer is then unchanged.
        """
        group = normalise_group(param_group, self.defaults, self._options)
        names, tensors = _listed(group["params"])
        options = group_options(group, self._options)
        if self._momentum_rule() == "muon" and options.fraction < 1:
            raise ValueError(
                f"fraction={options.fraction} in a group of {type(self).__name__}, which updates "
                "every slice: use dion3.Dion3"
            )
        for position, parameter in enumerate(tensors):
            name = _name(names, position, len(self.param_groups))
            layout.check_parameter(name, parameter, options)
        _check_no_repeats(names, tensors, self.param_groups)
        group["params"] = tensors if names is None else list(zip(names, tensors, strict=True))
        super().add_param_group(group)
        self._forget()

    def _checked_options(self) -> list[GroupOptions]:
        """The options of all groups, checked, and every parameter with them: both may have been
        exchanged since construction."""
        checked = []
        for number, group in enumerate(self.param_groups):
            options = group_options(group, self._options)
            for position, parameter in enumerate(group["params"]):
                name = _name(group.get("param_names"), position, number)
                layout.check_parameter(name, parameter, options)
            checked.append(options)
        return checked

    # ---- the step ------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            What `closure` returned, or None.

        Raises:
            ValueError: a learning rate that is not finite, a group value or parameter that has
                become invalid. Nothing has been changed then.
            RuntimeError: a sparse gradient; with `cuda_graph`, a missing one. Nothing has been
                changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @torch._disable_dynamo  # a compiled training loop breaks its graph here
    def _step(self) -> None:
        groups, options = self.param_groups, self._options
        grads = [p.grad for group in groups for p in group["params"]]
        for index, grad in enumerate(grads):
            if grad is not None and (
                grad.layout is not torch.strided or grad.dtype not in _GRAD_DTYPES
            ):
                raise _unusable_gradient(groups, index, grad)
        self._hyper.refresh(groups, options)
        with self._state.lock:
            self._run(grads)

    def _run(self, grads: Sequence[Tensor | None]) -> None:
        groups, options = self.param_groups, self._options
        if self._signature is None or not self._signature.matches(
            groups, self._state, options, grads
        ):
            self._make_plan(grads)
        if self._observed is not None:
            self._observed.clear()
        with self._state.worked_on(self._plans if self._momentum_rule() == "dion3" else ()):
            for plan in self._plans:
                hyper = self._hyper.on(plan.device, groups, options)
                plan.run(grads, hyper, self._observed)
        self._counts["steps"] += 1

    def _make_plan(self, grads: Sequence[Tensor | None]) -> None:
        checked = self._checked_options()
        present = [grad is not None for grad in grads]
        if self._options.cuda_graph:
            self._refuse_missing(present)
        self._ensure_state(checked, present)
        work = divide(self.param_groups, checked, present)
        seed = self._options.seed
        graph = self._options.cuda_graph
        count = len(self.param_groups)
        self.release_graphs()
        self._signature = None  # of the old plans
        self._plans = [DevicePlan(d, w, self._state, seed, graph, count) for d, w in work.items()]
        self._signature = Signature(self.param_groups, self._state, self._options, grads)
        self._counts["plans"] += 1

    def _refuse_missing(self, present: Sequence[bool]) -> None:
        """A parameter left out of the graph would stay frozen in silence."""
        index, missing = 0, []
        for number, group in enumerate(self.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter.is_cuda and parameter.requires_grad and not present[index]:
                    missing.append(_name(group.get("param_names"), position, number))
                index += 1
        if missing:
            raise RuntimeError(
                f"cuda_graph=True needs a gradient for every parameter that requires one; parameter "
                f"{', '.join(missing)} has none: call requires_grad_(False) on what is not trained, "
                "or use cuda_graph=False"
            )

    def release_graphs(self) -> None:
        """Give back the CUDA graphs and their memory. The next step runs without one, the step after
        it captures anew."""
        for plan in self._plans:
            plan.release_graph()

    def init_state(self) -> None:
        """Make the state of all parameters that require a gradient now, instead of at the first
        step: for checkpoints that are loaded into an existing state."""
        checked = self._checked_options()
        present = [False for group in self.param_groups for _ in group["params"]]
        with torch.no_grad():
            self._ensure_state(checked, present)

    def _ensure_state(self, checked: Sequence[GroupOptions], present: Sequence[bool]) -> None:
        """State for every parameter that takes part or may later: ranks and checkpoints then agree
        on the keys, whichever gradients there happen to be."""
        index = 0
        self._state.settle()  # its tensors may be exchanged
        for group, options in zip(self.param_groups, checked, strict=True):
            for parameter in group["params"]:
                if parameter.requires_grad or present[index]:
                    ensure_state(parameter, options, self._state)
                index += 1

    @property
    def state(self) -> Any:
        """Parameter -> key -> tensor, as in every `torch.optim.Optimizer`.

        The last part of a step, the damping of the momentum that was used, is left to the next step,
        where it is free; asking for the state does it at once. A momentum tensor that was taken from
        here before a step is therefore up to date only after the state has been asked for again: do so
        before reading or writing it. Optimizers may share a state, as the same object.
        """
        self._state.settle()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        if "_state" in self.__dict__:
            self._state.settle()  # others may hold its tensors
        self._state = state if isinstance(state, State) else State(dict, state)

    def _forget(self) -> None:
        """Drop everything that can be made again from groups, options and state."""
        self._state.settle()
        for plan in self.__dict__.get("_plans", ()):
            plan.release_graph()
        self._signature = None
        self._plans = []
        self._hyper = HyperTable(self._momentum_rule())

    # ---- pickling and checkpoints ----------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "state" in self.__dict__:  # put there by the line above, where the property hides it
            self.state = self.__dict__.pop("state")
        self.__dict__.setdefault("_counts", {"steps": 0, "plans": 0})
        self.__dict__.setdefault("_observed", None)
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Optimizer.state_dict`. Group values that are tensors (a learning rate)
        are written as plain numbers. See `dion3.checkpoints` for what marks the momentum's
        convention."""
        state_dict = super().state_dict()
        checkpoints.make_plain(state_dict, self._momentum_rule())
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class, of `dion3.Muon` or of `torch.optim.Muon`.

        State keeps the dtypes of `state_spec` (not the parameters'), and goes to the parameters'
        devices. Momentum saved by the other rule is rescaled: Dion3's is mu times Muon's. A
        learning rate that is a tensor here stays that tensor and takes the saved value.

        Raises:
            ValueError: the dict does not fit the groups and parameters. Nothing has been changed
            then.
        """
        checkpoints.check_is_dict(state_dict)
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replacement = pre_hook(self, state_dict)
            if replacement is not None:
                state_dict = replacement
        self._state.settle()  # the dict may hold its tensors, and a hook may have made a step
        with torch.no_grad():
            state, groups = checkpoints.prepare_load(
                state_dict, self.param_groups, self._options, self._momentum_rule()
            )
        self.__setstate__({"state": state, "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # ---- insight -------------------------------------------------------------------------------

    def describe(self) -> str:
        """A table of what a step does: the buckets of equal matrices with the selected side, k, the
        Newton-Schulz method and dtype, the AdamW parameters, and the bytes of state and scratch."""
        return report.describe(self.param_groups, self._checked_options())

    def stats(self) -> dict[str, Any]:
        """Numbers of the last plan: steps taken and plans built by this object, Newton-Schulz
        calls and matrices per step, elements by algorithm, and bytes.

        With `observe(True)` also, for the last step, one record per bucket: the root mean square of
        the update and its distance from orthogonality. Reading them waits for the device.
        """
        return report.stats(self._counts, self._plans, self.state, self._observed)

    def observe(self, enabled: bool = True) -> None:
        """Measure every update from the next step on (or no longer); `stats` reads the figures.
        Costs one more pass over the updates and a Gram matrix per matrix."""
        self._observed = [] if enabled else None


# ---- parameters of a group ----


def _refuse_sets(params: Any) -> None:
    if isinstance(params, set | frozenset):
        raise TypeError(
            "optimizer parameters need to be organized in ordered collections, but the ordering of "
            "tensors in sets will change between runs. Please use a list instead."
        )


def _listed(params: Any) -> tuple[list[str] | None, list[Tensor]]:
    """(names or None, tensors) of what a user may pass as a group's parameters."""
    if isinstance(params, Tensor):
        params = [params]
    _refuse_sets(params)
    if not isinstance(params, Iterable) or isinstance(params, str | bytes):
        raise TypeError(
            f"params should be tensors, (name, tensor) pairs or dicts, not {type(params).__name__}"
        )
    items = list(params)
    named = [isinstance(item, tuple) and len(item) == 2 for item in items]
    if any(named) and not all(named):
        raise ValueError(
            "all optimizer params should be with/without names. Some param names are missing"
        )
    tensors = [item[1] if is_named else item for item, is_named in zip(items, named, strict=True)]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                "optimizer can only optimize Tensors, but one of the params is "
                + torch.typename(tensor)
            )
        if not (tensor.is_leaf or tensor.retains_grad):
            raise ValueError(
                f"can't optimize a non-leaf Tensor (shape {tuple(tensor.shape)}): pass the leaf "
                "parameter it was computed from"
            )
    return ([item[0] for item in items] if items and all(named) else None), tensors


def _name(names: Sequence[str] | None, position: int, group: int) -> str:
    return f"'{names[position]}'" if names else f"{position} of group {group}"


def _check_no_repeats(
    names: Sequence[str] | None, tensors: Sequence[Tensor], groups: Sequence[Mapping[str, Any]]
) -> None:
    seen = {id(p): "another group" for group in groups for p in group["params"]}
    for position, tensor in enumerate(tensors):
        if id(tensor) in seen:
            raise ValueError(
                "some parameters appear in more than one parameter group: "
                f"parameter {_name(names, position, len(groups))}, shape {tuple(tensor.shape)}, is "
                f"also in {seen[id(tensor)]}; list a tied parameter once"
            )
        seen[id(tensor)] = "this group"
    if groups and (names is not None) != ("param_names" in groups[0]):
        raise ValueError(
            "all optimizer param groups should be with/without names. cannot add param group "
            f"{'without' if names is None else 'with'} names to the optimizer"
        )


def _unusable_gradient(
    groups: Sequence[Mapping[str, Any]], index: int, grad: Tensor
) -> RuntimeError:
    number = 0
    while index >= len(groups[number]["params"]):
        index -= len(groups[number]["params"])
        number += 1
    name = _name(groups[number].get("param_names"), index, number)
    if grad.layout is not torch.strided:
        return RuntimeError(
            f"dion3 does not support sparse gradients: parameter {name} has a {grad.layout} one; "
            "use sparse=False in the layer, or another optimizer for it"
        )
    return RuntimeError(
        f"parameter {name} has a {grad.dtype} gradient: float32, bfloat16 and float16 are supported"
    )
