# `make demo` and `make test` install what they need by themselves; a second run installs nothing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TRAIN  := $(VENV)/.installed-train
DEV    := $(VENV)/.installed-dev

ENGINES ?= .venv-vllm
VLLM    := $(ENGINES)/.installed
EXTRAS  := $(VENV)/.installed-extras

SEED    ?= 0
RUN_DIR ?= runs/demo_moe/seed$(SEED)
CODE    := src tests benchmarks
UNITS   ?= advantages books codec column_io loss packing router_replay

.PHONY: help setup demo docs test test-slow test-engines test-extras mutants check format bench clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(DEV)  ## create .venv with everything, in pinned versions

$(TRAIN): pyproject.toml constraints.txt src/headrace/distributed/_ragged.c
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[train,dashboard]'
	@touch $(TRAIN)

# torchao in a folder of its own: transformers imports it wherever it is installed, which takes every process seconds.
$(DEV): $(TRAIN)
	$(PIP) --editable '.[train,ray,mooncake,megatron,dev]'
	$(PIP) --no-deps --upgrade --target $(VENV)/torchao torchao==0.18.0
	@touch $(DEV)

# Without dependencies: the list is whole, and those of vLLM would bring builds for CUDA beside a torch for the CPU.
$(VLLM): constraints-vllm.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt
	@touch $(VLLM)

demo: $(TRAIN)  ## train a small MoE model with GRPO (SEED=0 RUN_DIR=runs/demo_moe/seed0)
	$(BIN)/headrace train demo_moe seed=$(SEED) run_dir=$(RUN_DIR) overwrite=true

# In the order of tests/suite_order.py.
test: $(DEV)  ## the test suite (no GPU, under 15 minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(DEV)  ## the tests marked slow
	$(BIN)/python -m pytest -m slow

# In place in that environment, then by processes that have it, from a trainer that has the other one.
test-engines: $(DEV) $(VLLM)  ## the contract of generators on vLLM's CPU build, in an environment of its own (.venv-vllm)
	OMP_NUM_THREADS=1 HEADRACE_GENERATORS=vllm VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=src \
	  $(ENGINES)/bin/python -m pytest -p no:cacheprovider -W ignore \
	  tests/contract/test_generators.py tests/contract/test_vllm_requests.py tests/contract/test_vllm_sleep.py
	for way in beside apart ranks; do \
	  OMP_NUM_THREADS=1 HEADRACE_GENERATORS=vllm@$$way HEADRACE_ENGINE_PYTHON=$(abspath $(ENGINES))/bin/python \
	  $(BIN)/python -m pytest tests/contract/test_generators.py || exit 1; done

# Without dependencies: the lists are whole. In folders that only the tests of these packages put on the path.
$(EXTRAS): $(DEV) constraints-verifiers.txt constraints-trackio.txt
	for name in verifiers trackio; do \
	  $(PIP) --no-deps --upgrade --target $(VENV)/$$name -r constraints-$$name.txt || exit 1; done
	@touch $(EXTRAS)

test-extras: $(EXTRAS)  ## environments of the package verifiers, and Trackio
	$(BIN)/python -m pytest -m slow tests/unit/test_verifiers.py tests/unit/test_trackio.py

# Strict: a link or a name that leads nowhere ends it. Nothing is fetched.
docs: $(DEV)  ## build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

mutants: $(DEV)  ## change the code at 100 random places per unit (UNITS=...): do tests notice?
	for unit in $(UNITS); do $(BIN)/python tests/mutation.py $$unit --floor 0.85 || exit 1; done

check: $(DEV)  ## lint (Dockerfiles too), format, types, layers
	$(BIN)/hadolint --failure-threshold warning docker/*.Dockerfile
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
	rm -rf $(VENV) $(ENGINES) .pytest_cache .mypy_cache .ruff_cache .hypothesis
