"""`check` beyond the tables: how they are stored, whether pruning keeps up, whether every handler is still known."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, insert, text, update
from sqlalchemy.orm import sessionmaker

from command import idempotency, on_a_terminal
from databases import Database
from marked import fill, metadata, on_one_database, one_of_each_engine, tables, url_of  # noqa: F401  # a fixture
from projector_dedup import AsyncDispatcher, Dispatcher, on, projector
from projector_dedup.asyncio_names import async_sessionmaker
from projector_dedup.dialects import configure_sqlite
from projector_dedup.dialects.columns import utc_now
from projector_dedup.late import REDELIVERY_HORIZON
from projector_dedup.maintenance.check import advise, check, check_handlers
from projector_dedup.maintenance.findings import Finding
from projector_dedup.maintenance.schema import require_tables
from projector_dedup.maintenance.state import CLEANED_AT, RETENTION, State, duration, write_state
from projector_dedup.maintenance.stats import Ages, ages

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


# Storage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_postgresql(postgresql: Database) -> Iterator[Engine]:
    """Our tables on PostgreSQL."""
    engine = create_engine(postgresql.url())
    metadata.create_all(engine)
    yield engine
    engine.dispose()


def run(engine: Engine, sql: str) -> None:
    """In a transaction of its own."""
    with engine.begin() as connection:
        connection.execute(text(sql))


def about(found: list[Finding], word: str) -> list[Finding]:
    """The findings with this word in them."""
    return [finding for finding in found if word in finding.problem]


def test_an_unlogged_table_is_fatal(on_postgresql: Engine) -> None:
    """A crash empties it, and every redelivery would be applied again; the remedy mends it. Cleanup still works."""
    assert about(check(on_postgresql, tables), "UNLOGGED") == []
    run(on_postgresql, "ALTER TABLE processed_message SET UNLOGGED")
    (finding,) = about(check(on_postgresql, tables), "UNLOGGED")
    assert finding.fatal
    done = idempotency("check", PROJECTOR_DEDUP_DATABASE_URL=url_of(on_postgresql))
    assert (done.returncode, "problem: processed_message is UNLOGGED" in done.stdout) == (1, True)
    require_tables(on_postgresql, tables)
    run(on_postgresql, finding.remedy.partition("; ")[2])
    assert about(check(on_postgresql, tables), "UNLOGGED") == []


def test_a_table_that_is_sound_is_left_alone(engine: Engine) -> None:
    """On a database as this version makes it, the markers just begun, there is nothing fatal and nothing of pruning."""
    metadata.create_all(engine)
    done = idempotency("check", "--json", PROJECTOR_DEDUP_DATABASE_URL=url_of(engine))
    assert (done.returncode, done.stderr) == (0, "")
    one = json.loads(done.stdout)
    assert one["ready"]
    assert not [finding for finding in one["findings"] if finding["fatal"] or "marker" in finding["problem"]]


# Pruning and horizon ---------------------------------------------------------------------------------------------


def deployment(oldest: float | None = 1, **state: float) -> Ages:
    """One whose oldest marker is so many hours old; ages and spans of its state in hours too."""
    moments = {name: NOW - timedelta(hours=state[name]) for name in ("cleaned_at", "pruned_until") if name in state}
    kept = state.get("retention_hours")
    at = None if oldest is None else NOW - timedelta(hours=oldest)
    known = State(state.get("horizon_hours"), kept, moments.get("cleaned_at"), moments.get("pruned_until"))
    return Ages(NOW, at, kept or 168, known, ())


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (deployment(None), None),
        (deployment(167), None),
        (deployment(169), "the oldest marker is 7 days old, and no complete cleanup was ever recorded"),
        (deployment(167 + 48, cleaned_at=5, retention_hours=168), None),
        (
            deployment(169 + 48, cleaned_at=5, retention_hours=168),
            "the oldest marker is 9 days old, but the retention is 168 hours; the last complete cleanup was 5 hours "
            "ago",
        ),
        (deployment(30, cleaned_at=47, retention_hours=1), None),
        (deployment(1, cleaned_at=49, retention_hours=1), "the last complete cleanup was 2 days ago"),
        (deployment(1, cleaned_at=335, retention_hours=168), None),
        (deployment(1, cleaned_at=337, retention_hours=168), "the last complete cleanup was 14 days ago"),
    ],
)
def test_pruning_that_does_not_keep_up(found: Ages, problem: str | None) -> None:
    """Advice from the edge on, and not a day before it; on an empty table there is nothing to prune."""
    assert [finding.problem for finding in advise(found)] == ([] if problem is None else [problem])
    assert not any(finding.fatal for finding in advise(found))


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (deployment(horizon_hours=200), None),
        (deployment(horizon_hours=168, retention_hours=168, cleaned_at=1, pruned_until=169), None),
        (
            deployment(horizon_hours=200, retention_hours=300, cleaned_at=1, pruned_until=150),
            "markers up to 2026-04-25 06:00:00 UTC are deleted, but a message may come again after 200 hours",
        ),
        (deployment(horizon_hours=200, retention_hours=300, cleaned_at=1, pruned_until=300), None),
    ],
)
def test_a_horizon_that_is_not_kept(found: Ages, problem: str | None) -> None:
    """What was pruned and may yet return is told; what is kept for longer than it needs is no matter."""
    problems = [finding.problem for finding in advise(found)]
    assert len(problems) == (problem is not None)
    assert problem is None or problems[0].startswith(problem)


def test_check_reads_what_cleanup_wrote(engine: Engine) -> None:
    """From the table of each database: an old marker, a short retention, a longer horizon."""
    metadata.create_all(engine)
    old = datetime.now(UTC) - timedelta(days=30)
    with engine.begin() as connection:
        connection.execute(insert(tables.marker), {"message_id": "1", "handler": "a.add", "processed_at": old})
    url = url_of(engine)
    assert "30 days old, and no complete cleanup was ever" in idempotency("check", "--database-url", url).stdout
    with engine.begin() as connection:
        values = {CLEANED_AT: datetime.now(UTC).isoformat(), RETENTION: "24", REDELIVERY_HORIZON: "48"}
        write_state(connection, tables, values)
    done = idempotency("check", "--database-url", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "30 days old, but the retention is 48 hours; the last complete cleanup was 0 minutes ago" in done.stdout


# Handlers --------------------------------------------------------------------------------------------------------


@projector(idempotent=True, name="totals")
class Totals:
    """Two handlers."""

    @on("added", name="add")
    def add(self, event: object, session: object) -> None:
        """Nothing."""

    @on("taken", name="take")
    def take(self, event: object, session: object) -> None:
        """Nothing."""


@projector(idempotent=True, name="awaited")
class Awaited:
    """One."""

    @on("added", name="add")
    async def add(self, event: object, session: object) -> None:
        """Nothing."""


def test_a_dispatcher_tells_what_its_handlers_are_called() -> None:
    """Sync and async."""
    assert Dispatcher(sessionmaker(), Totals()).identities == {"totals.add", "totals.take"}
    assert AsyncDispatcher(async_sessionmaker(), Awaited()).identities == {"awaited.add"}


def test_handlers_that_the_application_does_not_know(engine: Engine) -> None:
    """They are named, ten at most, with the command that mends it."""
    fill(engine, {"old\n.add": [1], **{f"old.{number:02}": [1] for number in range(11)}, "new.add": [1]})
    (finding,) = check_handlers(engine, {"new.add"}, tables=tables)
    assert finding.fatal
    assert finding.problem.endswith(
        ": old\\n.add, old.00, old.01, old.02, old.03, old.04, old.05, old.06, old.07, old.08 and 2 more"
    )
    assert "write @on(..., formerly=['old\\n.add']) for it, or run `idempotency rename OLD NEW" in finding.remedy
    known = {"new.add", "old\n.add", *(f"old.{number:02}" for number in range(11))}
    assert check_handlers(engine, known, tables=tables) == []
    fill(engine, {"count": [1]})
    (finding,) = check_handlers(engine, known, tables=tables)
    assert "write @projector(..., formerly=['count']) for it" in finding.remedy


APP = """
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from projector_dedup import Dispatcher, on, projector

@projector(idempotent=True, name="totals")
class Totals:
    @on("added", name="add")
    def add(self, event, session):
        pass

dispatcher = Dispatcher(sessionmaker(create_engine("sqlite://")), Totals())
number = 7

def make():
    return dispatcher

class Shop:
    dispatcher = dispatcher

def fails():
    raise RuntimeError("no settings for postgresql://app:s3cret@db/orders")

def needs(settings):
    return dispatcher
"""


@pytest.fixture
def app(tmp_path: Path) -> str:
    """A folder with the modules of an application in it."""
    folder = tmp_path / "app"
    (folder / "shop").mkdir(parents=True)
    (folder / "shop" / "__init__.py").touch()
    (folder / "shop" / "consumer.py").write_text(APP)
    (folder / "shop" / "broken.py").write_text("import no_such_dependency")
    return str(folder)


@pytest.mark.parametrize("place", ["shop.consumer:dispatcher", "shop.consumer:make", "shop.consumer:Shop.dispatcher"])
@on_one_database
def test_check_asks_the_application(place: str, app: str, engine: Engine) -> None:
    """A module of the current directory; a dispatcher, or a function that makes one."""
    metadata.create_all(engine)
    with engine.begin() as connection:
        keys = [{"message_id": "1", "handler": handler} for handler in ("totals.add", "shop.Totals.add")]
        connection.execute(insert(tables.marker), keys)
    done = idempotency("check", "--app", place, cwd=app, PROJECTOR_DEDUP_DATABASE_URL=url_of(engine))
    assert done.returncode == 1
    assert "problem: markers of handlers that the application does not have: shop.Totals.add\n" in done.stdout
    assert "idempotency rename OLD NEW" in done.stdout


@pytest.mark.parametrize(("formerly", "code"), [("", 1), ('formerly=["shop.Totals"]', 0)], ids=["without", "formerly"])
@on_one_database
def test_a_renamed_handler_is_a_problem_unless_it_has_its_former_name(
    formerly: str, code: int, app: str, engine: Engine
) -> None:
    """Its messages would be applied again; with `formerly` they are duplicates, and the exit code is 0."""
    fill(engine, {"shop.Totals.add": [1]})
    renamed = APP.replace('name="totals")', f'name="totals", {formerly})')
    (Path(app) / "renamed.py").write_text(renamed)
    done = idempotency("check", "--app", "renamed:dispatcher", cwd=app, PROJECTOR_DEDUP_DATABASE_URL=url_of(engine))
    assert (done.returncode, "is not ready" in done.stderr) == (code, code == 1)
    assert ("the application does not have: shop.Totals.add" in done.stdout) is (code == 1)


def test_handlers_without_times_are_named_before_any_cleanup(engine: Engine) -> None:
    """Afterwards it is too late for the messages whose markers are gone."""
    fill(engine, [1])
    (found,) = advise(ages(engine))
    assert "the messages of these handlers have no occurred_at: h" in found.problem


@on_one_database
def test_advice_can_ring_an_alarm(engine: Engine) -> None:
    """Beside markers that cleanup should have deleted, `--fail-on advice` exits with 1; where all is well, with 0."""
    configure_sqlite(engine)
    fill(engine, [1])
    with engine.begin() as connection:
        connection.execute(update(tables.marker).values(occurred_at=utc_now()))
    arguments = ["check", "--fail-on", "advice"]
    well = idempotency(*arguments, PROJECTOR_DEDUP_DATABASE_URL=url_of(engine))
    assert (well.returncode, well.stderr) == (0, "")
    fill(engine, {"old": [300 * 24]})
    rings = idempotency(*arguments, PROJECTOR_DEDUP_DATABASE_URL=url_of(engine))
    assert rings.returncode == 1
    assert "is ready, but follow the advice above" in rings.stderr
    assert "the oldest marker is 300 days old" in rings.stdout
    assert idempotency("check", PROJECTOR_DEDUP_DATABASE_URL=url_of(engine)).returncode == 0


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("shop.nothing:dispatcher", ["No module named 'shop.nothing'", "with its own Python"]),
        ("shop.broken:dispatcher", ["no_such_dependency"]),
        ("shop.consumer:dispatchr", ["AttributeError", "dispatchr"]),
        ("shop.consumer:number", ["is of type int", "Dispatcher"]),
        ("shop.consumer", ["is of type module", "Dispatcher"]),
        ("shop.consumer:dispatcher.x y", ["ValueError", "write it like myapp.consumer:dispatcher"]),
        ("shop.consumer:fails", ["RuntimeError: no settings"]),
        ("shop.consumer:needs", ["TypeError", "settings"]),
    ],
)
def test_an_application_that_cannot_be_asked(place: str, words: list[str], app: str, sqlite: Database) -> None:
    """One line, what to do, and no password; nothing is connected to before."""
    url = sqlite.url().render_as_string()
    done = idempotency("check", "--app", place, "--database-url", url, cwd=app)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in [f"--app {place}", *words])
    assert "s3cret" not in line
    debugged = idempotency("check", "--app", place, "--debug", "--database-url", url, cwd=app)
    assert "Traceback" in debugged.stderr
    assert "s3cret" not in debugged.stderr


# Output ----------------------------------------------------------------------------------------------------------


def test_json_has_the_problems_too(sqlite: Database) -> None:
    """Exit code 1, the document on stdout, the line for people on stderr."""
    engine = create_engine(sqlite.url())
    run(engine, "CREATE TABLE processed_message (message_id TEXT, handler TEXT)")
    done = idempotency("check", "--json", "--database-url", url_of(engine))
    assert done.returncode == 1
    one = json.loads(done.stdout)
    assert not one["ready"]
    assert {"problem", "remedy", "fatal"} == set(one["findings"][0])
    assert "is not ready" in done.stderr
    engine.dispose()


@pytest.mark.parametrize(
    ("hours", "said"),
    [
        (-0.001, "0 minutes"),
        (1 / 60, "1 minute"),
        (0.9, "54 minutes"),
        (1, "1 hour"),
        (47, "47 hours"),
        (48, "2 days"),
        (800, "33 days"),
    ],
)
def test_a_span_is_told_as_people_say_it(hours: float, said: str) -> None:
    """In one unit."""
    assert duration(timedelta(hours=hours)) == said


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_on_a_terminal_only(no_color: str, coloured: bool, sqlite: Database) -> None:
    """And not where NO_COLOR asks for none."""
    engine = create_engine(sqlite.url())
    metadata.create_all(engine)
    old = datetime.now(UTC) - timedelta(days=30)
    with engine.begin() as connection:
        connection.execute(insert(tables.marker), {"message_id": "1", "handler": "a.add", "processed_at": old})
    code, seen = on_a_terminal("check", "--database-url", url_of(engine), NO_COLOR=no_color)
    assert code == 0
    assert "advice" in seen
    assert ("\x1b[" in seen) is coloured
    assert "\x1b" not in idempotency("check", "--database-url", url_of(engine), FORCE_COLOR="1").stdout
    engine.dispose()
