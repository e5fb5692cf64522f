"""Runs a plan on one device: one call per operation for all matrices, whatever their number.

  momentum_           M[S] <- feedback M[S], S of the step before;        Algorithm 4 line 9
                      M <- keep M + gain G, and its row or column sums    line 1
  select_             the k slices with the largest sums; norms           line 2
  per pass:
    gather_             X <- M[S] / |M[S]|                                line 3
    newton_schulz_out   O <- polar(X), all stacks of the pass             line 3
    neuron_             row factors                                       lines 4-6
    update_             W <- round(a W - b O)                             lines 7-8
  adamw_              the other parameters

The lists below are the operations' arguments: entry i of each belongs to piece i. They are made
once; in steady state only the gradients are collected anew.

Line 9 is left to the next momentum_, which reads and writes all of M anyway. Until then it is due, and
whoever looks at M first calls `settle` (`Dion3.state` does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import layout, ops, reference
from .graph import StepGraph
from .layout import ROWS, Piece
from .plan import Bucket, DeviceWork, Item, geometry
from .state import State, stochastic
from .workspace import Workspace


class DevicePlan:
    """The argument lists of one device's part of a step, and the step itself."""

    def __init__(
        self,
        device: torch.device,
        work: DeviceWork,
        state: State,
        seed: int,
        cuda_graph: bool,
        groups: int,
    ) -> None:
        """Make the lists. `state` must be complete for every parameter that takes part; `groups`: how
        many parameter groups there are."""
        self.device = device
        self.graph = StepGraph() if cuda_graph and device.type == "cuda" else None
        self.work = work
        self.seed = seed
        self.workspace = Workspace(device)
        self.absent = torch.empty(0, device=device)
        self.staged: dict[int, tuple[Tensor, Tensor]] = {}
        self.kept: list[Tensor] | None = None
        self.feedback = torch.ones(groups, device=device)  # of the last step; 1 is none
        self.due = False
        self.stream: torch.cuda.Stream | None = None  # of the last step
        self.items = [item for bucket in work.buckets for item in bucket.items]
        self._list_momentum(state)
        self._list_weights(state)
        self.adamw = AdamWLists(self, state) if work.others else None
        self.steps = _unique(self.step)
        self.reads = sorted({i.index for i in self.items} | {o.index for o in work.others})
        changed = self.weight + (self.adamw.param if self.adamw else [])
        self.versioned = [t for t in changed if not t.is_inference()]
        mark = self.workspace.mark()
        self.passes: list[Pass] = []
        start = 0
        for buckets in work.passes:
            self.workspace.rewind(mark)
            self.passes.append(Pass(self, buckets, start, state))
            start = self.passes[-1].stop
        self.workspace.release()

    def _list_momentum(self, state: State) -> None:
        """Arguments of momentum_ and select_."""
        take = self.workspace.take
        self.grad_of = [(i.index, None if _is_whole(i.piece) else i.piece.view) for i in self.items]
        self.group = [item.group for item in self.items]
        self.axis = [item.piece.axis for item in self.items]
        self.k = [item.piece.k for item in self.items]
        self.nesterov = [item.options.nesterov for item in self.items]
        self.looks_at_grads = any(self.nesterov)
        self.momentum: list[Tensor] = []
        self.score: list[Tensor] = []
        self.sumsq: list[Tensor] = []
        self.norm: list[Tensor] = []
        self.indices: list[Tensor] = []
        self.slots: list[Tensor] = []
        for item in self.items:
            piece, stack = item.piece, _stack(item.piece)
            buffer = state[item.parameter]["momentum_buffer"]
            n = piece.selected_side
            self.momentum.append(piece.view(buffer))
            self.sumsq.append(take((*stack, n), torch.float64))
            self.norm.append(take(stack, torch.float64))
            selective = piece.selective
            self.score.append(take((*stack, n), torch.float64) if selective else self.absent)
            self.indices.append(take((*stack, piece.k), torch.int32) if selective else self.absent)
            slots = torch.empty((*stack, n), dtype=torch.int32, device=self.device)
            self.slots.append(
                slots if selective else self.absent
            )  # outlive the step, as M[S] is due

    def _list_weights(self, state: State) -> None:
        """Arguments of update_ that do not depend on the pass."""
        self.weight: list[Tensor] = []
        self.step: list[Tensor] = []
        for item in self.items:
            rounds = stochastic(item.parameter, item.options)
            weight = self.writable(item.parameter, rounds)
            view = item.piece.view(weight)
            if not layout.shares_memory(view, weight):
                view = item.piece.view(self.stage(item.parameter, item.parameter.dtype))
            self.weight.append(view)
            self.step.append(state[item.parameter]["step"] if rounds else self.absent)

    def writable(self, parameter: Tensor, rounds: bool) -> Tensor:
        """What the operations write into: the parameter, or its dense copy for this step."""
        if id(parameter) in self.staged:
            return self.staged[id(parameter)][1]
        if is_traceable_wrapper_subclass(parameter):
            return self.stage(parameter, parameter.dtype if rounds else torch.float32)
        return parameter.detach().as_subclass(Tensor)

    def stage(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """A dense scratch copy, filled before and written back after the step.

        For weights without dense storage of their own (wrapper subclasses, which then round once,
        by their own copy_) and for strides through which the matrices cannot be seen.
        """
        if id(parameter) not in self.staged:
            copy = self.workspace.take(tuple(parameter.shape), dtype)
            self.staged[id(parameter)] = (parameter.detach(), copy)
        return self.staged[id(parameter)][1]

    def run(
        self, grads: Sequence[Tensor | None], hyper: Tensor, observed: list[Any] | None
    ) -> None:
        """One step on this device.

        Args:
            grads: the gradients of all parameters, in order.
            hyper: the table of scalars.
            observed: None, or a list that takes one record per bucket (see `Pass.observe`).
        """
        if self.device.type == "cuda":
            self.stream = torch.cuda.current_stream(self.device)
        try:
            self._step(grads, hyper, observed)
        except BaseException:
            if not self.due:
                self.feedback.fill_(1.0)  # line 9 is for weights that were updated
            raise
        self.due = True
        # Not in a finally clause: whoever catches an error may look at the tensors of its traceback.
        if self.graph is None:
            self.workspace.release()

    def _step(
        self, grads: Sequence[Tensor | None], hyper: Tensor, observed: list[Any] | None
    ) -> None:
        self.workspace.acquire()
        for parameter, copy in self.staged.values():
            copy.copy_(parameter)
        if self.graph is None or observed is not None:
            self._run(grads, hyper, observed)
        elif self.graph.stays(self._place(grads)):
            self.graph.run("whole", lambda: self._run(grads, hyper, None))
            torch.autograd.graph.increment_version(self.versioned)
        else:
            self._run_around_graph(self.graph, grads, hyper)
        for parameter, copy in self.staged.values():
            parameter.copy_(copy)

    def settle(self) -> None:
        """M[S] <- feedback M[S] of the last step, unless it is done."""
        if not self.due:
            return
        self.due = False
        # In the order of the step's stream; M may have been made in inference mode.
        with torch.cuda.stream(self.stream), torch.inference_mode():
            reference.feed_back_(self.momentum, self.slots, self.feedback, self.group, self.axis)
            self.feedback.fill_(1.0)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def release_graph(self) -> None:
        """Give back the graph and the memory it works in."""
        if self.graph is not None:
            self.graph.reset()
            self.workspace.release()

    def _place(self, grads: Sequence[Tensor | None]) -> Any:
        """Where the gradients lie, in a form to be compared; None if that does not say it all."""
        plain = [grad for index in self.reads if type(grad := grads[index]) is Tensor]
        return geometry(plain) if len(plain) == len(self.reads) else None

    def _run(
        self, grads: Sequence[Tensor | None], hyper: Tensor, observed: list[Any] | None
    ) -> None:
        """The step, operation after operation."""
        if self.items:
            pieces = self._pieces(grads)
            self._accumulate(pieces, hyper)
            seen = [g if n else self.absent for g, n in zip(pieces, self.nesterov, strict=True)]
            self._orthogonalize(seen, hyper, observed)
        if self.adamw is not None:
            self.adamw.run(grads, hyper)

    def _run_around_graph(
        self, graph: StepGraph, grads: Sequence[Tensor | None], hyper: Tensor
    ) -> None:
        """What reads gradients as it is, and the rest from a graph."""
        if self.items:
            pieces = self._pieces(grads)
            self._accumulate(pieces, hyper)
            kept = self._keep(pieces)
            graph.run("behind", lambda: self._orthogonalize(kept, hyper, None))
            torch.autograd.graph.increment_version(self.versioned)
        if self.adamw is not None:
            self.adamw.run(grads, hyper)

    def _pieces(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        return [
            grad
            if view is None and type(grad := grads[index]) is Tensor
            else cut(grads[index], view)
            for index, view in self.grad_of
        ]

    def _accumulate(self, grads: list[Tensor], hyper: Tensor) -> None:
        try:
            ops.momentum_(
                self.momentum,
                grads,
                self.slots,
                self.feedback,
                hyper,
                self.group,
                self.axis,
                self.score,
                self.sumsq,
            )
        except KeyboardInterrupt:  # comes when the operation has ended
            self.due = False
            raise
        self.due = False

    def _keep(self, grads: list[Tensor]) -> list[Tensor]:
        """Copies of the gradients that Newton-Schulz sees (nesterov), in memory that a graph may read."""
        if self.kept is None:
            pairs = zip(grads, self.nesterov, strict=True)
            self.kept = [torch.empty_like(g) if n else self.absent for g, n in pairs]
        if self.looks_at_grads:
            targets = [k for k, n in zip(self.kept, self.nesterov, strict=True) if n]
            torch._foreach_copy_(
                targets, [g for g, n in zip(grads, self.nesterov, strict=True) if n]
            )
        return self.kept

    def _orthogonalize(
        self, grads: list[Tensor], hyper: Tensor, observed: list[Any] | None
    ) -> None:
        """All of the step behind the gradients."""
        self.feedback.copy_(hyper[:, reference.FEEDBACK])
        if self.steps:
            torch._foreach_add_(self.steps, 1.0)
        ops.select_(self.score, self.sumsq, self.indices, self.slots, self.norm, self.k)
        for part in self.passes:
            part.run(self, grads, hyper)
            if observed is not None:
                observed.extend(part.observe(hyper))


class Pass:
    """The buckets that are orthogonalized together, in memory that the next pass uses again."""

    def __init__(self, plan: DevicePlan, buckets: list[Bucket], start: int, state: State) -> None:
        self.buckets = buckets
        self.start = start
        self.gathered: list[Tensor] = []
        self.update: list[Tensor] = []
        self.factor: list[Tensor] = []
        self.calls: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        self.neuron: list[tuple[Tensor, Tensor, Tensor, int, Tensor]] = []
        self.stacks: list[Tensor] = []
        for bucket in buckets:
            shape = (bucket.matrices, *bucket.shape)
            x = plan.workspace.take(shape, bucket.config.dtype)
            out = plan.workspace.take(shape, bucket.config.dtype)
            xs, outs = self.calls.setdefault(bucket.config, ([], []))
            xs.append(x)
            outs.append(out)
            self.stacks.append(out)
            place = 0
            for item in bucket.items:
                at = slice(place, place + item.piece.batch)
                place = at.stop
                self.gathered.append(_unstack(x[at], item.piece))
                self.update.append(_unstack(out[at], item.piece))
                self.factor.append(self._list_neuron(plan, item, out[at], state))
        self.stop = start + len(self.update)
        self._list_update(plan)

    def _list_neuron(self, plan: DevicePlan, item: Item, update: Tensor, state: State) -> Tensor:
        """Arguments of neuron_; returns where the factors of the piece go."""
        if not item.options.neuron_norm:
            return plan.absent
        piece = item.piece
        factor = plan.workspace.take((piece.batch, piece.update_shape[0]), torch.float32)
        moments = piece.neurons(state[item.parameter]["neuron_second_moment"])
        indices = plan.absent
        if piece.axis == ROWS and piece.selective:
            indices = plan.indices[self.start + len(self.factor)].view(piece.batch, piece.k)
        if moments.is_contiguous():
            entries = [(update, moments, indices, factor)]
        else:  # a block of rows of a stack: its moments lie apart
            entries = [
                (update[b], moments[b], indices[b] if indices.numel() else indices, factor[b])
                for b in range(piece.batch)
            ]
        self.neuron += [(u, m, i, item.group, f) for u, m, i, f in entries]
        return factor if piece.stacked else factor[0]

    def _list_update(self, plan: DevicePlan) -> None:
        """Slices of the device's lists, and the numbers of update_."""
        part = slice(self.start, self.stop)
        pieces = [item.piece for item in plan.items[part]]
        self.momentum, self.indices = plan.momentum[part], plan.indices[part]
        self.norm, self.slots = plan.norm[part], plan.slots[part]
        self.group, self.axis = plan.group[part], plan.axis[part]
        self.weight, self.step = plan.weight[part], plan.step[part]
        self.scale = [piece.scale for piece in pieces]
        self.param_id = [item.index for item in plan.items[part]]
        self.index_base = [piece.index_base for piece in pieces]
        self.index_batch_stride = [piece.index_batch_stride for piece in pieces]
        self.index_row_stride = [piece.index_row_stride for piece in pieces]
        self.neuron_lists: list[list[Any]] = [[entry[i] for entry in self.neuron] for i in range(5)]

    def run(self, plan: DevicePlan, grads: list[Tensor], hyper: Tensor) -> None:
        """Lines 3 to 9 of Algorithm 4 for the pass."""
        ops.gather_(
            self.momentum,
            grads[self.start : self.stop],
            self.indices,
            self.norm,
            hyper,
            self.group,
            self.axis,
            self.gathered,
        )
        for config, (xs, outs) in self.calls.items():
            flat = [value for triple in config.coefficients for value in triple]
            ops.newton_schulz_out(
                xs, outs, flat, config.restarts, config.method, config.dtype, True, 0.0
            )
        if self.neuron:
            update, moments, indices, group, factor = self.neuron_lists
            ops.neuron_(update, moments, indices, hyper, group, factor)
        ops.update_(
            self.weight,
            self.update,
            self.slots,
            self.factor,
            hyper,
            self.group,
            self.axis,
            self.scale,
            self.step,
            plan.seed,
            self.param_id,
            self.index_base,
            self.index_batch_stride,
            self.index_row_stride,
        )

    def observe(self, hyper: Tensor) -> list[dict[str, Any]]:
        """Per bucket: root mean square of what was added to the weights, and how far the update is
        from orthogonal (|G - I|_F / sqrt(n), G the smaller Gram matrix). Tensors, not read back."""
        records = []
        place = self.start
        for bucket, out in zip(self.buckets, self.stacks, strict=True):
            o = out.float()
            wide = o if bucket.shape[0] <= bucket.shape[1] else o.mT
            gram = wide @ wide.mT
            n = gram.shape[-1]
            error = (gram - torch.eye(n, device=o.device)).norm(dim=(-2, -1)) / n**0.5
            squares, elements, begin = o.new_zeros(()), 0, 0
            for offset, item in enumerate(bucket.items):
                piece, at = item.piece, slice(begin, begin + item.piece.batch)
                step = hyper[item.group, 1] * self.scale[place - self.start + offset]
                squares = squares + (step * o[at].norm()) ** 2
                elements += piece.batch * piece.rows * piece.cols
                begin = at.stop
            place += len(bucket.items)
            records.append(
                {
                    "update_rms": (squares / elements).sqrt(),
                    "orthogonality_error": error.max(),
                }
            )
        return records


class AdamWLists:
    """Arguments of adamw_: flat arrays in the order of the parameter's memory."""

    def __init__(self, plan: DevicePlan, state: State) -> None:
        self.seed = plan.seed
        self.order: list[tuple[int, ...]] = []
        self.index: list[int] = []
        self.param: list[Tensor] = []
        self.exp_avg: list[Tensor] = []
        self.exp_avg_sq: list[Tensor] = []
        self.step: list[Tensor] = []
        self.group: list[int] = []
        self.stochastic: list[bool] = []
        for other in plan.work.others:
            rounds = stochastic(other.parameter, other.options)
            weight = plan.writable(other.parameter, rounds)
            order = layout.memory_order(weight)
            if order is None:
                weight = plan.stage(other.parameter, other.parameter.dtype)
                order = tuple(range(weight.ndim))
            entry = state[other.parameter]
            self.order.append(order)
            self.index.append(other.index)
            self.param.append(weight.permute(order).reshape(-1))
            self.exp_avg.append(entry["exp_avg"].permute(order).view(-1))
            self.exp_avg_sq.append(entry["exp_avg_sq"].permute(order).view(-1))
            self.step.append(entry["step"])
            self.group.append(other.group)
            self.stochastic.append(rounds)
        self.base = [0] * len(self.index)

    def run(self, grads: Sequence[Tensor | None], hyper: Tensor) -> None:
        """One AdamW step of all of them."""
        torch._foreach_add_(self.step, 1.0)
        flat = []
        for index, order in zip(self.index, self.order, strict=True):
            flat.append(dense(grads[index]).permute(order).reshape(-1))
        ops.adamw_(
            self.param,
            flat,
            self.exp_avg,
            self.exp_avg_sq,
            self.step,
            hyper,
            self.group,
            self.stochastic,
            self.seed,
            self.index,
            self.base,
        )


def cut(grad: Tensor | None, view: Callable[[Tensor], Tensor] | None) -> Tensor:
    """A piece of a gradient."""
    grad = dense(grad)
    return grad if view is None else view(grad)


def dense(grad: Tensor | None) -> Tensor:
    """The gradient as a plain strided tensor."""
    if type(grad) is Tensor:
        return grad
    if grad is None:
        raise RuntimeError("a gradient vanished while the step ran")
    if is_traceable_wrapper_subclass(grad):
        return torch.empty(grad.shape, dtype=grad.dtype, device=grad.device).copy_(grad)
    return grad.as_subclass(Tensor)


def _stack(piece: Piece) -> tuple[int, ...]:
    return (piece.batch,) if piece.stacked else ()


def _unstack(stack: Tensor, piece: Piece) -> Tensor:
    return stack if piece.stacked else stack[0]


def _is_whole(piece: Piece) -> bool:
    return piece.whole and piece.form == "plain"


def _unique(steps: Sequence[Tensor]) -> list[Tensor]:
    return list({id(step): step for step in steps if step.numel()}.values())
