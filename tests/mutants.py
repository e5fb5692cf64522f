"""Take one feature at a time out of a copy of the sources and show that the tests notice.

    python tests/mutants.py [--list] [NAME ...]

Each mutant is a small textual change in Python or C. The copy is built (only what the change
touches is compiled again) and the tests named with the mutant must fail; before that, the same
tests must pass on the unchanged copy. Exit code 1 if a mutant survives, 2 if the unchanged copy
fails or a change no longer fits the sources.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("csrc", "dion3", "tests", "build", "setup.py", "pyproject.toml", "Makefile", "README.md")


@dataclass(frozen=True)
class Mutant:
    """What is taken out: (old, new) pairs of text in one file; and the tests that must fail
    then."""

    feature: str
    file: str
    changes: tuple[tuple[str, str], ...]
    tests: str


def _m(feature: str, file: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(feature, file, ((old, new),), tests)


MUTANTS = [
    _m(
        "weight decay",
        "dion3/options.py",
        'decay = 1.0 - lr * group["weight_decay"]',
        "decay = 1.0",
        "test_optimizer.py::test_every_slice_decays",
    ),
    _m(
        "weight decay of unselected rows",
        "csrc/cpu/update.c",
        "for (int64_t j = 0; j < n; ++j) w[j] = d3_decay(a, w[j]);",
        "for (int64_t j = 0; j < n; ++j) w[j] = w[j];",
        "test_optimizer.py::test_every_slice_decays",
    ),
    _m(
        "decay by the plain learning rate",
        "dion3/options.py",
        "    transfer = lr_transfer(group, options)\n",
        "    transfer = lr_transfer(group, options)\n"
        '    decay = 1.0 - lr * transfer * group["weight_decay"]\n',
        "test_optimizer.py::test_decay_uses_the_plain_learning_rate",
    ),
    _m(
        "error feedback",
        "dion3/options.py",
        'keep, feedback = (mu, 1.0) if rule == "muon" else (1.0, mu)',
        'keep, feedback = (mu, 1.0) if rule == "muon" else (1.0, 1.0)',
        "test_optimizer.py::test_a_starved_slice_keeps_growing",
    ),
    _m(
        "growth of unselected slices",
        "dion3/options.py",
        'keep, feedback = (mu, 1.0) if rule == "muon" else (1.0, mu)',
        "keep, feedback = (mu, 1.0)",
        "test_optimizer.py::test_a_starved_slice_keeps_growing",
    ),
    _m(
        "feedback that is due before the state is looked at",
        "dion3/optimizer.py",
        "        self._state.settle()\n        return self._state\n",
        "        return self._state\n",
        "test_optimizer.py::test_step_equals_the_specification",
    ),
    _m(
        "feedback that is due before a new plan",
        "dion3/optimizer.py",
        "        self._state.settle()  # its tensors may be exchanged\n",
        "",
        "test_deferred_feedback.py::test_looking_at_the_state_changes_no_bit",
    ),
    _m(
        "feedback that is due before a load",
        "dion3/optimizer.py",
        "        self._state.settle()  # the dict may hold its tensors, and a hook may have made a step\n",
        "",
        "test_deferred_feedback.py::test_looking_at_the_state_changes_no_bit",
    ),
    _m(
        "feedback that another optimizer of the state has left",
        "dion3/state.py",
        "        if self.plans is not plans:\n            self.settle()\n",
        "",
        "test_deferred_feedback.py::test_optimizers_that_share_a_state_share_what_is_due",
    ),
    _m(
        "a state that is assigned stays the same state",
        "dion3/optimizer.py",
        "state if isinstance(state, State) else State(dict, state)",
        "State(dict, state)",
        "test_deferred_feedback.py::test_optimizers_that_share_a_state_share_what_is_due",
    ),
    _m(
        "a state that is replaced is complete",
        "dion3/optimizer.py",
        "            self._state.settle()  # others may hold its tensors\n",
        "            pass\n",
        "test_deferred_feedback.py::test_a_state_that_is_replaced_is_complete",
    ),
    _m(
        "no step while another thread looks at the state",
        "dion3/optimizer.py",
        "        with self._state.lock:\n",
        "        if True:\n",
        "test_deferred_feedback.py::test_another_thread_may_look_at_the_state",
    ),
    _m(
        "feedback of an interrupted momentum_",
        "dion3/executor.py",
        "        except KeyboardInterrupt:  # comes when the operation has ended\n            self.due = False\n",
        "        except KeyboardInterrupt:\n",
        "test_deferred_feedback.py::test_a_step_that_breaks_off_loses_no_feedback_and_leaves_none",
    ),
    _m(
        "plans that have left nothing are let go",
        "dion3/state.py",
        "plans, self.plans = self.plans, ()",
        "plans = self.plans",
        "test_deferred_feedback.py::test_plans_that_have_left_nothing_are_not_kept",
    ),
    _m(
        "no signature of the plans before an interrupt",
        "dion3/optimizer.py",
        "        self._signature = None  # of the old plans\n",
        "",
        "test_deferred_feedback.py::test_a_plan_whose_making_was_interrupted_is_not_used",
    ),
    _m(
        "no feedback of a step that broke off",
        "dion3/executor.py",
        "                self.feedback.fill_(1.0)  # line 9",
        "                pass  # line 9",
        "test_deferred_feedback.py::test_a_step_that_breaks_off_loses_no_feedback_and_leaves_none",
    ),
    _m(
        "feedback of the step before one that broke off",
        "dion3/executor.py",
        "            if not self.due:\n                self.feedback",
        "            if True:\n                self.feedback",
        "test_deferred_feedback.py::test_a_step_that_breaks_off_loses_no_feedback_and_leaves_none",
    ),
    _m(
        "feedback is done once momentum_ has run",
        "dion3/executor.py",
        "            raise\n        self.due = False\n",
        "            raise\n",
        "test_deferred_feedback.py::test_a_step_that_breaks_off_loses_no_feedback_and_leaves_none",
    ),
    _m(
        "feedback of the step it is due for",
        "dion3/executor.py",
        "self.feedback.copy_(hyper[:, reference.FEEDBACK])",
        "self.feedback = hyper[:, reference.FEEDBACK]",
        "test_deferred_feedback.py::test_looking_at_the_state_changes_no_bit",
    ),
    _m(
        "rounding of the feedback",
        "csrc/cpu/momentum.c",
        "    d3_block_round(damped, it->momentum.dtype, n);\n",
        "",
        "test_ops.py::test_feedback_is_rounded_before_the_gradient_is_added",
    ),
    _m(
        "undamped input of Newton-Schulz",
        "csrc/cpu/gather.c",
        "    if (nu == 1.0f) {",
        "    for (int64_t j = 0; j < n; ++j) m[j] = d3_mul(it->hyper[DION3_HYPER_FEEDBACK], m[j]);\n"
        "    if (nu == 1.0f) {",
        "test_optimizer.py::test_dion3_at_fraction_one_sees_bitwise_what_muon_sees",
    ),
    _m(
        "neuron norm",
        "dion3/executor.py",
        "if not item.options.neuron_norm:",
        "if True:",
        "test_optimizer.py::test_step_equals_the_specification",
    ),
    _m(
        "neuron second moment in float32",
        "dion3/state.py",
        "(second_moment_shape(parameter, options), torch.float32)",
        "(second_moment_shape(parameter, options), parameter.dtype)",
        "test_optimizer.py::test_second_moment_converges_to_a_constant_target",
    ),
    _m(
        "restart",
        "dion3/program.py",
        "bounds = (0, *restarts, len(coefficients))",
        "bounds = (0, len(coefficients))",
        "test_optimizer.py::test_restarts_hold_in_16_bits",
    ),
    _m(
        "transposition of tall matrices",
        "dion3/matrix_ops.py",
        "tall = x.size(1) > x.size(2)",
        "tall = False",
        "test_optimizer.py::test_a_tall_matrix_is_worked_on_from_its_short_side",
    ),
    _m(
        "selection of the short side",
        "dion3/layout.py",
        "axis = ROWS if rows <= cols else COLS",
        "axis = ROWS",
        "test_optimizer.py::test_auto_selects_the_short_side",
    ),
    Mutant(
        "ties to the lower index",
        "csrc/cpu/select.c",
        (
            (
                "    int32_t place = 0;\n",
                "    int32_t place = 0;\n    int64_t equal = 0;\n"
                "    for (int64_t i = 0; score && i < it->n; ++i)\n"
                "        equal += key_of(score[i]) == threshold;\n",
            ),
            ("(key == threshold && ties-- > 0)", "(key == threshold && equal-- <= ties)"),
        ),
        "test_optimizer.py::test_ties_go_to_the_lower_index",
    ),
    _m(
        "count of slices without the float trap",
        "dion3/options.py",
        "math.ceil(fraction * n - 1e-6)",
        "math.ceil(fraction * n)",
        "test_optimizer.py::test_selection_count",
    ),
    _m(
        "stochastic rounding",
        "dion3/state.py",
        'return options.rounding == "stochastic" or not is_traceable_wrapper_subclass(parameter)',
        "return False",
        "test_optimizer.py::test_every_slice_decays",
    ),
    _m(
        "the parameter in the key of stochastic rounding",
        "dion3/executor.py",
        "self.param_id = [item.index for item in plan.items[part]]",
        "self.param_id = [0 for item in plan.items[part]]",
        "test_optimizer.py::test_equal_parameters_round_differently",
    ),
    _m(
        "the place in the key of stochastic rounding",
        "dion3/layout.py",
        "index_base=row_start * strides[1],\n            index_batch_stride=strides[0]",
        "index_base=0,\n            index_batch_stride=0",
        "test_optimizer.py::test_equal_matrices_of_a_stack_round_differently",
    ),
    _m(
        "step count",
        "dion3/executor.py",
        "torch._foreach_add_(self.steps, 1.0)",
        "pass",
        "test_checkpoints.py::test_steps_beyond_what_16_bits_count",
    ),
    _m(
        "lr transfer",
        "dion3/options.py",
        'return 1.0 / math.sqrt(group.get("fraction", options.fraction))',
        "return 1.0",
        "test_optimizer.py::test_lr_transfer",
    ),
    _m(
        "shape scale",
        "dion3/executor.py",
        "self.scale = [piece.scale for piece in pieces]",
        "self.scale = [1.0 for piece in pieces]",
        "test_optimizer.py::test_shape_scale",
    ),
    _m(
        "Nesterov momentum",
        "dion3/options.py",
        'nesterov = mu if group["nesterov"] else 1.0',
        "nesterov = 1.0",
        "test_parity.py::test_the_fp32_path_is_far_closer_than_the_yardstick",
    ),
    _m(
        "momentum without Nesterov",
        "dion3/options.py",
        'keep, feedback = (mu, 1.0) if rule == "muon" else (1.0, mu)',
        "keep, feedback = 0.0, 0.0",
        "test_optimizer.py::test_momentum_matters_without_nesterov",
    ),
    _m(
        "eps",
        "dion3/options.py",
        'feedback, group["eps"], beta2, NEURON_EPS, nesterov]',
        "feedback, 0.0, beta2, NEURON_EPS, nesterov]",
        "test_optimizer.py::test_a_tiny_gradient_is_not_amplified_beyond_eps",
    ),
    _m(
        "maximize",
        "dion3/options.py",
        'sign = -1.0 if get("maximize", options.maximize) else 1.0',
        "sign = 1.0",
        "test_optimizer.py::test_flavours_equal_the_specification",
    ),
    _m(
        "one matrix per head",
        "dion3/layout.py",
        '        if options.head_axis == 0:\n            return "heads_rows"',
        '        if True:\n            return "heads_rows"',
        "test_optimizer_layout.py::test_heads_of_columns_are_a_stack",
    ),
    _m(
        "one matrix per block",
        "dion3/layout.py",
        "sizes = options.split_sizes or (rows,)",
        "sizes = (rows,)",
        "test_optimizer_layout.py::test_blocks_of_rows_are_separate_matrices",
    ),
    _m(
        "dense detour for wrapper subclasses",
        "dion3/executor.py",
        "            parameter.copy_(copy)\n",
        "            pass\n",
        "test_optimizer_layout.py::test_wrapper_subclasses_take_the_dense_detour",
    ),
    _m(
        "skipping of missing gradients",
        "dion3/plan.py",
        "if not present[index] or parameter.numel() == 0:",
        "if parameter.numel() == 0:",
        "test_optimizer_plan.py::test_a_missing_gradient_leaves_everything_alone",
    ),
    _m(
        "new plan for exchanged memory",
        "dion3/plan.py",
        "            and geometry(self.watched) == self.geometry\n",
        "",
        "test_optimizer_plan.py::test_the_plan_notices_exchanged_memory",
    ),
    _m(
        "live learning rate",
        "dion3/hyper.py",
        "        if keys == self._keys:\n",
        "        if self._keys:\n",
        "test_optimizer_contract.py::test_schedulers",
    ),
    _m(
        "state for parameters without a gradient",
        "dion3/optimizer.py",
        "if parameter.requires_grad or present[index]:",
        "if present[index]:",
        "test_optimizer_plan.py::test_state_exists_for_all_parameters_after_the_first_step",
    ),
    _m(
        "scratch memory only during the step",
        "dion3/workspace.py",
        "self._storage.resize_(0)",
        "pass",
        "test_optimizer_layout.py::test_scratch_memory_is_within_its_formula",
    ),
    _m(
        "limit of the scratch memory",
        "dion3/plan.py",
        "if filled and filled + need > WORKSPACE_LIMIT:",
        "if False:",
        "test_optimizer_layout.py::test_scratch_memory_is_within_its_formula",
    ),
    _m(
        "refusal of a learning rate that is not finite",
        "dion3/hyper.py",
        "or not math.isfinite(lr):",
        "or False:",
        "test_bad_input.py::test_a_step_that_cannot_be_done_changes_nothing",
    ),
    _m(
        "state dtypes kept on loading",
        "dion3/checkpoints.py",
        "        fresh = convert_state(",
        "        dtype = parameter.dtype\n        fresh = convert_state(",
        "test_checkpoints.py::test_round_trip_is_bitwise",
    ),
    _m(
        "momentum rescaled between Muon and Dion3",
        "dion3/checkpoints.py",
        'return mu if rule == "dion3" else 1.0 / mu',
        "return 1.0",
        "test_parity.py::test_a_torch_checkpoint_loads_into_dion3_rescaled",
    ),
    _m(
        "learning rate tensor kept on loading",
        "dion3/checkpoints.py",
        '            new["lr"] = group["lr"]\n',
        "",
        "test_checkpoints.py::test_a_learning_rate_tensor_stays_the_same_tensor",
    ),
]


def run(work: Path, tests: list[str], *, first_failure: bool) -> subprocess.CompletedProcess[str]:
    """pytest on some tests of the copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-x"] if first_failure else []
    command += [f"tests/{test}" for test in tests]
    paths = os.pathsep.join([str(work), str(work / "tests")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=work, env=env, capture_output=True, text=True)


def build(work: Path) -> None:
    """Compile what changed in the copy."""
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=work,
        env={**os.environ, "DION3_BUILD": "cpu", "PYTHONPATH": ""},
        check=True,
        capture_output=True,
    )


