"""Settings of a session that change what statements do: each one changes nothing here, or the error names it.

The settings come as a deployment makes them: by `init_command` on MariaDB, by `options` on PostgreSQL.
"""

from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from databases import DRIVERS, USUAL_DRIVERS, Driver
from projector_dedup import Message
from projector_dedup.errors import RetriesExhaustedError, UnsafeSessionError
from projector_dedup.maintenance.cleanup import prune
from projector_dedup.maintenance.rows import forget
from projector_dedup.options import RetryPolicy
from projector_dedup.verdict import Action, verdict_of
from rig import NOTHING, Durable, Rig, RigOn, add

MARIADB = [driver for driver in DRIVERS if driver.engine == "mariadb"]
PSYCOPG = next(driver for driver in USUAL_DRIVERS if driver.module == "psycopg")

MODES = ["", "ANSI", "ANSI_QUOTES", "EMPTY_STRING_IS_NULL", "HIGH_NOT_PRECEDENCE", "IGNORE_SPACE", "MSSQL"]
MODES += ["NO_BACKSLASH_ESCAPES", "ONLY_FULL_GROUP_BY", "ORACLE", "PAD_CHAR_TO_FULL_LENGTH", "PIPES_AS_CONCAT"]
MODES += ["SIMULTANEOUS_ASSIGNMENT", "TIME_ROUND_FRACTIONAL"]

FINE_ON_MARIADB = [f"sql_mode = '{mode}'" for mode in MODES]
FINE_ON_MARIADB += ["autocommit = 0", "autocommit = 1", "sql_safe_updates = 1", "completion_type = 1"]
FINE_ON_MARIADB += ["unique_checks = 0", "foreign_key_checks = 0", "sql_auto_is_null = 1", "time_zone = '+05:00'"]
FINE_ON_MARIADB += ["NAMES latin1", "character_set_results = NULL", "sql_big_selects = 0", "max_sort_length = 64"]
FINE_ON_MARIADB += ["tx_isolation = 'READ-UNCOMMITTED'", "div_precision_increment = 0", "group_concat_max_len = 4"]

FINE_ON_POSTGRESQL = ["transform_null_equals=on", "standard_conforming_strings=off", "backslash_quote=off"]
FINE_ON_POSTGRESQL += ["IntervalStyle=sql_standard", "TimeZone=Asia/Kathmandu", "bytea_output=escape"]
FINE_ON_POSTGRESQL += ["row_security=off", "default_transaction_isolation=serializable", "enable_seqscan=off"]
FINE_ON_POSTGRESQL += ["default_transaction_deferrable=on", "session_replication_role=replica", "lock_timeout=100"]
FINE_ON_POSTGRESQL += ["client_encoding=LATIN1", "exit_on_error=on"]
FINE_ON_POSTGRESQL += ["plan_cache_mode=force_generic_plan", "gin_fuzzy_search_limit=1", "extra_float_digits=0"]


def set_by_deployment(driver: Driver, setting: str) -> dict[str, Any]:
    """The arguments of an engine whose sessions begin with the setting."""
    given = {"options": f"-c {setting}"} if driver is PSYCOPG else {"init_command": f"SET {setting}"}
    return {"connect_args": given}


def message(message_id: str) -> Message:
    """One of an even number has a time."""
    occurred_at = datetime.now(UTC) if message_id[-1] in "02468" else None
    return Message(message_id, {"account": "a"}, type="added", occurred_at=occurred_at)


def deliver(rig: Rig, *message_ids: str, **options: Any) -> list[str]:
    """The outcomes of a batch, which may be one of a single message."""
    delivered = rig._dispatcher(add, **options).deliver_batch([message(each) for each in message_ids])
    return [each.outcome.value for each in rig.result(delivered)]


CASES = [
    (each, setting) for each in MARIADB for setting in (FINE_ON_MARIADB if each in USUAL_DRIVERS else ["NAMES latin1"])
]
CASES += [(PSYCOPG, setting) for setting in FINE_ON_POSTGRESQL]


