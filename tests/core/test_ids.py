"""Which texts are message ids, and that no two of them are ever taken for one, on any engine."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, event, select
from sqlalchemy.orm import Session

from databases import Database
from projector_dedup import Message
from projector_dedup.errors import InvalidMessageIdError
from projector_dedup.markers import claim
from projector_dedup.message import cloudevents, id_text, stored_id
from projector_dedup.tables import ProcessedMessage
from ready import engine_on

HANDLER = "h"


def _is_id(text: str) -> bool:
    try:
        return "\0" not in text and 1 <= len(text.encode()) <= 512
    except UnicodeEncodeError:
        return False


# Few characters, many likenesses: case, accents, composition, width, spaces, digits, quotes, placeholders.
LIKELY = st.text("aAáà\u0301ß sS\t\u200b\u00a01₁e+-.'\"\\%:$?\U0001f600\U0001f601", min_size=1, max_size=6)
ANY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=128)
LONG = st.builds(lambda tail: ("x" * 600)[: 512 - len(tail.encode())] + tail, LIKELY)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=63)  # 252 bytes
IDS = st.one_of(LIKELY, ANY, LONG)


def no_id() -> st.SearchStrategy[object]:
    """What is not text, or not text of 1 to 512 bytes that every database can store."""
    text = st.one_of(
        st.just(""),
        st.builds(lambda before, after: f"{before}\0{after}", LIKELY, LIKELY),
        st.builds(lambda before, code: before + chr(code), LIKELY, st.integers(0xD800, 0xDFFF)),
        st.text("aé€\U0001f600", min_size=513, max_size=600),
        st.integers(171, 200).map(lambda size: "€" * size),
    )
    return st.one_of(
        text, st.none(), st.booleans(), st.integers(), st.floats(), st.binary(), st.tuples(LIKELY), st.decimals()
    )


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    """An engine on each database, with the marker table."""
    with engine_on(database.url()) as engine:
        yield engine


def examples(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hypothesis on one database; each example rolls back, so it stays empty."""
    return settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])(
        function
    )


@examples
@given(ids=st.lists(IDS, min_size=2, max_size=12, unique=True))
@example(ids=["a", "A", "a ", " a", "á", "a\u0301"])
@example(ids=["x" * 511 + "1", "x" * 511 + "2", "x" * 510])
@example(ids=["1", "01", "1e0", "+1", "1.0"])
def test_distinct_ids_stay_distinct(engine: Engine, ids: list[str]) -> None:
    """Each is new, then each is a duplicate, and each is read back as the very text it was."""
    with Session(engine) as session:
        assert [claim(session, each, HANDLER) for each in ids] == [True] * len(ids)
        assert [claim(session, each, HANDLER) for each in ids] == [False] * len(ids)
        assert set(session.scalars(select(ProcessedMessage.message_id))) == set(ids)


@examples
@given(handlers=st.lists(st.one_of(LIKELY, NAMES), min_size=2, max_size=8, unique=True))
def test_distinct_handlers_stay_distinct(engine: Engine, handlers: list[str]) -> None:
    """The other half of the marker's key is compared as exactly."""
    with Session(engine) as session:
        assert [claim(session, "m1", each) for each in handlers * 2] == [True] * len(handlers) + [False] * len(handlers)


@examples
@given(bad=no_id())
def test_what_is_no_id_is_refused_before_any_statement(engine: Engine, bad: object) -> None:
    """Refused by the library, the same on every engine: no statement is sent."""
    sent: list[str] = []
    listener = lambda *arguments: sent.append(arguments[2])  # noqa: E731  # removed again below
    event.listen(engine, "before_cursor_execute", listener)
    try:
        with Session(engine) as session, pytest.raises(InvalidMessageIdError) as refusal:
            claim(session, cast(Any, bad), HANDLER)
    finally:
        event.remove(engine, "before_cursor_execute", listener)
    assert sent == []
    assert str(refusal.value).isprintable()


@given(text=st.one_of(st.text(max_size=6), st.text("a€\U0001f600", min_size=120, max_size=520)))
def test_every_text_is_an_id_or_refused(text: str) -> None:
    """The rule is the one that the docstring states, to the byte."""
    sentinel = RuntimeError("the id was accepted")

    class Stop(Session):
        def in_nested_transaction(self) -> bool:
            raise sentinel

    with pytest.raises((RuntimeError, InvalidMessageIdError)) as outcome:
        claim(Stop(), text, HANDLER)
    assert (outcome.value is sentinel) is _is_id(text)


def parts_of(stored: str) -> list[str]:
    """Take a stored id apart by the documented rule: each part follows its number of characters and a colon."""
    parts = []
    while stored:
        size, _, rest = stored.partition(":")
        parts.append(rest[: int(size)])
        stored = rest[int(size) :]
    return parts


PARTS = st.one_of(LIKELY, st.text("0123456789:", min_size=1, max_size=6), ANY)


@given(source=PARTS, message_id=PARTS)
@example(source="1:a", message_id="1:a")
@example(source="\U0001f600", message_id="7")
def test_a_stored_id_gives_its_source_and_its_id_back(source: str, message_id: str) -> None:
    """So two pairs never have one stored id; an event of CloudEvents with this source has the same."""
    stored = stored_id(message_id, source)
    assert parts_of(stored) == [source, message_id]
    assert stored == cloudevents({"source": source, "id": message_id})
    assert id_text(Message(message_id, None, source=source)) == stored
    assert stored_id(message_id) == message_id
    assert (source in stored, message_id in stored) == (True, True)  # readable


@given(pairs=st.lists(st.tuples(st.one_of(st.none(), PARTS), PARTS), min_size=2, max_size=2, unique=True))
def test_two_ids_share_a_stored_one_only_if_one_has_no_source_and_is_written_like_the_other(
    pairs: list[tuple[str | None, str]],
) -> None:
    """The one exception that the docstring states."""
    (one, first), (two, second) = pairs
    if stored_id(first, one) == stored_id(second, two):
        assert [one, two].count(None) == 1
        assert stored_id(first, one) in (first, second)


@given(source=st.one_of(no_id().filter(lambda value: value is not None)))
def test_what_is_no_id_is_no_source(source: object) -> None:
    """Refused by name, in a message with an id and in one whose id is in its body."""
    for message_id in ("7", None):
        with pytest.raises(InvalidMessageIdError):
            Message(message_id, None, source=cast(Any, source))


def test_a_subclass_of_str_is_taken_by_its_text(engine: Engine) -> None:
    """Not by its own ideas of comparing, hashing, encoding or printing."""

    class Odd(str):
        __slots__ = ()

        def encode(self, *_: object, **__: object) -> bytes:
            return b"same"

        def __str__(self) -> str:
            return "same"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 1

    with Session(engine) as session:
        assert claim(session, Odd("a"), HANDLER)
        assert claim(session, Odd("b"), HANDLER)
        assert not claim(session, "a", HANDLER)


def test_a_uuid_is_its_canonical_text(engine: Engine) -> None:
    """So a producer that sends text and one that sends a UUID mean the same message."""
    with Session(engine) as session:
        assert claim(session, uuid.UUID("0B1A2C3D-1111-4111-8111-111111111111"), HANDLER)
        assert not claim(session, "0b1a2c3d-1111-4111-8111-111111111111", HANDLER)
