"""A newcomer's path through the pages: each step works as it is printed, from an empty folder."""

import configparser
import importlib.util
import inspect
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, cast

import pika
import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

import projector_dedup.options
from brokers import broker
from databases import DRIVERS, Database
from projector_dedup import Dispatcher
from projector_dedup.brokers.rabbitmq import queues_beside
from reached import reached
from walkthrough import steps_of, walk

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


MISSING = [program for program in ("bash", "sed", "grep", "curl", "pkill") if shutil.which(program) is None]
typed_in_a_shell = pytest.mark.skipif(MISSING != [], reason=f"the pages use {', '.join(MISSING)}: not installed")


def _page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@typed_in_a_shell
@pytest.mark.timeout(300)
def test_getting_started(tmp_path: Path) -> None:
    """From an empty folder to a projector that is proven under redelivery; without the marker the proof fails."""
    typed = walk(_page("getting-started.md"), tmp_path, {})
    assert typed.count("pytest -q") == 1
    assert "idempotent=True" in (tmp_path / "totals.py").read_text(encoding="utf-8")


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def test_what_is_installed_can_be_installed() -> None:
    """Each extra that a page of the path installs is an extra of the library."""
    for name in ("getting-started.md", "tutorial.md"):
        commands = [step.command for step in steps_of(_page(name)) if step.command.startswith("pip install ")]
        assert commands
        for extras in re.findall(r"projector-dedup\[([\w,-]+)\]", "\n".join(commands)):
            assert set(extras.split(",")) <= EXTRAS.keys()


def test_getting_started_has_a_tab_for_each_driver() -> None:
    """The URL of each tab makes an engine, and there is one for each driver that the tests know."""
    snippets = re.findall(r"^engine = (create_\w+)\(\"(.*)\"\)$", _page("getting-started.md"), re.MULTILINE)
    makers: dict[str, Any] = {"create_engine": create_engine, "create_async_engine": create_async_engine}
    shown = set()
    for maker, url in snippets:
        driver = url.partition(":")[0]
        shown.add((driver, maker == "create_async_engine"))
        if any(each.installed for each in DRIVERS if each.drivername == driver):
            makers[maker](url)
    assert shown | {("sqlite+pysqlite", False)} == {(each.drivername, each.is_async) for each in DRIVERS}


@typed_in_a_shell
@pytest.mark.timeout(300)
def test_tutorial(tmp_path: Path, postgresql: Database) -> None:
    """From an empty folder to a worker on RabbitMQ and PostgreSQL that is killed, replayed, cleaned up and checked."""
    server, queue = broker("rabbitmq"), f"projector-dedup-test-{secrets.token_hex(6)}"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    replaced = {
        "postgresql+psycopg://shop:secret@localhost/shop": postgresql.url().render_as_string(hide_password=False),
        "AMQP_URL=amqp://guest:guest@localhost": f"AMQP_URL={server}",
        "QUEUE=payments": f"QUEUE={queue}",
        "METRICS_PORT=9464": f"METRICS_PORT={port}",
    }
    page = _page("tutorial.md")
    assert [old for old in replaced if old not in page] == []
    try:
        walk(page, tmp_path, replaced)
        _cron_works(tmp_path)
        _systemd_works(tmp_path)
    finally:
        with pika.BlockingConnection(pika.URLParameters(server)) as connection:
            reached.saw("rabbitmq", str(cast(Any, connection)._impl.server_properties["version"]))
            for name in (queue, *queues_beside(queue)):
                connection.channel().queue_delete(name)


def test_the_servers_of_the_tutorial() -> None:
    """compose.yaml starts those that its settings name, with this user and password, and for this machine alone."""
    settings = dict(re.findall(r"^(\w+_URL)=(.+)$", _page("tutorial.md"), re.MULTILINE))
    servers = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    database, amqp = make_url(settings["DATABASE_URL"]), make_url(settings["AMQP_URL"])
    assert settings["PROJECTOR_DEDUP_DATABASE_URL"] == settings["DATABASE_URL"]
    assert re.findall(r"POSTGRES_(\w+): (\w+)", servers) == [("USER", "shop"), ("PASSWORD", "secret")]
    assert (database.username, database.password, database.database) == ("shop", "secret", "shop")
    assert (amqp.username, amqp.password) == ("guest", "guest")  # what RabbitMQ has, if nobody says otherwise
    assert re.findall(r'ports: \["(.*)"\]', servers) == ["127.0.0.1:5432:5432", "127.0.0.1:5672:5672"]


def _here(folder: Path, text: str) -> str:
    return text.replace("/opt/shop/.venv/bin/", f"{Path(sys.executable).parent}/").replace("/opt/shop", str(folder))


