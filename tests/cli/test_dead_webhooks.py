"""`idempotency dead` settles the parked requests of a webhook; `check`, `cleanup` and `schema` have --parked."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result
from projector_dedup.cli.main import main
from sqlalchemy import Engine, create_engine, select, update

from command import idempotency, importing, on_a_terminal
from databases import Database
from projector_dedup.http.parked import default_parked_tables as tables
from projector_dedup.tables import default_metadata

SHOP = """
import os
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker
from projector_dedup import AsyncDispatcher, Dispatcher, on, projector
from projector_dedup.http import flask, starlette
from projector_dedup.http.webhook import Provider, Webhook

known = set()


def check(event):
    if event["account"] not in known:
        raise ValueError("account " + event["account"] + " is unknown")


@projector(idempotent=True, name="totals")
@on("paid")
def add(event, session):
    check(event)
    session.execute(text("insert into applied values (1)"))


@projector(idempotent=True, name="totals")
@on("paid")
async def aadd(event, session):
    check(event)
    await session.execute(text("insert into applied values (1)"))


shop = Provider("shop", lambda body, headers: True, id="X-Id", type="X-Type")
parks = {"on_reject": "park"}
url = os.environ["SHOP_URL"]
dispatcher = Dispatcher(sessionmaker(create_engine("sqlite:///" + url)), add)
engine = create_async_engine("sqlite+aiosqlite:///" + url)
async_dispatcher = AsyncDispatcher(async_sessionmaker(engine), aadd)
by_flask = flask.webhook_endpoint(dispatcher, shop, **parks)
by_starlette = starlette.webhook_endpoint(async_dispatcher, shop, **parks)
webhook = Webhook(dispatcher, shop, **parks)
answers = Webhook(dispatcher, shop)


def made():
    return webhook


async def awaited():
    return by_starlette
"""

Run = Callable[..., Result]


@pytest.fixture(name="engine")
def engine_fixture(sqlite: Database) -> Iterator[Engine]:
    """An engine on a database with the tables."""
    engine = create_engine(sqlite.url())
    for metadata in (default_metadata, tables.marker.metadata):
        metadata.create_all(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("create table applied (one integer)")
    yield engine
    engine.dispose()


@pytest.fixture(name="shop")
def shop_fixture(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module `shop`, in a file and imported, with two parked requests."""
    monkeypatch.setenv("SHOP_URL", str(engine.url.database))
    (tmp_path / "shop.py").write_text(SHOP)
    shop: Any = ModuleType("shop")
    exec(compile(SHOP, "shop.py", "exec"), vars(shop))  # a program of this test
    monkeypatch.setitem(sys.modules, "shop", shop)
    for number, account in enumerate("ab"):
        body, headers = json.dumps({"account": account}).encode(), {"X-Id": f"evt_{number}", "X-Type": "paid"}
        assert shop.webhook.deliver(body, headers | {"Authorization": "abc"}).status == 200
    yield shop
    shop.dispatcher.markers_engine.dispose()


def parked(*arguments: str, place: str = "shop:by_flask") -> Result:
    """Run `idempotency dead` for a webhook in this process."""
    return CliRunner().invoke(main, ["dead", place, *arguments])


def state(engine: Engine) -> tuple[list[str], int]:
    """Return the ids that are parked, and the number of applied events, as another connection sees them."""
    with engine.connect() as connection:
        ids = connection.scalars(select(tables.marker.c.message_id).order_by(tables.marker.c.message_id)).all()
        return list(ids), connection.exec_driver_sql("select count(*) from applied").scalar_one()


@pytest.mark.parametrize("place", ["by_flask", "by_starlette", "webhook", "made", "awaited"])
def test_a_webhook_is_named_in_each_way(shop: Any, engine: Engine, place: str) -> None:
    """What webhook_endpoint() returned, a Webhook, or a function that returns one; with and without asyncio."""
    shop.known.update("ab")
    listed = parked("list", place=f"shop:{place}").output.splitlines()
    assert listed[0].split() == ["id", "occurred", "(UTC)", "deliveries", "reason"]
    assert listed[3:] == [f"shop:{place}: 2 dead letters."]
    done = parked("replay", "--yes", place=f"shop:{place}")
    assert (done.exit_code, done.output) == (0, "Replayed 2 dead letters.\n")
    assert state(engine) == ([], 2)
    assert parked("list", place=f"shop:{place}").output == f"shop:{place}: 0 dead letters.\n"


