# Everything runs in .venv, which the first target that needs it makes.
# `make help` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

BIN := $(VENV)/bin
# One stamp for each extra: reinstalled only when the metadata or the pins change.
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-integration check bench sample faults chaos clean

help:
	@echo "make demo    train a small network on handwritten digits (examples/train_digits.py)"
	@echo "make test    run the tests, but for:"
	@echo "make test-integration  the examples, torchrun, and each benchmark at its smallest size"
	@echo "make test-all  both, with every cell of tests/resume; hours"
	@echo "make check   ruff, ruff format --check, mypy and import-linter"
	@echo "make bench   compare with torch's DataLoader (benchmarks/throughput.py)"
	@echo "make sample  a sample of the faults that covers their kinds pairwise (3 minutes; CI runs it)"
	@echo "make faults  every fault at every point (tests/faults); hours, --help lists the options"
	@echo "make chaos   1,000 kills at random times (tests/faults/chaos.py)"
	@echo "make clean   remove .venv, caches and build outputs"
	@echo "ARGS=... goes to the program that a target runs: make test ARGS='-k slots -x'"

demo: $(STAMP)-examples
	@$(BIN)/python examples/train_digits.py $(ARGS)

test: $(STAMP)-test
	@$(BIN)/python -m pytest --numprocesses=3 --ignore=tests/integration $(ARGS)

test-integration: $(STAMP)-test
	@$(BIN)/python -m pytest --numprocesses=3 tests/integration $(ARGS)

test-all: $(STAMP)-test
	@SHMLOADER_TEST_ALL=1 $(BIN)/python -m pytest --numprocesses=3 $(ARGS)

check: $(STAMP)-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)-test
	@$(BIN)/python benchmarks/throughput.py $(ARGS)

sample: $(STAMP)-test
	@$(BIN)/python -m tests.faults --sample --template $(ARGS)

faults: $(STAMP)-test
	@$(BIN)/python -m tests.faults $(ARGS)

chaos: $(STAMP)-test
	@$(BIN)/python -m tests.faults.chaos $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	rm -f shmloader/memory/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "shmloader needs Python 3.11 or later; name one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(STAMP)-%: pyproject.toml setup.py constraints.txt shmloader/memory/_streaming.c $(VENV)/.created
	@echo "Installing shmloader[$*] into $(VENV) (the first time this takes minutes: torch is large)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[$*]'
	@touch $@
