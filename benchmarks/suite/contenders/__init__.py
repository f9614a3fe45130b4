"""Everybody, by name, in the order in which tables show them."""

from __future__ import annotations

from importlib import import_module

from ..harness import Contender
from ..servers import DRIVERS
from . import orm

BASE = "no dedup, ORM"
BASE_UPSERT = "no dedup, Core upsert"
DEFAULT = "deliver"
UPSERT, UPSERT_RC = "deliver, Core upsert", "deliver, upsert, R. C."
READ_MODELS = "deliver, read_models"
BATCH_100, BATCH_1000 = "deliver_batch, 100", "deliver_batch, 1000"
ROWS_ONCE, ONE_STATEMENT = "batch handler 1000, ORM", "batch handler 1000, 1 SQL"
ASYNC = {driver: f"AsyncDispatcher, {driver}" for driver in ("psycopg", "asyncpg")}
BASE_ASYNC = {driver: f"no dedup, async {driver}" for driver in ASYNC}
SELECT_INSERT, ON_CONFLICT = orm.SelectThenInsert.name, orm.InsertOnConflict.name
CTE, SET_BASED = "psycopg, one CTE", "psycopg, set of 1000"
PROTEAN, EVENTSOURCING = "Protean, idempotent", "eventsourcing, tracking"

_NEED_MORE = ("asynchronous", "raw", "protean_projector", "eventsourcing_recorder")
MISSING: dict[str, str] = {}  # who could not be imported, and why


def everybody() -> dict[str, Contender]:
    """Every contender that can be imported here."""
    found: list[Contender] = [
        orm.NoDedup(BASE),
        orm.Deliver("deliver, not idempotent", declared={"idempotent": False}),
        orm.Deliver(DEFAULT),
        orm.Deliver("deliver, strict", strict=True),
        orm.Deliver(READ_MODELS, declared={"read_models": [orm.Total]}),
        orm.Deliver("deliver, claim_timeout", claim_timeout=1.0),
        orm.BareClaim(),
        orm.Deliver(BATCH_100, size=100),
        orm.Deliver(BATCH_1000, size=1_000),
        orm.Deliver(ROWS_ONCE, orm.rows_once, size=1_000, batch=True),
        orm.Deliver(ONE_STATEMENT, orm.one_statement, size=1_000, batch=True),
        orm.NoDedup(BASE_UPSERT, orm.upsert),
        orm.Deliver(UPSERT, orm.upsert),
        orm.Deliver(UPSERT_RC, orm.upsert, isolation="READ COMMITTED"),
        orm.SelectThenInsert(),
        orm.InsertOnConflict(),
    ]
    for module in _NEED_MORE:
        try:
            found += import_module(f".{module}", __name__).contenders()
        except ImportError as error:
            MISSING[module] = str(error)
    return {contender.name: contender for contender in found}


def on_engine(engine: str) -> dict[str, Contender]:
    """Those that run there."""
    assert engine in DRIVERS
    return {name: contender for name, contender in everybody().items() if engine in contender.engines}
