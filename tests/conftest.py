"""Fixtures of all tests: the device they run on, and the count of what needs a GPU."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(min(2, torch.get_num_threads()))

_GPU_REASON = "needs a CUDA device"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "gpu: needs a CUDA device; skipped, and counted, without one"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=_GPU_REASON))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum(_GPU_REASON in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.write_line(
            f"NOT RUN ON A GPU: {count} tests need a CUDA device and were skipped",
            yellow=True,
            bold=True,
        )


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test that takes this runs on the CPU, and on the GPU where there is one."""
    return torch.device(request.param)
