# `make` lists the targets. The environment is made once; it is installed again only when pyproject.toml or
# constraints.txt changed (the stamp files know).
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help train test notebooks aot gpu-check gpu-wheels lint types contracts wheel clean

VENV ?= .venv
BIN := $(VENV)/bin
EXPERIMENT ?= quickstart
ARGS ?=
JOBS ?= 2
PYTEST_ARGS ?=
export PYTHON

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

train: $(VENV)/.installed ## train the quickstart model on this machine; ARGS="train.steps=600" changes it, EXPERIMENT=... another
	$(BIN)/megascale train $(EXPERIMENT) $(ARGS)

test: $(VENV)/.installed-dev ## run the tests; PYTEST_ARGS="-k lamb" selects, JOBS=1 runs them in one process
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --durations=10 $(PYTEST_ARGS)

notebooks: $(VENV)/.installed-dev ## run all notebooks, four minutes; they lie with their outputs in build/notebooks
	@mkdir -p build/notebooks
	$(BIN)/jupyter-execute --kernel_name=python3 --timeout=600 --output=../build/notebooks/{notebook_name}.ipynb notebooks/*.ipynb

aot: $(VENV)/.installed-aot ## install what compiles for absent GPUs: `megascale compile gpt-175b --target h100 --nodes 1536`

gpu-check: $(VENV)/.installed-gpu ## on an H100 or H200, 8 minutes: check the kernels, rank their tiles, measure whole steps
	$(BIN)/python benchmarks/gpu_check.py $(ARGS)

GPU_WHEELS := annotated-types jax-triton omegaconf pydantic pydantic_core typing-inspection
gpu-wheels: $(VENV)/.installed ## wheels in build/gpu-wheels for gpu-check on a machine that has jax, flax, optax and Triton, but no network
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
	    --constraint constraints.txt --dest build/gpu-wheels $(GPU_WHEELS)

lint: $(VENV)/.installed-dev ## ruff on Python, shellcheck on shell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck .ci/run launch/*.sh launch/*.sbatch

types: $(VENV)/.installed-dev ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

contracts: $(VENV)/.installed-dev ## who may import whom
	$(BIN)/lint-imports

wheel: $(VENV)/.installed ## build dist/megascale_jax-*.whl, configs inside
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean: ## remove the environment, builds and caches; runs/ stays
	rm -rf -- $(VENV) dist build .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find megascale_jax tests benchmarks -name __pycache__ -type d -prune -exec rm -rf -- {} + 2>/dev/null || true

$(VENV)/.installed: pyproject.toml constraints.txt
	@launch/install.sh $(VENV)

$(VENV)/.installed-aot: pyproject.toml constraints.txt
	@launch/install.sh $(VENV) aot
	@touch $(VENV)/.installed

$(VENV)/.installed-gpu: pyproject.toml constraints.txt
	@launch/install.sh $(VENV) gpu
	@touch $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	@launch/install.sh $(VENV) dev
	@touch $(VENV)/.installed
