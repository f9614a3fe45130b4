"""`schema` and `check`: the SQL makes the tables that the library expects; of others, `check` says what mends them."""

import re
from collections.abc import Callable

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Column, Engine, MetaData, String, Table, Text, create_engine, event, func, select, text
from sqlalchemy.orm import sessionmaker

from alembic_project import run_python
from databases import Database
from marked import one_of_each_engine  # noqa: F401  # a fixture
from owning import (  # noqa: F401  # second_schema is a fixture
    TWICE,
    deliver,
    described,
    fatal,
    run_script,
    second_schema,
    state_of,
    twice,
)
from projector_dedup import Message, Outcome, make_tables
from projector_dedup.commands import make_command_tables
from projector_dedup.effects import make_effect_tables
from projector_dedup.errors import MissingTableError
from projector_dedup.http.parked import make_parked_tables
from projector_dedup.maintenance.check import check
from projector_dedup.maintenance.cleanup import count_expired, declare_horizon, prune, redelivery_horizon
from projector_dedup.maintenance.rows import find, forget, rename
from projector_dedup.maintenance.schema import ddl, require_tables
from projector_dedup.maintenance.state import write_state
from projector_dedup.maintenance.stats import ages, handlers_of
from projector_dedup.tables import DedupTables, ProcessedMessage, default_tables, key_tables
from projector_dedup.tables import default_metadata as metadata

# The SQL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_tables, make_command_tables, make_effect_tables, make_parked_tables])
def test_the_sql_makes_the_tables(engine: Engine, schema: str | None, make: Callable[..., DedupTables]) -> None:
    """Of any name, in any schema, side by side, as `create_all` makes them, and with the schema version."""
    default = make(MetaData()).marker.name
    for name, place in ((default, None), ("inbox", None), ("inbox2", schema), ("t" * 47, schema)):
        tables = make(MetaData(), name, place)
        run_script(engine, ddl(engine.dialect.name, tables))
        if name == default:  # the only table as yet
            with engine.connect() as connection:
                context = MigrationContext.configure(connection, opts={"compare_server_default": True})
                assert compare_metadata(context, tables.marker.metadata) == []
        made = described(engine, tables)
        assert twice(engine, tables) == TWICE
        assert fatal(engine, tables) == []
        assert state_of(engine, tables) == {"schema_version": str(tables.version)}
        tables.marker.metadata.drop_all(engine)
        tables.marker.metadata.create_all(engine)
        assert described(engine, tables) == made


def test_the_command_schema_prints_what_makes_the_tables(database: Database) -> None:
    """For the table that was asked for, with the rights that an application user needs."""
    done = run_python("-m", "projector_dedup", "schema", "--dialect", database.engine, "--table", "inbox")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"-- for {database.engine} (--dialect names another database: ")
    assert "-- GRANT SELECT, INSERT, UPDATE, DELETE ON inbox_state TO" in done.stdout
    engine = create_engine(database.url())
    run_script(engine, done.stdout)
    assert fatal(engine, make_tables(MetaData(), "inbox")) == []
    assert state_of(engine, make_tables(MetaData(), "inbox")) == {"schema_version": "2"}
    engine.dispose()


def test_a_name_that_is_too_long_is_told_in_one_line(sqlite: Database) -> None:
    """By every command that takes a name."""
    for command in (["schema"], ["check", "--database-url", sqlite.url().render_as_string()]):
        done = run_python("-m", "projector_dedup", *command, "--table", "t" * 48)
        assert done.returncode == 1
        assert done.stderr.startswith("Error: the name of the marker table must have 1 to 47 bytes, and ")
        assert len(done.stderr.splitlines()) == 1


# Versions --------------------------------------------------------------------------------------------------------


def make_tables_of_the_version_before(engine: Engine) -> DedupTables:
    """Make the tables as the code before made them; return what it claims in."""
    before = key_tables(MetaData(), "processed_message", None)
    run_script(engine, ddl(engine.dialect.name, before))
    run_script(engine, "UPDATE processed_message_state SET value = '1'")
    return before


def test_code_of_the_old_version_claims_after_an_upgrade(engine: Engine) -> None:
    """The SQL makes the new tables of the old ones; nothing that was claimed before or after is lost or doubled."""
    run_script(engine, ddl(engine.dialect.name))
    expected, version = described(engine), state_of(engine)
    metadata.drop_all(engine)
    before = make_tables_of_the_version_before(engine)
    assert deliver(engine, "before", before) is Outcome.APPLIED
    done = run_python("-m", "projector_dedup", "schema", "--upgrade", "--dialect", engine.dialect.name)
    run_script(engine, done.stdout)
    assert (described(engine), state_of(engine), fatal(engine)) == (expected, version, [])
    assert deliver(engine, "after", before) is Outcome.APPLIED
    for tables in (before, default_tables):
        assert {deliver(engine, each, tables) for each in ("before", "after")} == {Outcome.DUPLICATE}
    assert rows_of(engine, default_tables) == 2


