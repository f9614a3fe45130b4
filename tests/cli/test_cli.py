"""The command `idempotency`: what it answers, how it fails, and what it never prints."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from projector_dedup.cli.main import main
from projector_dedup.cli.options import parse
from projector_dedup.cli.output import without_secrets
from sqlalchemy import URL, MetaData, create_engine, text

import projector_dedup
from command import idempotency
from databases import Database
from marked import metadata, on_one_database, one_of_each_engine  # noqa: F401  # a fixture

SECRET = "s3cret"


def assert_failed_in_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 1, one line on stderr with the words that help, no traceback."""
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    for word in words:
        assert word in done.stderr


@pytest.fixture
def url(sync_url: URL) -> str:
    """The URL of a database with the tables in it."""
    engine = create_engine(sync_url)
    metadata = MetaData()
    projector_dedup.make_tables(metadata)
    metadata.create_all(engine)
    engine.dispose()
    return sync_url.render_as_string(hide_password=False)


# Help and usage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), *((name,) for name in sorted(main.commands))], ids=" ".join)
def test_help_answers(arguments: tuple[str, ...]) -> None:
    """The help of every command shows an example and the exit codes."""
    answer = CliRunner().invoke(main, [*arguments, "--help"])
    assert answer.exit_code == 0
    assert "Example" in answer.output
    assert "Exit codes:" in answer.output
    assert [line for line in answer.output.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["horizon", "x"], "'x' is not a valid number."),
        (["horizon", "nan"], "give a finite number"),
        (["cleanup", "--batch-size", "1.5"], "'1.5' is not a valid whole number."),
    ],
    ids=" ".join,
)
def test_a_text_that_is_no_number_is_called_so(arguments: list[str], said: str) -> None:
    """In the words of a person; click speaks of float ranges."""
    answer = CliRunner().invoke(main, [*arguments, "--database-url", "sqlite:///x.db"])
    assert (answer.exit_code, said in answer.output) == (2, True), answer.output


def test_one_hour_is_no_hours(sqlite: Database) -> None:
    """The number and its word agree."""
    engine = create_engine(sqlite.url())
    metadata.create_all(engine)
    engine.dispose()
    url = sqlite.url().render_as_string(hide_password=False)
    commands = [["horizon", "1"], ["horizon"], ["cleanup"], ["horizon", "0.5", "--yes"]]
    said = [idempotency(*command, "--database-url", url).stdout for command in commands]
    horizon = "The redelivery horizon is 1 hour.\n"
    half = "The redelivery horizon is 0.5 hours.\n"
    assert said == [horizon, horizon, "Deleted 0 markers older than 1 hour.\n", half]


def test_help_says_the_defaults() -> None:
    """`cleanup --help` says the retention, the batch size, and the variable that gives the URL."""
    answer = CliRunner().invoke(main, ["cleanup", "--help"], terminal_width=100).output
    assert "horizon, else 168]" in " ".join(answer.split())
    assert "[default: 5000" in answer
    assert "PROJECTOR_DEDUP_DATABASE_URL" in answer


