# The newest supported Python that runs (a name on the path may be a pyenv shim that fails); make PYTHON=... overrides.
CAN_RUN = -c "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1
CANDIDATES := python3.13 python3.12 python3.11 python3
find_python = $(shell for name in $(1); do "$$name" $(CAN_RUN) && echo "$$name" && break; done)
PYTHON ?= $(call find_python,$(CANDIDATES))
VENV := .venv
BIN := $(VENV)/bin

# Every process imports the sources and tests again: without byte code, collecting the tests takes twice the time.
export PYTHONDONTWRITEBYTECODE :=

# Tests of real deployments and shared folders. They wait for other processes most of the time, so more of them run at
# once than there are cores; their ports and folders are their own. Other long checks compute, and would make them late.
REAL := attacks deploy executors soak sweeps warm years
ALONE := flood  # nginx ends connections whose handshakes have to wait for a core

.PHONY: demo check check-slow check-newest check-lowest print-newest-python check-all soak bench docs format clean

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
	$(BIN)/lint-imports --no-logo
	@# mypy uses one core only, and without a cache for most of a minute: it runs beside the tests. Its output is printed
	@# when it fails, and at the end; either of the two fails the target.
	@output=$$(mktemp); types=; trap 'kill $$types 2>/dev/null; rm -f $$output' EXIT; trap 'exit 130' INT TERM; \
	{ $(BIN)/mypy >$$output 2>&1 || { echo; echo "$(BIN)/mypy"; cat $$output; exit 1; }; } & types=$$!; \
	echo "$(BIN)/pytest -n 2 --dist worksteal"; $(BIN)/pytest -n 2 --dist worksteal; tests=$$?; \
	wait $$types; mypy=$$?; echo "$(BIN)/mypy"; cat $$output; \
	if [ $$tests -ne 0 ]; then echo "the tests failed"; fi; if [ $$mypy -ne 0 ]; then echo "mypy failed"; fi; \
	[ $$tests -eq 0 ] && [ $$mypy -eq 0 ]

check-slow: $(VENV)/ready  ## the long checks
	$(BIN)/pytest -m slow -n 2 --dist worksteal $(foreach name,$(REAL) $(ALONE),--ignore tests/slow/test_$(name).py)
	$(BIN)/pytest -m slow $(foreach name,$(ALONE),tests/slow/test_$(name).py)
	$(BIN)/pytest -m slow -n 4 --dist worksteal $(foreach name,$(REAL),tests/slow/test_$(name).py)

# Tests of results, engines, commands and files, for environments with other versions.
OTHER := $(addprefix tests/,golden/test_hashes.py golden/test_fixtures.py contract/test_engines.py contract/test_kernel.py \
  $(addprefix unit/,test_checkpoint.py test_numerics.py test_simulation.py cli/test_cli.py nets/test_nets.py runs/test_record.py))
NEWEST_PYTHON ?= $(call find_python,python3.13 $(wildcard $(HOME)/.pyenv/versions/3.13*/bin/python3.13))
LOWEST_PYTHON ?= $(call find_python,python3.11 $(wildcard $(HOME)/.pyenv/versions/3.11*/bin/python3.11))

print-newest-python:  # for .ci/run
	@echo $(NEWEST_PYTHON)

check-newest:  ## a part of the tests with Python 3.13 and the newest versions of all libraries
	@test -n "$(NEWEST_PYTHON)" || { echo "No Python 3.13 with venv was found: name one with make NEWEST_PYTHON=..."; exit 1; }
	test -x .venv-newest/bin/python || $(NEWEST_PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check --upgrade -e ".[dev]"
	.venv-newest/bin/pytest -n 2 --dist worksteal $(OTHER)

check-lowest:  ## the same with Python 3.11 and the lowest versions of the direct dependencies
	@test -n "$(LOWEST_PYTHON)" || { echo "No Python 3.11 with venv was found: name one with make LOWEST_PYTHON=..."; exit 1; }
	test -x .venv-lowest/bin/python || $(LOWEST_PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m tests.lowest >.venv-lowest/lowest.txt
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check -c .venv-lowest/lowest.txt -e . pytest pytest-xdist hypothesis
	.venv-lowest/bin/pytest -n 2 --dist worksteal $(OTHER)

check-all: check check-slow  ## both: over Flower every name, not only one for each verb

soak: $(VENV)/ready  ## a real deployment under 30 kills, and under faults of every kind; KILLS=60 for more
	$(BIN)/python -m tests.soak a b --kills $(or $(KILLS),30)

bench: $(VENV)/ready  ## time and memory as ratios, added to benchmarks/history.json
	$(BIN)/python benchmarks/bench.py

$(VENV)/docs: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

docs: $(VENV)/docs  ## the documentation as a site: open site/index.html (its search needs python -m http.server -d site)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-newest .venv-lowest runs/demo site .cache .mypy_cache .pytest_cache .ruff_cache
