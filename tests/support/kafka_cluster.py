"""A mock cluster of librdkafka's, in a process of its own: a broker on a real socket, but no Kafka, and no disk.

The cluster lives in the process that has made it, so one process hosts it for all clients of a test. It knows topics,
consumer groups with generations and time-outs, committed offsets and idempotent producers; it creates topics when a
producer asks for one. It cannot tell what a real cluster does with retention, replication or authorization.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

PARTITIONS = 4  # of a topic that the mock creates by itself

PRODUCE, FETCH, OFFSET_COMMIT = 0, 1, 8  # requests, by their numbers in Kafka's protocol
NOT_ENOUGH_REPLICAS, MESSAGE_TOO_LARGE, UNKNOWN_TOPIC, NOT_AUTHORIZED = 19, 10, 3, 29  # errors, likewise


class KafkaCluster:
    """Our end: the address of the brokers, and the faults that they are told to have."""

    def __init__(self, process: subprocess.Popen[str], brokers: str) -> None:
        self._process = process
        self.brokers = brokers

    def make_topic(self, name: str, partitions: int) -> None:
        """Create a topic."""
        self._tell("topic", name, partitions)

    def fail(self, request: int, error: int, times: int) -> None:
        """Answer the next requests of a kind with an error, whoever sends them."""
        self._tell("fail", request, error, times)

    def break_topic(self, name: str, error: int) -> None:
        """Answer whatever concerns a topic with an error, from now on."""
        self._tell("break", name, error)

    def _tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


@contextlib.contextmanager
def kafka_cluster(folder: Path) -> Iterator[KafkaCluster]:
    """Start a cluster of one broker. It writes its log into ``folder``: nobody would empty a pipe."""
    with (
        (folder / "kafka.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield KafkaCluster(process, process.stdout.readline().strip())
        finally:
            process.kill()


# The other end ------------------------------------------------------------------------------------------------------


def _main() -> None:
    from confluent_kafka import cimpl

    library = ctypes.CDLL(cimpl.__file__)  # which finds the functions of the librdkafka that it is linked with
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
        getattr(library, name).restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    text = ctypes.create_string_buffer(512)
    conf = ctypes.c_void_p(library.rd_kafka_conf_new())
    client = ctypes.c_void_p(library.rd_kafka_new(0, conf, text, ctypes.c_size_t(512)))  # 0: a producer
    assert client.value, text.value
    cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(client, 1))
    library.rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, ctypes.c_int32(100))
    answer = partial(print, flush=True)
    answer(library.rd_kafka_mock_cluster_bootstraps(cluster).decode())
    for line in sys.stdin:
        _obey(library, cluster, *line.split())
        answer("done")


def _obey(library: Any, cluster: ctypes.c_void_p, command: str, *words: str) -> None:
    if command == "topic":
        name, partitions = words
        assert library.rd_kafka_mock_topic_create(cluster, name.encode(), int(partitions), 1) == 0
    elif command == "break":
        name, error = words
        library.rd_kafka_mock_topic_set_error(cluster, name.encode(), int(error))
    else:
        request, code, times = map(int, words)
        errors = (ctypes.c_int * times)(*[code] * times)
        library.rd_kafka_mock_push_request_errors_array(
            cluster, ctypes.c_int16(request), ctypes.c_size_t(times), errors
        )


if __name__ == "__main__":
    _main()