def test_version() -> None:
    """`--version` names the package, and the SQLAlchemy that a bug report has to name."""
    answer = CliRunner().invoke(main, ["--version"])
    assert answer.exit_code == 0
    assert answer.output.startswith("projector-dedup ")
    assert "SQLAlchemy" in answer.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-command",),
        ("check",),
        ("cleanup", "--database-url", "sqlite:///x.db", "--retention-hours", "0"),
        ("cleanup", "--database-url", "sqlite:///x.db", "--retention-hours", "nan"),
        ("cleanup", "--database-url", "sqlite:///x.db", "--batch-size", "0"),
        ("show", "--database-url", "sqlite:///x.db", ""),
        ("forget", "--database-url", "sqlite:///x.db", "x" * 513, "--yes"),
        ("forget", "--database-url", "sqlite:///x.db", "payment-1"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_exit_code_2(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be meant is refused before anything is connected to."""
    monkeypatch.delenv("PROJECTOR_DEDUP_DATABASE_URL", raising=False)
    assert CliRunner().invoke(main, arguments).exit_code == 2


# check -----------------------------------------------------------------------------------------------------------


def test_check_of_a_ready_database(url: str) -> None:
    """Where the tables are right, check says so and exits with 0."""
    done = idempotency("check", PROJECTOR_DEDUP_DATABASE_URL=url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "processed_message is ready" in done.stdout


def test_the_variable_is_one_url_whatever_it_has(tmp_path: Path) -> None:
    """Blanks do not separate two URLs."""
    folder = tmp_path / "my data"
    folder.mkdir()
    url = f"sqlite:///{folder}/x.db"
    engine = create_engine(url)
    metadata.create_all(engine)
    engine.dispose()
    done = idempotency("check", PROJECTOR_DEDUP_DATABASE_URL=url)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [["check"], ["cleanup"], ["show", "x"], ["forget", "x", "--yes"]], ids=" ".join)
@on_one_database
def test_a_missing_table_is_told_with_its_remedy(command: list[str], sync_url: URL) -> None:
    """Without the tables every command fails, names the table, and says how to create it."""
    done = idempotency(*command, "--database-url", sync_url.render_as_string(hide_password=False))
    if sync_url.get_backend_name() == "sqlite":
        assert_failed_in_one_line(done, "there is no file")
        Path(sync_url.database or "").touch()
        done = idempotency(*command, "--database-url", sync_url.render_as_string(hide_password=False))
    assert_failed_in_one_line(done)
    assert "processed_message is missing" in done.stdout + done.stderr
    assert "idempotency schema" in done.stdout + done.stderr


def test_another_table_and_another_schema(postgresql: Database) -> None:
    """`--table` and `--schema` look at the table of that name, in that schema, only."""
    engine = create_engine(postgresql.url())
    metadata = MetaData()
    projector_dedup.make_tables(metadata, "orders_seen", schema="reading")
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA reading"))
        metadata.create_all(connection)
    engine.dispose()
    command = ["check", "--database-url", postgresql.url().render_as_string(hide_password=False)]
    table, schema = ["--table", "orders_seen"], ["--schema", "reading"]
    assert idempotency(*command, *table, *schema).returncode == 0
    assert [idempotency(*command, *options).returncode for options in (table, schema)] == [1, 1]


# Failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"postgresql://app:{SECRET}@127.0.0.1:1/orders", ["cannot connect", "app:***@127.0.0.1:1/orders"]),
        (f"postgresql://app:{SECRET}@127.0.0.1:port/orders", ["cannot be read", "postgresql+psycopg://"]),
        (f"postgresql://app:{SECRET}@1@127.0.0.1/orders", ["an @ behind its host", "%40"]),
        (f"postgresql://app:1@{SECRET}?x@127.0.0.1/orders", ["an @ behind its host", "%3F"]),
        (f"postgresql://127.0.0.1:1/orders?password={SECRET}", ["cannot connect", "127.0.0.1:1/orders: "]),
        (f"postgresql://127.0.0.1:1/orders?pasword={SECRET}&sslmode=require", ["pasword"]),
        (f"mariadb://127.0.0.1:1/orders?pasword={SECRET}", ["pasword"]),
        (f"postgresql://a/b:{SECRET}@127.0.0.1/orders", ["an @ behind its host", "%2F"]),
        (f"mariadb://a/b:{SECRET}@127.0.0.1/orders", ["an @ behind its host", "%2F"]),
        (f"no url at all {SECRET}", ["cannot be read"]),
        (f"nosuchdb://app:{SECRET}@127.0.0.1/orders", ["does not support nosuchdb"]),
        (f"oracle+nosuchdriver://app:{SECRET}@127.0.0.1/orders", ["does not support oracle+nosuchdriver"]),
        (f"mssql+pymssql://app:{SECRET}@127.0.0.1/orders", ["does not support mssql+pymssql", "postgresql+psycopg"]),
        (f"mariadb://app:{SECRET}@127.0.0.1:1/orders", ["cannot connect", "app:***@127.0.0.1:1/orders: Can't connect"]),
        (f"mysql+asyncmy://app:{SECRET}@127.0.0.1:1/orders", ["cannot connect", "mysql+pymysql"]),
        ("sqlite:///no/such/file.db", ["there is no file no/such/file.db"]),
        ("sqlite://", ["in memory", "sqlite:///file.db"]),
    ],
    ids=[
        "no-server",
        "port",
        "two-@",
        "@-and-?",
        "password-parameter",
        "misspelt-parameter",
        "misspelt-parameter-mariadb",
        "slash-in-user",
        "slash-in-user-mariadb",
        "no-url",
        "database",
        "dialect",
        "driver",
        "no-mariadb",
        "no-mariadb-async",
        "no-file",
        "memory",
    ],
)
def test_a_database_that_cannot_be_had(url: str, words: list[str]) -> None:
    """A bad URL, a missing driver, a server that is not there: one line, what to do, and no password anywhere."""
    done = idempotency("check", "--database-url", url)
    assert SECRET not in done.stdout + done.stderr
    assert_failed_in_one_line(done, *words)


@pytest.mark.parametrize("parameter", ["password", "pasword"])
def test_a_traceback_has_no_password(parameter: str) -> None:
    """Whether the driver connects or refuses the parameter; the last line is the same as without --debug."""
    url = f"postgresql://app:{SECRET}@127.0.0.1:1/orders?{parameter}={SECRET}"
    done = idempotency("check", "--debug", "--database-url", url)
    assert "Traceback" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == idempotency("check", "--database-url", url).stderr.strip()


@pytest.mark.parametrize(
    ("module", "url", "extra"),
    [
        ("psycopg", "postgresql://127.0.0.1/orders", "postgresql"),
        ("psycopg2", "postgresql+psycopg2://127.0.0.1/orders", "psycopg2"),
        ("pymysql", "mariadb+asyncmy://127.0.0.1/orders", "pymysql"),
        ("MySQLdb", "mysql+mysqldb://127.0.0.1/orders", "mysqlclient"),
    ],
)
def test_a_driver_that_is_not_installed_is_told_with_its_pip_line(module: str, url: str, extra: str) -> None:
    """The answer is the line that installs it."""
    hide = f"import sys; sys.modules[{module!r}] = None; from projector_dedup.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", hide, "check", "--database-url", url], capture_output=True, text=True, check=False
    )
    assert_failed_in_one_line(done, f"pip install 'projector-dedup[{extra}]'")


def test_a_wrong_password_is_told_in_the_servers_words(mariadb: Database) -> None:
    """Without the driver's number, brackets and quotes around them."""
    url = mariadb.url().set(username="nobody", password=SECRET).render_as_string(hide_password=False)
    done = idempotency("check", "--database-url", url)
    assert SECRET not in done.stderr
    assert_failed_in_one_line(done, ": Access denied for user 'nobody'@", "; check that the server runs")


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    """A file of another kind is told in one line."""
    path = tmp_path / "letter.txt"
    path.write_text("Dear reader, " * 100)
    assert_failed_in_one_line(idempotency("check", "--database-url", f"sqlite:///{path}"), "letter.txt")


def test_a_password_in_the_wrong_place_is_not_echoed() -> None:
    """A URL that was given as an argument instead of an option is not repeated with its password."""
    done = idempotency("check", "--database-url", "sqlite:///x.db", f"postgresql://app:{SECRET}@127.0.0.1/orders")
    assert done.returncode == 2
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("postgres://h/d", "postgresql+psycopg"),
        ("postgresql://h/d", "postgresql+psycopg"),
        ("postgresql+asyncpg://h/d", "postgresql+psycopg"),
        ("postgresql+psycopg_async://h/d", "postgresql+psycopg"),
        ("sqlite+aiosqlite:///d.db", "sqlite+pysqlite"),
        ("mysql+asyncmy://h/d", "mysql+pymysql"),
        ("postgresql+psycopg2://h/d", "postgresql+psycopg2"),
        ("postgresql+pg8000://h/d", "postgresql+pg8000"),
    ],
)
def test_an_async_driver_is_replaced_by_its_sync_twin(given: str, used: str) -> None:
    """The URL that the application uses works for the command."""
    assert parse(given).drivername == used


@pytest.mark.parametrize(
    "text",
    [
        f"could not open postgresql://app:{SECRET}@db/orders",
        f"could not open postgresql://app:a@ /{SECRET}@db/orders now",
        f"could not open postgresql://db/orders?pasword={SECRET}&sslmode=require: no",
        f"could not open: host=db user=app password={SECRET} dbname=orders",
        f"could not open: Password: {SECRET} was wrong",
    ],
)
def test_what_others_say_is_printed_up_to_a_url_or_a_password(text: str) -> None:
    """An error of click, a driver or the application; the lines before and after stay as they are."""
    cleaned = without_secrets(f"one\n{text}\nanother")
    assert SECRET not in cleaned
    assert cleaned.startswith("one\ncould not open")
    assert cleaned.endswith("***\nanother")


def test_without_rich_the_command_says_what_to_install() -> None:
    """In one line; the library itself needs no rich."""
    hide = "import sys; sys.modules['rich'] = None; import projector_dedup.cli.main"
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, check=False)
    assert_failed_in_one_line(done, "pip install 'projector-dedup[cli]'")
