VENV ?= .venv
BIN := $(VENV)/bin
ROOMS := capture proxy rewards learner rollouts hone

.PHONY: help setup demo test check format clean bench-gateway

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.ready  ## make the virtual environment (about two minutes, 4 GB)

$(VENV)/.ready: requirements/cpu.txt deploy/setup.sh pyproject.toml
	./deploy/setup.sh $(VENV)

demo: setup  ## train the tic-tac-toe agent through real vLLM: a quarter of an hour on two cores
	$(BIN)/hone demo

test: setup  ## every test, against the real vLLM
	$(BIN)/python -m pytest -n 2 --dist loadgroup

check: setup  ## lint, format, types, import law, docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/test_docs.py

bench-gateway: setup  ## what the gateway costs, beside a bare relay, nginx and LiteLLM (ARGS=--quick)
	$(BIN)/python -m bench.gateway $(ARGS)

format: setup  ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and every run
	rm -rf $(VENV) runs