def test_only_tables_that_have_changed_are_upgraded() -> None:
    """Those of commands and effects are the same as in the version before."""
    done = run_python("-m", "projector_dedup", "schema", "--upgrade", "--commands")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (
        *(0, "-- the tables of commands are the same as in the version before"),
    )


def test_everything_works_on_the_tables_of_the_version_before(engine: Engine) -> None:
    """What looks after the tables, too; `check` advises to upgrade them, and calls them ready."""
    make_tables_of_the_version_before(engine)
    assert deliver(engine, "1") is Outcome.APPLIED
    assert [each.digest for each in find(engine, "1")] == [None]
    assert rename(engine, "h", "new").copied == 1
    assert forget(engine, "1", handler="new") == 1
    for look in LOOKS[:-1]:
        look(engine)
    advice = [each.problem for each in check(engine) if not each.fatal and "processed_message" in each.problem]
    assert fatal(engine) == []
    assert advice == [
        "processed_message has no column digest",
        "processed_message is at schema version 1, and this code is for 2",
    ]
    with sessionmaker(engine)() as session:
        assert session.scalars(select(ProcessedMessage.message_id)).all() == ["1"]
        assert [each.handler for each in session.scalars(select(ProcessedMessage))] == ["h"]


def test_a_renamed_handler_compares_with_what_the_old_name_stored(engine: Engine) -> None:
    """`rename` copies the digest too, and `find` returns it."""
    metadata.create_all(engine)
    digest = bytes(range(32))
    assert deliver(engine, Message("1", {}, digest=digest)) is Outcome.APPLIED
    assert rename(engine, "h", "new").copied == 1
    assert [each.digest for each in find(engine, "1")] == [digest[:16].hex()] * 2


@pytest.mark.parametrize(
    ("written", "code", "problem"),
    [
        (None, 3, None),
        ("3", 3, None),
        ("2", 3, "advice"),
        ("1", 3, "works with version 2 too, but not with older ones; run `alembic upgrade heads`"),
        ("4", 3, "upgrade projector-dedup here"),
        ("x", 3, "another program wrote"),
    ],
)
def test_check_knows_two_versions(
    engine: Engine, written: str | None, code: int, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own and the one before, for rolling deploys; without a number the structure decides."""
    monkeypatch.setattr(DedupTables, "revisions", ("a revision",) * code)
    default_tables.marker.metadata.create_all(engine)
    with engine.begin() as connection:
        write_state(connection, default_tables, {"schema_version": written})
    found = [finding for finding in check(engine) if "schema version" in finding.problem]
    assert [finding.fatal for finding in found] == ([] if problem is None else [problem != "advice"])
    if problem in (None, "advice"):
        require_tables(engine, default_tables)
        return
    assert str(problem) in found[0].remedy
    for refused in LOOKS:
        with pytest.raises(MissingTableError, match=re.escape(str(problem))):
            refused(engine)


@pytest.mark.parametrize("version", [None, "1"], ids=["create_all", "schema"])
def test_columns_that_are_missing_are_told_before_anything_is_deleted(engine: Engine, version: str | None) -> None:
    """By one look, which names the column as `check` does, whether a version is stored or not."""
    default_tables.marker.metadata.create_all(engine)
    with engine.begin() as connection:
        write_state(connection, default_tables, {"schema_version": version})
        connection.execute(text("ALTER TABLE processed_message DROP COLUMN occurred_at"))
    for refused in LOOKS:
        with pytest.raises(MissingTableError, match="processed_message has no column occurred_at; write a migration"):
            refused(engine)
    assert fatal(engine) == ["processed_message has no column occurred_at"]


@pytest.mark.parametrize(
    "make", [make_command_tables, make_effect_tables, make_parked_tables], ids=lambda make: make.__name__
)
def test_a_table_of_another_kind_is_refused(engine: Engine, make: Callable[..., DedupTables]) -> None:
    """It has all columns of a marker; forgetting a "marker" would delete an answer, or an effect that is not sent."""
    its = make(MetaData(), "other")
    its.marker.metadata.create_all(engine)
    given = make_tables(MetaData(), "other")
    assert len(fatal(engine, given)) == 1
    for refused in LOOKS:
        with pytest.raises(MissingTableError, match="other is a table of another kind: it has the columns"):
            refused(engine, given)
    require_tables(engine, its)


def test_times_without_a_zone_are_refused(postgresql: Database) -> None:
    """Cleanup in a session with another zone would take new markers for old ones, and a message would count twice."""
    engine = create_engine(postgresql.url())
    default_tables.marker.metadata.create_all(engine)
    run_script(engine, "ALTER TABLE processed_message ALTER processed_at TYPE timestamp")
    for refused in LOOKS:
        with pytest.raises(MissingTableError, match=r"processed_message\.processed_at has no time zone"):
            refused(engine)
    engine.dispose()


def test_a_state_table_without_its_key_is_refused(engine: Engine) -> None:
    """It may have two horizons, and cleanup would keep the shorter one."""
    default_tables.marker.metadata.create_all(engine)
    run_script(engine, "DROP TABLE processed_message_state")
    Table("processed_message_state", MetaData(), Column("key", String(255)), Column("value", Text)).create(engine)
    for refused in LOOKS:
        with pytest.raises(MissingTableError, match=r"processed_message_state has no unique index over \(key\)"):
            refused(engine)


def test_no_marker_is_inserted_to_try_the_table(engine: Engine) -> None:
    """That is `check`'s, which somebody runs on purpose."""
    run_script(engine, ddl(engine.dialect.name))
    assert deliver(engine, "m1") is Outcome.APPLIED
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda _connection, _cursor, statement, *_: sent.append(statement))
    for look in LOOKS[:-1]:
        look(engine)
    rename(engine, "h", "new", dry_run=True)
    assert [each for each in sent if each.startswith("INSERT INTO processed_message ")] == []


LOOKS: list[Callable[..., object]] = [
    lambda engine, tables=default_tables: prune(engine, tables=tables),
    lambda engine, tables=default_tables: count_expired(engine, tables=tables),
    lambda engine, tables=default_tables: declare_horizon(engine, 24, tables=tables),
    lambda engine, tables=default_tables: forget(engine, "nobody", tables=tables),
    lambda engine, tables=default_tables: rename(engine, "a", "b", tables=tables),
]
"""What looks at the tables once, before it changes or counts anything."""


def test_a_missing_table_is_named(engine: Engine) -> None:
    """With what creates it, instead of a driver's error; also by what only reads."""
    for refused in (*LOOKS, redelivery_horizon, ages, handlers_of, lambda engine: find(engine, "1")):
        with pytest.raises(MissingTableError, match=r"processed_message is missing.*make_tables.*idempotency schema"):
            refused(engine)


# What is wrong with tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_tables, make_command_tables, make_effect_tables, make_parked_tables])
def test_create_all_yields_the_same(engine: Engine, make: Callable[..., DedupTables]) -> None:
    """`create_all`, under any name, leaves nothing for `check` to say that matters, and `check` leaves no row."""
    tables = make(MetaData(), name="inbox")
    tables.marker.metadata.create_all(engine)
    assert fatal(engine, tables) == []
    require_tables(engine, tables)
    assert rows_of(engine, tables) == 0


def rows_of(engine: Engine, tables: DedupTables) -> int | None:
    """How many rows there are, as another connection sees them."""
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(tables.marker))


@pytest.mark.parametrize(
    ("make", "column", "kinds"),
    [
        (make_tables, "digest", {"postgresql": "text", "mariadb": "BINARY(20)"}),
        (make_command_tables, "result", {"postgresql": "text", "mariadb": "BLOB"}),  # 64 KiB less one byte
        (make_command_tables, "result", {"mariadb": "LONGTEXT"}),
        (make_command_tables, "fingerprint", {"postgresql": "varchar(16)", "mariadb": "BINARY(16)"}),
        (
            make_command_tables,
            "codec",
            {"postgresql": "varchar(32)", "mariadb": "VARBINARY(32)", "sqlite": "VARCHAR(32)"},
        ),
        (make_command_tables, "codec", {"postgresql": "bytea", "mariadb": "INT"}),
        (make_command_tables, "codec", {"postgresql": "char(80)", "mariadb": "BINARY(80)"}),  # pads
        (make_command_tables, "outcome", {"sqlite": "TEXT"}),  # gives back a text
        (
            make_effect_tables,
            "processed_at",
            {"postgresql": "timestamptz NOT NULL DEFAULT now()", "mariadb": "DATETIME(6) NOT NULL"},
        ),
        (
            make_effect_tables,
            "processed_at",
            {"sqlite": "DATETIME DEFAULT CURRENT_TIMESTAMP", "mariadb": "DATETIME(6) DEFAULT now()"},
        ),
        (make_effect_tables, "evidence", {"postgresql": "text", "mariadb": "BLOB"}),
        (
            make_effect_tables,
            "provider_key",
            {"postgresql": "varchar(20)", "mariadb": "VARBINARY(20)", "sqlite": "VARCHAR(20)"},
        ),
        (make_effect_tables, "armed_at", {"postgresql": "integer", "mariadb": "INT"}),
        (make_parked_tables, "body", {"postgresql": "text", "mariadb": "BLOB"}),
        (make_parked_tables, "reason", {"postgresql": "varchar(20)", "mariadb": "VARCHAR(20)"}),
    ],
)
def test_a_column_that_changes_what_it_keeps_is_found(
    engine: Engine, make: Callable[..., DedupTables], column: str, kinds: dict[str, str]
) -> None:
    """A row is tried out: cut, converted or refused, it is not given back as it was, or has an age too early."""
    kind = kinds.get(engine.dialect.name)
    if kind is None:
        pytest.skip("no other type of this kind")
    tables = make(MetaData())
    script = ddl(engine.dialect.name, tables)
    line = next(each for each in script.splitlines() if each.strip().replace("`", "").startswith(f"{column} "))
    run_script(engine, script.replace(line, f"{column} {kind},"))
    (problem,) = fatal(engine, tables)
    name = tables.marker.name
    assert problem.startswith((name, f"no {tables.noun} could be inserted to try {name}"))
    assert ("is not NULL in a row without an outcome" in problem) is (column == "processed_at")
    assert rows_of(engine, tables) == 0


@pytest.mark.parametrize(
    ("ddl", "problem"),
    [
        ("SELECT 1", "is missing"),
        ("CREATE TABLE processed_message (message_id TEXT, handler TEXT)", "has no column processed_at"),
        (
            "CREATE TABLE processed_message (message_id TEXT, handler TEXT, processed_at TIMESTAMP, "
            "occurred_at TIMESTAMP)",
            "has no unique index over (message_id, handler)",
        ),
    ],
)
def test_check_says_what_is_wrong(engine: Engine, ddl: str, problem: str) -> None:
    """A table that would fail, or worse would let duplicates pass, is found, with the remedy."""
    with engine.begin() as connection:
        connection.execute(text(ddl))
    findings = [finding for finding in check(engine) if problem in finding.problem]
    assert findings
    assert findings[0].fatal
    assert findings[0].remedy


@pytest.mark.parametrize(
    ("ids", "names", "default", "problem"),
    [
        ("TEXT COLLATE NOCASE", "TEXT", "CURRENT_TIMESTAMP", "treats different message ids or handlers as equal"),
        ("TEXT", "TEXT COLLATE NOCASE", "CURRENT_TIMESTAMP", "treats different message ids or handlers"),
        ("TEXT UNIQUE", "TEXT", "CURRENT_TIMESTAMP", "treats different message ids or handlers"),
        ("TEXT", "TEXT", "(datetime('now', '-3 days'))", "processed_at is not the time"),
    ],
)
def test_check_tries_the_table_out(sqlite: Database, ids: str, names: str, default: str, problem: str) -> None:
    """A table that takes "a" and "A" for one, or whose rows are old at once, would lose or double messages."""
    engine = create_engine(sqlite.url())
    with engine.begin() as connection:
        connection.execute(
            text(
                f"CREATE TABLE processed_message (message_id {ids}, handler {names}, "
                f"processed_at TIMESTAMP DEFAULT {default}, occurred_at TIMESTAMP, "
                "PRIMARY KEY (message_id, handler))"
            )
        )
        connection.execute(text("CREATE TABLE processed_message_state (key TEXT PRIMARY KEY, value TEXT)"))
    assert any(problem in finding.problem for finding in check(engine) if finding.fatal)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM processed_message")) == 0
    engine.dispose()


WRONG = {
    "processed_at timestamptz": "processed_at may be NULL",
    "processed_at timestamp NOT NULL": "processed_at has no time zone",
}


@pytest.mark.parametrize("column", WRONG)
def test_moments_that_could_not_be_compared_are_found(postgresql: Database, column: str) -> None:
    """A marker without a moment is never pruned; one without a zone by whoever's zone it is."""
    engine = create_engine(postgresql.url())
    with engine.begin() as connection:
        metadata.create_all(connection)
        connection.execute(text(f"ALTER TABLE processed_message DROP COLUMN processed_at, ADD COLUMN {column}"))
    assert WRONG[column] in " ".join(finding.problem for finding in check(engine) if finding.fatal)
    engine.dispose()


def test_a_user_who_may_not_write_is_not_ready(postgresql: Database) -> None:
    """Deliveries would fail, so it is a problem, in the server's words."""
    owner = create_engine(postgresql.url())
    metadata.create_all(owner)
    with owner.begin() as connection:
        connection.execute(text("GRANT USAGE ON SCHEMA public TO pg_monitor"))
        connection.execute(text("GRANT SELECT ON processed_message, processed_message_state TO pg_monitor"))
    owner.dispose()
    engine = create_engine(postgresql.url(), connect_args={"options": "-c role=pg_monitor"})
    finding, *others = [each for each in check(engine) if each.fatal]
    assert others == []
    assert "permission denied" in finding.problem
    assert "INSERT" in finding.remedy
    engine.dispose()
