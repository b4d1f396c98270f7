# `make demo` and `make test` need nothing but Python 3.11+, git and make; each sets up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo example test test-browser format clean

demo: $(READY)
	$(BIN)/logra train --config recipes/tiny.yaml
	$(BIN)/logra report runs/tiny -o runs/tiny/report.html

example: $(READY)
	$(BIN)/python examples/optimizer_only.py

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

# Chromium and its driver come from the system's packages where they are missing.
test-browser: $(READY)
	(command -v chromium && command -v chromedriver) >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium chromium-driver)
	$(BIN)/python -m pytest browser

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
