"""The commands for tables of commands: `--commands` on each, `show` and `forget` of a key."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from click.testing import CliRunner
from projector_dedup.cli.main import main
from sqlalchemy import Engine, create_engine, select, update
from sqlalchemy.orm import Session, sessionmaker

from command import idempotency
from databases import Database
from marked import on_one_database
from projector_dedup.commands import Begun, Call, Commands, Rejected, begin_command, command, raw
from projector_dedup.commands import default_command_tables as tables
from projector_dedup.late import PRUNED_UNTIL
from projector_dedup.maintenance.state import write_state
from projector_dedup.tables import default_tables

ANSWER = {"order": 7, "note": "grün\u202e"}
WITH_COMMANDS = ["check", "cleanup", "forget", "horizon", "rename", "schema", "show"]


@command(name="shop.place")
def place(asked: dict[str, int], call: Call) -> dict[str, Any]:
    """Answer with a word that is not ASCII; or reject."""
    assert call.key is not None
    if asked["amount"] > 100:
        raise Rejected("insufficient_funds", {"missing": asked["amount"] - 100})
    return ANSWER


@command(name="shop.cancel", default=lambda _asked, _call: "cancelled")
def cancel(asked: dict[str, int], call: Call) -> str:
    """Answer nothing that is stored."""
    return f"{asked}{call.key}"


@command(name="shop.picture", codec=raw)
def picture(asked: dict[str, int], call: Call) -> bytes:
    """Answer bytes that are no text."""
    assert call.key is not None
    return bytes([255, asked["amount"]])


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    """An engine on each database, with the tables of commands in it."""
    engine = create_engine(database.url())
    tables.marker.metadata.create_all(engine)
    yield engine
    engine.dispose()


def handle(engine: Engine, operation: Any, key: str, scope: str | None = None, amount: int = 1) -> None:
    """Handle one command."""
    Commands(sessionmaker(engine)).handle(operation, {"amount": amount}, key=key, scope=scope)


def left(engine: Engine) -> list[tuple[str, str]]:
    """The key and the operation of each record, as another connection sees them."""
    other = create_engine(engine.url)
    with other.connect() as connection:
        rows = connection.execute(select(tables.marker.c.message_id, tables.marker.c.handler)).all()
    other.dispose()
    return sorted((row.message_id, row.handler) for row in rows)


def ask(engine: Engine, *arguments: str) -> tuple[int, str, str]:
    """Run the command on the database with --commands: its exit code, and what it prints."""
    url = engine.url.render_as_string(hide_password=False)
    done = idempotency(*arguments, "--commands", PROJECTOR_DEDUP_DATABASE_URL=url)
    return done.returncode, done.stdout, done.stderr


def test_tables_of_commands_beside_those_of_projectors_are_named(engine: Engine) -> None:
    """Also where those of projectors are missing; not where those of commands are meant, or are not there."""
    hint = " The tables of commands are here too: run this command with --commands for them."
    url = engine.url.render_as_string(hide_password=False)

    def said() -> str:
        return idempotency("check", PROJECTOR_DEDUP_DATABASE_URL=url).stdout

    assert hint in said()
    default_tables.marker.metadata.create_all(engine)
    assert hint in said()
    assert hint not in ask(engine, "check")[1]
    tables.marker.drop(engine)
    assert "Next: " in (last := said())
    assert hint not in last


@pytest.mark.parametrize("name", sorted(main.commands))
def test_help_names_the_option(name: str) -> None:
    """Every command that is about tables has it, with the name that it stands for."""
    answer = CliRunner().invoke(main, [name, "--help"], terminal_width=80).output
    assert ("--commands" in answer) is (name in WITH_COMMANDS)
    assert ("processed_command" in answer) is (name in WITH_COMMANDS)


# Tables ----------------------------------------------------------------------------------------------------------


def test_tables_are_checked_and_cleaned(database: Database) -> None:
    """`check`, `cleanup`, `horizon` and `rename`, each on processed_command, in its own words."""
    engine = create_engine(database.url())
    code, _, wrong = ask(engine, "check")
    assert code == 1
    assert "there is no file" in wrong or "is not ready" in wrong
    tables.marker.metadata.create_all(engine)
    assert "processed_command is ready.\n" in ask(engine, "check")[1]
    handle(engine, place, "k", "s")
    assert ask(engine, "rename", "shop.place", "shop.order")[1] == (
        "Copied 1 record of shop.place to shop.order; 0 were there already.\n"
    )
    assert ask(engine, "horizon", "24")[1] == "The redelivery horizon is 24 hours.\n"
    assert "24 hours" in ask(engine, "cleanup", "--retention-hours", "1")[2]
    with engine.begin() as connection:
        connection.execute(update(tables.marker).values(processed_at=datetime(2020, 1, 1, tzinfo=UTC)))
    assert "the oldest record is " in ask(engine, "check")[1]
    only = ask(engine, "cleanup", "--operation", "shop.order")
    assert only == (0, "Deleted 1 record of shop.order older than 24 hours.\n", "")
    assert left(engine) == [("1:sk", "shop.place")]
    engine.dispose()


@on_one_database
def test_schema_prints_the_tables(database: Database) -> None:
    """Of the name that was given, or processed_command."""
    for options, name in (([], "processed_command"), (["--table", "orders"], "orders")):
        done = idempotency("schema", "--commands", "--dialect", database.engine, *options)
        assert f"CREATE TABLE {name} (" in done.stdout
        assert "outcome" in done.stdout


@on_one_database
def test_a_record_without_an_outcome_is_shown_as_one(engine: Engine) -> None:
    """It answers nobody. --app is of projectors."""
    with Session(engine) as session:
        assert isinstance(begin_command(session, place, {"amount": 1}, key="k"), Begun)
        session.commit()
    assert "no outcome" in ask(engine, "show", "k")[1]
    assert ask(engine, "check", "--app", "a:b")[0] == 2


# Records ---------------------------------------------------------------------------------------------------------


@on_one_database
def test_show_tells_what_was_answered(engine: Engine) -> None:
    """State, moment, size and codec of each operation; with --result what is stored, which cannot forge a line."""
    for operation, key, scope, amount in (
        (place, "k", "tenant", 1),
        (cancel, "k", "tenant", 1),
        (place, "poor", None, 150),
        (picture, "bytes", None, 1),
    ):
        handle(engine, operation, key, scope, amount)
    code, said, wrong = ask(engine, "show", "k", "--scope", "tenant")
    assert (code, wrong) == (0, "")
    title, header, *rows = said.splitlines()
    assert title == "Key k in scope tenant:"
    assert header.split() == ["operation", "state", "recorded", "(UTC)", "bytes", "codec"]
    assert rows[0].startswith("shop.cancel  result not stored  ")
    assert rows[1].startswith("shop.place   result  ")
    assert rows[1].endswith(
        f"  {len(json.dumps(ANSWER, ensure_ascii=False, separators=(',', ':')).encode())}  typed-json"
    )

    said = ask(engine, "show", "k", "--scope", "tenant", "--operation", "shop.place", "--result")[1]
    assert "shop.cancel" not in said
    assert said.endswith('Stored by shop.place:\n{\n  "order": 7,\n  "note": "grün\\u202e"\n}\n')
    assert "Stored by shop.cancel:\nnothing\n" in ask(engine, "show", "k", "--scope", "tenant", "--result")[1]
    said = ask(engine, "show", "poor", "--result")[1]
    assert "  rejected  " in said
    assert '"code": "insufficient_funds"' in said
    assert said.startswith("Key poor:\n")
    assert ask(engine, "show", "bytes", "--result")[1].endswith("Stored by shop.picture:\nff01\n")

    one = json.loads(ask(engine, "show", "k", "--scope", "tenant", "--json", "--result")[1])
    assert (one["key"], one["scope"], one["table"]) == ("k", "tenant", "processed_command")
    assert [(each["operation"], each["state"], each["bytes"] is None) for each in one["records"]] == [
        ("shop.cancel", "result not stored", True),
        ("shop.place", "result", False),
    ]
    assert one["records"][1]["result"] == ANSWER


@on_one_database
def test_a_key_that_is_not_there(engine: Engine) -> None:
    """Exit code 1, and why that may be: pruned, another scope, another operation."""
    handle(engine, place, "k", "tenant")
    with engine.begin() as connection:
        write_state(connection, tables, {PRUNED_UNTIL: "2026-01-02T03:04:05+00:00"})
    for arguments, words in (
        (["show", "k"], "no record of key k in "),
        (["show", "k", "--scope", "t"], "no record of key k in scope t in "),
        (
            ["forget", "k", "--yes", "--scope", "tenant", "--operation", "shop.cancel"],
            "no record of key k in scope tenant and operation shop.cancel in ",
        ),
    ):
        code, _, wrong = ask(engine, *arguments)
        (line,) = wrong.splitlines()
        assert (code, words in line) == (1, True)
        assert "before 2026-01-02 03:04:05 UTC" in line
    assert left(engine) == [("6:tenantk", "shop.place")]


@on_one_database
def test_forget_frees_a_key(engine: Engine) -> None:
    """Of one operation in one scope, which must be said; the command is handled again then."""
    for scope in ("a", "ab", None):
        handle(engine, place, "k", scope)
    handle(engine, cancel, "k", "a")
    code, _, wrong = ask(engine, "forget", "k", "--scope", "a", "--yes")
    assert (code, "give the --operation of the key" in wrong) == (2, True)
    code, said, _ = ask(engine, "forget", "k", "--scope", "a", "--operation", "shop.place", "--yes")
    assert code == 0
    assert "Key k in scope a was handled by:" in said
    assert said.splitlines()[-1] == (
        "Deleted 1 record. A command with this key is handled again, by shop.place, unless one of these remaining "
        "names is a name of that operation too: shop.cancel."
    )
    assert left(engine) == [("0:k", "shop.place"), ("1:ak", "shop.cancel"), ("2:abk", "shop.place")]
    handle(engine, place, "k", "a")
    assert len(left(engine)) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "k", "--scope", "s"], "add --commands"),
        (["show", "k", "--result"], "add --commands"),
        (["forget", "--yes"], "Missing argument 'ID'"),
        (["forget", "k", "--commands", "--yes"], "give the --operation"),
        (["forget", "k", "--commands", "--scope", "", "--yes"], "an empty text"),
        (["forget", "--commands", "", "--operation", "o", "--yes"], "an empty text"),
        (["show", "k", "--commands", "--scope", "s" * 512], "at most 512 bytes"),
        (["show", "k" * 512, "--commands"], "at most 512 bytes"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_wrong_command_line(arguments: list[str], words: str) -> None:
    """Exit code 2 before a database is opened, and what to say instead."""
    answer = CliRunner().invoke(main, [*arguments, "--database-url", "sqlite:////no/such.db"])
    assert answer.exit_code == 2
    assert words in " ".join(answer.output.split())
