"""Everybody, by name, in the order in which tables show them."""

from __future__ import annotations

from importlib import import_module

from ..harness import Contender
from ..servers import DRIVERS
from . import by_hand, library
from .model import Total, upsert

BASE = "no dedup, ORM"
BASE_UPSERT = "no dedup, Core upsert"
DEFAULT = "deliver"
UPSERT, UPSERT_RC = "deliver, Core upsert", "deliver, upsert, R. C."
READ_MODELS = "deliver, read_models"
BATCH_100, BATCH_1000 = "deliver_batch, 100", "deliver_batch, 1000"
SHARED_100, SHARED_1000 = "deliver_batch, 100 shared", "deliver_batch, 1000 shared"
ROWS_ONCE, ONE_STATEMENT = "batch handler 1000, ORM", "batch handler 1000, 1 SQL"
ASYNC = {driver: f"AsyncDispatcher, {driver}" for driver in ("psycopg", "asyncpg")}
BASE_ASYNC = {driver: f"no dedup, async {driver}" for driver in ASYNC}
SELECT_INSERT, ON_CONFLICT = by_hand.SelectThenInsert.name, by_hand.InsertOnConflict.name
CTE, SET_BASED = "psycopg, one CTE", "psycopg, set of 1000"
PROTEAN, EVENTSOURCING = "Protean, idempotent", "eventsourcing, tracking"

_NEED_MORE = ("asynchronous", "raw", "protean_projector", "eventsourcing_recorder")
MISSING: dict[str, str] = {}  # who could not be imported, and why


def everybody() -> dict[str, Contender]:
    """Every contender that can be imported here."""
    found: list[Contender] = [
        by_hand.NoDedup(BASE),
        library.Deliver("deliver, not idempotent", idempotent=False),
        library.Deliver(DEFAULT),
        library.Deliver("deliver, reads", reads=True),
        library.Deliver("deliver, strict", strict=True),
        library.Deliver(READ_MODELS, read_models=[Total]),
        library.Deliver("deliver, claim_timeout", claim_timeout=1.0),
        library.Deliver("deliver, engine events", listened=True),
        library.BareClaim(),
        library.DeliverBatch(BATCH_100, 100),
        library.DeliverBatch(BATCH_1000, 1_000),
        library.shared(SHARED_100, 100),
        library.shared(SHARED_1000, 1_000),
        library.rows_once(ROWS_ONCE, 1_000),
        library.one_statement(ONE_STATEMENT, 1_000),
        by_hand.NoDedup(BASE_UPSERT, upsert),
        library.core_upsert(UPSERT),
        library.core_upsert(UPSERT_RC, "READ COMMITTED"),
        by_hand.SelectThenInsert(),
        by_hand.InsertOnConflict(),
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
