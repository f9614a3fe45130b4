"""Break long lines between words where a terminal would cut them anywhere; in a pipe a line stays one line."""

from __future__ import annotations

import shutil
import textwrap
from typing import IO, Any

WIDTH = 80  # columns of a terminal that does not tell how wide it is


def fitted(text: str, stream: IO[Any], indent: str = "") -> str:
    """Return the text for ``stream``: on a terminal, lines that are too long are broken, and go on after ``indent``."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        if len(line) > width
        else line
        for line in text.split("\n")
    )
