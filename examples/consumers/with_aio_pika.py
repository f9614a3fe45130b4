"""Count the flights in a queue of RabbitMQ, with aio-pika: many at a time. It may be killed, and run as you like."""

import asyncio
import os
import signal

from flights import MAX_DELAY, async_dispatcher
from projector_dedup.integrations.aio_pika import Consumer


async def main() -> None:
    """Consume until SIGTERM."""
    queue = os.environ.get("QUEUE", "flights")
    consumer = Consumer(os.environ["AMQP_URL"], queue, async_dispatcher(), max_delay=MAX_DELAY)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)
    await consumer.run()


asyncio.run(main())
