# Tasks of a checkout. `make help` lists them. The `polywire` command needs only `make setup`.

VENV := .venv
BIN := $(VENV)/bin
PYTHON := $(BIN)/python
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start thousands of processes, and without byte code each would compile everything that it imports again.
unexport PYTHONDONTWRITEBYTECODE

# How all packages are installed: locked versions with hashes, no isolated builds, byte code compiled once at the end.
INSTALL = $(PYTHON) -m pip install --require-hashes --no-compile --no-build-isolation --use-pep517 --quiet --progress-bar off

# Installs the packages of the first prerequisite. If that fails, the last lines say why and what to do; all others are in the log.
PIP_LOG = $(VENV)/pip.log
INSTALL_LOCKED = $(INSTALL) -r $< 2> $(PIP_LOG) || { \
	{ grep -o 'ERROR: .*' $(PIP_LOG) || true; } | tail -1 >&2; \
	if grep -q 'Retrying (' $(PIP_LOG); then reason="check the network connection, or name a package index in PIP_INDEX_URL"; else reason="see $(PIP_LOG)"; fi; \
	echo "could not install the packages of $<: $$reason; then run make again" >&2; exit 1; }

# Prints how long a recipe line took; SECONDS is counted by the shell.
TOOK := echo "  done in $$SECONDS s"

