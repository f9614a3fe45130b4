"""`idempotency rebuild`: a recipe that one follows with a terminal, its exit codes, and what it says at each step."""

import importlib
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from projector_dedup.cli.main import main
from sqlalchemy import Engine, create_engine, select, text

from projector_dedup import Message
from projector_dedup.maintenance.cleanup import prune
from projector_dedup.maintenance.rebuilds import open_rebuilds
from projector_dedup.tables import default_metadata, default_tables

APPLICATION = """
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from projector_dedup import AsyncDispatcher, Dispatcher, Message, on, projector
from projector_dedup.building import building

archive = [Message(f"p{number:02}", number, "paid") for number in range(12)]

refunds = [Message("r01", 1, "refunded")]


def opened():
    return iter(archive)


def kept(table, fails=()):
    def keep(number, session):
        if number in fails:
            raise ValueError(f"number {number} is not understood")
        session.execute(text(f"INSERT INTO {table} VALUES (:number)"), {"number": number})

    async def keep_async(number, session):
        await session.execute(text(f"INSERT INTO {table} VALUES (:number)"), {"number": number})

    return keep, keep_async


def named(name, handler):
    return projector(idempotent=True, name=name)(on("paid")(handler))


factory = sessionmaker(create_engine("sqlite:///shop.db"))
old, new, failing = named("totals", kept("old")[0]), named("totals-2", kept("new")[0]), kept("new", {4, 7})[0]
before = Dispatcher(factory, old)
during = Dispatcher(factory, old, building(new, beside="totals"))
failing = Dispatcher(factory, old, building(named("totals-2", failing), beside="totals"))
after = Dispatcher(factory, old, new)


def during_async():
    factory = async_sessionmaker(create_async_engine("sqlite+aiosqlite:///shop.db"))
    new = building(named("totals-2", kept("new")[1]), beside="totals")
    return AsyncDispatcher(factory, named("totals", kept("old")[1]), new)
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The folder of an application, whose old generation has applied twelve payments."""
    monkeypatch.chdir(tmp_path)
    Path("shop.py").write_text(APPLICATION, encoding="utf-8")
    engine = create_engine("sqlite:///shop.db")
    default_metadata.create_all(engine)
    with engine.begin() as connection:
        for table in ("old", "new"):
            connection.execute(text(f"CREATE TABLE {table} (number INTEGER)"))
    monkeypatch.syspath_prepend(str(tmp_path))
    application = importlib.import_module("shop")
    for message in application.archive:
        application.before.deliver(message)
    yield engine
    engine.dispose()
    sys.modules.pop("shop")


def run(*arguments: str) -> Result:
    """`idempotency rebuild` of the new generation."""
    return CliRunner().invoke(main, ["rebuild", "--projector", "totals-2", *arguments])


def numbers(engine: Engine, table: str) -> list[int]:
    """The rows of a read model, sorted."""
    with engine.connect() as connection:
        return sorted(connection.scalars(text(f"SELECT number FROM {table}")))


def is_open(engine: Engine) -> bool:
    """True while the rebuild is open."""
    with engine.connect() as connection:
        return bool(open_rebuilds(connection, default_tables))


@pytest.mark.parametrize("during", ["shop:during", "shop:during_async"])
def test_the_recipe(shop: Engine, during: str) -> None:
    """Rebuild, verify too early, take building away, verify, and switch."""
    done = run("--app", during, "--source", "shop:archive", "--batch-size", "5")
    assert done.exit_code == 0, done.output
    assert "12 applied, 0 applied before, 0 not handled by totals-2, 0 failed." in done.stdout
    assert "Next: remove building(...) everywhere" in done.stdout
    early = run("--app", during, "--verify", "--settle", "0")
    assert early.exit_code == 1
    assert "totals-2 has 12 of 12 messages of the old generation, 0 lacking. It has 0 messages without" in early.stdout
    assert (
        "no message is lacking, but the projector is still building: remove building(...) around totals-2"
        in early.stderr
    )
    assert is_open(shop)
    verified = run("--app", "shop:after", "--verify")
    assert (verified.exit_code, verified.stderr) == (0, "")
    assert "Next: switch the reads." in verified.stdout
    assert not is_open(shop)
    assert numbers(shop, "new") == numbers(shop, "old") == list(range(12))
    again = run("--app", "shop:after", "--verify", "--beside", "totals", "--json")
    answer = json.loads(again.stdout)
    assert (answer["ready"], answer["old"], answer["number"], answer["building"]) == (True, 12, 0, False)


