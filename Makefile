# Needs Python 3.11 or newer, pip and make. Every target sets up .venv by itself when it is missing or stale.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: test lint types contract unit demo bench format clean

test: lint types contract unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contract: $(STAMP)
	$(BIN)/lint-imports

# Two lanes: see tests/conftest.py.
unit: $(STAMP)
	$(BIN)/pytest --numprocesses 2 --dist loadgroup

demo: $(STAMP)
	@$(BIN)/everstep demo

# About an hour, on an otherwise idle machine.
bench: $(STAMP)
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/failure_free.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/checkpoint_crash.py
	$(BIN)/python benchmarks/checkpoint_policy.py
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/logging_and_replay.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# The stamp is as new as the files that decide what is installed: a change to either makes it stale.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) with $(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,exact,lightning,transformers]'
	@touch $@