def test_a_list_has_a_limit_and_no_values(shop: Any) -> None:
    """It prints bodies and headers only with --values; no secret is among them."""
    assert shop.known == set()
    found = parked("list", "--limit", "1").output
    assert found.splitlines()[2:] == ["shop:by_flask: 2 dead letters; raise --limit to list more."]
    assert "ValueError: account a is unknown" in found
    listed = json.loads(parked("list", "--json").output)
    assert (listed["consumer"], listed["there"], listed["complete"]) == ("shop:by_flask", 2, True)
    assert [{*each} for each in listed["dead_letters"]] == [{"id", "occurred_at", "deliveries", "reason"}] * 2
    (first, _) = json.loads(parked("list", "--json", "--values").output)["dead_letters"]
    assert (first["body"], first["headers"]) == ({"account": "a"}, {"x-id": "evt_0", "x-type": "paid"})
    assert 'body         {\n               "account": "a"' in parked("list", "--values").output


def test_what_fails_again_stays_and_the_exit_code_is_1(shop: Any, engine: Engine) -> None:
    """One line says so, and the others are applied."""
    shop.known.add("a")
    done = parked("replay", "--yes")
    assert (done.exit_code, done.stdout) == (1, "Replayed 1 dead letters.\n")
    assert done.stderr == "Error: 1 were rejected again, and stay: `list` shows why\n"
    assert state(engine) == (["evt_1"], 1)


def test_a_dropped_request_is_gone(shop: Any, engine: Engine) -> None:
    """It is printed first; one that is not there is one line."""
    assert shop.known == set()
    dropped = parked("drop", "evt_0", "--yes").output.splitlines()
    assert (dropped[-1].split()[:2], dropped[-1]) == (["Dropped", "1"], "Dropped 1 dead letters of message evt_0.")
    assert state(engine) == (["evt_1"], 0)
    again = parked("drop", "evt_0", "--yes")
    assert (again.exit_code, "no dead letter of message evt_0" in again.stderr) == (1, True)


def test_a_question_comes_first_on_a_terminal(shop: Any, engine: Engine, tmp_path: Path) -> None:
    """Of 80 columns; after a no everything is in its place. Without a terminal, the question is refused."""
    assert shop.known == set()
    for arguments in (["replay"], ["drop", "evt_0"]):
        assert (parked(*arguments).exit_code, "--yes" in parked(*arguments).stderr) == (2, True)
    environment = importing(SHOP_URL=str(engine.url.database))
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    given = {name: environment[name] for name in ("PYTHONPATH", "SHOP_URL")}
    code, seen = on_a_terminal("dead", "shop:by_starlette", "replay", types="n\n", **given)
    assert (code, "Replay 2 dead letters of shop:by_starlette?" in seen) == (1, True), seen
    assert "nothing was replayed" in seen
    code, seen = on_a_terminal("dead", "shop:by_starlette", "drop", "evt_1", types="n\n", **given)
    assert (code, "nothing was dropped" in seen, state(engine)) == (1, True, (["evt_0", "evt_1"], 0))
    code, seen = on_a_terminal("dead", "shop:by_starlette", "list", **given)
    drawn = re.sub(r"\x1b\[\d*m", "", seen).splitlines()
    assert (code, max(map(len, drawn)) <= 80, drawn[-1]) == (0, True, "shop:by_starlette: 2 dead letters."), seen


def test_a_missing_table_is_one_line(shop: Any, engine: Engine) -> None:
    """With the command that prints its SQL."""
    assert shop.known == set()
    tables.marker.drop(engine)
    refused = parked("list")
    assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
    assert "`idempotency schema --parked`" in refused.stderr


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("no_such_module:webhook", "ModuleNotFoundError"),
        ("shop:dispatcher", "is of type Dispatcher"),
        ("json:dumps", "TypeError"),
    ],
)
def test_a_wrong_name_is_one_line_and_exit_code_2(shop: Any, place: str, words: str) -> None:
    """A missing module, another type, and a function that takes arguments."""
    assert shop.known == set()
    refused = parked("list", place=place)
    assert (refused.exit_code, refused.stderr.count("\n"), words in refused.stderr) == (2, 1, True), refused.stderr


# The tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(main.commands))
def test_help_names_the_option(name: str) -> None:
    """The commands about tables have it; those about what was handled do not."""
    answer = CliRunner().invoke(main, [name, "--help"], terminal_width=80).output
    assert ("--parked" in answer) is (name in {"check", "cleanup", "schema"})


