"""`make torture` is exact for a while, and says so if a projector is not."""

import subprocess
import sys

import pytest

from command import importing
from reached import reached

RUN = "import sys, torture; sys.argv = ['make torture', *sys.argv[1:]]; {}; sys.exit(torture.main())"


def torture(before: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command behind a line of Python."""
    command = [sys.executable, "-c", RUN.format(before), *arguments]
    done = subprocess.run(command, env=importing(), capture_output=True, text=True, check=False)
    if "is not installed" in done.stderr or "needs a package" in done.stderr:
        reached.give_up(arguments[0], "make torture", done.stderr.strip())
    return done


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_a_short_run_is_as_promised(server: str) -> None:
    """Eight workers, twelve kills, a crash of the server, and a moment in which it is read-only."""
    few = ("--deliveries", "600", "--kills", "12", "--crashes", "1", "--read-only", "1")
    done = torture("pass", server, *few)
    assert (done.returncode, done.stderr) == (0, "")
    *_, row = done.stdout.splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == [server, "600", "60"]
    assert int(cells[3]) >= 10
    assert cells[4] == "1"
    assert cells[8:13] == ["0"] * 5
    assert cells[-1] == "as promised"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_projector_without_markers_is_found() -> None:
    """Half of the messages come twice, so every account has too much."""
    naive = "made = torture.projector; torture.projector = lambda name, **_: made(name=name)"
    done = torture(naive, "postgresql", "--deliveries", "300", "--kills", "0", "--crashes", "0", "--read-only", "0")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.rstrip().endswith("NOT AS PROMISED |")
