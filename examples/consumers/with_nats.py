"""Count the flights in a stream of NATS JetStream. It may be killed at any time, and run as often as you like."""

import asyncio
import os
import signal

import nats

from flights import MAX_DELAY, async_dispatcher
from projector_dedup.integrations.nats import Consumer


async def main() -> None:
    """Consume until the process is told to end."""
    connection = await nats.connect(os.environ["NATS_URL"])
    stream, dispatcher = os.environ.get("STREAM", "flights"), async_dispatcher()
    consumer = Consumer(connection, stream, "airlines", dispatcher, in_flight=4, max_delay=MAX_DELAY, ack_wait=10)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)
    await consumer.run()
    await connection.close()


asyncio.run(main())
