# `make train` and `make test` do all set-up in .venv by themselves; the second call starts at once.

RECIPE ?= recipes/gspo-tiny-moe-cpu.yaml
ARGS   ?=
# An interpreter of your choice: make test PYTHON=/path/to/python3.11
PYTHON ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: train test lint soak env help

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
pins = grep -E '^($(1))==' requirements/cpu.txt

help:
	@echo "make train   train the tiny MoE on this machine's CPU; ARGS='--set seed=2' overrides recipe keys"
	@echo "make test    all tests but the soak tests"
	@echo "make lint    ruff, mypy, shellcheck, hadolint"
	@echo "make soak    the long tests: whole training runs"

train: env
	$(BIN)/python -m gspo_megatron.launch --config $(RECIPE) $(ARGS)

# One test at a time: many start SGLang servers or gloo ranks, and two such tests at once starve each other on 2 cores.
test: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -m "not soak" $(ARGS)

soak: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -m soak $(ARGS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/shellcheck .ci/run $(wildcard slurm/*.sbatch slurm/*.sh)
	$(if $(wildcard Dockerfile),$(BIN)/hadolint Dockerfile)

env: $(VENV)/.installed-project

# The marker is written last. Without it, or with pins newer than it, the environment is made anew: an interrupted
# installation may have left half a package, which pip would take for a whole one.
$(VENV)/.installed: requirements/cpu.txt requirements/gpu.txt
	@python=; for candidate in $(if $(PYTHON),"$(PYTHON)",python3.11 python3 python); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: no Python 3.11 found (tried: $(or $(PYTHON),python3.11 python3 python)); install it (Debian, Ubuntu:" \
	    "python3.11 python3.11-venv python3.11-dev) or say where it is: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	header=$$("$$python" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")'); \
	for need in "$$header" "$$(command -v c++ || echo c++)"; do \
	  if [ ! -e "$$need" ]; then echo "error: $$need not found: some packages are compiled during set-up; install g++ and" \
	    "Python's headers (Debian, Ubuntu: g++ python3.11-dev)" >&2; exit 1; fi; \
	done; \
	echo "Setting up $(VENV) with $$("$$python" --version): about 2 GiB, some minutes, once"; \
	"$$python" -m venv --clear $(VENV)
	@echo "[1/3] build tools"
	@$(PIP) install --quiet --no-deps $$($(call pins,pip|setuptools|packaging|pybind11))
	@echo "[2/3] $$(grep -c == requirements/cpu.txt) packages"
	@$(PIP) install --no-deps --no-build-isolation --ignore-requires-python -r requirements/cpu.txt
	@echo "[3/3] torch's own dependencies, if any are missing"
	@grep -E '^(cuda|nvidia)-' requirements/gpu.txt > $(VENV)/cuda-pins.txt
	@$(PIP) install -c $(VENV)/cuda-pins.txt $$($(call pins,torch))
	@touch $@

$(VENV)/.installed-project: $(VENV)/.installed pyproject.toml
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