def copy_sources(work: Path) -> None:
    """The copy, with file times, so that only what a mutant touches is compiled again."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, work / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, work / name)


def attempt(work: Path, mutant: Mutant) -> str:
    """Apply, build, test, and put the file back. "killed", "survived" or "does not fit"."""
    path = work / mutant.file
    original = path.read_text()
    text = original
    for old, new in mutant.changes:
        if text.count(old) != 1:
            return "does not fit"
        text = text.replace(old, new)
    native = mutant.file.startswith("csrc/")
    path.write_text(text)
    try:
        if native:
            build(work)
        result = run(work, [mutant.tests], first_failure=True)
    finally:
        path.write_text(original)
        if native:
            build(work)
    # 1: a test failed. Anything else (a wrong name, an error of collection) proves nothing.
    return "killed" if result.returncode == 1 else "survived"


def main() -> int:
    """Run the mutants named on the command line, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="features; default: all")
    parser.add_argument("--list", action="store_true", help="print the features and stop")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(m.feature for m in MUTANTS))
        return 0
    unknown = set(arguments.names) - {m.feature for m in MUTANTS}
    if unknown:
        parser.error(f"no such feature: {', '.join(sorted(unknown))}")
    chosen = [m for m in MUTANTS if not arguments.names or m.feature in arguments.names]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        copy_sources(work)
        build(work)
        result = run(work, sorted({m.tests for m in chosen}), first_failure=False)
        if result.returncode != 0:
            print(result.stdout[-4000:], result.stderr[-2000:])
            print("the unchanged sources fail: nothing can be shown")
            return 2
        outcomes = []
        for number, mutant in enumerate(chosen, 1):
            begin = time.monotonic()
            outcome = attempt(work, mutant)
            outcomes.append(outcome)
            took = time.monotonic() - begin
            place = f"[{number}/{len(chosen)}]"
            print(
                f"{place} {outcome:13} without {mutant.feature}  ({mutant.tests}, {took:.0f} s)",
                flush=True,
            )
    print(f"{outcomes.count('killed')} of {len(outcomes)} mutants were noticed")
    return 2 if "does not fit" in outcomes else int("survived" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
