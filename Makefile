# dion3: `make help` lists what can be made. Everything stays inside this folder.
#
#   PYTHON=python3.12   the interpreter to start from; 3.11 or newer
#   VENV=none           make no virtual environment: use $(PYTHON) and the torch it already has
#   TORCH="torch==..."  what pip installs into the environment; options such as --index-url may follow
#   DION3_BUILD=cpu     what to build: auto (CUDA when torch and nvcc have it), cpu, cuda, none
#   ARGS="..."          handed to the program that the target runs
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

ifeq ($(VENV),none)
PY := $(PYTHON)
CLANG_FORMAT ?= clang-format
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# The environment is the user's own: nothing is installed.
needs =
else
PY := $(VENV)/bin/python
CLANG_FORMAT ?= $(VENV)/bin/clang-format
# The stamps of the optional dependency sets of pyproject.toml, e.g. $(call needs,test demo).
needs = $(patsubst %,$(VENV)/.installed-%,$(1))
endif

# Tests use one thread per process; at most eight processes.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() or 1))')
# pytest-xdist is not required: without it the tests run one after the other.
XDIST = $(shell $(PY) -c 'import xdist; print("-n $(JOBS)")' 2>/dev/null)
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest

C_SOURCES := $(wildcard csrc/*.[ch] csrc/*.cpp csrc/*/*.[ch] csrc/*/*.cu csrc/*/*.cuh tests/c/*.[ch])
PY_SOURCES := setup.py dion3 tests benchmarks docs
LINTED = $(wildcard $(PY_SOURCES))

include csrc/build.mk

# Even `make -j ext` finds the environment in place.
ext: | $(if $(filter none,$(VENV)),,$(VENV)/.torch)

## The two commands of the README

.PHONY: demo test
demo: $(call needs,demo) ext ## train a small language model with AdamW, Muon and Dion3; writes a table and a plot to out/
	$(PY) -m dion3 demo $(ARGS)

test: $(call needs,test) ext ## build, then run all tests that this machine can run
	$(MAKE) --no-print-directory test-c DION3_BUILD=$$(cut -d' ' -f1 build/ext-config.txt)
	$(PYTEST) $(XDIST) tests $(ARGS)

## More tests, and measurements

.PHONY: test-slow gpu-test gpu-bench gpu-plots bench mutants
test-slow: $(call needs,test) ext ## the long experiments that `make test` leaves out
	$(PYTEST) $(XDIST) tests -m slow --override-ini addopts= $(ARGS)

gpu-test: $(call needs,test) ext ## all tests on the GPU; fails where there is none
	$(PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu-test: torch sees no GPU")'
	$(PYTEST) tests $(ARGS)

gpu-bench: $(call needs,demo) ext ## time products, Newton-Schulz, the step and its operations, and train, on the GPU
	$(PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu-bench: torch sees no GPU")'
	$(PY) -m benchmarks.bench_gemm $(ARGS)
	$(PY) -m benchmarks.bench_newton_schulz $(ARGS)
	$(PY) -m benchmarks.bench_step_ops $(ARGS)
	$(PY) -m benchmarks.bench_step $(ARGS)
	$(PY) -m benchmarks.bench_training $(ARGS)

gpu-plots: $(call needs,demo) ## draw the figures and fill the tables of docs/benchmarks.md from benchmarks/results
	$(PY) -m benchmarks.plots $(ARGS)

bench: $(call needs,demo) ext ## time the step, the orthogonalizer and the update on this machine; JSON and a plot in out/
	$(PY) -m dion3 bench $(ARGS)

mutants: $(call needs,test) ext ## take each feature out in turn and show that a test fails
	$(PY) tests/mutants.py $(ARGS)

## Code style

.PHONY: fmt fmt-check lint
fmt: $(call needs,lint) ## format all C, CUDA and Python
	$(CLANG_FORMAT) -i $(C_SOURCES)
	$(PY) -m ruff format $(LINTED)
	$(PY) -m ruff check --fix --exit-zero --quiet $(LINTED)

fmt-check: $(call needs,lint) ## fail where `make fmt` would change something
	$(CLANG_FORMAT) --dry-run -Werror $(C_SOURCES)
	$(PY) -m ruff format --check $(LINTED)

lint: $(call needs,lint) ## ruff and mypy
	$(PY) -m ruff check $(LINTED)
	$(PY) -m mypy

## Documentation

.PHONY: docs plots
docs: $(call needs,docs) ext ## build the documentation into docs/_build/html; a warning is an error
	$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

plots: $(call needs,docs) ext ## compute the figures of docs/ again from our own functions
	$(PY) docs/plots.py $(ARGS)

## Packages

.PHONY: dist dist-check
dist: $(call needs,test) ## build the source archive, and a wheel from that archive, into dist/
	rm -rf dist
	$(PY) -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")'
	$(PY) -m pip wheel --no-build-isolation --no-deps --wheel-dir dist dist/dion3-*.tar.gz

dist-check: dist ## install that wheel into a fresh environment and use it there
	rm -rf build/dist-check
	$(PYTHON) -m venv build/dist-check
	build/dist-check/bin/python -m pip install $(TORCH)
	build/dist-check/bin/python -m pip install dist/dion3-*.whl
	cd build/dist-check && env -u PYTHONPATH bin/python -m dion3 info && env -u PYTHONPATH bin/python -m dion3 selftest

## Housekeeping

.PHONY: clean distclean help
clean: ## remove what was built
	rm -rf build dist docs/_build out *.egg-info .pytest_cache .mypy_cache .ruff_cache dion3/*.so
	find dion3 tests docs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## remove the virtual environment too
	rm -rf .venv

help: ## this list
	@echo "Usage: make TARGET [PYTHON=python3.12] [VENV=none] [TORCH=torch==2.13.0] [DION3_BUILD=auto] [ARGS=...]"
	@awk '/^## / { printf "\n%s\n", substr($$0, 4) } \
	      /^[a-z][a-z0-9-]*:.*## / { name = $$1; sub(/:.*/, "", name); sub(/.*## /, ""); printf "  %-12s %s\n", name, $$0 }' $(MAKEFILE_LIST)

# The environment. torch comes first and alone, so that nothing else can ask pip for another one;
# the package itself is linked in place and built by `ext`, which rebuilds only what changed.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("dion3 needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet $(TORCH) setuptools wheel ninja numpy
	@touch $@

$(VENV)/.installed-%: $(VENV)/.torch pyproject.toml
	DION3_BUILD=none $(PY) -m pip install --quiet --no-build-isolation --editable '.[$*]'
	@touch $@
