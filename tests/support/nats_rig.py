"""A stream of NATS JetStream for one test, looked at on connections of the test's own."""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import nats
from nats.js import JetStreamContext
from nats.js.api import RawStreamMsg
from nats.js.errors import NotFoundError

from brokers import broker
from consumer_rig import Sent
from nats_garbage import send
from projector_dedup.brokers.nats import MESSAGE_ID, REJECTED_FOR, dead_stream, replay
from reached import reached

T = TypeVar("T")
DURABLE = "airlines"


class JetStream:
    """One stream with a name of its own, looked at on a connection of the test's own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.stream = f"test-{secrets.token_hex(6)}"
        self.subject = f"{self.stream}.all"
        self.dead_stream = dead_stream(self.stream, DURABLE)
        self.ask(lambda streams: streams.add_stream(name=self.stream, subjects=[f"{self.stream}.>"]))

    def ask(self, question: Callable[[JetStreamContext], Coroutine[Any, Any, T]]) -> T:
        """Ask the server."""

        async def run() -> T:
            async with await nats.connect(self.url) as connection:
                reached.saw("nats", str(connection.connected_server_version))
                return await question(connection.jetstream())

        return asyncio.run(run())

    def publish(self, messages: Sequence[Sent]) -> None:
        """Publish, and return when the server has it all; twice is twice, which `Nats-Msg-Id` would prevent."""

        async def publish(streams: JetStreamContext) -> None:
            for each in messages:
                beside = {MESSAGE_ID: each.id, "type": each.type}
                headers = {name: value for name, value in beside.items() if value}
                await streams.publish(self.subject, each.body, headers=headers or None)

        self.ask(publish)

    def post(self, body: bytes, **headers: str) -> None:
        """Publish one message with any headers that nats-py takes."""
        self.ask(lambda streams: streams.publish(self.subject, body, headers=headers or None))

    def send(self, block: bytes, body: bytes, subject: str = "") -> None:
        """Publish one message with its headers in octets."""

        async def run() -> None:
            async with await nats.connect(self.url) as connection:
                await send(connection, (subject or self.subject).encode(), block, body)

        asyncio.run(run())

    def dead_messages(self) -> list[RawStreamMsg]:
        """The dead letters, with their headers."""
        return self.ask(self._letters)

    def dead(self) -> list[Sent]:
        """The dead letters, as they were sent."""
        found = self.dead_messages()
        return [Sent((each.headers or {}).get(MESSAGE_ID), each.data or b"") for each in found]

    async def _letters(self, streams: JetStreamContext) -> list[RawStreamMsg]:
        try:
            state = (await streams.stream_info(self.dead_stream)).state
        except NotFoundError:
            return []
        found = []
        for number in range(state.first_seq, state.last_seq + 1) if state.messages else ():
            with contextlib.suppress(NotFoundError):
                found.append(await streams.get_msg(self.dead_stream, number))
        return found

    def letters(self) -> dict[bytes, str]:
        """The body of each dead letter, and why it is one."""

        async def read(streams: JetStreamContext) -> dict[bytes, str]:
            return {each.data or b"": (each.headers or {})[REJECTED_FOR] for each in await self._letters(streams)}

        return self.ask(read)

    def replay(self) -> int:
        """Publish the dead letters again, by the library."""

        async def run() -> int:
            async with await nats.connect(self.url) as connection:
                return await replay(connection, self.stream, DURABLE)

        return asyncio.run(run())

    def left(self) -> int:
        """How many messages were not delivered yet, or not acknowledged."""
        try:
            found = self.ask(lambda streams: streams.consumer_info(self.stream, DURABLE))
        except NotFoundError:  # nobody has consumed yet
            return self.ask(lambda streams: streams.stream_info(self.stream)).state.messages
        return (found.num_pending or 0) + (found.num_ack_pending or 0)

    def close(self) -> None:
        """Delete the streams."""

        async def delete(streams: JetStreamContext) -> None:
            for name in (self.stream, self.dead_stream):
                with contextlib.suppress(NotFoundError):
                    await streams.delete_stream(name)

        self.ask(delete)


@contextlib.contextmanager
def jet_stream() -> Iterator[JetStream]:
    """A stream of its own on the NATS of this run; the test ends here if there is none."""
    with contextlib.closing(JetStream(broker("nats"))) as opened:
        yield opened
