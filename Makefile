# Everything runs in .venv, which the first target that needs it creates. `make` alone lists the targets.
SHELL := /bin/sh
.DEFAULT_GOAL := help

PORT ?= 8000
MODEL ?= demo:k3-tiny
COVERAGE_FLOOR ?= 91
PYTEST_ARGS ?=
BENCH_ARGS ?=
FUZZ_ARGS ?=

PY := .venv/bin/python
# The mark's name says for which path and which pins: a moved checkout or changed pins install again, a `touch` does not.
INSTALLED := .venv/.installed-$(shell { pwd; cat pyproject.toml constraints.txt; } | cksum | cut -d' ' -f1)

.PHONY: help install run stop test lint format bench load fuzz audit soak gpu-test gpu-bench readme clean

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

# OpenMP's threads spin while they wait, which takes the cores from the processes that the tests start.
test: $(INSTALLED)  ## run the tests, with a floor under the coverage
	OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest --cov --cov-report=term:skip-covered --cov-fail-under=$(COVERAGE_FLOOR) $(PYTEST_ARGS)

lint: $(INSTALLED)  ## check style, types and unsafe calls
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -m bandit -q -c pyproject.toml -r app encoder

format: $(INSTALLED)  ## rewrite the files in the house style
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

readme: $(INSTALLED)  ## rewrite the generated tables and the plot in README.md and docs
	$(PY) -m scripts.tower_plot
	$(PY) -m scripts.readme_tables
	$(PY) -m scripts.performance_tables
	$(PY) -m scripts.metrics_table

bench: $(INSTALLED)  ## measure on the CPU, write benchmarks/results/*.json and the README
	$(PY) -m benchmarks.tower_cpu
	$(PY) -m benchmarks.load_memory
	$(PY) -m scripts.readme_tables

load: $(INSTALLED)  ## offer the service three times what it can do, for three minutes (BENCH_ARGS=--minutes 10)
	$(PY) -m benchmarks.load $(BENCH_ARGS)

fuzz: $(INSTALLED)  ## ten minutes of broken media and requests (FUZZ_ARGS=--minutes 60), counted in benchmarks/results
	$(PY) -m tests.fuzz $(FUZZ_ARGS)

audit: $(INSTALLED)  ## unsafe calls, and published advisories against the pinned packages (needs the network)
	$(PY) -m bandit -q -c pyproject.toml -r app encoder
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[audit]'
	$(PY) -m pip_audit --strict --disable-pip --no-deps --progress-spinner off -r constraints.txt

soak: $(INSTALLED)  ## twenty minutes of mixed traffic with a fault a minute (BENCH_ARGS=--minutes 60)
	$(PY) -m benchmarks.soak $(BENCH_ARGS)

gpu-test: $(INSTALLED)  ## run the tests that need a CUDA device
	@scripts/check_gpu.sh
	GPU_TEST_RECORD=benchmarks/results/gpu_tests.json $(PY) -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

gpu-bench: $(INSTALLED)  ## measure on the GPU, write benchmarks/results/*.json and the README
	@scripts/check_gpu.sh
	$(PY) -m benchmarks.attention
	$(PY) -m benchmarks.tower
	$(PY) -m benchmarks.fp8
	$(PY) -m benchmarks.preprocess
	$(PY) -m benchmarks.decode
	$(PY) -m benchmarks.service
	$(PY) -m benchmarks.startup
	$(PY) -m scripts.tower_plot
	$(PY) -m scripts.readme_tables

clean: stop  ## remove .venv, logs and caches
	rm -rf .venv .run build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
