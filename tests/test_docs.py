"""README, CONTRIBUTING and docs/ against the code: paths and targets exist, examples run."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest
import torch

import dion3
from dion3.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SOURCES = sorted(
    path
    for pattern in ("csrc/**/*", "dion3/**/*.py", "tests/**/*.py", "tests/**/*.c", "docs/*.py")
    for path in ROOT.glob(pattern)
    if path.suffix in {".py", ".c", ".h", ".cpp", ".cu", ".cuh"}
)
page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)

PATH = re.compile(r"(?<![\w/.-])((?:csrc|dion3|tests|docs|benchmarks|\.ci)/[\w./-]*[\w/])")
PLACEHOLDER = re.compile(r"NAME|_build|\.\.\.")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def missing_paths(text: str) -> list[str]:
    """Return the repository paths named in text that do not exist."""
    named = {name for name in PATH.findall(text) if not PLACEHOLDER.search(name)}
    return sorted(name for name in named if not (ROOT / name).exists())


@page
def test_every_path_exists(page):
    assert not missing_paths(page.read_text())


@page
def test_every_link_leads_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@page
def test_every_make_target_exists(page):
    rules = "".join((ROOT / name).read_text() for name in ("Makefile", "csrc/build.mk"))
    targets = set(re.findall(r"^([a-z][\w-]*):", rules, re.MULTILINE))
    for line in re.findall(r"(?:^|`)make ([a-z][a-z0-9 -]*)", page.read_text(), re.MULTILINE):
        assert set(line.split()) <= targets, line


@page
def test_every_command_exists(page, capsys):
    for command in set(re.findall(r"python -m dion3 ([a-z]+)", page.read_text())):
        with pytest.raises(SystemExit) as left:
            main([command, "--help"])
        assert left.value.code == 0, command
        assert f"dion3 {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks").glob("bench_*.py")), ids=lambda p: p.stem
)
def test_every_benchmark_has_a_place_in_the_makefile(path):
    assert f"-m benchmarks.{path.stem} $(ARGS)" in (ROOT / "Makefile").read_text()


def test_every_path_in_the_sources_exists():
    missing = {str(path.relative_to(ROOT)): missing_paths(path.read_text()) for path in SOURCES}
    assert not {path: names for path, names in missing.items() if names}


def test_the_readme_names_every_page():
    readme = (ROOT / "README.md").read_text()
    for path in PAGES:
        assert path.name in ("README.md", "index.md") or path.name in readme, path


def test_every_optional_dependency_is_used():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    sources = "".join(path.read_text() for path in SOURCES if path.suffix == ".py")
    for requirement in [*extras["demo"], *extras["test"]]:
        name = re.match(r"[\w-]+", requirement).group()
        if not name.startswith(("pytest", "dion3")):
            assert re.search(rf"^ *(import|from) {name}\b", sources, re.MULTILINE), requirement


def test_every_public_method_is_in_the_reference():
    reference = (ROOT / "docs" / "api.md").read_text()
    for name, value in vars(dion3.Dion3).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            assert re.search(rf"\b{name}\b", reference), name


class Language(torch.nn.Module):
    """The `model` of the examples: an embedding, a hidden layer, a head."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.hidden = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 16)

    def forward(self, tokens):
        scores = self.head(torch.relu(self.hidden(self.embed(tokens))))
        return torch.nn.functional.cross_entropy(scores, tokens)


@page
def test_every_python_example_runs(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    torch.manual_seed(0)
    names = {
        "torch": torch,
        "dion3": dion3,
        "model": Language(),
        "batches": [torch.arange(16), torch.arange(8)],
    }
    for block in blocks:  # the examples of a page follow from each other
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("name", sorted(inspect.signature(dion3.Dion3).parameters))
def test_every_argument_of_dion3_is_documented(name):
    assert f"`{name}" in "".join(path.read_text() for path in PAGES) or name == "params"


def test_every_public_name_is_in_the_reference():
    reference = (ROOT / "docs" / "api.md").read_text()
    for name in dion3.__all__:
        assert re.search(rf"\b{name}\b", reference), name
