# Everything runs from a machine that has Python 3 and make: the first target that needs it fetches
# uv into .venv-tools, and uv makes .venv (newest JAX) and .venv-oldest from pyproject.toml.

PYTHON ?= python3
UV ?= .venv-tools/bin/uv
UV_VERSION := 0.13.9
WORKERS ?= auto
GPU_WORKERS ?= 4
ARGS ?=

# Tests get the processor even where a GPU is present; `make test-gpu` is for the card.
TEST := -m pytest -n $(WORKERS) --dist worksteal

# What differs by the kernel's code, not by JAX's: a few of each kind are enough on the oldest.
NEWEST_ONLY := beside_what or reaches_nothing or keep_their_order or what_is_masked or \
  (rise and float16) or ((test_gradients or test_values) and (bias or mask or soft_cap or dropout \
  or stages or window or heads_of or shuffled or past_the or wide_no or segments))

# Tests start many processes; where this is set, each would compile jax's sources again.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help setup train test test-newest test-oldest test-compile test-gpu lint format types compile-report clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile

setup: .venv/.stamp ## make .venv with everything pinned in pyproject.toml

train: .venv/.stamp ## train a small mixture-of-experts model (options: make train ARGS="--help")
	.venv/bin/python examples/train.py $(ARGS)

test: test-newest test-oldest test-compile ## all tests on the newest JAX, kernels and transforms on the oldest

test-newest: .venv/.stamp
	.venv/bin/python $(TEST) $(ARGS)

test-oldest: .venv-oldest/.stamp
	.venv-oldest/bin/python $(TEST) tests/test_dispatch.py tests/attention/test_mosaic.py \
	  tests/attention/test_transforms.py tests/grouped_matmul/test_transforms.py \
	  -k "not ($(NEWEST_ONLY))" $(ARGS)

test-compile: .venv-compile/.stamp ## the tests that compile for a GPU that is not there
	.venv-compile/bin/python $(TEST) tests/compile $(ARGS)

test-gpu: .venv/.stamp ## the tests that need a GPU, on this machine's
	XLA_PYTHON_CLIENT_PREALLOCATE=false .venv/bin/python -m pytest -m gpu -n $(GPU_WORKERS) --dist worksteal $(ARGS)

lint: .venv/.stamp ## ruff: rules and format
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: .venv/.stamp ## let ruff rewrite what it can
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

types: .venv/.stamp ## pyright
	.venv/bin/pyright

compile-report: .venv-compile/.stamp ## registers, spills and instructions of a kernel, with no GPU (CONTRIBUTING.md)
	.venv-compile/bin/python -m pallas_ops.compile_report $(ARGS)

clean: ## remove the environments and every cache
	rm -rf .venv .venv-oldest .venv-compile .venv-tools .hypothesis .pytest_cache .ruff_cache uv.lock
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A venv is only as good as its stamp: an interrupted sync is run again.
.venv/.stamp: pyproject.toml .python-version | $(filter .venv-tools/%,$(UV))
	env -u VIRTUAL_ENV UV_PROJECT_ENVIRONMENT=.venv $(UV) sync --quiet
	@touch $@

.venv-oldest/.stamp: pyproject.toml .python-version | $(filter .venv-tools/%,$(UV))
	env -u VIRTUAL_ENV UV_PROJECT_ENVIRONMENT=.venv-oldest $(UV) sync --quiet \
	  --no-default-groups --group test --group run --group jax-oldest
	@touch $@

.venv-compile/.stamp: pyproject.toml .python-version | $(filter .venv-tools/%,$(UV))
	env -u VIRTUAL_ENV UV_PROJECT_ENVIRONMENT=.venv-compile $(UV) sync --quiet \
	  --no-default-groups --group run --group test --group jax-newest --group compile
	@touch $@

.venv-tools/bin/uv:
	$(PYTHON) -m venv .venv-tools
	.venv-tools/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
