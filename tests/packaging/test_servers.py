"""`make servers` names a server that it cannot set up, and has a line of the page for each that it can."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import servers
from command import importing


def test_a_server_that_cannot_be_had_is_named_and_skipped(tmp_path: Path) -> None:
    """The next one is tried, the exit code is 2, and nothing is left that looks like a server."""
    (tmp_path / "rm").symlink_to(shutil.which("rm") or "rm")
    command = [sys.executable, "-m", "servers", "postgresql-16", "postgresql-17"]
    environment = importing(PATH=str(tmp_path), PROJECTOR_DEDUP_TEST_SERVERS=str(tmp_path))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    for name in ("postgresql-16", "postgresql-17"):
        assert f"{name} is SKIPPED: npm: No such file or directory" in done.stdout
        assert not (tmp_path / name).exists()
    assert done.stdout.endswith("servers: not tested: postgresql-16, postgresql-17\n")


def test_the_server_of_today_is_named_and_skipped(tmp_path: Path) -> None:
    """A gate does not fail because Debian or npm cannot be reached; it says which server it has not tested."""
    (tmp_path / "rm").symlink_to(shutil.which("rm") or "rm")
    environment = importing(PATH=str(tmp_path), PROJECTOR_DEDUP_TEST_SERVERS=str(tmp_path))
    command = [sys.executable, "-m", "servers", "--today"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^servers: ([-\w]+) is SKIPPED: .*\nservers: not tested: \1\n\Z", done.stdout, re.MULTILINE)


def test_each_server_has_its_line() -> None:
    """What is written replaces one line of the page, and no other."""
    page = servers.PAGE.read_text(encoding="utf-8")
    for server in servers.SERVERS.values():
        assert len(re.findall(servers.ROW.format(server.title), page, re.MULTILINE)) == 1, server.title
