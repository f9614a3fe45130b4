"""What converters make of a broker's message, and that of garbage they make a named error and nothing else."""

import base64
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from incoming_garbage import ATTRIBUTES, BODIES, HEADERS
from projector_dedup import Message
from projector_dedup.brokers.incoming import Incoming, cloudevent, json_event, json_of, moment_of, text_of
from projector_dedup.errors import InvalidMessageError, InvalidMessageIdError
from projector_dedup.message import cloudevents

NOON = datetime(2013, 1, 1, 12, tzinfo=UTC)


def json_message(**attributes: Any) -> Incoming:
    """A CloudEvents event in structured mode."""
    event = {"specversion": "1.0", "id": "7", "source": "/s", "type": "flight", **attributes}
    body = {name: value for name, value in event.items() if value is not None}
    return Incoming(json.dumps(body).encode(), content_type="application/cloudevents+json; charset=utf-8")


def in_headers(prefix: str, content_type: str | None = "application/json", body: bytes = b"5", **more: Any) -> Incoming:
    """A CloudEvents event in binary mode."""
    attributes = {"specversion": "1.0", "id": "7", "source": "/s", "type": "flight", "time": "2013-01-01T12:00:00Z"}
    headers = {f"{prefix}{name}": value for name, value in {**attributes, **more}.items() if value is not None}
    return Incoming(body, headers=headers, content_type=content_type)


def test_a_json_event_keeps_what_the_broker_carried_beside_it() -> None:
    """Id, type and time of the broker are those of the message, the body is parsed."""
    incoming = Incoming(b'{"miles": 5}', "7", "flight", NOON)
    assert json_event(incoming) == Message("7", {"miles": 5}, "flight", NOON)


@pytest.mark.parametrize("at", [NOON, NOON.timestamp(), int(NOON.timestamp()), "2013-01-01T12:00:00Z", b"20130101T12Z"])
def test_a_moment_comes_in_several_forms(at: object) -> None:
    """A datetime, seconds since 1970, or text, in bytes too."""
    assert moment_of(at) == NOON


@pytest.mark.parametrize("at", [True, "", "noon", 1e30, float("nan"), 1 << 80, b"\xff", [], {}, "x" * 600])
def test_what_is_no_moment_is_refused(at: object) -> None:
    """Nothing is guessed, and no other error than the named one comes out."""
    with pytest.raises(InvalidMessageError):
        moment_of(at)


def test_an_id_in_bytes_is_the_text_that_they_encode() -> None:
    """It is not the text ``b'7'``, under which nobody else would claim the message."""
    assert json_event(Incoming(b"{}", b"7")) == json_event(Incoming(b"{}", "7")) == Message("7", {})
    assert text_of(bytearray(b"7"), "id") == text_of(memoryview(b"7"), "id") == "7"


@pytest.mark.parametrize("value", [b"\xff", "\ud800", 7, True, ["7"], "x" * 513, "é" * 257, b"x" * 513])
def test_an_id_that_is_no_short_text_is_refused_by_name(value: object) -> None:
    """Numbers are refused too: "7" and 7 would else be one id here and two elsewhere."""
    with pytest.raises(InvalidMessageIdError, match="message id"):
        json_event(Incoming(b"{}", value))
    with pytest.raises(InvalidMessageError, match="the type"):
        json_event(Incoming(b"{}", "7", value))


def test_only_a_limit_away_from_too_long() -> None:
    """A header of 512 bytes is one that a database can store."""
    assert text_of("x" * 512, "id") == text_of(b"x" * 512, "id") == "x" * 512


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"{",
            b"\xff",
            b"NaN",
            b'{"a": -Infinity}',
            b"[" * 100_000,
            b"9" * 5_000,
            b'{"a":1}x',
            b"\xef\xbb\xbf{}",
        ),
        *(b"1e999", b'{"a": [-1E+400]}'),
    ],
)
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    """Nesting beyond the parser, and numbers beyond Python's limit, are refused as well."""
    with pytest.raises(InvalidMessageError, match="is not JSON"):
        json_of(Incoming(body))


@pytest.mark.parametrize("body", [b"1234567890123.4567", b"0.10000000000000001", b"1e-400", b"-0.0", b"1e308"])
def test_a_number_is_a_float_for_whoever_reads_the_json(body: bytes) -> None:
    """It is exactly that of Python's json: drivers and handlers know no other."""
    number = json_of(Incoming(body))
    assert type(number) is float
    assert repr(number) == repr(json.loads(body))


def test_a_structured_cloudevent() -> None:
    """Everything is in the body; the id is made of source and id."""
    message = cloudevent(json_message(time="2013-01-01T13:00:00+01:00", data={"miles": 5}))
    assert message == Message("2:/s1:7", {"miles": 5}, "flight", NOON.astimezone(timezone(timedelta(hours=1))))
    assert message.id == cloudevents({"source": "/s", "id": "7"})
    assert cloudevent(json_message()).body is None
    assert cloudevent(json_message(data_base64=base64.b64encode(b"\xff").decode())).body == b"\xff"


