# Two commands matter to a newcomer: `make demo` and `make test`. Each does all its own set-up.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Python keeps what it has compiled, whatever the environment says: the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

# Everything that the build and the tests need of the system; the one list.
SYSTEM_PACKAGES := python3-venv python3-dev g++ git iproute2 chromium libucx-dev postgresql libfuse3-dev fuse3 rsync sqlite3 openssh-server

# What the slow tests need beside them: a Slurm cluster on machines of namespaces, the service manager of a user, a
# simulator of networks to compare with, promtool for the alert rules.
SLOW_PACKAGES := slurmctld slurmd slurm-client munge systemd python3-simgrid prometheus

CPP_SOURCES := $(shell find cpp -name '*.cpp' -o -name '*.hpp')

# The packages are listed because an editable install only knows those that were there when it was made.
NATIVE_SOURCES := CMakeLists.txt cpp/CMakeLists.txt $(CPP_SOURCES) $(shell find src -name __init__.py)

.PHONY: help setup system demo soak test test-slow test-campaigns test-gpu native-tests native-build tidy sim bench bench-collectives bench-training bench-fs bench-kvstore bench-cluster bench-checkpoint bench-netsim bench-operators lint docs format native clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

system:
	@scripts/system-packages $(SYSTEM_PACKAGES)

# Without compiling all modules of all packages, of which few are ever imported.
$(VENV)/.packages: constraints.txt pyproject.toml scripts/check-python
	@scripts/check-python $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check --no-compile -c constraints.txt $$(sed -e '/^#/d' -e 's/==.*//' constraints.txt)
	@touch $@

$(VENV)/.native: $(VENV)/.packages $(NATIVE_SOURCES)
	CMAKE_BUILD_PARALLEL_LEVEL=$(WORKERS) flock $(VENV) $(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

setup: system $(VENV)/.native  ## Virtual environment, pinned packages, native extension

native: $(VENV)/.native  ## Rebuild the extension after a change in cpp/

demo: setup  ## Platform, file system and training, through two deaths and an interruption; ends with a report
	$(BIN)/ff demo --whole

MINUTES ?= 20
soak: setup  ## 20 minutes of kills, pauses, cut links and full disks under tasks and writers (MINUTES=3 OPTIONS="--seed 7")
	$(BIN)/ff soak --minutes $(MINUTES) $(OPTIONS)

lint: setup  ## Format check, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@echo clang-format --dry-run --Werror, of the C++ sources
	@$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup  ## The API reference, from docstrings, into build/docs
	$(BIN)/python scripts/api-reference build/docs

format: setup  ## Apply the formatters and the safe lint fixes
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP_SOURCES)
	$(BIN)/ruff check --fix .

# Tests that start processes mostly wait for them: beside tests that compute, and more of them than processors.
PYTEST := $(BIN)/pytest -q -n $(WORKERS) --durations 15 --durations-min 8
MIXED := $(BIN)/pytest -q --processor-time --durations 15 --durations-min 8 -n $$(($(WORKERS) + 2)) --dist worksteal

test: lint  ## Lint and the test suite, under 10 minutes on 2 cores
	$(MIXED) -m "not slow and not gpu" --timeout 400

# The slow tests wait even more: a worker uses a quarter of a processor. So there are more workers, and what only computes
# runs beside them, at a lower priority. The native tests themselves come after them: some of their limits are those of a
# machine with nothing else to do.
WAITING := $(BIN)/pytest -q --processor-time --durations 40 --durations-min 8 -n $$(($(WORKERS) + 4)) --dist worksteal

# TURNS=4: a quarter of the slow test files, another with each commit, and those that changed lately; one of the sanitizers.
TURNS ?= 1
# BEFORE=TIME: slow tests that have not begun at this Unix time are left out, but those that changed lately.
BEFORE ?=

test-slow: setup  ## Sanitizers, wider simulations, clusters, many kills (TURNS=4: the quarter that this commit runs)
	@scripts/system-packages $(SLOW_PACKAGES)
	@mkdir -p build
	make WORKERS=1 TURNS=$(TURNS) native-build tidy >build/beside.log 2>&1 & beside=$$!; \
	trap 'kill $$beside 2>/dev/null || true' EXIT; \
	$(WAITING) --slow-files -m "slow and not gpu and (rotates or not (campaign and processes))" --rotate-campaigns 50 --turns $(TURNS) $(if $(BEFORE),--begin-before $(BEFORE)) --timeout 900; \
	trap - EXIT; wait $$beside || { cat build/beside.log; exit 1; }
	@grep clang-tidy: build/beside.log
	$(MAKE) native-tests TURNS=$(TURNS)

native-tests: setup
	TURNS=$(TURNS) scripts/native-tests

native-build: setup
	TURNS=$(TURNS) JOBS=$(WORKERS) nice -n 10 scripts/native-tests build

# At a lower priority: it takes the processors while the tests of the sanitizers wait.
tidy: setup
	WORKERS=$(WORKERS) nice -n 10 scripts/tidy

test-campaigns: setup  ## What takes many minutes more: wide simulations, every small table beside an integer programming solver
	FIREFLYER_TEST_EXAMPLES=new $(PYTEST) -m "not slow and not processes and not gpu" tests/property
	$(PYTEST) --dist worksteal -m "campaign and not processes and not gpu"
	$(BIN)/pytest -q -m "campaign and processes and not gpu"

test-gpu: setup  ## Tensors on a CUDA device; needs one, and a torch that was built for it
	$(BIN)/pytest -q -m gpu tests

SEEDS ?= 2000
sim: setup  ## Seeded worlds of the chunk store (SEEDS=20000; says which seed fails, and how to run it again)
	for world in replicas clients whole managers; do \
	  $(BIN)/python -m tests.support.fs.chain_sim.campaign --world $$world --seeds $(SEEDS) --workers $(WORKERS) || exit 1; done

bench: setup  ## Every benchmark briefly, beside its peers, into build/bench
	$(BIN)/python -m bench

bench-collectives: setup  ## The collectives in full (OPTIONS="--only 1x4 --rounds 3" for a part)
	$(BIN)/python -m bench collectives --full $(OPTIONS)

bench-training: setup  ## FSDP, dispatch of tokens, codecs, the pipeline's executor, beside gloo and PyTorch's runtime
	$(BIN)/python -m bench training --full $(OPTIONS)

bench-kvstore: setup  ## Transactions per second of the key-value engines
	$(BIN)/python -m bench kvstore --full $(OPTIONS)

bench-cluster: setup  ## The scheduler: passes, events, a month of tasks; suspension
	$(BIN)/python -m bench cluster --full $(OPTIONS)

bench-checkpoint: setup  ## Checkpoints of one rank beside torch, safetensors and a plain program with O_DIRECT; on 3FS beside its chunk client
	$(BIN)/python -m bench checkpoint --full $(OPTIONS)

bench-netsim: setup  ## The flow simulator: 10,000 GPUs, and random flows beside SimGrid
	@scripts/system-packages python3-simgrid
	$(BIN)/python -m bench netsim --full $(OPTIONS)

bench-operators: setup  ## Health checks, reports of failures over 10 million jobs, and 90 days of a fleet with lemon nodes
	$(BIN)/python -m bench operators --full $(OPTIONS)

bench-fs: setup  ## Reads, writes and delays of the chunk store, beside sockets and disk
	$(BIN)/python -m bench fs --full $(OPTIONS)

clean:  ## Remove the virtual environment and everything built
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
