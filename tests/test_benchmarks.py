"""The parts of the benchmarks that need no GPU: they import, count as documented, and fill the page."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch

import dion3
from benchmarks import bench_step, harness, plots
from dion3.plan import NSConfig

BENCHMARKS = Path(plots.__file__).parent
FACTS = {"gpu": "NVIDIA H200", "torch": "2", "cuda": "13", "commit": "c", "date": "2026-01-01"}


@pytest.mark.parametrize("name", [*sorted(p.stem for p in BENCHMARKS.glob("bench_*.py")), "plots"])
def test_help_needs_no_gpu(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"benchmarks.{name}").main()
    assert left.value.code == 0
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out


def test_columns_keep_their_order_and_the_first_of_a_name_counts(tmp_path):
    table = harness.Table("gemm", FACTS, ["shape", "ratio", "bar", "error", "bar"])
    table.add("1x8", 0.5, 0.6, 0.1, 0.7)
    rows = plots.read(table.save(str(tmp_path))).rows
    assert [list(row.items()) for row in rows] == [
        [("shape", "1x8"), ("ratio", "0.5"), ("bar", "0.6"), ("error", "0.1")]
    ]


def test_operations_of_newton_schulz():
    """The table in docs/kernels.md, section 4."""
    table = tuple(dion3.scaled(dion3.POLAR_EXPRESS, 1.05))
    config = NSConfig(table, (2,), "auto", torch.float16)
    n, m = 32, 128
    assert bench_step.ns_operations(config, (m, n)) == 6 * n * n * m + 14 * n**3
    assert bench_step.ns_operations(config, (n, n)) == 20 * n**3
    standard = config._replace(method="standard")
    assert bench_step.ns_operations(standard, (n, m)) == 15 * n * n * m + 5 * n**3


@pytest.mark.parametrize(
    ("make", "least"),
    [
        # momentum 6, gather f (2 + 4), update 4 + 4 f; newton-schulz in fp32 on a CPU
        (lambda p: dion3.Dion3(p, fraction=0.25, momentum_dtype=torch.bfloat16), 12.5),
        # the neuron norm reads the update once more
        (
            lambda p: dion3.Dion3(
                p, fraction=0.25, neuron_norm=True, momentum_dtype=torch.bfloat16
            ),
            13.5,
        ),
        # momentum 6, gather 2 + 2 (the gradient: Nesterov) + 4, update 4 + 4
        (lambda p: dion3.Muon(p, momentum_dtype=torch.bfloat16), 22),
        (lambda p: dion3.Dion3([{"params": p, "algorithm": "adamw"}]), 22),
        (lambda p: torch.optim.AdamW(p), 14),
    ],
)
def test_bytes_of_the_floor(make, least):
    weights = [torch.nn.Parameter(torch.randn(16, 64).bfloat16()) for _ in range(2)]
    for p in weights:
        p.grad = torch.randn_like(p)
    optimizer = make(weights)
    optimizer.step()
    limits = harness.Ceilings(bytes_per_ms=1.0, operations_per_ms=math.inf)
    assert bench_step.floor_ms(optimizer, limits) == least * 2 * 16 * 64


@pytest.mark.parametrize(("size", "read"), [(2, 1 - 0.75**32), (4, 1 - 0.75**16)])
def test_a_gather_of_columns_moves_whole_pieces_of_memory(size, read):
    assert harness.gather_elements(400, 100, size, True) == 100
    assert harness.gather_elements(400, 100, size, False) == pytest.approx(400 * read)
    assert harness.gather_elements(400, 400, size, False) == 400


def test_a_result_fills_its_part_of_the_page(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    images = tmp_path / "docs" / "images"
    images.mkdir(parents=True)
    page = tmp_path / "docs/benchmarks.md"
    text = (BENCHMARKS.parent / "docs/benchmarks.md").read_text()
    page.write_text(text)
    table = harness.Table("training", FACTS, ["step", "Muon", "difference", "noise", "Dion3 f=1/4"])
    for step in range(1, 41):
        table.add(step, 3.0 / step, 1e-4, 1e-4, 3.1 / step)
    table.save(str(tmp_path / "benchmarks" / "results"))
    monkeypatch.setattr("sys.argv", ["plots", "--root", str(tmp_path)])
    plots.main()
    assert capsys.readouterr().out.count("skipped") == len(plots.PARTS) - 1
    assert (images / "h200_training.png").stat().st_size > 10_000
    filled = page.read_text()
    assert "images/h200_training.png" in filled and "commit c, 2026-01-01" in filled
    plots.main()
    assert page.read_text() == filled
    assert all(f"<!-- {name} -->" in text for name in plots.PARTS)
