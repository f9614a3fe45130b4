"""`make pictures`: pictures of what commands print, and a dark twin of each picture of ``static``.

Each command runs in a terminal of its own, in an empty folder. The picture shows all that the command prints.
"""

import io
import os
import pty
import re
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.color import parse_rgb_hex
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

DOCS = Path(__file__).parent
STATIC = DOCS / "static"
BIN = Path(sys.executable).parent

COLUMNS = 50  # of the terminal, so that a screen of 390 pixels shows letters of 11 pixels

DARK = {
    "#f6f8fa": "#151b23",  # background of a box or a terminal
    "#1f2328": "#f0f6fc",  # text
    "#59636e": "#9198a1",  # secondary text, arrows
    "#d1d9e0": "#3d444d",  # borders
    "#cf222e": "#f85149",  # red
    "#1a7f37": "#3fb950",  # green
    "#9a6700": "#d29922",  # yellow
    "#0969da": "#4493f8",  # blue
    "#ffffff": "#131416",  # background of a page
}
"""The colours of the light pictures, each with that of the dark twin."""

COMMANDS = {"exactly-once": "pytest -q --show-capture=no", "check": "idempotency check"}
"""The pictures of terminals, each with the command that prints it."""

TWINS = ["transaction", "twice", "shop", *COMMANDS]
"""The pictures that have a dark twin by ``DARK``. The first three are drawn by hand."""

# The format of rich without the fonts that it fetches: a picture in a page may fetch nothing.
FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" width="460" viewBox="0 0 {width} {height}">
<style>
text {{ font: {char_height}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }}
{styles}
</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">{backgrounds}{matrix}</g>
</svg>
"""


def prepare(folder: Path) -> None:
    """Write a test of a projector that counts each redelivery, and a database with marker tables without any index."""
    (snippet, *_) = re.findall(r"^```python\n(.*?)^```", (DOCS / "testing.md").read_text(), re.DOTALL | re.MULTILINE)
    (folder / "test_totals.py").write_text(snippet.replace("idempotent=True, ", ""))
    schema = [str(BIN / "idempotency"), "schema", "--dialect", "sqlite"]
    ddl = subprocess.run(schema, capture_output=True, text=True, check=True).stdout  # noqa: S603  # our own command
    ddl = re.sub(r",\s*CONSTRAINT pk_processed_message PRIMARY KEY.*|CREATE INDEX.*", "", ddl)
    database = sqlite3.connect(folder / "shop.db")
    database.executescript(f"PRAGMA journal_mode = WAL; {ddl}")
    database.close()


def printed(command: str, folder: Path) -> str:
    """Return what the command prints in a terminal. Each of these commands finds a fault, and so ends with 1."""
    ours, theirs = pty.openpty()
    environment = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "COLUMNS": str(COLUMNS),
        "TERM": "xterm-256color",
        "PROJECTOR_DEDUP_DATABASE_URL": "sqlite:///shop.db",
    }
    process = subprocess.Popen(  # noqa: S603  # a command of this file
        ["sh", "-c", command],  # noqa: S607
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    output = b""
    try:
        while some := os.read(ours, 65536):
            output += some
    except OSError:  # on Linux: the command has ended
        pass
    os.close(ours)
    if process.wait() != 1:
        sys.exit(f"{command} ended with {process.returncode}, not with 1:\n{output.decode()}")
    return output.decode().replace("\r\n", "\n").rstrip()


def terminal(name: str, command: str, output: str) -> str:
    """Return the light picture of a command and its output."""
    background, text, grey, _border, red, green, yellow, blue, _page = (parse_rgb_hex(each[1:]) for each in DARK)
    theme = TerminalTheme(background, text, [text, red, green, yellow, blue, blue, blue, grey])
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(output))
    return console.export_svg(title="", theme=theme, code_format=FORMAT, unique_id=name)


def dark(light: str) -> str:
    """Return a light picture in the colours of its dark twin."""
    return re.sub("|".join(DARK), lambda colour: DARK[colour[0]], light)


def main() -> None:
    """Write the pictures of terminals, and all dark twins."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for name, command in COMMANDS.items():
            picture = terminal(name, command, printed(command, Path(folder)))
            (STATIC / f"{name}-light.svg").write_text(picture, encoding="utf-8")
    for name in TWINS:
        light = (STATIC / f"{name}-light.svg").read_text(encoding="utf-8")
        (STATIC / f"{name}-dark.svg").write_text(dark(light), encoding="utf-8")


if __name__ == "__main__":
    main()
