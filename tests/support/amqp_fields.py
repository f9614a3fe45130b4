"""Properties of AMQP 0-9-1 as any client may write them: every type of a header, in octets, and drawn at random."""

import random
import struct
from collections.abc import Iterator
from typing import Any

import pika

PROPERTIES = (
    *("content_type", "content_encoding", "headers", "delivery_mode", "priority", "correlation_id", "reply_to"),
    *("expiration", "message_id", "timestamp", "type", "user_id", "app_id", "cluster_id"),
)
"""In the order in which they lie in a frame."""


class Raw(pika.BasicProperties):  # type: ignore[misc]
    """Properties that are sent as they are: each is the octets of its value."""

    def __init__(self, **properties: bytes) -> None:
        super().__init__()
        self.octets = properties

    def encode(self) -> list[bytes]:
        """The flags, and the octets of each property."""
        flags = sum(1 << (15 - place) for place, name in enumerate(PROPERTIES) if name in self.octets)
        return [struct.pack(">H", flags), *(self.octets[name] for name in PROPERTIES if name in self.octets)]


def short(text: bytes) -> bytes:
    """A short string, as properties and names of headers are."""
    return bytes([len(text)]) + text


def table(*headers: tuple[bytes, bytes]) -> bytes:
    """The property ``headers``, of names and values."""
    return _long(b"".join(short(name) + value for name, value in headers))


def array(*values: bytes) -> bytes:
    """A value that is an array."""
    return b"A" + _long(b"".join(values))


def nested(depth: int) -> bytes:
    """An array in an array, and so on."""
    value = b"V"
    for _ in range(depth):
        value = array(value)
    return value


def moment(seconds: int) -> bytes:
    """A value that is a timestamp."""
    return b"T" + struct.pack(">Q", seconds)


def _long(octets: bytes) -> bytes:
    return struct.pack(">I", len(octets)) + octets


VALUES = {
    "true": b"t\x09",
    "signed octet": b"b\x80",
    "octet": b"B\xff",
    "signed short": b"s\x80\x00",
    "short": b"u\xff\xff",
    "signed long": b"I\x80\x00\x00\x00",
    "long": b"i\xff\xff\xff\xff",
    "signed long long": b"l\x80" + bytes(7),
    "signed long long of others": b"L\x80" + bytes(7),
    "float": b"f" + struct.pack(">f", 0.5),
    "double": b"d" + struct.pack(">d", 1e300),
    "decimal": b"D\x02\xff\xff\xff\xff",
    "decimal with 255 places": b"D\xff\x00\x00\x00\x07",
    "text": b"S" + _long("é\0".encode()),
    "text that is not UTF-8": b"S" + _long(b"\xff\xfe"),
    "octets": b"x" + _long(b"\xff\xfe"),
    "nothing": b"V",
    "timestamp": moment(1_356_998_400),
    "table": b"F" + table((b"a", b"S" + _long(b"\xff"))),
    "array": array(b"S" + _long(b"\xff"), b"V"),
    "nested array": nested(100),
    "array that is longer when pika encodes it": array(*[b"b\x01"] * 60_000),
}
"""Values of each type of RabbitMQ, https://www.rabbitmq.com/amqp-0-9-1-errata.html, that every client can decode."""

LATE_VALUES = {
    "timestamp in milliseconds": moment(1_356_998_400_000),
    "first second of the year 10000": moment(253_402_300_800),
}
"""Values over which pika closes the connection, and aio-pika does not."""

OCTET_VALUES = {"table with a name that is not UTF-8": b"F" + table((b"\xff", b"V"))}
"""Values over which aio-pika closes the connection, and pika does not."""

UNREADABLE_VALUES = {
    "last timestamp": moment((1 << 64) - 1),
    "table with a timestamp": b"F" + table((b"t", moment(1 << 62))),
    "array with a timestamp": array(moment(1 << 62)),
    "array that is nested too deeply": nested(20_000),
}
"""Values over which every client closes the connection."""

NAMES = (b"h", b"", b"x-deliveries", b"x-rejected-for", b"n" * 255)
OCTET_NAMES = (b"\xff\xfe",)


def drawn(times: int, *, octets: bool) -> Iterator[dict[str, Any]]:
    """Headers with each value alone, then so many tables of headers at random; the same in each run.

    With ``octets`` they are those that pika can decode, with texts that are not UTF-8; else those of aio-pika.
    """
    dice = random.Random(20130101)
    values = [*VALUES.values(), *(OCTET_VALUES if octets else LATE_VALUES).values()]
    names = [*NAMES, *(OCTET_NAMES if octets else ())]
    for value in values:
        yield {"headers": table((b"h", value))}
    small = [value for value in values if len(value) < 1_000]
    for _ in range(times):
        within = [b"F" + table((dice.choice(names), dice.choice(small))), array(*dice.choices(small, k=3))]
        some = [(name, dice.choice([*small, *within])) for name in dice.sample(names, 3)]
        texts = dice.sample(
            ["content_type", "content_encoding", "correlation_id", "reply_to", "app_id", "cluster_id"], 3
        )
        text = dice.choice([b"", b"a", b"a" * 255, *([b"\xff"] if octets else ())])
        yield {"headers": table(*some), **{name: short(text) for name in texts}}
