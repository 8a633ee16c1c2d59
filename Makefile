PYTHON ?= python3
# One worker a core; `make test PYTEST_ARGS=-x` for one process and the like.
PYTEST_ARGS ?= --numprocesses auto --dist worksteal
# The tests of the core itself: neither of the command line and the kit, nor through real pipelines.
CORE_TESTS := $(addprefix tests/,accelerator backends hooks mixins residency selection) $(wildcard tests/test_*.py)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SIM := $(VENV)/.sim
SIM_SOURCES := $(wildcard omni_offload/testing/sim/csrc/*) omni_offload/testing/sim/build.py

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all coverage mutants check format bench docs wheel clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

setup: $(READY) $(SIM)  ## make .venv with everything, and build the simulated accelerator

demo: $(READY) $(SIM)  ## make a picture on an accelerator smaller than the pipeline's weights
	@$(BIN)/omni-offload run digits --prompt seven

test: $(READY) $(SIM)  ## the tests, but for the exhaustive ones
	$(BIN)/python -m pytest -m "not exhaustive" $(PYTEST_ARGS)

test-all: $(READY) $(SIM)  ## all tests, coverage and mutants (long)
	$(BIN)/python -m pytest $(PYTEST_ARGS)
	$(MAKE) coverage
	$(MAKE) mutants

coverage: $(READY) $(SIM)  ## the core's branch coverage by its own tests that do the same in every run; less than all of it fails
	$(BIN)/python -m pytest $(CORE_TESTS) -m "not exhaustive and not rotating and not traced" --cov --cov-report=term $(PYTEST_ARGS)
	@echo "left out on purpose:"; grep -rn "pragma: no cover" omni_offload --include='*.py' --exclude-dir=testing --exclude-dir=cli || echo "  nothing"

mutants: $(READY) $(SIM)  ## change the core one line at a time; a named test must notice each
	$(BIN)/python tests/mutation/run_mutants.py

check: $(READY)  ## linter, formatter, types, import ladder
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## format the code, and correct what the linter can
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

bench: $(READY) $(SIM)  ## the benchmarks in virtual time, which write docs/benchmarks/ and the README's table
	$(BIN)/python tests/benchmarks/model_level.py --write
	$(BIN)/python docs/readme_table.py
	$(BIN)/python tests/benchmarks/layerwise_bound.py --write
	TORCH_CPP_LOG_LEVEL=ERROR $(BIN)/python tests/benchmarks/distributed_bound.py --write

docs: $(READY)  ## the documentation, in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

wheel: $(READY)  ## the wheel, in dist/
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

clean:  ## remove what was built here
	rm -rf $(VENV) dist build site outputs *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# A newer pip is not needed, and its notices are not for the user of this Makefile.
$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; some minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is too old: Python 3.11 or newer is needed; set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Without a compiler there is no simulated accelerator: what needs it says so, and the demo runs on the CPU.
define BUILD_SIM
from omni_offload.errors import OffloadError
from omni_offload.testing import sim
try:
    sim.install()
except OffloadError as error:
    print(f"not built: {error}")
endef
export BUILD_SIM

$(SIM): $(READY) $(SIM_SOURCES)
	@echo "building the simulated accelerator (once; about 20 s)"
	@$(BIN)/python -c "$$BUILD_SIM"
	@touch $@