@pytest.mark.parametrize(("driver", "setting"), CASES, ids=str)
def test_a_setting_changes_nothing(rig_on: RigOn, driver: Driver, setting: str) -> None:
    """Single messages, duplicates, batches, a bounded claim, cleanup and forgetting do what they do without it."""
    rig = rig_on(driver, **set_by_deployment(driver, setting))
    bounded = {} if setting == "lock_timeout=100" else {"claim_timeout": 1.0}
    assert [*deliver(rig, "m1"), *deliver(rig, "m1")] == ["applied", "duplicate"]
    assert deliver(rig, "\u00e92", **bounded) == ["applied"]
    assert deliver(rig, "m1", "m3", "m4", "\u00e92") == ["duplicate", "applied", "applied", "duplicate"]
    assert rig.durable() == Durable(4, 4)
    if driver.is_async:
        return
    rig.outside.execute("update processed_message set processed_at = '2026-01-01' where message_id = 'm1'")
    assert prune(rig.sync_engine, retention_hours=168).deleted == 1
    assert forget(rig.sync_engine, "m3") == 1
    assert rig.durable() == Durable(2, 4)


@pytest.mark.parametrize("limit", [1, 1000])
@pytest.mark.parametrize("driver", MARIADB, ids=str)
def test_a_limit_of_rows_is_refused(rig_on: RigOn, driver: Driver, limit: int) -> None:
    """`sql_select_limit` hides markers and settings from whoever reads them, so deliveries and cleanup name it."""
    rig = rig_on(driver, **set_by_deployment(driver, f"sql_select_limit = {limit}"))
    with pytest.raises(UnsafeSessionError, match="SET sql_select_limit = DEFAULT") as refused:
        rig.deliver(add)
    assert verdict_of(refused.value).action is Action.RETRY_LATER
    assert rig.durable() == NOTHING
    if not driver.is_async:
        with pytest.raises(UnsafeSessionError, match="SET sql_select_limit = DEFAULT"):
            prune(rig.sync_engine, retention_hours=168)


LATER = [
    (driver, setting)
    for driver in MARIADB
    if driver in USUAL_DRIVERS
    for setting in (
        "max_join_size = 1",
        "tx_read_only = 1",
        "max_session_mem_used = 8192",
    )
]
LATER += [
    (PSYCOPG, setting)
    for setting in (
        "default_transaction_read_only=on",
        "array_nulls=off",
        "client_encoding=SQL_ASCII",
        "search_path=pg_catalog",
    )
]


def failure(rig: Rig, *message_ids: str) -> Exception | None:
    """The error of a delivery, or None."""
    try:
        deliver(rig, *message_ids, retry=RetryPolicy(attempts=2, base=0.0005))
    except Exception as error:  # noqa: BLE001  # any error has a verdict
        return error
    return None


@pytest.mark.parametrize(("driver", "setting"), LATER, ids=str)
def test_a_setting_that_prevents_deliveries_makes_no_poison(rig_on: RigOn, driver: Driver, setting: str) -> None:
    """Whatever the server refuses because of it, no message is rejected, and no marker is there without its write."""
    rig = rig_on(driver, **set_by_deployment(driver, setting))
    raised = [failure(rig, "m1"), failure(rig, "m1", "m3", "m5")]
    assert any(raised)
    assert Action.REJECT not in [verdict_of(error).action for error in raised if error is not None]
    durable = rig.durable()
    assert durable.markers == durable.amount


TIMEOUTS = [(PSYCOPG, "statement_timeout=250", "pg_sleep(60)")]
TIMEOUTS += [(driver, "max_statement_time = 0.25", "sleep(60)") for driver in MARIADB if driver in USUAL_DRIVERS]


@pytest.mark.parametrize(("driver", "setting", "sleep"), TIMEOUTS, ids=str)
def test_a_statement_timeout_makes_no_poison(rig_on: RigOn, driver: Driver, setting: str, sleep: str) -> None:
    """The server cancels a statement of the handler: the message is not rejected, and nothing is applied."""
    rig = rig_on(driver, **set_by_deployment(driver, setting))

    def slow(session: Session) -> None:
        add(session)
        session.execute(text(f"select {sleep}"))

    refused = pytest.raises((OperationalError, RetriesExhaustedError), match=r"statement timeout|max_statement_time")
    with refused as raised:
        rig.deliver(slow, retry=RetryPolicy(attempts=2, base=0.0005))
    assert verdict_of(raised.value).action is not Action.REJECT
    assert rig.durable() == NOTHING
