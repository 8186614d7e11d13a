# Every target does its own set-up; run any of them on a bare machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help run test lint install examples lock clean
.DEFAULT_GOAL := help

help:
	@echo "make run      set up, then the demo gateway on http://127.0.0.1:8080"
	@echo "make test     set up, then every test"
	@echo "make lint     ruff, mypy, import-linter"
	@echo "make install  only the set-up (.venv)"
	@echo "make examples envoy/examples from what pointsman render gives now"

install: $(STAMP)

# uv resolves and installs in seconds where pip takes minutes; it comes from the index like the rest.
$(STAMP): pyproject.toml constraints.txt Makefile
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit("Pointsman needs Python 3.11 or newer; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "installing dependencies into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[envoy,test,lint]'
	@touch $@

run: install
	@exec $(BIN)/pointsman up --demo

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Rendered, committed, and compared by a test: never edited by hand.
examples: install
	@mkdir -p envoy/examples
	$(BIN)/pointsman render tests/data/config/article.toml > envoy/examples/article.yaml
	$(BIN)/pointsman render extproc/demo/demo.toml > envoy/examples/demo.yaml

# New pins from pyproject.toml's ranges, for every supported Python.
lock: install
	$(BIN)/uv pip compile -q pyproject.toml --all-extras --universal --python-version 3.11 \
	  --no-emit-index-url --no-header --no-annotate -o constraints.txt
	@echo 'uv==$(shell $(BIN)/uv --version | cut -d" " -f2)' >> constraints.txt

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache
