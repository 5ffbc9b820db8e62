# `make train` and `make test` do all set-up in .venv by themselves; the second call starts at once.

# The run of `make train`; ARGS goes on to the command: make train ARGS='--set seed=2', make test ARGS='tests/unit -k loss'
RECIPE := recipes/gspo-tiny-moe-cpu.yaml
ARGS :=
# An interpreter other than the first Python 3.11 on PATH: make test PYTHON=/path/to/python3.11
PYTHON :=

BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs

.PHONY: help train test soak bench lint env

help:
	@echo "make train   train the tiny MoE on this machine's CPU; ARGS='--set seed=2' overrides recipe keys"
	@echo "make test    all tests but the long ones; ARGS='tests/unit -k loss' chooses"
	@echo "make soak    the long tests: whole training runs, injected faults"
	@echo "make bench   memory and time beside peers and limits"
	@echo "make lint    ruff, mypy, shellcheck, hadolint"

train: env
	$(BIN)/python -m gspo_megatron.launch --config $(RECIPE) $(ARGS)

# One test at a time: many start an SGLang server or gloo ranks, and two of those at once starve each other on 2 cores.
test: env
	$(PYTEST) -m "not soak" $(ARGS)

soak: env .venv/soak/.installed
	$(PYTEST) -m soak $(ARGS)

bench: env .venv/soak/.installed
	$(BIN)/python tools/bench/loss.py
	$(BIN)/python tools/bench/logprobs.py $(ARGS)
	$(BIN)/python tools/bench/convert.py
	$(BIN)/python tools/bench/push.py
	$(BIN)/python tools/bench/rollout.py
	$(BIN)/python tools/bench/async_step.py

lint: env
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/shellcheck .ci/run $(wildcard requirements/*.sh slurm/*.sh slurm/*.sbatch)
	$(if $(wildcard Dockerfile),$(BIN)/hadolint Dockerfile)

env: .venv/.project

.venv/.installed: requirements/cpu.txt requirements/gpu.txt
	@requirements/install.sh $(if $(PYTHON),"$(PYTHON)")

.venv/soak/.installed: requirements/soak.txt .venv/.installed
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --upgrade --target .venv/soak -r requirements/soak.txt
	@touch $@

.venv/.project: .venv/.installed pyproject.toml
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