def test_the_tables_are_checked_and_cleaned(database: Database) -> None:
    """On each database: `schema` makes them, `check` calls them ready, and `cleanup` deletes old requests only."""
    engine = create_engine(database.url())
    tables.marker.metadata.create_all(engine)
    url = {"PROJECTOR_DEDUP_DATABASE_URL": engine.url.render_as_string(hide_password=False)}
    values = {"handler": "shop", "reason": "r", "headers": "{}", "body": b"{}"}
    with engine.begin() as connection:
        connection.execute(tables.marker.insert(), [values | {"message_id": each} for each in ("old", "new")])
        old = update(tables.marker).where(tables.marker.c.message_id == "old")
        connection.execute(old.values(processed_at=datetime.now(UTC) - timedelta(hours=200)))
    checked = idempotency("check", "--parked", **url)
    assert (checked.returncode, "parked_webhook is ready.\n" in checked.stdout) == (0, True), checked.stdout
    assert "put `idempotency cleanup --parked` into cron" in checked.stdout
    assert "horizon" not in checked.stdout
    assert "run this command with --parked for them" in idempotency("check", **url).stdout
    cleaned = idempotency("cleanup", "--parked", **url)
    assert (cleaned.returncode, cleaned.stdout) == (0, "Deleted 1 parked request older than 168 hours.\n")
    with engine.connect() as connection:
        assert connection.scalars(select(tables.marker.c.message_id)).all() == ["new"]
    assert idempotency("cleanup", "--parked", "--retention-hours", "1", "--handler", "shop", **url).returncode == 0
    refused = idempotency("check", "--parked", "--app", "shop:dispatcher", **url)
    assert (refused.returncode, "cannot be used with --parked" in refused.stderr) == (2, True)
    engine.dispose()


# The page -------------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "webhooks.md").read_text(encoding="utf-8")


def test_the_section_of_the_page(tmp_path: Path) -> None:
    """Its program parks an event that fails; its commands list, replay and drop it, and delete what is old."""
    program = PAGE.partition("```python\n")[2].partition("```")[0]
    section = PAGE.partition("## Park what can never succeed\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"<!-- park -->\n```python\n(.*?)```", section, re.DOTALL)
    commands = re.findall(r"^    idempotency (.*?)(?: +#.*)?$", section, re.MULTILINE)
    (tmp_path / "webhooks.py").write_text(f"{program}\n{block}")
    (tmp_path / "send.py").write_text(SENDER)
    given = importing(STRIPE_SECRET="whsec_test", GITHUB_SECRET="test")
    given |= {"PROJECTOR_DEDUP_DATABASE_URL": "sqlite:///webhooks.db"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=given, capture_output=True, text=True, check=False
        )
        return f"{done.returncode} {done.stdout}"

    assert run("send.py", "evt_1", "evt_2") == '0 {"outcome": "parked"}\n{"outcome": "parked"}\n'
    listed, replayed, dropped, cleaned = ((*each.split(), *_yes(each)) for each in commands)
    assert "KeyError: 'customer'" in run("-m", "projector_dedup", *listed)
    assert run("-m", "projector_dedup", *replayed) == "1 Replayed 0 dead letters.\n"
    assert run("-m", "projector_dedup", *dropped).endswith("Dropped 1 dead letters of message evt_2.\n")
    (tmp_path / "webhooks.py").write_text(f"{program}\n{block}".replace('invoice["customer"]', 'invoice["by"]'))
    assert run("-m", "projector_dedup", *replayed) == "0 Replayed 1 dead letters.\n"
    assert run("-m", "projector_dedup", *cleaned) == "0 Deleted 0 parked requests older than 168 hours.\n"
    with create_engine(f"sqlite:///{tmp_path / 'webhooks.db'}").connect() as connection:
        assert connection.exec_driver_sql("select * from revenue").all() == [("cus_1", 3000)]
        assert connection.exec_driver_sql("select count(*) from parked_webhook").scalar() == 0


def _yes(command: str) -> list[str]:
    return ["--yes"] if {"replay", "drop"} & set(command.split()) else []


SENDER = """
import hashlib, hmac, json, sys, time
from fastapi.testclient import TestClient
from webhooks import app, from_stripe

app.add_route("/parks", from_stripe, methods=["POST"])
with TestClient(app) as client:
    for name in sys.argv[1:]:
        invoice = {"by": "cus_1", "amount_paid": 3000}
        body = json.dumps({"id": name, "type": "invoice.paid", "data": {"object": invoice}})
        signed = f"{int(time.time())}.{body}"
        mac = hmac.new(b"whsec_test", signed.encode(), hashlib.sha256).hexdigest()
        signature = "t=" + signed.partition(".")[0] + ",v1=" + mac
        print(client.post("/parks", content=body, headers={"Stripe-Signature": signature}).text)
"""
