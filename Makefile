# Everything runs in a virtual environment inside the checkout; nothing else on the machine is touched.
#   make demo       a small real model answers a prompt
#   make test       the default tests
#   make PYTHON=python3.12 test    with another interpreter

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
INSTALLED := pyproject.toml hatch_build.py $(shell find native -name '*.py' -o -name '*.h' -o -name '*.cc')

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# pyright would otherwise ask a registry for its newest version on every run
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help demo dev test test-all fuzz lint format clean

help:
	@echo "make demo      run a small real model on a prompt"
	@echo "make test      run the default tests"
	@echo "make test-all  run the slow tests too"
	@echo "make fuzz      run random shapes through the native ops under sanitizers"
	@echo "make lint      check style, types and import walls"
	@echo "make format    put the code into the house style"
	@echo "make dev       only make the environment, with the development tools"
	@echo "make clean     remove the environment and all caches"

demo: $(RUN_STAMP)
	$(BIN)/noria run smollm2-135m-instruct -p "What is a water wheel, and what is it used for?" --max-tokens 64

dev: $(DEV_STAMP)

test: $(DEV_STAMP)
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

test-all: $(DEV_STAMP)
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile -m "not oracle"

# Not in the environment: it needs a C++ compiler with AddressSanitizer and UBSan, and no Python package.
FUZZ_ROUNDS ?= 2000
fuzz:
	$(PYTHON) native/build.py --fuzz build/fuzz_native
	build/fuzz_native $(FUZZ_ROUNDS)

# All checks run, so that one look shows everything there is to mend.
lint: $(DEV_STAMP)
	@status=0; \
	step() { echo "+ $$*"; "$$@" || status=1; }; \
	step $(BIN)/ruff check .; \
	step $(BIN)/ruff format --check .; \
	step $(BIN)/pyright --pythonpath $(BIN)/python; \
	step $(BIN)/lint-imports; \
	exit $$status

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build src/noria/ops/_native .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed; noria needs Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "noria needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu install the package python3-venv" >&2; \
	  exit 1; }

$(RUN_STAMP): $(INSTALLED) | $(BIN)/python
	@echo "installing noria into $(VENV) (a minute or two the first time)"
	@$(PIP) install --editable .
	@touch $@

# The development environment can run the demo as well.
$(DEV_STAMP): $(INSTALLED) | $(BIN)/python
	@echo "installing noria and its development tools into $(VENV) (a minute or two the first time)"
	@$(PIP) install --editable ".[dev]"
	@touch $(RUN_STAMP) $@
