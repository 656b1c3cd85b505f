# Everything runs in .venv, which the first target that needs it creates.
# `make help` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

# The loaders to compare with, in an environment of their own; ROWS selects workloads.
PEERS         ?= .venv-peers
PEER_PACKAGES := torchdata spdl SeqTools grain transformers datasets webdataset \
	brotli catalogue cramjam python-snappy xxhash zstd
# Pins older releases of what the others need, and builds of torchvision for another torch.
PEERS_PINNING := mosaicml-streaming
ROWS          ?=

# The frameworks that train with loaders, in an environment of their own. The second list pins
# older releases of what the first needs, so its packages are installed without their dependencies.
FRAMEWORKS          ?= .venv-frameworks
FRAMEWORKS_PINNING  := mosaicml-streaming

# Dask and Ray, in an environment of their own.
CLUSTER ?= .venv-cluster

# How long `make soak` runs.
MINUTES ?= 20

BIN := $(VENV)/bin
# One stamp for each extra: reinstalled only when the metadata or the pins change.
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-full test-all test-integration test-frameworks test-cluster streams-matrix check docs bench bench-peers bench-host bench-cluster gpu sample faults chaos environments soak clean

help:
	@echo "make demo    train a small network on handwritten digits (examples/train_digits.py)"
	@echo "make test    run the quick tests, some of each kind (4 minutes)"
	@echo "make test-full  run the slow tests, except for those of integration (20 minutes)"
	@echo "make test-integration  run the examples, torchrun, and each benchmark at its smallest size"
	@echo "make test-frameworks  test under Lightning, accelerate, Hugging Face and others (downloads 2 GB; 15 minutes)"
	@echo "make test-cluster  test executor= on clusters of Dask and Ray on this machine (10 minutes)"
	@echo "make test-all  run test, test-full and test-integration, with every cell of tests/resume (hours)"
	@echo "make streams-matrix  resume streams of shards on all numbers of workers and ranks (15 minutes)"
	@echo "make check   run ruff, ruff format --check, mypy and import-linter"
	@echo "make docs    build the documentation into build/docs (installs Sphinx the first time)"
	@echo "make bench   compare with torch's DataLoader (benchmarks/throughput.py)"
	@echo "make bench-peers  compare with other loaders; ROWS=AB selects workloads (benchmarks/peers.py)"
	@echo "make bench-host  compare one pool of workers for a host's ranks with pools of their own"
	@echo "make bench-cluster  compare batches made on Dask and Ray with local ones (benchmarks/cluster.py)"
	@echo "make gpu     probe, test and measure on this machine's GPU, with PYTHON as it is (25 minutes)"
	@echo "make sample  inject a sample of the faults that covers their kinds pairwise (3 minutes, in CI)"
	@echo "make faults  inject every fault at every point (tests/faults; hours; ARGS=--help)"
	@echo "make chaos   kill 1,000 times at random times (tests/faults/chaos.py)"
	@echo "make chaos-host  kill or stop 300 times among ranks that share workers or a dataset (tests/faults/host.py)"
	@echo "make soak    run random mixes in one process for 20 minutes, which must not grow; MINUTES=n"
	@echo "make environments  run under limits, system call filters, in a container (tests/faults/environments.py)"
	@echo "make clean   remove .venv, .venv-peers, .venv-frameworks, .venv-cluster, caches and build outputs"
	@echo "ARGS=... is passed to the program that a target runs: make test ARGS='-k slots -x'"

demo: $(STAMP)-examples
	@$(BIN)/python examples/train_digits.py $(ARGS)

test: $(STAMP)-test
	@$(BIN)/python -m pytest --numprocesses=4 --dist=worksteal --ignore=tests/integration -m 'not slow' \
		--durations=15 $(ARGS)

test-full: $(STAMP)-test
	@$(BIN)/python -m pytest --numprocesses=4 --dist=worksteal --ignore=tests/integration -m slow \
		--durations=15 $(ARGS)

test-integration: $(STAMP)-test
	@$(BIN)/python -m pytest --numprocesses=4 tests/integration \
		--override-ini=faulthandler_timeout=600 $(ARGS)

test-frameworks: $(FRAMEWORKS)/.installed
	@SHMLOADER_TEST_FRAMEWORKS=1 $(FRAMEWORKS)/bin/python -m pytest tests/frameworks \
		--override-ini=faulthandler_timeout=0 --durations=15 $(ARGS)

test-cluster: $(CLUSTER)/.installed
	@SHMLOADER_TEST_CLUSTER=1 $(CLUSTER)/bin/python -m pytest tests/cluster \
		--override-ini=faulthandler_timeout=0 --durations=15 $(ARGS)

