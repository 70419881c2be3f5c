# Targets set themselves up; the second time takes seconds. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: help run test setup-run setup-dev lint types contracts unit ui real long walks oracle monkey bench locale schemas screens gpu clean

help:
	@echo "make run       set up, then open the wizard"
	@echo "make test      set up, then lint, types, import contracts and every test"
	@echo "make long      the real runs that take minutes each   (minutes)"
	@echo "make walks     200 Pilot walks of the wizard          (minutes)"
	@echo "make oracle    every config against every release     (minutes)"
	@echo "make monkey    random keys against the TUI            (minutes)"
	@echo "make bench     the budgets, measured"
	@echo "make gpu       what must hold on a machine with GPUs"
	@echo "make locale    extract and compile the translations"
	@echo "make schemas   regenerate the schema files"

setup-run:
	@$(PYTHON) .ci/bootstrap.py run

setup-dev:
	@$(PYTHON) .ci/bootstrap.py dev

run: setup-run
	@$(BIN)/python .ci/bootstrap.py exec

test: setup-dev lint types contracts unit ui real

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

contracts:
	$(BIN)/lint-imports

unit:
	$(PYTEST) tests/unit tests/plain -q -n 3 -m "not slow"

ui:
	$(PYTEST) tests/tui tests/pty -q -n 2 -m "not slow"

real:
	$(PYTEST) tests/real -q -m "not slow"

long: setup-dev
	$(PYTEST) tests/real -q -m slow -k "not oracle"

walks: setup-dev
	$(PYTEST) tests/tui -q -n 2 -m slow

oracle: setup-dev
	$(PYTEST) tests/real -q -m slow -k oracle

monkey: setup-dev
	$(PYTEST) tests/pty -q -m slow -k monkey

bench: setup-dev
	$(BIN)/python tests/bench/bench.py
	$(BIN)/python tests/bench/supervise.py

locale: setup-dev
	$(BIN)/python .ci/translate.py

schemas: setup-dev
	$(BIN)/python schemas/generate.py --check

gpu: setup-dev
	$(BIN)/python tests/tools/gpu_acceptance.py

screens: setup-dev
	$(BIN)/python tests/tools/screens.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
