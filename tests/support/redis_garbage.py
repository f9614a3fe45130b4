"""What another client may add to a Redis stream: fields of any name and value, and broken envelopes of FastStream."""

import json
import random
from collections.abc import Iterator

from payments import payment

MAGIC = b"\x89BIN\r\n\x1a\n\x00\x01"
FIELDS = (
    *(
        (b"message_id", b"\xff"),
        (b"message_id", b""),
        (b"message_id", b"i" * 600),
        (b"type", b"payment"),
        (b"type", b""),
    ),
    *((b"type", b"\xff"), (b"occurred_at", b"9" * 400), (b"occurred_at", b"soon"), (b"content_type", b"\x00")),
    *((b"", b""), (b"\xff\n", b"\xff"), (b"\\xff", b"x"), (b"headers", b"x" * 100_000), (b"x-rejected-for", b"\xff")),
)
BINARY = (
    *(
        b"",
        b"\x00",
        b"\x00\x00\x00\x12\xff\xff\xff\xff\x00\x01",
        b"\xff" * 40,
        b"\x00\x00\x00\x12\x00\x00\x00\x20\xff\xff",
    ),
    b"\x00\x00\x00\x12\x00\x00\x00\x1a\x00\x01\x00\x01\xff\x00\x01x{}",
)
HEADERS: tuple[object, ...] = (
    None,
    5,
    [],
    {},
    {"message_id": 5},
    {"type": None},
    {"correlation_id": "\ud800"},
    {"message_id": {}},
    "x",
)


def garbage(seed: int, count: int) -> Iterator[list[bytes]]:
    """Yield the fields and values of entries: payments of the accounts a, b and c, and others."""
    dice = random.Random(seed)
    for number in range(count):
        event = dice.choice([payment(number, account) for account in "aabc"])
        body = dice.choice([event, event, b"", b"\xff", b"{", b"[" * 10_000, b"null"])
        envelopes = [
            json.dumps({"data": data, "headers": dice.choice(HEADERS)}) for data in (event.decode(), 5, "\ud800")
        ]
        content = dice.choice(
            [*[each.encode() for each in envelopes], *[MAGIC + each for each in BINARY], b"[1]", b"\xff"]
        )
        fields = [(b"body", body)] if dice.random() < 0.7 else [(b"__data__", content)]
        fields += dice.sample([*FIELDS, (b"message_id", b"h%d" % number)], dice.choice((0, 0, 0, 1, 2)))
        dice.shuffle(fields)
        yield [part for field in fields for part in field]
