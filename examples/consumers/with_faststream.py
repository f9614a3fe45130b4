"""Count the flights in a queue of RabbitMQ, with FastStream. Kill it at any time, and run as many as you like."""

import asyncio
import os

from faststream import FastStream
from faststream.rabbit import RabbitBroker

from flights import MAX_DELAY, async_dispatcher
from projector_dedup.integrations.faststream.rabbit import subscribe

broker = RabbitBroker(os.environ["AMQP_URL"])
subscribe(broker, os.environ.get("QUEUE", "flights"), async_dispatcher(), max_delay=MAX_DELAY)
asyncio.run(FastStream(broker).run())
