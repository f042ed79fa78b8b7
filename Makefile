# Every target sets up its own virtual environment; nothing but Python 3.11+ and make is needed.

PYTHON ?= python3
DEMO ?=
WORKERS ?= 3
OTHER_POSTGRES ?= 14 15 17
FAULTS ?= 100
FAULTS_IN_CLUSTER ?= 25
FAULTS_WITH_SPARK ?= 25
FUZZ_EXAMPLES ?= 20000
FUZZ_SECONDS ?= 60

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
# All platforms and Pythons in one file; no line names the index it was made from.
LOCK := $(BIN)/uv --no-config --quiet pip compile --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-annotate --no-header
CAMPAIGN := $(BIN)/python -m tests.fault.campaign

SBOM := PYTHONWARNINGS=ignore $(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible

.DEFAULT_GOAL := help
.PHONY: help demo test test-alone test-long check audit bench test-more more prove fuzz lock sbom licences clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.demo  ## real servers, a live shop, the bridge, a mirror and Spark; Ctrl-C ends it
	$(BIN)/bridge demo $(DEMO)

# Tests wait more than they compute, so three workers fill two cores. Files with long tests come
# first: the last ones to run are short, and no worker is left alone with a long file.
test: $(VENV)/.dev  ## all tests, on real servers
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not more and not alone" \
		tests/fault tests/spark tests/integration tests/property tests/unit

test-alone: $(VENV)/.dev  ## tests that want the machine for themselves, one after the other
	$(PYTEST) -m "alone and not more" tests

test-long: $(VENV)/.dev  ## the tests that kill and cut in loops, twenty rounds instead of three, a million rows
	TAILRACE_LONG=1 $(PYTEST) -m "not more" --timeout 3600 tests/fault tests/integration/test_mirror_faults.py \
		tests/integration/test_snapshot_handoff.py

check: $(VENV)/.dev  ## format, lint, types, import rules, known vulnerabilities, and the built wheel in an empty environment
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports
	$(BIN)/python -m tests.dependencies audit
	rm -rf build/check && mkdir -p build/check
	$(BIN)/python -m build --outdir build/check .
	$(BIN)/python -m venv build/check/venv
	build/check/venv/bin/python -m pip install --quiet --disable-pip-version-check build/check/*.whl
	cd build/check && for command in bridge cdc spark-consumer; do \
		venv/bin/$$command --help > $$command.txt && venv/bin/$$command --version || exit 1; \
	done

audit: $(VENV)/.dev  ## known vulnerabilities of the packages of the image, if an advisory source can be reached
	$(BIN)/python -m tests.dependencies audit

bench: $(VENV)/.dev  ## throughput and latency, as ratios to PostgreSQL's own tools
	$(BIN)/python -m tests.bench

test-more: more  ## tests that need more than Python packages: a browser, PostgreSQL 14, 15 and 17
	$(PYTEST) -m more tests/browser  # the browser's driver keeps an event loop, so nothing else runs with it
	$(PYTEST) -m more --ignore tests/browser tests
	for version in $(OTHER_POSTGRES); do \
		TAILRACE_POSTGRES=$$version $(PYTEST) -n $(WORKERS) -k pg$$version tests/integration || exit 1; \
	done

prove: $(VENV)/.dev  ## the guarantees at length: mistakes are caught, FAULTS more faults do no harm
	$(PYTEST) -q -m alone tests/fault/test_mutations.py
	failed=; \
	$(CAMPAIGN) --add $(FAULTS) || failed=1; \
	$(CAMPAIGN) --add $(FAULTS_IN_CLUSTER) --cluster || failed=1; \
	$(CAMPAIGN) --add $(FAULTS_WITH_SPARK) --with-spark || failed=1; \
	test -z "$$failed"

fuzz: $(VENV)/.dev  ## property tests with FUZZ_EXAMPLES examples each, then FUZZ_SECONDS of coverage-guided fuzzing
	HYPOTHESIS_PROFILE=fuzz FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) \
		$(PYTEST) -n $(WORKERS) --timeout 0 tests/property
	$(PIP_INSTALL) -e '.[fuzz]'
	$(BIN)/python -m tests.property.coverage_guided --seconds $(FUZZ_SECONDS)

lock: $(VENV)/.release  ## the packages of the image anew, each with its hashes: compose/requirements*.lock
	$(LOCK) --upgrade --extra arrow --output-file compose/requirements.lock pyproject.toml
	$(LOCK) --upgrade --extra arrow --extra spark --constraints compose/requirements.lock \
		--output-file compose/requirements-spark.lock pyproject.toml
	printf 'hatchling>=1.27\nsetuptools\n' | $(LOCK) --upgrade --output-file compose/requirements-build.lock -

sbom: $(VENV)/.release  ## the packages of the images, as CycloneDX: build/sbom.json, build/sbom-spark.json
	mkdir -p build
	$(SBOM) --output-file build/sbom.json compose/requirements.lock
	$(SBOM) --output-file build/sbom-spark.json compose/requirements-spark.lock

licences: $(VENV)/.dev  ## name, version and licence of every package that tailrace installs
	$(BIN)/python -m tests.dependencies licences

more: $(VENV)/.dev  ## what make test-more needs
	$(PIP_INSTALL) -e '.[more]'
	$(BIN)/python -m tests.browser.chromium
	$(BIN)/python -m tests.fixtures.postgres_trees

clean:  ## remove what builds, tests and runs have left; the environment stays
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	rm -rf artifacts checkpoints derby.log metastore_db spark-warehouse
	find bridge consumer_sdk spark_consumer tailrace tests -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("tailrace needs Python 3.11 or newer; set PYTHON=…")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) -e '.[demo,spark]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.release: $(VENV)/.dev
	$(PIP_INSTALL) -e '.[release]'
	@touch $@
