# The newest supported Python that runs (a name on the path may be a pyenv shim that fails); make PYTHON=... overrides.
CAN_RUN = -c "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1
CANDIDATES := python3.13 python3.12 python3.11 python3
PYTHON ?= $(shell for name in $(CANDIDATES); do "$$name" $(CAN_RUN) && echo "$$name" && break; done)
VENV := .venv
BIN := $(VENV)/bin

REAL := attacks deploy soak sweeps warm years  # tests of real deployments and shared folders: one after the other

.PHONY: demo check check-slow check-all soak bench docs format clean

$(VENV)/ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || test -n "$(PYTHON)" || \
	  { echo "No Python 3.11 to 3.13 with venv was found: install one, or name it with make PYTHON=/path/to/python."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,flower]"
	@touch $@

demo: $(VENV)/ready  ## FedDrift on a drifting federation, beside the floor and the ceiling, with a picture
	$(BIN)/feddrift run --stream sine-2 --algorithm FedDrift --algorithm Oblivious --algorithm Oracle --out runs/demo
	$(BIN)/feddrift plot runs/demo clusters --out runs/demo/clusters.png
	$(BIN)/feddrift plot runs/demo accuracy --out runs/demo/accuracy.png

check: $(VENV)/ready  ## lint, types and tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -n 2 --dist worksteal

check-slow: $(VENV)/ready  ## the long checks
	$(BIN)/pytest -m slow -n 2 --dist worksteal $(foreach name,$(REAL),--ignore tests/slow/test_$(name).py)
	$(BIN)/pytest -m slow $(foreach name,$(REAL),tests/slow/test_$(name).py)

check-all: check check-slow  ## both: over Flower every name, not only one for each verb

soak: $(VENV)/ready  ## a real deployment under 30 kills, and under faults of every kind; KILLS=60 for more
	$(BIN)/python -m tests.soak a b --kills $(or $(KILLS),30)

bench: $(VENV)/ready  ## time and memory as ratios, added to benchmarks/history.json
	$(BIN)/python benchmarks/bench.py

docs: $(VENV)/ready  ## the documentation as a site: open site/index.html (its search needs python -m http.server -d site)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs/demo site .mypy_cache .pytest_cache .ruff_cache