@pytest.mark.parametrize("prefix", ["ce-", "CE-", "ce_", "cloudEvents:", "cloudEvents_"])
@pytest.mark.parametrize("encode", [str, str.encode])
def test_a_binary_cloudevent(prefix: str, encode: Any) -> None:
    """The attributes are in headers with the prefix of the protocol, in some of them as bytes; the body is the data."""
    incoming = in_headers(prefix)
    incoming = Incoming(incoming.body, headers={name: encode(value) for name, value in incoming.headers.items()})
    assert cloudevent(incoming) == Message("2:/s1:7", 5, "flight", NOON)


def test_binary_data_that_is_not_json_is_left_alone() -> None:
    """Bytes stay bytes, and JSON by any name is parsed."""
    assert cloudevent(in_headers("ce_", "application/protobuf", b"\xff")).body == b"\xff"
    assert cloudevent(in_headers("ce_", "application/vnd.flight+json; charset=utf-8")).body == 5


def test_a_header_whose_name_is_not_utf_8_is_no_attribute() -> None:
    """pika gives such a name as bytes; the event beside it is read."""
    incoming = in_headers("cloudEvents:")
    headers: dict[Any, object] = {b"\xff": 1, **incoming.headers}
    assert cloudevent(Incoming(incoming.body, headers=headers)) == cloudevent(incoming)


def test_both_modes_are_one_message() -> None:
    """A producer that changes the mode does not make new ids."""
    assert cloudevent(json_message()).id == cloudevent(in_headers("ce-")).id


@pytest.mark.parametrize(
    ("incoming", "says"),
    [
        (json_message(specversion="0.3"), "specversion 1.0"),
        (json_message(specversion=None), "specversion 1.0"),
        (json_message(id=None), "no id"),
        (json_message(source=""), "no source"),
        (json_message(id=7), "must be str, not int"),
        (json_message(id="x" * 600), "at most 512"),
        (json_message(type=None), "has a type"),
        (json_message(type=5), "type of a CloudEvents event is int"),
        (json_message(time="soon"), "cannot be read"),
        (json_message(time="2013-01-01T12:00:00"), "no time zone"),
        (json_message(data=1, data_base64="AA=="), "this one has both"),
        (json_message(data_base64="A*"), "not base64"),
        (json_message(data_base64=5), "not base64"),
        (Incoming(b"[]", content_type="application/cloudevents+json"), "a JSON object, not list"),
        (Incoming(b"[]", content_type="application/cloudevents-batch+json"), "one by one"),
        (Incoming(b"", content_type="application/cloudevents+avro"), "not as application/cloudevents\\+avro"),
        (Incoming(b"{}"), "specversion 1.0"),
        (in_headers("ce_", body=b"{"), "is not JSON"),
        (in_headers("ce_", id=None), "no id"),
        (in_headers("ce_", type=b"\xff"), "not UTF-8"),
        (in_headers("ce_", subject=5), "header ce_subject is int"),
        (in_headers("ce_", extra="x" * 600), "header ce_extra is limited"),
        (in_headers("ce_", ID="8"), "two values for id"),
    ],
)
def test_what_is_no_cloudevent_is_refused_by_name(incoming: Incoming, says: str) -> None:
    """The text says which part of the event is wrong."""
    with pytest.raises(InvalidMessageError, match=says):
        cloudevent(incoming)


@given(body=BODIES, message_id=HEADERS, kind=HEADERS, at=HEADERS)
@example(b"{}", None, None, None)
def test_garbage_becomes_a_message_or_a_named_error(body: bytes, message_id: Any, kind: Any, at: Any) -> None:
    """Whatever a broker delivers, ``json_event`` raises ``InvalidMessageError`` or makes a message."""
    try:
        made = json_event(Incoming(body, message_id, kind, at))
    except InvalidMessageError:
        return
    assert made.id is None or made.id == (message_id if isinstance(message_id, str) else message_id.decode())


@given(
    body=st.one_of(BODIES, st.dictionaries(st.sampled_from(ATTRIBUTES), st.one_of(st.text(), st.integers())).map(
        lambda event: json.dumps(event).encode()
    )),
    headers=st.dictionaries(
        st.one_of(st.text(), st.sampled_from([f"ce_{name}" for name in ATTRIBUTES])),
        st.one_of(HEADERS, st.just("1.0"), st.just(b"1.0")),
    ),
    content_type=st.one_of(
        HEADERS, st.sampled_from(["application/cloudevents+json", "application/json", "application/cloudevents-batch"])
    ),
)  # fmt: skip
def test_garbage_is_no_cloudevent(body: bytes, headers: dict[str, Any], content_type: Any) -> None:
    """Whatever a broker delivers, ``cloudevent`` raises ``InvalidMessageError`` or makes a message with an id."""
    try:
        made = cloudevent(Incoming(body, headers=headers, content_type=content_type))
    except InvalidMessageError:
        return
    assert made.id
    assert made.type
