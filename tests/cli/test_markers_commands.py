"""`show` and `forget`: the markers of one message."""

import hashlib
import json
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, create_engine, insert, select
from sqlalchemy.orm import sessionmaker

from command import idempotency, on_a_terminal
from marked import metadata, on_one_database, one_of_each_engine, tables, url_of  # noqa: F401  # a fixture
from projector_dedup import Dispatcher, Message, Outcome, on, projector
from projector_dedup.errors import InvalidMessageIdError
from projector_dedup.late import PRUNED_UNTIL
from projector_dedup.maintenance.cleanup import declare_horizon
from projector_dedup.maintenance.rows import find, forget
from projector_dedup.maintenance.state import write_state
from projector_dedup.message import stored_id

ODD = "pay\nment 1\u202e"
HOUR = timedelta(hours=1)
DIGEST = hashlib.sha256(b"{}").digest()[:16]


def fill(engine: Engine, *keys: tuple[str, str]) -> datetime:
    """Markers of an hour ago; when they were processed."""
    metadata.create_all(engine)
    at = (datetime.now(UTC) - HOUR).replace(microsecond=0)
    with engine.begin() as connection:
        connection.execute(
            insert(tables.marker),
            [
                {
                    "message_id": message_id,
                    "handler": handler,
                    "processed_at": at,
                    "occurred_at": at - HOUR,
                    "digest": DIGEST if handler != "b.add" else None,
                }
                for message_id, handler in keys
            ],
        )
    return at


def left(engine: Engine) -> set[tuple[str, str]]:
    """What another connection sees."""
    other = create_engine(engine.url)
    with other.connect() as connection:
        rows = connection.execute(select(tables.marker.c.message_id, tables.marker.c.handler)).all()
    other.dispose()
    return {(row.message_id, row.handler) for row in rows}


def test_find_gives_the_markers_of_that_message_only(engine: Engine) -> None:
    """By handler, with the moments as they are, in UTC; an id that looks alike is another."""
    at = fill(engine, ("1", "b.add"), ("1", "a.add"), ("01", "a.add"), ("1 ", "a.add"))
    found = find(engine, "1", tables=tables)
    assert [(each.message_id, each.handler) for each in found] == [("1", "a.add"), ("1", "b.add")]
    for each in found:
        assert (each.processed_at, each.occurred_at) == (at, at - HOUR)
        assert HOUR <= each.age < HOUR + timedelta(minutes=2)
    assert find(engine, "2", tables=tables) == []


def test_forget_deletes_the_markers_of_that_message_only(engine: Engine) -> None:
    """And says how many there were."""
    fill(engine, ("1", "b.add"), ("1", "a.add"), ("01", "a.add"), ("1 ", "a.add"))
    assert forget(engine, "1", tables=tables) == 2
    assert left(engine) == {("01", "a.add"), ("1 ", "a.add")}
    assert forget(engine, "1", tables=tables) == 0


def test_forget_of_one_handler(engine: Engine) -> None:
    """The others keep their marker."""
    fill(engine, ("1", "b.add"), ("1", "a.add"))
    assert forget(engine, "1", handler="a.add", tables=tables) == 1
    assert forget(engine, "1", handler="B.add", tables=tables) == 0
    assert left(engine) == {("1", "b.add")}


def test_what_was_forgotten_is_applied_again(engine: Engine) -> None:
    """That is what it is for."""
    metadata.create_all(engine)
    runs = []

    @projector(idempotent=True, name="counting")
    class Counting:
        @on("payment", name="add")
        def add(self, event: object, _session: object) -> None:
            runs.append(event)

    dispatcher = Dispatcher(sessionmaker(engine), Counting(), tables=tables)
    outcomes = []
    for forgotten in (False, False, True, False):
        if forgotten:
            assert forget(engine, "1", handler="counting.add", tables=tables) == 1
        outcomes.append(dispatcher.deliver(Message("1", {}, type="payment")).outcome)
    applied, duplicate = Outcome.APPLIED, Outcome.DUPLICATE
    assert outcomes == [applied, duplicate, applied, duplicate]
    assert len(runs) == 2


def test_what_is_no_id_is_refused(engine: Engine) -> None:
    """As a claim would refuse it."""
    for function in (find, forget):
        with pytest.raises(InvalidMessageIdError, match="must not be empty"):
            function(engine, "", tables=tables)


# The commands ----------------------------------------------------------------------------------------------------


@on_one_database
def test_show_prints_a_line_for_each_handler(engine: Engine) -> None:
    """Ids and names with control characters are escaped: they must not forge a line."""
    at = fill(engine, (ODD, "a\t.add"), (ODD, "b.add"))
    done = idempotency("show", ODD, PROJECTOR_DEDUP_DATABASE_URL=url_of(engine))
    assert (done.returncode, done.stderr) == (0, "")
    title, header, *rows = done.stdout.splitlines()
    assert title == r"Message pay\nment 1\u202e:"
    assert header.split() == ["handler", "processed", "(UTC)", "age", "occurred", "(UTC)", "digest"]
    moments = [f"{moment:%Y-%m-%d %H:%M:%S}" for moment in (at, at - HOUR)]
    digests = [hashlib.sha256(b"{}").hexdigest()[:12], "-"]  # as sha256sum prints it
    for row, name, digest in zip(rows, [r"a\t.add", "b.add"], digests, strict=True):
        assert row.startswith(f"{name} ")
        assert row.split()[-1] == digest
        assert all(moment in row for moment in moments)


