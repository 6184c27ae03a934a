# The two commands: `make demo` and `make test`. Everything they need is installed into .venv from pyproject.toml.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
QUICK ?=
SIZE ?= 500MB
ROUNDS ?= 5

.PHONY: demo test check lint types layers bench bench-commands clean

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ckptstore needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt -e '.[torch,plot,test]'
	touch $@

.venv/.bench-ready: .venv/.ready
	$(PIP) install -c constraints.txt -e '.[bench]'
	touch $@

demo: .venv/.ready  ## train, get killed, resume, compare bit for bit (QUICK=1: under 40 s)
	$(BIN)/python -m tools.demo $(if $(QUICK),--quick)

test: .venv/.ready  ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

check: lint types layers  ## ruff, mypy --strict, import layers

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy and the layer check see the rooms only in an installed copy: cli/ and formats/ are ckptstore.cli and
# ckptstore.formats by the mapping in pyproject.toml, which neither tool reads.
build/tc: .venv/.ready FORCE
	rm -rf build
	$(PIP) install --no-deps --target build/tc .

types: build/tc
	cd build/tc && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p ckptstore

layers: build/tc
	cd build/tc && PYTHONPATH=. ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-cache

bench: .venv/.bench-ready  ## save and load against peers (SIZE=500MB ROUNDS=5)
	$(BIN)/python -m tools.bench.save_load --size $(SIZE) --rounds $(ROUNDS)

bench-commands: .venv/.bench-ready  ## start-up and log speed of the command
	$(BIN)/python -m tools.bench.commands

clean:
	rm -rf .venv build demo-out bench-out .cache *.egg-info

FORCE:
