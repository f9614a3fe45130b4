"""What the README and the pages of `docs` show is what happens."""

import ast
import contextlib
import inspect
import json
import re
import secrets
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pika
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

import projector_dedup
from brokers import broker
from databases import until
from pages import snippets
from projector_dedup import Defer, Dispatcher, on, projector
from reached import reached

ROOT = Path(__file__).parents[2]
ADRS = sorted(path.name for path in (ROOT / "docs" / "adr").glob("0*.md"))
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
OTHERS = [
    "AGENTS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "benchmarks/RESULTS.md",
]


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


QUICK_START = snippets("README.md")[0]
"""The snippets of several pages continue where it ends."""


@pytest.mark.parametrize(
    ("page", "before"),
    [
        ("docs/unit-of-work.md", [QUICK_START]),
        ("docs/commands.md", []),
        ("docs/effects.md", []),
        ("docs/observing.md", [QUICK_START]),
        ("docs/handlers.md", [QUICK_START]),
        ("docs/concurrency.md", [QUICK_START]),
        ("docs/stale-news.md", [QUICK_START]),
        ("docs/operations.md", [QUICK_START]),
        ("docs/tables.md", [QUICK_START]),
        ("docs/rebuild.md", [QUICK_START]),
    ],
)
def test_what_is_typed_prints_what_it_says(tmp_path: Path, page: str, before: list[str]) -> None:
    """Typed into a file and run, the snippets of a page print the values that their comments promise."""
    script = tmp_path / "typed.py"
    script.write_text("\n".join([*before, *snippets(page)]), encoding="utf-8")
    run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    promised = re.findall(r"print\(.*# (.+)$", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert run.stdout.split("\n")[:-1] == promised


def test_the_quick_start_remembers(tmp_path: Path) -> None:
    """Run again, it finds two duplicates and the amount of before."""
    for outcomes in (["Outcome.APPLIED", "Outcome.DUPLICATE", "30"], ["Outcome.DUPLICATE", "Outcome.DUPLICATE", "30"]):
        typed = [sys.executable, "-c", QUICK_START]
        run = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert run.stdout.split() == outcomes


def test_every_snippet_compiles() -> None:
    """No snippet of any page has a typing error of ours in it."""
    for page in PAGES:
        for snippet in snippets(page):
            compile(snippet, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_links_lead_somewhere() -> None:
    """Every relative link of every page is a file of the repository."""
    lost = []
    for page in [*PAGES, *OTHERS]:
        prose = re.sub(r"^```.*?^```", "", _text(page), flags=re.DOTALL | re.MULTILINE)
        targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", prose)
        lost += [f"{page}: {target}" for target in targets if not ((ROOT / page).parent / target).exists()]
    assert lost == []


def test_an_index_shows_the_readme_with_its_links() -> None:
    """A release makes every link and picture of README absolute, and changes nothing else; each is a file of ours."""
    command = [str(ROOT / ".ci" / "absolute_links"), "https://host/owner/name", "v1.2.3"]
    released = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    links = re.findall(r"\]\(([^)#][^)]*)", released)
    pictures = re.findall(r'(?:src|srcset)="([^"]*)', released)
    assert links
    assert pictures
    for addresses, folder in (
        (links, "https://host/owner/name/blob/v1.2.3/"),
        (pictures, "https://host/owner/name/raw/v1.2.3/"),
    ):
        assert [each for each in addresses if not each.startswith(folder)] == []
        files = [each.removeprefix(folder).partition("#")[0] for each in addresses]
        assert [file for file in files if not (ROOT / file).is_file()] == []
        released = released.replace(folder, "")
    assert released == _text("README.md")


# A consumer ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def consumer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The snippets of docs/guarantees.md as one module, with a handler that rejects an amount."""
    monkeypatch.chdir(tmp_path)
    module: Any = ModuleType("consumer")
    monkeypatch.setitem(sys.modules, "consumer", module)  # where SQLAlchemy and dataclasses look for annotations
    for snippet in [QUICK_START, *snippets("docs/guarantees.md")]:
        exec(compile(snippet, "README.md", "exec"), vars(module))

    @projector(idempotent=True, name="consumer")
    class Payments:
        @on(module.PaymentReceived)
        def add(self, event: Any, session: Session) -> None:
            if event.amount < 0:
                raise ValueError("poison")
            totals = session.get(module.Totals, event.account_id)
            if totals is None:
                raise Defer("no such account yet")
            totals.amount += event.amount

    module.dispatcher = Dispatcher(module.sessionmaker(module.engine), Payments())
    module.parse = lambda body: module.PaymentReceived(**json.loads(body))
    yield module
    module.engine.dispose()


MESSAGES = [
    ("good", "p-1", '{"account_id": "alice", "amount": 5}', "acknowledged"),
    ("redelivered", "p-1", '{"account_id": "alice", "amount": 5}', "acknowledged"),
    ("garbage", "p-2", "{", "dead letter"),
    ("poison", "p-3", '{"account_id": "alice", "amount": -1}', "dead letter"),
    ("too early", "p-4", '{"account_id": "bob", "amount": 5}', "again"),
    ("no id", None, '{"account_id": "alice", "amount": 5}', "dead letter"),
    ("empty id", "", '{"account_id": "alice", "amount": 5}', "dead letter"),
    ("good too", "p-5", '{"account_id": "alice", "amount": 7}', "acknowledged"),
]
"""Delivery tag, message id, body, and what the consumer is to do."""


def test_the_consumer_survives_poison_on_rabbitmq(consumer: Any) -> None:
    """By pika: what is poison is in the dead letters, what came too early is delivered again, and then applied."""
    connection = pika.BlockingConnection(pika.URLParameters(broker("rabbitmq")))
    channel, queue = connection.channel(), f"projector-dedup-test-{secrets.token_hex(6)}"
    reached.saw("rabbitmq", str(cast(Any, connection)._impl.server_properties["version"]))
    consumer.logger = SimpleNamespace(warning=lambda *_: None)
    channel.queue_declare(dead := f"{queue}-dead", exclusive=True)
    to_the_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    channel.queue_declare(queue, exclusive=True, arguments=to_the_dead)
    channel.basic_qos(prefetch_count=3)
    for tag, id_, body, _ in MESSAGES:
        channel.basic_publish("", queue, body.encode(), pika.BasicProperties(message_id=id_, type=tag))
    came: list[str] = []
    delays: list[float] = []
    call_later = connection.call_later

    def delayed(delay: float, callback: Any) -> object:
        delays.append(delay)
        return call_later(delay, callback)

    connection.call_later = delayed

    def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        if method.redelivered:
            with Session(consumer.engine) as session, session.begin():
                session.add(consumer.Totals(account_id="bob", amount=0))  # what the early message has waited for
        came.append(properties.type)
        consumer.on_message(channel, method, properties, body)

    channel.basic_consume(queue, on_message)
    while len(came) < len(MESSAGES) + 1:
        connection.process_data_events(time_limit=None)
    expected = sorted(tag for tag, _, _, done in MESSAGES if done == "dead letter")
    waiting = [channel.basic_get(dead, auto_ack=True)[1] for _ in expected]
    assert sorted(each.type for each in waiting if each) == expected
    assert (came[-1], delays) == ("too early", [1.0])
    connection.close()
    with Session(consumer.engine) as session:
        amounts = {each.account_id: each.amount for each in session.scalars(select(consumer.Totals))}
    assert amounts == {"alice": 30 + 5 + 7, "bob": 5}


def test_the_consumer_of_readme(tmp_path: Path) -> None:
    """As a program: of two deliveries of one payment it counts one, and what it cannot read is in the dead letters."""
    url, queue = broker("rabbitmq"), f"projector-dedup-test-{secrets.token_hex(6)}"
    program = "\n".join(snippets("README.md")).replace("amqp://guest:guest@localhost", url).replace("payments", queue)
    (tmp_path / "typed.py").write_text(program, encoding="utf-8")
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel, dead = connection.channel(), f"{queue}.dead"
    for each in (queue, dead):
        channel.queue_declare(each, durable=True)
    for id_, body in [("p-1", b'{"account_id": "alice", "amount": 5}')] * 2 + [("p-2", b"{")]:
        channel.basic_publish("", queue, body, pika.BasicProperties(message_id=id_, type="payment.received"))
    process = subprocess.Popen([sys.executable, "typed.py"], cwd=tmp_path)
    rejected: list[Any] = []

    def has_rejected() -> bool:
        rejected.append(channel.basic_get(dead, auto_ack=True)[1])
        return rejected[-1] is not None

    try:
        until(has_rejected)
    finally:
        process.terminate()
        process.wait(30)
        for each in (queue, dead, *(f"{queue}.wait.{seconds}s" for seconds in (1, 5, 30, 300))):
            channel.queue_delete(each)
        connection.close()
    assert rejected[-1].message_id == "p-2"
    with contextlib.closing(sqlite3.connect(tmp_path / "read_model.db")) as database:
        assert database.execute("SELECT amount FROM totals").fetchall() == [(30 + 5,)]


# The reference and the summaries --------------------------------------------------------------------------------------


def test_every_decision_is_in_the_index() -> None:
    """docs/adr/README.md has a line for each record, with its title."""
    lines = []
    for name in ADRS:
        number, title = _text(f"docs/adr/{name}").split("\n", 1)[0].removeprefix("# ").split(". ", 1)
        lines.append(f"| {number} | [{title}]({name}) |")
    index = _text("docs/adr/README.md").splitlines()
    assert [line for line in lines if line not in index] == []


def test_a_decision_is_short() -> None:
    """Each record has at most 600 words, and the table of what did not help at most 2,500."""
    lengths = {name: len(_text(f"docs/adr/{name}").split()) for name in [*ADRS, "tried.md"]}
    assert {name: words for name, words in lengths.items() if words > (2_500 if name == "tried.md" else 600)} == {}


REFERENCE = "\n".join(_text(page) for page in PAGES if page.startswith("docs/api/"))


def test_every_public_name_is_in_the_reference() -> None:
    """Errors come with their module; all other names are listed."""
    listed = set(re.findall(r"^\.\. auto\w+:: (\w+)", REFERENCE, re.MULTILINE))
    assert {*projector_dedup.__all__} - listed == {"Defer"}
    assert "automodule:: projector_dedup.errors" in REFERENCE


def test_the_reference_names_each_module_from_which_it_documents_something() -> None:
    """The table of the first page says where to import from: eight names from the package, the rest by module."""
    table = _text("docs/api/index.md")
    modules = set(
        re.findall(r"^\.\. auto(?:class|function|decorator):: projector_dedup\.(\w+)", REFERENCE, re.MULTILINE)
    )
    assert {module for module in modules if f".{module}`" not in table} == set()


def test_a_decorator_is_shown_with_its_options() -> None:
    """The reference shows one signature where type checkers are given several."""
    for name in ("projector", "on"):
        (shown,) = re.findall(rf"^\.\. autodecorator:: {name}\((.*)\)$", REFERENCE, re.MULTILINE)
        signature = inspect.signature(getattr(projector_dedup, name))
        parameters = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
        options = [each for each in parameters if each.kind is not inspect.Parameter.POSITIONAL_ONLY]
        assert shown == str(inspect.Signature(options))[1:-1]


def test_every_option_is_told() -> None:
    """docs/handlers.md names the keywords of the decorators and of dispatchers."""
    for target in (Dispatcher, projector, on):
        parameters = inspect.signature(cast(Any, target)).parameters.values()
        keywords = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        assert [name for name in keywords if not re.search(rf"`{name}[`=]|\b{name}=", _text("docs/handlers.md"))] == []


def test_the_summary_names_every_driver() -> None:
    """docs/installation.md has the extra of each driver that the tests are installed with."""
    summary = _text("docs/installation.md").split("\n## Drivers\n")[1].split("\n## ")[0]
    (extras,) = re.findall(r"^DRIVERS := (.*)$", _text("Makefile"), re.MULTILINE)
    assert [extra for extra in [*extras.split(","), "mysqlclient"] if f"`[{extra}]`" not in summary] == []


def test_files_that_pages_name_are_there() -> None:
    """A test or an example that a promise refers to can be opened."""
    named = {
        (page, file)
        for page in [*PAGES, *OTHERS]
        for file in re.findall(r"\b(?:tests|examples)/[\w/]+\.(?:py|md|txt)\b", _text(page))
    }
    assert len(named) > 20
    assert {(page, file) for page, file in named if not (ROOT / file).is_file()} == set()