@on_one_database
def test_a_message_of_a_source_is_shown_and_forgotten_by_its_source(engine: Engine) -> None:
    """Or by the stored id, which the log lines contain; the same id without a source is another message."""
    stored = stored_id("7", "payments")
    where = {"PROJECTOR_DEDUP_DATABASE_URL": url_of(engine)}
    fill(engine, (stored, "a.add"), ("7", "b.add"))
    shown = idempotency("show", "7", "--source", "payments", **where)
    assert shown.stdout.startswith("Message 7 of source payments:")
    assert "a.add" in shown.stdout
    assert "b.add" not in shown.stdout
    assert "a.add" in idempotency("show", stored, **where).stdout
    lacking = idempotency("show", "7", "--source", "refunds", **where)
    assert lacking.returncode == 1
    assert "no marker of message 7 of source refunds" in lacking.stderr
    done = idempotency("forget", "7", "--source", "payments", "--yes", **where)
    assert done.returncode == 0, done.stderr
    assert left(engine) == {("7", "b.add")}
    for arguments, says in (
        (("show", "7", "--source", ""), "must not be empty"),
        (("show", "k", "--source", "payments", "--commands"), "--source is only for messages"),
    ):
        wrong = idempotency(*arguments, **where)
        assert wrong.returncode == 2
        assert says in wrong.stderr


@on_one_database
def test_show_prints_json(engine: Engine) -> None:
    """With the id as it is."""
    at = fill(engine, (ODD, "a.add"))
    done = idempotency("show", ODD, "--json", PROJECTOR_DEDUP_DATABASE_URL=url_of(engine))
    one = json.loads(done.stdout)
    (marker,) = one["markers"]
    assert (one["message_id"], marker["handler"], marker["processed_at"]) == (ODD, "a.add", at.isoformat())
    assert marker["digest"] == DIGEST.hex()


@pytest.mark.parametrize("command", [["show"], ["forget", "--yes"]], ids=" ".join)
@on_one_database
def test_a_message_that_is_not_there(command: list[str], engine: Engine) -> None:
    """Exit code 1, and why that may be; since when markers are gone, if that is known."""
    fill(engine, ("1", "a.add"))
    with engine.begin() as connection:
        write_state(connection, tables, {PRUNED_UNTIL: "2026-01-02T03:04:05+00:00"})
    done = idempotency(*command, "2\n", PROJECTOR_DEDUP_DATABASE_URL=url_of(engine))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert r"no marker of message 2\n in " in line
    assert "before 2026-01-02 03:04:05 UTC" in line
    assert "case and white space count" in line
    assert left(engine) == {("1", "a.add")}


@on_one_database
def test_forget_says_what_a_redelivery_will_do(engine: Engine) -> None:
    """It shows what it deletes, and whom a redelivery will reach."""
    fill(engine, ("1", "a.add"), ("1", "b.add"), ("2", "a.add"))
    done = idempotency("forget", "1", "--yes", "--handler", "b.add", PROJECTOR_DEDUP_DATABASE_URL=url_of(engine))
    assert (done.returncode, done.stderr) == (0, "")
    assert "Message 1 was applied by:" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        "Deleted 1 marker. A redelivery is applied again, by b.add, unless one of these remaining names is a name of "
        "that handler too: a.add."
    )
    assert left(engine) == {("1", "a.add"), ("2", "a.add")}


@on_one_database
def test_forget_of_a_handler_without_a_marker(engine: Engine) -> None:
    """The handler is named; the others keep their marker."""
    fill(engine, ("1", "a.add"))
    done = idempotency("forget", "1", "--yes", "--handler", "b.add", PROJECTOR_DEDUP_DATABASE_URL=url_of(engine))
    assert done.returncode == 1
    assert "no marker of message 1 and handler b.add" in done.stderr
    assert left(engine) == {("1", "a.add")}


@on_one_database
@pytest.mark.parametrize(("answer", "code", "stays"), [("y\n", 0, False), ("\n", 1, True)])
def test_forget_asks_on_a_terminal(answer: str, code: int, stays: bool, engine: Engine) -> None:
    """Only a yes deletes."""
    fill(engine, ("1", "a.add"))
    ended, seen = on_a_terminal("forget", "1", "--database-url", url_of(engine), types=answer)
    assert ended == code
    assert "a.add" in seen
    assert "Delete these markers?" in seen
    assert ("nothing was deleted" in seen) is stays
    assert bool(left(engine)) is stays


@on_one_database
@pytest.mark.parametrize("arguments", [("forget", "1"), ("horizon", "1"), ("rename", "h", "i", "--remove-old")])
def test_a_question_wants_somebody_to_ask(engine: Engine, arguments: tuple[str, ...]) -> None:
    """In a pipe the command line has to answer; at a terminal, nobody's answer is no bug of ours."""
    fill(engine, ("1", "h"))
    declare_horizon(engine, 5)
    done = idempotency(*arguments, "--database-url", url_of(engine))
    assert (done.returncode, "add --yes" in done.stderr) == (2, True)
    code, seen = on_a_terminal(*arguments, "--database-url", url_of(engine), types="\x04")
    assert code == 1
    assert "Interrupted." in seen
    assert left(engine) == {("1", "h")}


@on_one_database
def test_no_command_changes_the_journal_of_a_file(engine: Engine) -> None:
    """That is its owner's to choose; `check` advises."""
    fill(engine, ("1", "h"))
    for arguments in (["check"], ["show", "1"], ["cleanup"]):
        done = idempotency(*arguments, "--database-url", url_of(engine))
        assert done.returncode == 0
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete"
