# The two commands: `make demo` and `make test`. Everything they need is installed into .venv from pyproject.toml.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
QUICK ?=
SIZE ?= 500MB
ROUNDS ?= 5
COUNT ?= 10000

.PHONY: docs pages hooks matrix demo test test-rest test-long test-moto test-torchtitan check lint types layers golden frozen conformance bench bench-commands bench-catalog bench-codecs bench-recycling bench-chains bench-training bench-tensors bench-diffs bench-recovery bench-pmem exact crash rank-kills shim-kills agent-kills powercut mutants mutants-ordinary fuzz sanitize wheels torture clean

.venv/.installed: pyproject.toml constraints.txt setup.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ckptstore needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt -e '.[torch,plot,test]'
	touch $@

# The compiled kernels, in place; without a C compiler there are none, and numpy does the work.
formats/core.abi3.so: .venv/.installed $(wildcard native/*)
	$(BIN)/python native/core_build.py

.venv/.ready: .venv/.installed formats/core.abi3.so
	touch $@

.venv/.bench-ready: .venv/.ready
	$(PIP) install -c constraints.txt -e '.[bench]'
	touch $@

docs: .venv/.docs-ready  ## the site in build/site and the man pages in build/man; links are checked, warnings are errors
	$(BIN)/python -m tools.site

pages: .venv/.ready  ## the pages of docs/ that are generated from the code; tests compare them
	$(BIN)/python -m tools.site.options docs/cli-options.md
	$(BIN)/python -m tools.structure --modules docs/modules.md
	$(BIN)/python -m tools.crash.points docs/crash-points.md

.venv/.docs-ready: .venv/.ready
	$(PIP) install -c constraints.txt -e '.[docs]'
	touch $@

hooks: .venv/.ready  ## checks before each commit (.pre-commit-config.yaml), installed into this clone
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(BIN)/pre-commit install

demo: .venv/.ready  ## train, get killed, resume, compare bit for bit (QUICK=1: under 40 s)
	$(BIN)/python -m tools.demo $(if $(QUICK),--quick)

# Tests start hundreds of interpreters. Where PYTHONDONTWRITEBYTECODE is set (containers set it), each would compile the
# package's modules again, half a second of a core; set to nothing, it is off. Three workers: many tests wait.
test test-rest test-long: export PYTHONDONTWRITEBYTECODE =

test: .venv/.ready  ## every protocol, codec, damage, rank and interface test (on every change)
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not rest" $(PYTEST_ARGS)

test-rest: .venv/.ready  ## the rest: jobs of many processes, the harnesses, samples of kills, small benchmarks, what the docs show
	$(BIN)/python -m pytest -n 3 --dist loadfile -m rest $(PYTEST_ARGS)

test-long: .venv/.ready  ## all tests, those whose form in CI is a short one in the long one
	CKPTSTORE_TESTS=long $(BIN)/python -m pytest -n 3 --dist loadfile --timeout 1200 $(PYTEST_ARGS)

# Each pair downloads a torch, of which the CUDA builds that pip finds take gigabytes, and is deleted when it was tested.
matrix: .venv/.ready  ## each Python of pyproject.toml with the oldest and newest torch (PYTHONS="3.11" TORCHES="oldest" TESTS="...")
	$(BIN)/python -m tools.matrix $(foreach one,$(PYTHONS),--python $(one)) $(foreach one,$(TORCHES),--torch $(one)) $(TESTS)

# Of its dependencies only these are imported; wandb and datasets would take hundreds of megabytes.
test-torchtitan: .venv/.ready  ## torchtitan's own checkpoint manager, killed and resumed with a store
	$(BIN)/pip install -q --no-deps --upgrade --target .cache/torchtitan \
	  torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring_parser==0.18.0 typeguard==4.6.1
	PYTHONPATH=.cache/torchtitan $(BIN)/python -m pytest tests/integrations/test_torchtitan.py

test-moto: .venv/.ready  ## the backends' conformance suite on moto, a second opinion on S3
	$(PIP) install -c constraints.txt -e '.[test-moto]'
	$(BIN)/python -m pytest tests/backends/test_objects.py -k Moto

check: lint types layers  ## ruff, mypy --strict, import layers

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# cli/ and formats/ are the packages ckptstore.cli and ckptstore.formats: pyproject.toml maps them for an installation, and
# the links ckptstore/cli and ckptstore/formats show them to tools that look for packages in folders.
types: .venv/.ready
	$(BIN)/mypy -p ckptstore

layers: .venv/.ready
	PYTHONPATH=. $(BIN)/lint-imports --no-cache

bench: .venv/.bench-ready  ## save and load against peers (SIZE=500MB ROUNDS=5)
	$(BIN)/python -m tools.bench.storage.save_load --size $(SIZE) --rounds $(ROUNDS)

bench-commands: .venv/.bench-ready  ## start-up and log speed of the command
	$(BIN)/python -m tools.bench.storage.commands

bench-catalog: .venv/.bench-ready  ## what 1,000 to 200,000 checkpoints cost: fold, READ, OPEN, log, memory, stall
	$(BIN)/python -m tools.bench.storage.catalog

bench-training: .venv/.bench-ready  ## ways to checkpoint in a training loop: slowdown, stall, memory, steps lost to a kill
	$(BIN)/python -m tools.bench.training --rounds $(ROUNDS)

bench-tensors: .venv/.bench-ready  ## 10,000 tensors beside torch.save and torch.load (COUNT=100000)
	$(BIN)/python -m tools.bench.storage.tensors --count $(COUNT) --rounds $(ROUNDS)

bench-codecs: .venv/.bench-ready  ## ratio and speed of every codec against other compressors
	$(BIN)/python -m tools.bench.codecs

bench-recycling: .venv/.bench-ready  ## new files against overwritten ones on this disk
	$(BIN)/python -m tools.bench.storage.recycling

bench-chains: .venv/.bench-ready  ## delta chains: bytes against restore time
	$(BIN)/python -m tools.bench.codecs.chains --steps 200 --chain 30

# The crash campaign in full; `make test-rest` runs short forms of all of it.
N ?= 200
SECONDS ?= 60
MUTANTS ?= 200
SINCE ?= HEAD~1

bench-diffs: .venv/.bench-ready  ## gradient diffs through the store: bits, and seconds beside zstd-3 and ZipNN
	$(BIN)/python -m tools.bench.codecs.diffs

bench-recovery: .venv/.bench-ready  ## restores of replayed steps: one thread, all, or computed again; before and after a merge
	$(BIN)/python -m tools.bench.codecs.recovery

bench-pmem: .venv/.bench-ready  ## one segment on (simulated) persistent memory beside a copy in memory
	$(BIN)/python -m tools.bench.storage.pmem

exact: .venv/.ready  ## 1,000 training steps as gradient diffs: restored and resumed, bit for bit
	$(BIN)/python -m tools.exact --json bench-out/exact.json

crash: .venv/.ready  ## enumerated power cuts, SIGKILL at every crash point, faults at every place
	$(BIN)/python -m tools.crash.states --limit 4000
	$(BIN)/python -m tools.crash.kills --kills 2000
	$(BIN)/python -m tools.crash.faultsweep
	$(BIN)/python -m tools.crash.states --limit 1000 --medium pmem
	$(BIN)/python -m tools.crash.states --limit 1000 --medium pmem-msync
	$(BIN)/python -m tools.crash.kills --kills 500 --medium pmem-msync

KILLS ?= 200

rank-kills: .venv/.ready  ## SIGKILL of ranks that save together: at every crash point, and at random, KILLS times
	$(BIN)/python -m tools.kills.rank_kills --kills $(KILLS) $(if $(SEED),--seed $(SEED))

shim-kills: .venv/.ready  ## SIGKILL of training scripts with a Checkpointer, KILLS times: they end bit-identical
	$(BIN)/python -m tools.kills.shim_kills --kills $(KILLS)

agent-kills: .venv/.ready  ## SIGKILL of trainers, agents and both, KILLS times: nothing acknowledged is lost
	$(BIN)/python -m tools.kills.agent_kills --kills $(KILLS)

powercut: .venv/.ready  ## N real journal replays on loop devices (needs root)
	$(BIN)/python -m tools.crash.powercut --cuts $(N)

torture: .venv/.ready  ## writers, readers, gc, kills and faults at once for SECONDS
	$(BIN)/python -W ignore -m tools.crash.torture --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

mutants: .venv/.ready  ## remove each sync, check and fence in turn: some test must fail
	$(BIN)/python -m tools.mutants

mutants-ordinary: .venv/.ready  ## MUTANTS slips in what changed since SINCE (or in MODULES): some test must fail
	$(BIN)/python -m tools.mutants --ordinary $(MUTANTS) --seed $(or $(SEED),0) $(or $(MODULES),--since $(SINCE))

golden: .venv/.ready  ## golden files that are missing; frozen ones are never changed
	$(BIN)/python -m tools.golden

READER ?= $(BIN)/python -m tools.conformance.page

frozen: .venv/.ready  ## the version that froze format 1 and this one, in turns on the same stores
	$(BIN)/python -m tools.frozen --operations 60 --stores 5 $(if $(SEED),--seed $(SEED))

conformance: .venv/.ready  ## the conformance set against an executable (READER="...")
	$(BIN)/python -m tools.conformance $(READER)

sanitize: .venv/.ready  ## the compiled kernels and the decoders on them under ASan and UBSan: hostile tests, then fuzzing for SECONDS
	$(BIN)/python -m tools.sanitize --seconds $(SECONDS)

wheels: .venv/.ready  ## build/wheels: the source distribution, and wheels for glibc and musl, x86-64 and ARM
	$(PIP) install -c constraints.txt -e '.[wheels]'
	$(BIN)/python native/wheels.py

fuzz: .venv/.ready  ## every decoder against mutated input for SECONDS
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP) install -c constraints.txt -e '.[fuzz]' || \
		echo "atheris cannot be installed here: inputs are mutated without a look at the code that they reach"
	$(BIN)/python -m tools.fuzz --seconds $(SECONDS)

clean:
	rm -rf .venv build demo-out bench-out .cache *.egg-info

