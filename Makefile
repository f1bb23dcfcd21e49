# Two commands matter: `make demo` and `make test`. Each does all its own set-up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_FLAGS ?= -n auto --dist loadfile

# One thread for each process: the tests start several processes for each core as it is.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo test nightly lint ruff types imports tree clean

help:
	@echo "make demo     compile a small Llama, train it on 4 processes, prove it equal to the model, draw it"
	@echo "make test     run the tests"
	@echo "make nightly  10,000 random cases of parity, and the slow tests; some hours"
	@echo "make lint     ruff, mypy --strict, import contracts"
	@echo "make install  set up .venv with the pinned versions and the hgc command ($(BIN)/hgc)"

install: $(STAMP)

$(STAMP): setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hgc needs Python 3.11 or newer; $(PYTHON) is older: run make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m hgc.tools.demo out

test: $(STAMP)
	@$(BIN)/python -m pytest $(PYTEST_FLAGS)

# Another seed each night: NIGHTLY_SEED=7 repeats one. Both parts run, and the night fails if one does.
NIGHTLY_SEED ?= $(shell date +%Y%m%d)
NIGHTLY_CASES ?= 10000
NIGHTLY_JOBS ?= $(shell nproc)
nightly: $(STAMP)
	@mkdir -p out
	@$(BIN)/hgc bench parity --cases $(NIGHTLY_CASES) --seed $(NIGHTLY_SEED) --jobs $(NIGHTLY_JOBS) --json out/parity.json; \
	  cases=$$?; $(BIN)/python -m pytest $(PYTEST_FLAGS) -m slow && exit $$cases

# mypy and import-linter read files and do not know setup.py's mapping, so they are shown the tree as it is when installed.
tree:
	@rm -rf build/tree && mkdir -p build/tree/hgc
	@cd build/tree/hgc && ln -s ../../../hgc/[!_]* ../../../hgc/_[!_]* ../../../hgc/__init__.py ../../../passes ../../../backends ../../../tools .

lint: ruff types imports

ruff: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP) tree
	@cd build/tree && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p hgc

imports: $(STAMP) tree
	@cd build/tree && ../../$(BIN)/lint-imports --no-logo --cache-dir ../../.import_linter_cache ../../.importlinter

clean:
	rm -rf build out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
