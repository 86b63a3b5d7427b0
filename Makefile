# Two commands for a newcomer: `make demo` and `make test`. Both make their own virtual environment.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python

.PHONY: demo test test-slow test-conformance test-harnesses check lint types clean help
.DEFAULT_GOAL := help

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 18

$(VENV)/.local: pyproject.toml
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -e '.[local]'
	@touch $@

$(VENV)/.dev: pyproject.toml
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.local

demo: $(VENV)/.local ## train a small agent on this machine, start to finish
	$(RUN) -m agentcore_rl_toolkit demo $(ARGS)

test: $(VENV)/.dev ## the tests (under 8 minutes)
	$(RUN) -m pytest -m 'not slow and not conformance and not harness' $(ARGS)

test-slow: $(VENV)/.dev ## the tests marked slow
	$(RUN) -m pytest -m slow $(ARGS)

test-conformance: $(VENV)/.dev ## every model family through the gateway (scripts/fetch_tokenizers.py gets them)
	$(RUN) -m pytest -m conformance tests/conformance $(ARGS)

test-harnesses: $(VENV)/.dev ## agent harnesses of others against the gateway (installs them; needs npm)
	$(RUN) -m pytest -m harness tests/harnesses $(ARGS)

lint: $(VENV)/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.dev
	$(RUN) -m mypy

check: lint types test ## lint, types, tests: what must pass before a commit

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .harnesses .mypy_cache .pytest_cache .ruff_cache .hypothesis
