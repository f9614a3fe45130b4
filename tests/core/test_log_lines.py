"""Log lines: no text of a message, a handler or a producer acts on a terminal or forges a line."""

import ast
import io
import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session, sessionmaker

from projector_dedup import Dispatcher, on, projector
from projector_dedup.brokers.incoming import Incoming
from projector_dedup.brokers.settling import Settling
from projector_dedup.commands import Rejected
from projector_dedup.errors import RetriesExhaustedError
from projector_dedup.http.recording import Answers
from projector_dedup.message import logger_of

PACKAGE = Path(__file__).parents[2] / "projector_dedup"
EVIL = "a\u202eb\x1b[2J\rc\u2028d\x85e\nERROR forged"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the library logs, as Python's own formatter writes it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("projector_dedup")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.setLevel(before)
    logger.removeHandler(handler)


def lines(log: io.StringIO) -> list[str]:
    """The lines that nobody has indented; none of the text acts on a terminal."""
    text = log.getvalue()
    assert [each for each in text if not each.isprintable() and each != "\n"] == []
    assert "forged" in text
    return [line for line in text.splitlines() if line[0] != " "]


@pytest.mark.parametrize("detail", [EVIL, {"why": EVIL}], ids=["text", "data"])
def test_the_detail_of_a_rejection_is_one_line(log: io.StringIO, detail: object) -> None:
    """A customer may have written it."""
    Answers().to(Rejected("late", detail))
    assert len(lines(log)) == 1


def test_a_traceback_of_an_answer_is_indented(log: io.StringIO) -> None:
    """The text of an error and that of its cause cannot begin a line."""
    error = RetriesExhaustedError(EVIL)
    error.__cause__ = ValueError(EVIL)
    Answers().to(error)
    assert len(lines(log)) == 1


def test_a_consumers_lines_are_its_own(log: io.StringIO, factory: sessionmaker[Session]) -> None:
    """Id, source and error are one line; the traceback of the handler stands below it, indented."""

    @projector(idempotent=True, name=f"evil {EVIL!r}")
    @on(EVIL)
    def evil(_event: Any, _session: Session) -> None:
        raise ValueError(EVIL)

    Settling(Dispatcher(factory, evil)).deliver(Incoming(b"{}", EVIL, EVIL, origin=f"queue {EVIL}"))
    assert len(lines(log)) == 1
    assert "  ValueError: a" in log.getvalue()


def test_numbers_and_the_error_of_a_record_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """A formatter or a handler of the application finds what it would find without us."""
    error = ValueError("x")
    logger_of("projector_dedup.consumers").warning("%d %.1f %s", 7, 1.5, timedelta(1), exc_info=error)
    (record,) = caplog.records
    assert record.getMessage() == "7 1.5 1 day, 0:00:00"
    assert record.exc_info is not None
    assert record.exc_info[1] is error


def test_every_logger_of_the_library_is_made_so() -> None:
    """A logger of Python's own would print whatever it gets."""
    made = [
        path.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node).startswith("logging.getLogger(")
        and "psycopg" not in ast.unparse(node)  # which is not the library's
    ]
    assert made == ["message.py"]
