"""What another client may write into a topic of Kafka: confluent-kafka's own producer would send little of it."""

import ctypes
import random
from collections.abc import Iterator, Sequence

from confluent_kafka import cimpl

from payments import payment

Header = tuple[bytes, bytes | None]

NUMBERS = (b"9" * 400, b"9" * 4300, b"-1", b"1e9", b"\xff", b"", None, b"7")
HEADERS: tuple[Header, ...] = (
    *((b"trace", b"\xff"), (b"trace", b"t"), (b"", b""), (b"empty", None), (b"message_id", b"\xff"), (b"type", None)),
    *(
        (b"type", b"payment"),
        (b"type", b"\xff"),
        (b"message_id", b"i" * 600),
        (b"odd\n name", b"1"),
    ),
    *(
        (f"projector-dedup-{name}".encode(), value)
        for name in ("attempt", "not-before", "timestamp")
        for value in NUMBERS
    ),
)
TIMESTAMPS = (0, -1, -5, 1, 1 << 50, (1 << 63) - 1)


def garbage(seed: int, count: int) -> Iterator[tuple[bytes | None, list[Header], int]]:
    """Yield values, headers and timestamps: payments of the accounts a, b and c, and others."""
    dice = random.Random(seed)
    for number in range(count):
        values = [payment(number, account) for account in "aabcc"]
        ids: list[Header] = [(b"message_id", b"h%d" % number), (b"message_id", b"k%d" % number)]
        headers = dice.sample([*HEADERS, *ids, *ids], dice.randrange(6))
        yield dice.choice([*values, None, b"", b"\xff", b"{"]), headers, dice.choice(TIMESTAMPS)


def produce(brokers: str, topic: str, messages: Sequence[tuple[bytes | None, list[Header], int]]) -> None:
    """Send messages by librdkafka itself, and return when the cluster has them all. A timestamp of 0 is now."""
    library = ctypes.CDLL(cimpl.__file__)
    for function in ("rd_kafka_conf_new", "rd_kafka_new"):
        getattr(library, function).restype = ctypes.c_void_p
    text, size = ctypes.create_string_buffer(512), ctypes.c_size_t
    conf = ctypes.c_void_p(library.rd_kafka_conf_new())
    settings = ((b"bootstrap.servers", brokers.encode()), (b"log_level", b"0"), (b"batch.num.messages", b"1"))
    for setting, value in settings:  # one, as in kafka_rig.py
        assert library.rd_kafka_conf_set(conf, setting, value, text, size(512)) == 0
    client = ctypes.c_void_p(library.rd_kafka_new(0, conf, text, size(512)))  # 0: a producer
    for body, headers, timestamp in messages:
        # A topic, a partition, "copy it", and a time.
        arguments: list[object] = [*(1, topic.encode()), *(3, 0), *(7, 2), *(8, ctypes.c_int64(timestamp))]
        if body is not None:
            arguments += [4, body, size(len(body))]
        for name, content in headers:
            arguments += [9, name, content, size(len(content or b""))]
        assert library.rd_kafka_producev(client, *arguments, 0) == 0
    assert library.rd_kafka_flush(client, 30_000) == 0
    library.rd_kafka_destroy(client)