SOURCES := $(wildcard src/polywire/*.py src/polywire/*/*.py src/polywire/*/*/*.py)
COMPILED := $(if $(SOURCES),$(shell grep -lx "import cython" $(SOURCES)))
DECLARED := $(wildcard src/polywire/*/*.pxd src/polywire/*/*/*.pxd)
SPELLED := src tests docs changes deploy examples benchmarks tools $(wildcard *.md *.toml *.py) Makefile
CHECKED := src tests setup.py $(wildcard examples benchmarks tools)
CLIENTS := $(patsubst requirements/interop/%.lock,$(VENV)/interop/%,$(wildcard requirements/interop/*.lock))
DEV := $(VENV)/.dev $(VENV)/.built $(CLIENTS)
FUZZ_SECONDS ?= 30
SIM_COUNT ?= 0
SIM_FIRST ?= 0
SIM_WORLD ?=
SECONDS ?= 60
COUNT ?= 30
LEDGER ?=
SEED_OF_HISTORIES = $(or $(SEED),1)
# Twice the cores of a small machine, because tests often wait.
WORKERS ?= 4
# The tests of a module run in one worker. tests/conftest.py starts the longest modules first.
SPREAD := --dist loadscope --no-loadscope-reorder
PYTEST_ARGS ?=
RUN_TESTS = $(PYTHON) -m pytest -n $(WORKERS) $(SPREAD) $(PYTEST_ARGS)
# Runs tests that failed once more, alone, if they are few (docs/internals/decisions/0122-simulation-and-histories.md).
RERUN = { [ $$? -eq 1 ] && $(PYTHON) -m tests.rerun; }
QUICK := -m "not slow and not spark" $(wildcard tests/unit tests/vectors tests/property)
# Unit tests of packages with compiled modules only, if they have any, because the results of others do not depend on
# compilation; and the mutations, because functions of compiled classes cannot be replaced.
PURE := -m "not slow and not spark" $(wildcard $(sort $(foreach module,$(COMPILED),tests/unit/$(word 3,$(subst /, ,$(module))))) tests/vectors tests/property tests/sim/test_mutations.py)
# Runs independent targets in parallel; the output of each stays together.
BESIDE = $(MAKE) --silent --output-sync=target $(if $(findstring --jobserver,$(MAKEFLAGS)),,--jobs=4)
AUDIT_ARGS ?=
BENCH_ARGS ?=

.PHONY: help setup build dev fmt lint type contract house test test-pure test-quick test-pure-quick coverage test-all fuzz sim histories takeovers three-brokers processes sim-mutations bench bench-gate bench-peers docs screenshots site audit sbom demo demo-cluster wheel-test lock clean distclean spark

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

setup: $(VENV)/.installed ## Create .venv with the polywire command (quick if nothing changed)
	@$(PYTHON) -c 'from polywire.build_info import describe; print(describe(), "is in $(BIN)/polywire")'

build: $(VENV)/.built ## Compile the compilable modules, in place

dev: $(VENV)/.base ## Install what tests and checks need (with PySpark, about 450 MB)
	+@$(BESIDE) $(DEV)
	@$(MAKE) --silent $(VENV)/.installed

spark: $(VENV)/.demo $(VENV)/.installed ## Install Spark and what the demo needs

fmt: dev ## Format the code
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/ruff check --fix $(CHECKED)

lint: $(VENV)/.dev ## Check format and style
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/codespell $(SPELLED)

type: $(VENV)/.dev ## Check types
	$(BIN)/mypy $(CHECKED)

contract: $(VENV)/.dev ## Check the import contract
	PYTHONPATH=src $(BIN)/lint-imports --no-logo

house: $(VENV)/.installed ## List import cycles, unused code, unread fields, repeated functions and interfaces with too many methods
	@$(PYTHON) -m tools.inspector

# The checks need no compiled modules, so they run beside the compilation.
test: $(VENV)/.base ## Check everything and run all tests, compiled
	+@$(BESIDE) $(DEV) lint type contract
	@$(MAKE) --silent $(VENV)/.installed
	$(RUN_TESTS) || $(RERUN)

test-pure: dev ## Run all tests uncompiled
	export POLYWIRE_PURE=1; $(RUN_TESTS) || $(RERUN)

test-quick: dev ## Run the quick tests, compiled
	$(RUN_TESTS) $(QUICK) || $(RERUN)

test-pure-quick: dev ## Run the quick tests of packages that have compiled modules uncompiled
	export POLYWIRE_PURE=1; $(RUN_TESTS) $(PURE) || $(RERUN)

# Tracing makes tests several times slower, so tests that limit processor time may fail here but pass in `make test`.
TRACED = $(BIN)/coverage run -m pytest -n $(WORKERS) $(SPREAD) $(QUICK) $(PYTEST_ARGS) || echo "SOME TESTS FAILED WHILE TRACED" >&2

coverage: dev ## Report the lines and branches that the quick tests reach, compiled and uncompiled (build/coverage)
	@rm -rf build/coverage && mkdir -p build/coverage
	POLYWIRE_PURE=1 $(TRACED)
	$(TRACED)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	@$(BIN)/coverage report | tee build/coverage/table.txt

test-all: test test-pure fuzz ## Run all tests compiled and uncompiled, and fuzz

fuzz: dev ## Fuzz every decoder for FUZZ_SECONDS (30) each
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(PYTHON) -m tests.fuzz

sim: dev ## Run simulations until a check fails; SEED=7 shows one run, SIM_COUNT=100 limits the runs, SIM_WORLD=broker selects one simulation
	$(PYTHON) -m tests.sim $(if $(SIM_WORLD),--world $(SIM_WORLD)) $(if $(SEED),--seed $(SEED),--first $(SIM_FIRST) --count $(SIM_COUNT))

histories: dev ## Kill, pause and starve real brokers and check what clients recorded over five protocols (SECONDS=600 SEED=7, or LEDGER=1 to continue)
	$(PYTHON) -m tests.histories --seconds $(SECONDS) --seed $(SEED_OF_HISTORIES) $(if $(LEDGER),--ledger)

takeovers: dev ## Kill, stop and race three brokers on one bucket and check what clients recorded (COUNT=500 SEED=7, or LEDGER=1 to continue)
	$(PYTHON) -m tests.histories.takeovers --count $(COUNT) --seed $(SEED_OF_HISTORIES) $(if $(LEDGER),--ledger)

three-brokers: dev ## Run every scenario and the real clients through each of three brokers on a bucket (about ten minutes)
	for place in leader standby-1 standby-2; do POLYWIRE_THROUGH=$$place $(PYTHON) -m pytest -n $(WORKERS) $(SPREAD) tests/behaviour tests/interop $(PYTEST_ARGS); done

processes: dev ## Run every scenario and the real clients against two and four processes (about ten minutes)
	for count in 2 4; do POLYWIRE_THROUGH=$$count-processes $(PYTHON) -m pytest -n $(WORKERS) $(SPREAD) tests/behaviour tests/interop $(PYTEST_ARGS); done

sim-mutations: dev ## Remove one mechanism at a time, and check that a simulation fails (a few minutes)
	POLYWIRE_PURE=1 $(PYTHON) -m tests.sim.mutate

bench: dev ## Measure Polywire on this machine
	$(PYTHON) -m benchmarks

bench-peers: dev ## Compare Polywire with NATS, Redis, RabbitMQ, Kafka, Tansu and Iggy, if they are installed (a few minutes)
	$(PYTHON) -m benchmarks.peers $(BENCH_ARGS)

bench-gate: $(VENV)/.installed ## Count the broker's instructions for small requests, and fail if there are more than in the last stored result
	$(PYTHON) -m benchmarks.instructions --quick $(BENCH_ARGS)

docs: dev ## Generate docs/reference and check all links of the documentation
	$(PYTHON) -m tools.reference
	$(PYTHON) -m pytest tests/test_docs.py tests/test_reference.py

screenshots: dev ## Take the pictures of the console in docs/operate (needs Chromium); look at them before you commit them
	$(PYTHON) -m tools.screenshots

site: $(VENV)/site ## Build the documentation as static pages (build/site/html; needs the network once)
	PYTHONPATH=$(CURDIR)/$(VENV)/site $(PYTHON) -m tools.site

audit: $(VENV)/audit $(VENV)/.installed ## Check the locked dependencies for known vulnerabilities (needs the network)
	PYTHONPATH=$(VENV)/audit $(PYTHON) -m tools.audit $(AUDIT_ARGS)

sbom: $(VENV)/.installed ## Write a bill of materials to dist/polywire.cdx.json (CycloneDX)
	$(PYTHON) -m tools.bill_of_materials

demo: $(VENV)/.demo $(VENV)/.installed ## Send 336,776 real flights through Polywire and Spark
	@$(PYTHON) examples/flights.py

demo-cluster: $(VENV)/.demo $(VENV)/.installed ## Send them through three brokers on a bucket, and kill the leader
	@$(PYTHON) -m examples.flights_cluster

wheel-test: $(VENV)/.base ## Build compiled and pure wheels, and test each in an empty environment (needs the network)
	$(PYTHON) -m tools.wheels

lock: ## Update requirements/*.lock from pyproject.toml (needs uv)
	requirements/lock.sh

clean: ## Remove builds and caches
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src -name '*.so' -delete
	$(if $(COMPILED),rm -f $(COMPILED:.py=.c) $(COMPILED:.py=.html))
	rm -f $(VENV)/.built $(VENV)/.installed
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## Also remove .venv and the results of the demos
	rm -rf $(VENV) demo-output demo-cluster-output polywire-data

$(VENV)/.made:
	@found=""; \
	for candidate in $${PYTHON3:-python3} python3.14 python3.13 python3.12 python3.11; do \
		if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "polywire needs Python 3.11 or newer and found none (python3 is $$(python3 --version 2>&1)): install one, or set its path: make setup PYTHON3=/path/to/python3.12" >&2; \
		exit 1; \
	fi; \
	echo "creating $(VENV) with $$($$found --version)"; \
	$$found -m venv $(VENV) || { echo "could not create $(VENV): is the venv module installed (Debian: apt install python3-venv)?" >&2; rm -rf $(VENV); exit 1; }; \
	touch $@

# The base lock includes setuptools and cython, which builds without isolation need.
$(VENV)/.base: requirements/base.lock $(VENV)/.made
	@echo "installing what polywire needs (less than a minute)"
	@$(INSTALL_LOCKED); \
	$(PYTHON) -m compileall -q -j 0 $(VENV)/lib; \
	$(TOOK)
	@touch $@

$(VENV)/.built: setup.py pyproject.toml src/polywire/build_info.py $(COMPILED) $(DECLARED) $(VENV)/.base
	@echo "compiling $(words $(COMPILED)) modules (about three minutes on two cores, once)"
	@# Tests that build wheels reuse the translations.
	@CYTHON_CACHE_DIR=build/cython $(PYTHON) setup.py --quiet build_ext --inplace; $(TOOK)
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.built
	@echo "installing polywire from this checkout"
	@# Without POLYWIRE_COMPILE=0, pip would compile all modules again, although src has them.
	@POLYWIRE_COMPILE=0 $(PYTHON) -m pip install --no-deps --no-index --no-build-isolation --quiet --editable .
	@$(PYTHON) -m compileall -q -j 0 src
	@touch $@

$(VENV)/.demo: requirements/demo.lock $(VENV)/.base
	@echo "installing Spark and the flights (about 450 MB, once)"
	@$(INSTALL_LOCKED); $(TOOK)
	@touch $@

$(VENV)/.dev: requirements/dev.lock $(VENV)/.base
	@echo "installing Spark and the tools for tests and checks (about 500 MB, once)"
	@$(INSTALL_LOCKED)
	@touch $@ $(VENV)/.demo

$(VENV)/audit: requirements/audit.lock $(VENV)/.base
	@echo "installing pip-audit"
	@rm -rf $@.new && mkdir -p $@.new
	@$(INSTALL) --only-binary :all: --target $@.new -r $< || { echo "NOT AUDITED: pip-audit cannot be installed here" >&2; rm -rf $@.new; exit 1; }
	@rm -rf $@ && mv $@.new $@ && touch $@

$(VENV)/site: requirements/site.lock $(VENV)/.base
	@echo "installing zensical"
	@rm -rf $@.new && mkdir -p $@.new
	@$(INSTALL) --only-binary :all: --target $@.new -r $< || { echo "NO SITE: zensical cannot be installed here" >&2; rm -rf $@.new; exit 1; }
	@rm -rf $@ && mv $@.new $@ && touch $@

# If a client has no wheel for this machine, its folder stays empty and its tests are skipped.
$(VENV)/interop/%: requirements/interop/%.lock $(VENV)/.base
	@rm -rf $@.new && mkdir -p $@.new
	@$(INSTALL) --only-binary :all: --target $@.new -r $< || { echo "$* cannot be installed here: its tests will be skipped" >&2; rm -rf $@.new; mkdir -p $@.new; }
	@rm -rf $@ && mv $@.new $@ && touch $@
