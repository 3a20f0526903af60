# Everything a user needs from a checkout. Each target sets up what it needs in a virtual environment of its own.
PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= mpich,image,dev
RANKS  ?= 1 2 3 4
WORKERS ?= 2
NUM     ?= 100
SEED    ?= 0
# Many tests wait for programs or for threads: more at a time than there are cores. Those of the inner loop wait less.
WAITERS ?= 4
QUICK_PARTS ?= 3
WHEEL_TESTS ?=

READY   := $(VENV)/.ready
RUN     := PATH="$(abspath $(VENV))/bin:$$PATH"
# Tests use one thread each: many are processes and threads of their own.
THREADS := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# Hundreds of tests start Python, which without bytecode compiles all of the package each time.
unexport PYTHONDONTWRITEBYTECODE
export EXTRAS RANKS WAITERS WORKERS WHEEL_TESTS

.PHONY: help setup train docs test test-quick test-fast test-programs mutants fuzz test-mpi test-wheel lint types clean

help:  ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet -e ".[$(EXTRAS)]"
	@touch $@

setup: $(READY)  ## Make the virtual environment with dbrdist, MPI and the tools.

train: $(READY)  ## Train a network on real images with two ranks; ends with the test accuracy.
	$(RUN) mpiexec -n 2 dbrdist-train --overwrite examples/digits/config.yaml

# The suites stand in tests/suites.py: single tests that fail are repeated once and counted, and a suite that fails does
# not stop the next one. What failed is listed at the end.
SUITES := $(PYTHON) tests/suites.py --venv main=$(VENV)

test: $(READY)  ## Pass all tests: the fast suite, programs, then real MPI with 1 to 4 ranks; what failed is listed last.
	$(SUITES) fast programs mpi

test-quick: $(READY)  ## The inner loop: the fast suite without slow tests, and each value of a test's axes once.
	$(RUN) $(THREADS) python tests/parts.py $(QUICK_PARTS) tests -q --quick

test-fast: $(READY)  ## All tests but those of programs and of MPI; the tests for GPUs run on a stand-in for CuPy.
	$(SUITES) fast

test-programs: $(READY)  ## The tests that start programs: jobs of real ranks, dbrdist-launch, scripts, loaders, compilers.
	$(SUITES) programs

fuzz: $(READY)  ## Try random programs, runs and jobs against independent expectations; NUM of each, from SEED on.
	$(RUN) $(THREADS) PYTHONPATH="$(CURDIR):$(CURDIR)/launch" sh -c '\
	  python -m tests.fuzz.numerics --cases $(NUM) --seed $(SEED) && \
	  python -m tests.fuzz.runs --jobs $(NUM) --seed $(SEED) && \
	  python -m tests.fuzz.launcher --jobs $(NUM) --seed $(SEED) && \
	  python -m tests.fuzz.ranks --jobs $(NUM) --seed $(SEED)'

test-mpi: $(READY)  ## The MPI suite with each number of ranks.
	$(SUITES) mpi

mutants: $(READY)  ## Break the code at 100 random places, one by one, and list what no test notices; takes hours.
	$(RUN) $(THREADS) nice -n 19 python tests/rules/mutants.py --workers $(WORKERS) --record

# As users install it, far from the sources: `pip install .` compiles what every step goes through.
test-wheel:  ## Install dbrdist as users do, compiled, in an environment of its own, and pass the tests of what is compiled.
	$(PYTHON) tests/suites.py --venv wheel=$(VENV)-wheel wheel

lint: $(READY)  ## Style and format.
	$(RUN) ruff check .
	$(RUN) ruff format --check .

types: $(READY)  ## Types of the core, the communicators and the launcher.
	$(RUN) mypy

$(VENV)/.docs: pyproject.toml $(READY)
	$(VENV)/bin/python -m pip install --quiet -e ".[docs]"
	@touch $@

docs: $(VENV)/.docs  ## Build the documentation site in site/ and check its links; only the first time needs the network.
	$(RUN) python packaging/site/build.py

clean:  ## Remove the virtual environment and caches.
	rm -rf $(VENV) $(VENV)-wheel .pytest_cache .mypy_cache .ruff_cache build dist site