test-all: $(STAMP)-test
	@SHMLOADER_TEST_ALL=1 $(BIN)/python -m pytest --numprocesses=4 --override-ini=faulthandler_timeout=3600 $(ARGS)

streams-matrix: $(STAMP)-test
	@SHMLOADER_TEST_ALL=1 $(BIN)/python -m pytest --numprocesses=4 tests/resume/test_streams_matrix.py \
		--override-ini=faulthandler_timeout=600 $(ARGS)

check: $(STAMP)-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)-docs
	@$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet \
		-d build/doctrees docs build/docs $(ARGS)
	@echo "build/docs/index.html"

bench: $(STAMP)-test
	@$(BIN)/python benchmarks/throughput.py $(ARGS)

bench-peers: $(PEERS)/.installed
	@$(PEERS)/bin/python benchmarks/peers.py $(if $(ROWS),--rows=$(ROWS)) $(ARGS)
	@$(PEERS)/bin/python benchmarks/chart.py

bench-host: $(STAMP)-test
	@$(BIN)/python benchmarks/host_workers.py $(ARGS)

bench-cluster: $(CLUSTER)/.installed
	@$(CLUSTER)/bin/python benchmarks/cluster.py $(ARGS)

# For machines with a GPU and no network: installs nothing; PYTHON must have the packages.
# Without setuptools or a C compiler, torch copies large batches instead of our C function.
gpu:
	@$(PYTHON) -c 'import torch, numpy, cloudpickle, psutil, pytest, hypothesis' 2>/dev/null \
		|| { echo "make gpu needs a Python with torch, numpy, cloudpickle, psutil, pytest and hypothesis;" \
			"name one: make gpu PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) setup.py --quiet build_ext --inplace >/dev/null 2>&1 || true
	@PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) benchmarks/gpu.py $(ARGS)

sample: $(STAMP)-test
	@$(BIN)/python -m tests.faults --sample --template $(ARGS)

faults: $(STAMP)-test
	@$(BIN)/python -m tests.faults $(ARGS)

chaos: $(STAMP)-test
	@$(BIN)/python -m tests.faults.chaos $(ARGS)

chaos-host: $(STAMP)-test
	@$(BIN)/python -m tests.faults.host $(ARGS)

soak: $(STAMP)-test
	@$(BIN)/python -m tests.faults.soak --minutes $(MINUTES) $(ARGS)

environments: $(STAMP)-test
	@$(BIN)/python -m tests.faults.environments $(ARGS)

clean:
	rm -rf $(VENV) $(PEERS) $(FRAMEWORKS) $(CLUSTER) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	rm -f shmloader/memory/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created $(PEERS)/.created $(FRAMEWORKS)/.created $(CLUSTER)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "shmloader needs Python 3.11 or later; name one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Making $(@D) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(@D)
	@touch $@

$(STAMP)-%: pyproject.toml setup.py constraints.txt shmloader/memory/_streaming.c $(VENV)/.created
	@echo "Installing shmloader[$*] into $(VENV) (the first time this takes minutes: torch is large)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[$*]'
	@touch $@

# A package that cannot be installed is missing in the results, which say what pip said.
$(PEERS)/.installed: pyproject.toml setup.py constraints.txt shmloader/memory/_streaming.c $(PEERS)/.created
	@echo "Installing shmloader and its peers into $(PEERS) (the first time this takes minutes)"
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[examples,plots]'
	@for package in $(PEER_PACKAGES); do \
		$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
			--constraint constraints.txt $$package > $(PEERS)/$$package.log 2>&1 \
		|| { echo "$$package cannot be installed:"; tail -1 $(PEERS)/$$package.log; }; \
	done
	@for package in $(PEERS_PINNING); do \
		$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
			--constraint constraints.txt --no-deps $$package > $(PEERS)/$$package.log 2>&1 \
		|| { echo "$$package cannot be installed:"; tail -1 $(PEERS)/$$package.log; }; \
	done
	@touch $@

# torch first, at its pinned version, so that no framework chooses another one.
$(FRAMEWORKS)/.installed: pyproject.toml setup.py constraints.txt shmloader/memory/_streaming.c $(FRAMEWORKS)/.created
	@echo "Installing shmloader and the frameworks into $(FRAMEWORKS) (minutes, and gigabytes)"
	@$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt torch
	@$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[frameworks]'
	@$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-deps $(FRAMEWORKS_PINNING)
	@touch $@

$(CLUSTER)/.installed: pyproject.toml setup.py constraints.txt shmloader/memory/_streaming.c $(CLUSTER)/.created
	@echo "Installing shmloader, Dask and Ray into $(CLUSTER) (minutes)"
	@$(CLUSTER)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[cluster]'
	@touch $@