def test_what_is_lacking_is_named(shop: Engine) -> None:
    """A message that fails ends the run, or is named; either way a verification finds it."""
    ended = run("--app", "shop:failing", "--source", "shop:archive", "--batch-size", "6")
    assert ended.exit_code == 1
    assert "message p04 was not applied: ValueError: number 4 is not understood." in ended.stderr
    assert "--keep-going" in ended.stderr
    done = run("--app", "shop:failing", "--source", "shop:opened", "--batch-size", "5", "--keep-going")
    assert done.exit_code == 1
    assert "failed: message p04: ValueError: number 4 is not understood\n" in done.stderr
    assert "2 messages failed, see above" in done.stderr
    found = run("--app", "shop:after", "--verify", "--settle", "0")
    assert found.exit_code == 1
    assert "10 of 12 messages of the old generation, 2 lacking" in found.stdout
    assert "  lacking: p04\n  lacking: p07\n" in found.stdout
    mended = run("--app", "shop:during", "--source", "shop:opened", "--json")
    facts = json.loads(mended.stdout)
    assert mended.exit_code == 0
    assert (facts["read"], facts["applied"], facts["complete"]) == (12, 2, True)
    assert run("--app", "shop:after", "--verify").exit_code == 0
    assert numbers(shop, "new") == list(range(12))


def test_cleanup_says_what_it_keeps(shop: Engine) -> None:
    """And the markers of a rebuild that has ended are kept for no longer."""
    url = "sqlite:///shop.db"
    assert run("--app", "shop:during", "--source", "shop:archive", "--limit", "3").exit_code == 0
    with shop.begin() as connection:
        connection.execute(default_tables.marker.update().values(processed_at=datetime(2026, 1, 1, tzinfo=UTC)))
    kept = CliRunner().invoke(main, ["cleanup", "--database-url", url])
    assert (
        "Deleted 0 markers older than 168 hours. Kept the markers of open rebuilds: totals-2 (finish them by `"
        in kept.stdout
    )
    as_json = CliRunner().invoke(main, ["cleanup", "--database-url", url, "--log-json"])
    assert json.loads(as_json.stdout)["rebuilds"] == ["totals-2"]
    with shop.begin() as connection:
        state = default_tables.state
        its = state.c.key == "rebuild:totals-2"
        value = json.loads(str(connection.scalar(select(state.c.value).where(its))))
        older = json.dumps(value | {"opened": "2026-01-01T00:00:00.000000+00:00"})
        connection.execute(state.update().where(its).values(value=older))
    checked = CliRunner().invoke(main, ["check", "--database-url", url])
    assert checked.exit_code == 0
    assert "advice: a rebuild of totals-2 has been open for" in checked.stdout
    with shop.begin() as connection:
        connection.execute(default_tables.state.delete().where(its))
    assert prune(shop).deleted == 15
    nothing = run("--app", "shop:after", "--verify", "--beside", "totals")
    assert nothing.exit_code == 1
    assert "the old generation has no marker, so the command could not compare anything" in nothing.stderr
    dispatcher = sys.modules["shop"].after
    dispatcher.deliver(Message("p99", 99, "paid"))
    unknown = run("--app", "shop:after", "--verify", "--beside", "totals")
    assert unknown.exit_code == 1
    assert "the markers of earlier messages were deleted" in unknown.stderr
    assert run("--app", "shop:after", "--verify", "--beside", "totals", "--source-vouches").exit_code == 0


@pytest.mark.usefixtures("shop")
def test_a_wrong_command_line_says_what_to_do() -> None:
    """One of two; a place that can be imported; a projector that is there."""
    assert run("--app", "shop:during").exit_code == 2
    assert run("--app", "shop:during", "--verify", "--source", "shop:archive").exit_code == 2
    missing = run("--app", "shop:during", "--source", "shop:archives")
    assert missing.exit_code == 1
    assert "--source shop:archives cannot be imported: AttributeError" in missing.stderr
    in_use = run("--app", "shop:after", "--source", "shop:archive")
    assert in_use.exit_code == 1
    assert "totals-2 is in use: register the new generation by building(..., beside=...)" in in_use.stderr
    skipped = run("--app", "shop:during", "--source", "shop:refunds")
    assert skipped.exit_code == 1
    assert "totals-2 handles none of these messages; check their types" in skipped.stderr
