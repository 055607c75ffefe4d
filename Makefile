# make demo and make test need nothing but Python 3.11 or 3.12 and the package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := fabric profiles policies roles deploy docs tests examples benchmarks

.PHONY: demo test check docs fuzz chaos bench fmt clean

# Nothing of a verdict is left to chance, not even the order of sets. `make fuzz` looks for what that leaves out.
test check: export PYTHONHASHSEED := 0
# The suite starts some thousand processes: each would compile all it imports where this is set.
test check fuzz chaos bench: export PYTHONDONTWRITEBYTECODE :=
RERUNS ?= 0
MINUTES ?= 10
RUNS ?= 5
SECONDS ?= 30
SEED ?= 0
HISTORIES ?= 1000
FIRST ?= 0
INPUTS ?= 1000000

# A stamp per set of extras: a machine that has the environment does not install again.
$(VENV)/demo.stamp: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else "Tenuto needs Python 3.11 or 3.12; say which with: make PYTHON=python3.11")'
	@echo "installing Tenuto and PyTorch into $(VENV): this takes some minutes, once"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[worker]'
	touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[plan,estimate,worker,gateway,plots,sweep,docs,test]'
	touch $@

$(VENV)/bench.stamp: $(VENV)/test.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[plan,estimate,worker,gateway,plots,sweep,docs,test,bench]'
	touch $@

demo: $(VENV)/demo.stamp  ## serve a trained model on real inputs, print what happened, stop
	$(BIN)/tenuto demo

test: $(VENV)/test.stamp  ## the whole suite: what needs no process of its own on all cores, then the rest, three at a time: they wait for half of their time
	$(BIN)/python -m pytest -n auto --ignore tests/integration
	$(BIN)/python -m pytest -n 3 --reruns $(RERUNS) tests/integration

check: $(VENV)/test.stamp  ## format, lint, types, unit and property tests: before every commit
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_rooms.py tests/unit tests/property

docs: $(VENV)/test.stamp  ## pages that are made from the code, then the site in build/site; a dead link is an error
	$(BIN)/python -m docs.generate
	$(BIN)/python -m mkdocs build --strict --quiet

fuzz: $(VENV)/test.stamp  ## property tests with new seeds for MINUTES, then INPUTS malformed ones for decoders and sockets; prints what makes a finding happen again
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)
	$(BIN)/python -m tests.malformed --inputs $(INPUTS)

chaos: $(VENV)/test.stamp  ## HISTORIES virtual ones from seed FIRST on, then RUNS of SECONDS with real processes from SEED on
	$(BIN)/python -m tests.chaos.virtual --first $(FIRST) --count $(HISTORIES)
	$(BIN)/python -m tests.chaos.live --runs $(RUNS) --seconds $(SECONDS) --seed $(SEED)

bench: $(VENV)/bench.stamp  ## every benchmark beside its rival, in its quick form; writes docs/results/benchmarks.md
	$(BIN)/python -m benchmarks.report

fmt: $(VENV)/test.stamp
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean:
	rm -rf $(VENV) build *.egg-info
