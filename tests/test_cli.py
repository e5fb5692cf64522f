"""`python -m dion3`: help, exit codes, and short runs whose results are read back."""

import io
import json
import math
import subprocess
import sys

import pytest
import torch

from dion3.cli import COMMANDS, main
from dion3.cli.contenders import updates
from dion3.cli.progress import Progress
from dion3.cli.timing import Contender, time_in_turn


def lines(capsys):
    """What was printed, as lines of words."""
    return [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def matplotlib_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)


# ---- the command line itself --------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert f"dion3 {command}" in text and len(text.splitlines()) > 5


def test_module_lists_the_commands_and_refuses_others():
    wrong = subprocess.run([sys.executable, "-m", "dion3", "train"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "invalid choice: 'train'" in wrong.stderr
    assert all(command in wrong.stderr for command in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["selftest", "--device", "tpu"], "--device tpu"),
        (["selftest", "--device", "cuda:99"], "--device cuda:99"),
        (["restarts", "--restarts", "5"], "--restarts 5"),
        (["restarts", "--coefficients", "1,2"], "--coefficients 1,2"),
        (["restarts", "--set", "you", "--coefficients", "1,2,3"], "exclude each other"),
        (["restarts", "--safety", "-1"], "safety"),
        (["restarts", "--set", "keller", "--steps", "60", "--restarts", "9"], "combinations"),
        (["demo", "--optimizers", "adamw,sgd"], "sgd"),
        (["demo", "--dim", "65", "--heads", "4"], "--dim 65"),
        (["bench", "--optimizers", ""], "--optimizers"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_one_line(arguments, words, capsys):
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1


@pytest.mark.parametrize("arguments", [["demo", "--steps", "0"], ["bench", "--repeats", "x"], []])
def test_wrong_flags_are_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2


# ---- info, selftest, restarts -------------------------------------------------------------------


def test_info(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text and "native" in text and "cpu" in text
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"] == torch.__version__
    assert isinstance(facts["build"]["native"], bool)
    assert len(facts["devices"]) == 1 + torch.cuda.device_count()


def test_selftest_passes(device, capsys):
    assert main(["selftest", "--device", str(device)]) == 0
    text = capsys.readouterr().out
    assert "FAIL" not in text and text.count("  ok  ") >= 12


@pytest.mark.parametrize(
    "name", ["momentum_", "select_", "gather_", "neuron_", "update_", "adamw_"]
)
def test_selftest_notices_a_broken_operation(name, monkeypatch, capsys):
    from dion3 import ops

    right = getattr(ops, name)

    def wrong(*arguments):
        right(*arguments)
        written = next(a for a in reversed(arguments) if isinstance(a, list) and _is_output(a))
        written[0].view(-1)[3] += 1

    def _is_output(value):
        return isinstance(value[0], torch.Tensor) and value[0].numel() > 3

    monkeypatch.setattr(ops, name, wrong)
    assert main(["selftest", "--device", "cpu"]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAIL" in line]
    assert failed and failed[0].startswith(name.rstrip("_"))


def test_selftest_notices_a_broken_orthogonalizer(monkeypatch, capsys):
    module = sys.modules["dion3.newton_schulz"]
    right = module.gram_ns
    monkeypatch.setattr(module, "gram_ns", lambda x, **options: 1.05 * right(x, **options))
    assert main(["selftest", "--device", "cpu"]) == 1
    assert "FAIL" in next(
        x for x in capsys.readouterr().out.splitlines() if x.startswith("gram_ns")
    )


def test_restarts_table(capsys):
    assert main(["restarts"]) == 0
    rows = lines(capsys)[-4:]
    assert [row[1:-2] for row in rows] == [["-"], ["2"], ["1", "2"], ["1", "2", "3"]]
    assert [row[-1] for row in rows] == ["no", "yes", "yes", "yes"]
    assert [float(row[-2]) for row in rows[1:]] == pytest.approx([84.57, 60.87, 34.33], rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "restarts"),
    [
        (["--set", "keller", "--restarts", "1"], [3]),
        (["--set", "you", "--restarts", "2"], [1, 3]),
        (["--safety", "1.01", "--restarts", "1"], [1]),
        (["--coefficients", "3.4445,-4.775,2.0315", "--steps", "5", "--restarts", "2"], [2, 3]),
    ],
)
def test_restarts_of_other_coefficients(arguments, restarts, capsys):
    assert main(["restarts", *arguments, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert found["restarts"] == restarts


def test_restarts_take_the_rows_that_gram_ns_takes(capsys):
    from dion3.coefficients import normalize_coefficients

    main(["restarts", "--steps", "7", "--json"])
    found = json.loads(capsys.readouterr().out)["coefficients"]
    assert found == [list(row) for row in normalize_coefficients(None, 7)]


def test_restarts_that_are_not_enough_are_exit_code_1(capsys):
    # Eight rows of Polar Express, all but the last scaled by 1.01, need two restarts.
    from dion3.coefficients import POLAR_EXPRESS_8, scaled

    triples = [*scaled(POLAR_EXPRESS_8[:7], 1.01), POLAR_EXPRESS_8[7]]
    flags = [word for t in triples for word in ("--coefficients", ",".join(map(repr, t)))]
    assert main(["restarts", *flags, "--restarts", "1"]) == 1
    assert "none is safe" in capsys.readouterr().out
    assert main(["restarts", *flags, "--restarts", "2"]) == 0
    assert main(["restarts", "--restarts", "0"]) == 1  # the metric is 2.7e12
    capsys.readouterr()
    assert main(["restarts", "--set", "keller", "--steps", "20", "--restarts", "0", "--json"]) == 1
    assert "Infinity" not in capsys.readouterr().out


# ---- demo and bench -----------------------------------------------------------------------------

TINY = ["--layers", "1", "--dim", "16", "--heads", "2", "--context", "32", "--batch", "4"]


def test_demo_trains_all_optimizers_alike(tmp_path, capsys):
    assert main(["demo", "--quick", *TINY, "--steps", "12", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    report = json.loads((tmp_path / "demo.json").read_text())
    runs = {run["label"]: run for run in report["runs"]}
    assert list(runs) == ["AdamW", "torch.optim.Muon", "Dion3 f=1", "Dion3 f=1/4"]
    first = {run["losses"][0] for run in runs.values()}
    assert len(first) == 1, "all start from the same weights and the same batch"
    assert first.pop() == pytest.approx(math.log(256), abs=0.1)
    for label, run in runs.items():
        assert len(run["losses"]) == 12 and run["held_out"][-1][0] == 12
        assert run["final_held_out"] < run["losses"][0] - 0.05, f"{label} learned nothing"
        assert f"{run['final_held_out']:.4f}" in captured.out
        assert f"{label:<17} [####" in captured.err
    matrices = 12 * 16 * 16
    rest = 256 * 16 * 2 + 32 * 16 + 6 * 16
    assert matrices * 8 + rest * 8 < runs["AdamW"]["state_bytes"] < matrices * 8 + rest * 8 + 200
    assert runs["Dion3 f=1"]["state_bytes"] < matrices * 4 + rest * 8 + 200
    assert len({tuple(run["losses"]) for run in runs.values()}) == 4, "no two runs are the same"
    assert (tmp_path / "demo.png").read_bytes()[:4] == b"\x89PNG"


def test_demo_repeats_itself(tmp_path, capsys):
    command = ["demo", "--quick", *TINY, "--steps", "4", "--optimizers", "dion3-1/4", "--no-plot"]
    for name in ("one", "two"):
        assert main([*command, "--out", str(tmp_path / name)]) == 0
    one, two = (
        json.loads((tmp_path / name / "demo.json").read_text())["runs"][0]["losses"]
        for name in ("one", "two")
    )
    assert one == two
    assert not (tmp_path / "one" / "demo.png").exists()


def test_demo_without_matplotlib(tmp_path, capsys, matplotlib_missing):
    command = ["demo", "--quick", *TINY, "--steps", "2", "--optimizers", "adamw"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    assert "no plot: matplotlib is not installed" in capsys.readouterr().err
    assert not (tmp_path / "demo.png").exists()


def test_demo_text_is_split_by_file():
    from dion3.demo.data import load_corpus, windows

    corpus = load_corpus()
    share = corpus.held_out_files / (corpus.held_out_files + corpus.train_files)
    assert 0.05 < share < 0.2 and len(corpus.train) > 4 * len(corpus.held_out)
    pieces = windows(corpus.train, 16, 5, seed=3)
    assert pieces.shape == (5, 17) and pieces.dtype == torch.int64
    assert torch.equal(pieces, windows(corpus.train, 16, 5, seed=3))
    assert not torch.equal(pieces, windows(corpus.train, 16, 5, seed=4))
    text = bytes(corpus.train.tolist())
    assert all(bytes(piece.tolist()) in text for piece in pieces)
    assert bytes(corpus.held_out[1000:1400].tolist()) not in text


def test_bench_writes_json_and_plot(tmp_path, capsys):
    command = ["bench", "--size", "tiny", "--layers", "1", "--repeats", "3", "--warmup", "1"]
    assert main([*command, "--device", "cpu", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    report = json.loads((tmp_path / "bench.json").read_text())
    names = [entry["name"] for entry in report["step"]]
    assert names == ["AdamW", "torch.optim.Muon", "Muon", "Dion3 f=1", "Dion3 f=1/4"]
    elements = sum(rows * cols for rows, cols in report["settings"]["shapes"])
    for entry in report["step"] + report["orthogonalizer"] + report["update"]:
        assert len(entry["samples_ms"]) == 3
        assert min(entry["samples_ms"]) <= entry["low_ms"] <= entry["median_ms"]
        assert entry["median_ms"] <= entry["high_ms"] <= max(entry["samples_ms"])
        assert entry["name"] in captured.out
    states = {entry["name"]: entry["state_bytes"] for entry in report["step"]}
    assert states["AdamW"] > 8 * elements and 4 * elements <= states["Muon"] < 4.1 * elements
    assert {entry["dtype"] for entry in report["orthogonalizer"]} >= {"bfloat16", "float32"}
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"


def test_bench_of_one_part_in_bfloat16(tmp_path, capsys):
    command = ["bench", "--size", "tiny", "--layers", "1", "--repeats", "1", "--warmup", "0"]
    flags = ["--only", "step", "--dtype", "bfloat16", "--optimizers", "dion3-1/4", "--no-plot"]
    assert main([*command, *flags, "--device", "cpu", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    assert not {"orthogonalizer", "update"} & set(report) and len(report["step"]) == 1


@pytest.mark.parametrize("shape", [(9, 6), (8, 7)])
def test_benched_updates_do_the_same(shape):
    results = []
    for contender in updates(shape, 2, torch.device("cpu"))[:2]:
        weights = contender.call.args[0]
        before = [weight.clone() for weight in weights]
        contender.call()
        results.append([weight.clone() for weight in weights])
        assert not torch.equal(weights[0], before[0])
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)
    for a, b in zip(*results, strict=True):  # torch may fuse the multiplication and the addition
        torch.testing.assert_close(a, b, rtol=2**-7, atol=0)


# ---- the pieces ---------------------------------------------------------------------------------


def test_contenders_take_turns():
    calls = []
    contenders = [Contender(name, lambda name=name: calls.append(name)) for name in "abc"]
    rounds = []
    results = time_in_turn(contenders, 1, 2, torch.device("cpu"), rounds.append)
    assert "".join(calls) == "abc" + "bca" + "cab"
    assert rounds == [1, 2, 3]
    assert [(r["name"], len(r["samples_ms"])) for r in results] == [("a", 2), ("b", 2), ("c", 2)]


def test_progress_in_a_log_and_in_a_terminal():
    log = io.StringIO()
    with Progress(20, "run", log) as progress:
        for done in range(1, 21):
            progress.update(done, f"loss {done}")
    written = log.getvalue().splitlines()
    assert len(written) == 10 and written[-1].startswith("run [" + 24 * "#" + "] 20/20  loss 20")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    with Progress(2, "run", terminal) as progress:
        progress.update(1, "a long text")
        progress.update(2, "short")
    first, last = terminal.getvalue().removeprefix("\r").split("\r")
    assert "1/2  a long text" in first and last.endswith("\n")
    assert len(last.rstrip("\n")) >= len(first), "a shorter line covers the longer one"
