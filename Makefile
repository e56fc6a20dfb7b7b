# Every command makes the environment it needs under .venv/ first; see scripts/environment.py.
# PYTHON is the default Python; PY and JAX choose another environment: make bench PY=3.13 JAX=0.11.2

PYTHON ?= python3
PY ?=
JAX ?=
MINUTES ?= 10
ARGS ?=
PYTEST_ARGS ?=

environment = $(PYTHON) scripts/environment.py $(if $(PY),--python $(PY)) $(if $(JAX),--jax $(JAX))
linters = $(PYTHON) scripts/environment.py --lint
newest = $(PYTHON) scripts/environment.py --python newest

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo structure-factor delayed-match sae test lint page unit test-matrix package release coverage bench conformance docs docs-serve fuzz format hooks pythons clean

help: ## show the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

demo: ## train a small GPT, print its sites, save a plot of gradient flow and a page
	@python=$$($(PYTHON) scripts/environment.py --demo) && "$$python" examples/gradient_flow.py

structure-factor: ## solve plasmas, train a network on them, look inside it; ARGS="--species CH"
	@python=$$($(environment)) && "$$python" -m examples.structure_factor $(ARGS)

delayed-match: ## learn a task online, and compare with backpropagation through time
	@python=$$($(environment)) && "$$python" examples/delayed_match.py

sae: ## harvest a small GPT, train a sparse autoencoder and linear probes from the dataset
	@python=$$($(environment)) && "$$python" -m examples.sparse_autoencoder $(ARGS) && \
	"$$python" -m examples.linear_probe $(ARGS)

test: lint page unit ## lint, types, and tests on the default Python and the newest one found

lint: ## ruff, codespell, import-linter and pyright
	@python=$$($(environment)) && lint=$$($(linters)) && \
	"$$lint" -m ruff check . && \
	"$$lint" -m ruff format --check . && \
	"$$(dirname "$$lint")/codespell" && \
	"$$(dirname "$$lint")/lint-imports" && \
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 "$$lint" -m pyright --pythonpath "$$python"

page: ## build the page of tapax.view, check its types, run its unit tests
	@$(PYTHON) scripts/page.py --test

unit: ## only the tests; PYTEST_ARGS="-k scan" selects some
	@$(PYTHON) scripts/matrix.py --default -- $(PYTEST_ARGS)

coverage: ## branch coverage of tapax/ by the tests of the newest Python; COVERAGE_FILE names the data
	@python=$$($(newest)) && "$$python" -m pytest -q -n 2 -m "not many" --cov --cov-report=term $(PYTEST_ARGS)

test-matrix: ## the tests on every Python found, from 3.11 to 3.14, with every jax tested on it
	@$(PYTHON) scripts/matrix.py -- $(PYTEST_ARGS)

package: ## build the sdist and the wheel in dist/, check them, install every extra into an empty environment
	@python=$$($(newest)) && "$$python" scripts/distributions.py && \
	"$$python" -m pytest -q -m "" tests/project $(PYTEST_ARGS)

release: ## check that this commit can be released; ARGS=--no-dry-run also tags it
	@python=$$($(newest)) && "$$python" scripts/release.py $(ARGS)

bench: ## speed and memory, as ratios; ARGS="--quick" is passed on
	@python=$$($(environment)) && "$$python" -m benchmarks.run $(ARGS)

conformance: ## judge tapax and eight other libraries, write docs/conformance.md; ARGS="--only oryx"
	@python=$$($(newest)) && "$$python" -m conformance.run $(ARGS)

docs: ## the site in build/docs: every page executed, every link, name and page checked
	@python=$$($(PYTHON) scripts/environment.py --docs) && "$$python" scripts/docs.py $(ARGS)

docs-serve: ## serve the site, and build it again when a page changes
	@python=$$($(PYTHON) scripts/environment.py --docs) && "$$python" scripts/docs.py --serve $(ARGS)

fuzz: ## many planted NaNs, then random programs for MINUTES (10) minutes
	@python=$$($(environment)) && "$$python" -m pytest -q -n 2 -m many tests/nonfinite tests/fuzz && \
	"$$python" -m tests.fuzz --minutes $(MINUTES) $(ARGS)

format: ## apply ruff's format and its safe fixes
	@lint=$$($(linters)) && { "$$lint" -m ruff check --fix .; "$$lint" -m ruff format .; }

hooks: ## install the pre-commit hooks
	@lint=$$($(linters)) && "$$lint" -m pre_commit install

pythons: ## list the Pythons found on this machine
	@$(PYTHON) scripts/pythons.py

clean: ## remove environments, caches and build products
	rm -rf .venv web/node_modules web/build tapax/viewer/assets .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage build dist
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
