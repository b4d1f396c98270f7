# `make demo` and `make test` need nothing but Python 3.11+, git and make; each sets up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo example test format clean

demo: $(READY)
	$(BIN)/logra train --config recipes/tiny.yaml

example: $(READY)
	$(BIN)/python examples/optimizer_only.py

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and by exact version, so that what follows finds its range satisfied.
$(READY): pyproject.toml constraints.txt src/logra/_native.c
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build src/*.egg-info src/logra/*.so