def _cron_works(folder: Path) -> None:
    """Run each line of the cron file as cron does: by sh, with no environment but cron's own."""
    script = folder / "cron.sh"
    script.write_text(_here(folder, script.read_text(encoding="utf-8")), encoding="utf-8")
    lines = (folder / "shop.cron").read_text(encoding="utf-8").splitlines()
    jobs = [line.split(None, 6) for line in lines if line[:1].isdigit()]
    assert [job[5] for job in jobs] == ["shop", "shop"]
    for *when, _user, command in jobs:
        assert len(when) == 5
        assert "%" not in command  # which cron reads as a newline
        sh = ["/bin/sh", "-c", _here(folder, command)]
        run = subprocess.run(sh, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
        assert (run.returncode, run.stderr) == (0, "")


def _systemd_works(folder: Path) -> None:
    """The unit names the programs and files of the tutorial; where systemd is installed, it accepts the unit."""
    unit = folder / "shop-worker.service"
    unit.write_text(_here(folder, unit.read_text(encoding="utf-8")).replace("User=shop", "User=root"), encoding="utf-8")
    read = configparser.ConfigParser(interpolation=None)
    read.optionxform = str  # type: ignore[assignment,method-assign]  # typeshed knows a function of its own only
    read.read(unit, encoding="utf-8")
    program, _, place = read["Service"]["ExecStart"].split()
    assert Path(program).exists()
    assert (Path(read["Service"]["WorkingDirectory"]) / f"{place.partition(':')[0]}.py").exists()
    assert Path(read["Service"]["EnvironmentFile"]).exists()
    if verify := shutil.which("systemd-analyze"):
        run = subprocess.run([verify, "verify", unit], capture_output=True, text=True, check=False)
        assert unit.name not in run.stderr, run.stderr


# Questions, traps, and the index for programs ------------------------------------------------------------------------


def test_each_question_has_a_short_answer_with_a_link() -> None:
    """docs/faq.md: a heading is a question, and its answer has two to five sentences and a link to the whole of it."""
    sections = _page("faq.md").split("\n## ")[1:]
    assert len(sections) > 20
    for section in sections:
        question, answer = section.split("\n", 1)
        sentences = re.findall(r"[.?)](?=\s|$)", re.sub(r"\([^()]*\)|\be\.g\.", "", answer.replace("\n", " ")))
        assert question.endswith("?")
        assert 2 <= len(sentences) <= 6, question
        assert "](" in answer, question


def test_the_pattern_for_agents_works(tmp_path: Path) -> None:
    """The program of docs/skill.md runs as it is printed, and prints what its comments promise."""
    (program,) = re.findall(r"^```python\n(.*?)^```", _page("skill.md"), re.DOTALL | re.MULTILINE)
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.split() == re.findall(r"print\(.*# (.+)$", program, re.MULTILINE)


def test_the_index_for_programs_is_complete() -> None:
    """Each link of docs/llms.txt is a page of the site, and every page of the navigation has a link."""
    linked = re.findall(r"\]\(([\w/.-]+)\.html\)", _page("llms.txt"))
    assert [page for page in linked if not (DOCS / f"{page}.md").is_file()] == []
    toctrees = re.findall(r"^```{toctree}\n:caption: .*?\n\n(.*?)^```", _page("index.md"), re.DOTALL | re.MULTILINE)
    navigation = {page for tree in toctrees for page in tree.split() if not page.startswith("project/")}
    assert navigation <= set(linked)


def test_code_fits_on_a_narrow_screen() -> None:
    """No line of code on the pages of the path is cut at a width of 1,280 pixels: 88 columns fit."""
    for name in ("getting-started.md", "tutorial.md", "skill.md", "index.md"):
        blocks = re.findall(r"^```\w+\n(.*?)^```", _page(name), re.DOTALL | re.MULTILINE)
        assert [line for block in blocks for line in block.splitlines() if len(line) > 88] == []


def test_the_reference_lists_parameters() -> None:
    """What the docstring of the dispatcher, or of all classes, says of an option is an entry; what it raises is not."""
    spec = importlib.util.spec_from_file_location("parameters", DOCS / "parameters.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options = [
        each.name for each in inspect.signature(Dispatcher).parameters.values() if each.kind is each.KEYWORD_ONLY
    ]
    own, shared = ((inspect.getdoc(each) or "").splitlines() for each in (Dispatcher, projector_dedup.options))
    lines = module.listed(own, options, shared)
    fields = dict(re.findall(r"^:param (\w+): (.+)$", "\n".join(lines), re.MULTILINE))
    assert [name for name in options if name not in fields] == []
    assert fields["claim_timeout"].startswith("the longest wait, in seconds, ")
    assert fields["claim_timeout"].endswith(".")
    assert "Raises ``HandlerDefinitionError``" in "\n".join(line for line in lines if not line.startswith(":param"))
