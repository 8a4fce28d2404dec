# Every target sets up what it needs by itself; see .ci/setup.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN = $(VENV)/bin
PACKAGES = platform engine kernels adapters migrations
NS = build/ns/loraplex

.PHONY: setup setup-dev demo test check ns fidelity refusals bench bench-peers bench-cases bench-kernels

setup: ## what `loraplex serve` and the demo need
	@VENV=$(VENV) $(PYTHON) .ci/setup run

setup-dev:
	@VENV=$(VENV) $(PYTHON) .ci/setup dev

demo: setup ## a real model, two real adapters, one batch, an API (ARGS=--once: print and leave)
	$(BIN)/loraplex demo $(ARGS)

test: setup-dev ## everything that can run on this machine
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

check: setup-dev ns ## style, types, the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	PYTHONPATH=build/ns $(BIN)/lint-imports

ns: # mypy, pyright and import-linter see the five folders as one package through links
	@mkdir -p $(NS) && for p in $(PACKAGES); do ln -sfn ../../../$$p $(NS)/$$p; done

fidelity: setup-dev ## logits against PEFT's own (FIXTURES=DIR, else small cases made on the spot)
	$(BIN)/python -m tests.acceptance.fidelity $(FIXTURES)

refusals: setup-dev ## malformed uploads against a running server (FIXTURES=DIR likewise)
	$(BIN)/python -m tests.acceptance.refusals $(FIXTURES)

bench: setup-dev ## our speed beside the peers that are installed, on the same requests, in one run
	$(BIN)/python -m benchmarks.run $(ARGS)

bench-peers: setup ## vLLM for CPUs, llama.cpp and OpenVINO GenAI, each in an environment of its own in build/peers
	$(BIN)/python -m benchmarks.peers $(ARGS)

bench-cases: setup-dev ## what users of other servers report: gaps, starts, memory
	$(BIN)/python -m benchmarks.cases $(ARGS)

bench-kernels: setup-dev ## every kernel against its roofline
	$(BIN)/python -m benchmarks.kernels $(ARGS)
