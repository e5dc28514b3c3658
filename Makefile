# One door to the tooling. `make run` and `make test` set everything up when it has not been done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup run test suite test-slow test-launches chaos soak format lint type docs results site dist check clean
help:          ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(READY)   ## make .venv with all that tests need, every extra included
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "manyhands needs Python 3.11 or newer; try: make setup PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

run: $(READY)   ## train PPO on CartPole on all cores until it is solved
	$(BIN)/manyhands train ppo --env CartPole-v1 --target-return 475 --steps 200000

# Three processes on two cores: many tests wait, for workers to start or for a deadline.
test: $(READY) lint   ## what CI runs
	@$(MAKE) --no-print-directory -j 2 type suite

suite: $(READY)
	$(BIN)/python -m pytest -q -m "not slow" -n 3 --dist loadfile --no-loadscope-reorder

# Two at a time, then those that measure time or whose workers wait for nobody, one by one. The second
# part runs whatever the first one found.
SLOW := $(BIN)/python -m pytest -q --durations=0 --durations-min=5 --timeout 900
test-slow: $(READY)   ## the long learning runs and checks
	@code=0; \
	$(SLOW) -m "slow and not alone" -n 2 --dist worksteal || code=$$?; \
	$(SLOW) -m "slow and alone" || code=$$?; \
	exit $$code

test-launches: $(READY)   ## 2,000 launches each on local, mpi and torch, on a busy machine: hours
	MANYHANDS_LAUNCHES=2000 $(BIN)/python -m pytest -q -s -m slow tests/faults/test_many_launches.py

chaos: $(READY)   ## 1,000 faults into running trainings of every strategy; writes docs/results/chaos.md
	$(BIN)/python benchmarks/chaos.py --faults 1000 --seed 1 --minutes 40 --keep

soak: $(READY)   ## half an hour without a fault: memory, open files and speed stay as they are
	$(BIN)/python benchmarks/chaos.py --faults 0 --minutes 30 --keep

format: $(READY)   ## write the house format
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lint: $(READY)   ## ruff, format included; which folder may import which
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports

type: $(READY)   ## mypy, strict
	$(BIN)/mypy

docs: $(READY)   ## rebuild the generated reference pages
	$(BIN)/python docs/generate/reference.py docs/reference

results: $(READY)   ## rebuild docs/results from what benchmarks have stored
	$(BIN)/python docs/generate/results.py docs/results

site: $(READY)   ## build the website into site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "to read it: $(BIN)/python -m http.server -d site"

dist: $(READY)   ## build the wheel into dist/, and try it in an empty virtual environment
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation
	MANYHANDS_WHEEL=$$(echo dist/*.whl) $(BIN)/python -m pytest -q -m slow -k empty_environment tests/examples/test_wheel.py

check: test   ## all of it

clean:   ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
