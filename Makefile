# Everything runs in .venv, which the first target that needs it creates. `make` alone lists the targets.
SHELL := /bin/sh
.DEFAULT_GOAL := help

PORT ?= 8000
MODEL ?= demo:k3-tiny
COVERAGE_FLOOR ?= 91
PYTEST_ARGS ?=

PY := .venv/bin/python
# The mark's name says for which path and which pins: a moved checkout or changed pins install again, a `touch` does not.
INSTALLED := .venv/.installed-$(shell { pwd; cat pyproject.toml constraints.txt; } | cksum | cut -d' ' -f1)

.PHONY: help install run stop test lint format bench gpu-test gpu-bench readme clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

install: $(INSTALLED)  ## create .venv and install everything into it

# Console scripts hold absolute paths, so nothing below calls one: `python -m` works in any checkout.
$(INSTALLED):
	@$(PY) -m pip --version >/dev/null 2>&1 || { python=$$(scripts/find_python.sh) && "$$python" -m venv .venv; }
	@echo "Installing into .venv (the first time takes a few minutes: torch is large)"
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]' || { \
	    echo "make: pip could not install the packages; the package index must be reachable the first time" >&2; exit 1; }
	@touch $(INSTALLED)

run: $(INSTALLED)  ## start the service on the demo model, encode a photo and a clip (PORT=8000, MODEL=demo:k3-tiny)
	@$(PY) scripts/service.py start --port $(PORT) --model "$(MODEL)"
	@$(PY) scripts/show_sample.py --url http://127.0.0.1:$(PORT)
	@echo "The service goes on running; to stop it: make stop"

stop:  ## stop what `make run` started
	@if [ -x $(PY) ]; then $(PY) scripts/service.py stop; fi

test: $(INSTALLED)  ## run the tests, with a floor under the coverage
	$(PY) -m pytest --cov --cov-report=term:skip-covered --cov-fail-under=$(COVERAGE_FLOOR) $(PYTEST_ARGS)

lint: $(INSTALLED)  ## check style and types
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

format: $(INSTALLED)  ## rewrite the files in the house style
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

readme: $(INSTALLED)  ## rewrite the generated tables in README.md and docs/metrics.md
	$(PY) -m scripts.readme_tables
	$(PY) -m scripts.metrics_table

bench: $(INSTALLED)  ## measure on the CPU, write benchmarks/results/*.json and the README
	$(PY) -m benchmarks.tower_cpu
	$(PY) -m benchmarks.load_memory
	$(PY) -m scripts.readme_tables

gpu-test: $(INSTALLED)  ## run the tests that need a CUDA device
	@scripts/check_gpu.sh
	$(PY) -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

gpu-bench: $(INSTALLED)  ## measure on the GPU, write benchmarks/results/*.json and the README
	@scripts/check_gpu.sh
	$(PY) -m benchmarks.attention
	$(PY) -m benchmarks.tower
	$(PY) -m scripts.readme_tables

clean: stop  ## remove .venv, logs and caches
	rm -rf .venv .run build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
