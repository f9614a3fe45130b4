"""The tables of effects: the ways to own them, what `check` finds wrong with them, and what is never deleted."""

from datetime import UTC, datetime

import pytest
from sqlalchemy import Engine, select, text, update
from sqlalchemy.orm import Session, sessionmaker

from marked import one_of_each_engine  # noqa: F401  # a fixture
from owning import (  # noqa: F401  # second_schema is a fixture
    TWICE,
    charge,
    fatal,
    run_script,
    second_schema,
    twice,
)
from projector_dedup.dialects.columns import utc_now
from projector_dedup.effects import Effects, arm, default_effect_tables
from projector_dedup.errors import RefusedError
from projector_dedup.maintenance.cleanup import count_expired, prune
from projector_dedup.maintenance.rows import forget, rename
from projector_dedup.maintenance.stats import ages

TABLE = default_effect_tables.marker


def armed(engine: Engine, key: str, scope: str | None = None) -> None:
    """Arm an effect."""
    with Session(engine) as session, session.begin():
        arm(session, charge, 3, key=key, scope=scope)


def rows(engine: Engine) -> list[tuple[str, str]]:
    """The key and the name of each effect, as another connection sees them."""
    with engine.connect() as connection:
        found = connection.execute(select(TABLE.c.message_id, TABLE.c.handler)).all()
    return sorted((row.message_id, row.handler) for row in found)


@pytest.fixture
def owned(engine: Engine) -> Engine:
    """An engine on a database that has the tables of effects."""
    default_effect_tables.marker.metadata.create_all(engine)
    return engine


def test_what_is_not_finished_is_never_deleted(owned: Engine) -> None:
    """By cleanup, which counts it as of no age; by forget, which names it."""
    effects = Effects(sessionmaker(owned), [charge])
    effects.run(charge, 3, key="done", scope="s")
    for key in ("k1", "k2"):
        armed(owned, key, "s")
    with owned.begin() as connection:
        connection.execute(update(TABLE).values(armed_at=0))
        old = datetime(2020, 1, 1, tzinfo=UTC)
        connection.execute(update(TABLE).where(TABLE.c.outcome.is_not(None)).values(processed_at=old))
    assert ages(owned, tables=default_effect_tables).oldest == old
    assert count_expired(owned, tables=default_effect_tables) == 1
    assert prune(owned, tables=default_effect_tables).deleted == 1
    assert prune(owned, tables=default_effect_tables).deleted == 0
    assert ages(owned, tables=default_effect_tables).oldest is None
    with pytest.raises(RefusedError, match=r"shop\.charge: an unfinished effect cannot be deleted"):
        forget(owned, "1:sk1", handler="shop.charge", tables=default_effect_tables)
    assert len(rows(owned)) == 2
    effects.settle()
    assert forget(owned, "1:sk1", handler="shop.charge", tables=default_effect_tables) == 1
    assert rows(owned) == [("1:sk2", "shop.charge")]


def test_a_renamed_effect_is_moved_with_its_provider_key(owned: Engine) -> None:
    """It is sent once, under the key that it had; not while an attempt runs, and not beside a twin."""
    armed(owned, "k")
    with owned.connect() as connection:
        key = connection.execute(select(TABLE.c.provider_key)).scalar_one()
    with pytest.raises(RefusedError, match="cannot be copied to another name"):
        rename(owned, "shop.charge", "new", tables=default_effect_tables)
    with owned.begin() as connection:
        connection.execute(update(TABLE).values(lease_until=2**45))
    with pytest.raises(RefusedError, match=r"with the name shop\.charge is running"):
        rename(owned, "shop.charge", "new", tables=default_effect_tables, remove_old=True)
    with owned.begin() as connection:
        connection.execute(update(TABLE).values(lease_until=None))
    assert rename(owned, "shop.charge", "new", tables=default_effect_tables, remove_old=True).removed == 1
    assert rows(owned) == [("0:k", "new")]
    armed(owned, "k")
    for old_is_done in (False, True):
        if old_is_done:
            with owned.begin() as connection:
                done = {"outcome": 1, "processed_at": utc_now(), "next_at": None}
                connection.execute(update(TABLE).where(TABLE.c.handler == "shop.charge").values(done))
        with pytest.raises(RefusedError, match="exists with the new name too"):
            rename(owned, "shop.charge", "new", tables=default_effect_tables, remove_old=True)
        assert rows(owned) == [("0:k", "new"), ("0:k", "shop.charge")]
    with owned.connect() as connection:
        moved = connection.execute(text("SELECT provider_key FROM external_effect WHERE handler = 'new'"))
        assert moved.scalar_one() in (key, key.encode())
