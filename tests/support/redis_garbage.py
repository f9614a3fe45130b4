"""What another client may add to a Redis stream: fields of any name and value."""

import random
from collections.abc import Iterator

from payments import payment

FIELDS = (
    *((b"message_id", b"\xff"), (b"message_id", b""), (b"message_id", b"i" * 600)),
    *((b"type", b"payment"), (b"type", b""), (b"type", b"\xff")),
    *((b"occurred_at", b"9" * 400), (b"occurred_at", b"soon"), (b"content_type", b"\x00")),
    *((b"", b""), (b"\xff\n", b"\xff"), (b"\\xff", b"x"), (b"headers", b"x" * 100_000), (b"x-rejected-for", b"\xff")),
)


def garbage(seed: int, count: int) -> Iterator[list[bytes]]:
    """Yield the fields and values of entries: payments of the accounts a, b and c, and others."""
    dice = random.Random(seed)
    for number in range(count):
        event = dice.choice([payment(number, account) for account in "aabc"])
        body = dice.choice([event, event, b"", b"\xff", b"{", b"[" * 10_000, b"null"])
        fields = [(b"body" if dice.random() < 0.7 else b"payload", body)]
        fields += dice.sample([*FIELDS, (b"message_id", b"h%d" % number)], dice.choice((0, 0, 0, 1, 2)))
        dice.shuffle(fields)
        yield [part for field in fields for part in field]
