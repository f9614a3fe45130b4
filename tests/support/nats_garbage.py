"""What another client may write into a NATS stream by a socket: headers and subjects that nats-py would never send."""

import random
from collections.abc import Iterator

from nats.aio.client import Client

from payments import payment

FIRST = (b"NATS/1.0", b"NATS/1.0 503", b"NATS/1.0 404 No Messages", b"NATS/1.0 409 Consumer Deleted", b"NATS/1.0 408")
STRANGE_FIRST = (b"NATS/1.0 100 Idle Heartbeat", b"NATS/1.0 5\xff3", b"NATS/1.0 503 \xff", b"NATS", b"", b"NATS/1.0\n")
LINES = (
    *(b"Status: 503", b"trace: \xff", b"trace: 1", b"trace: 2", b"no colon", b": no name", b"caf\xe9: x", b"a(b): c"),
    *(b"type: payment", b"type: \xff", b"Nats-Msg-Id: \xff", b"x-subject: nowhere", b"x-rejected-for: ?", b"e:"),
    *(b"Nats-TTL: never", b"Nats-Rollup: sub", b"Nats-Expected-Last-Msg-Id: nobody", b"Nats-Schedule: @every 1s"),
)
ENDS = (b"\r\n\r\n", b"\r\n\r\n", b"\r\n", b"", b"\n")
SUBJECTS = (b"made", b"\xff", b"a\x00b", b"*", b"a\x0cb", b"a\x0bb")
BODIES = (b"", b"{", b"\xff")


def garbage(seed: int, count: int) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield the end of a subject, a block of headers and a body: payments of the accounts a, b and c, and others."""
    dice = random.Random(seed)
    for number in range(count):
        ids = (b"Nats-Msg-Id: h%d" % number, b"x-message-id: x%d" % number, b"Nats-Msg-Id: k%d" % number)
        first = dice.choice((*FIRST, *STRANGE_FIRST))
        lines = [first, *dice.sample((*LINES, *ids), dice.randrange(5))]
        body = dice.choice((*BODIES, *[payment(number, account) for account in "aabc"]))
        yield dice.choice(SUBJECTS), b"\r\n".join(lines) + dice.choice(ENDS), body
    for block in (b"x", b"NATS/1.0", b"NATS/1.0\r\n", b"foo: bar\r\n\r\n", b"\r\n"):
        yield b"made", block, payment(count, "b")


async def send(connection: Client, subject: bytes, block: bytes, body: bytes) -> None:
    """Send one message as it is."""
    line = b"HPUB %s %d %d\r\n" % (subject, len(block), len(block) + len(body))
    await connection._send_command(line + block + body + b"\r\n")
    await connection.flush()
