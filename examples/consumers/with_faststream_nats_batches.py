"""Count the flights in a stream of NATS JetStream, with FastStream, 20 in one transaction. Kill it at any time."""

import asyncio
import os

from faststream import FastStream
from faststream.nats import NatsBroker

from flights import MAX_DELAY, async_dispatcher
from projector_dedup.integrations.faststream.nats import subscribe

stream = os.environ.get("STREAM", "flights")
broker = NatsBroker(os.environ["NATS_URL"])
subscribe(broker, stream, f"{stream}.>", "airlines", async_dispatcher(), batch=20, max_delay=MAX_DELAY, ack_wait=10)
asyncio.run(FastStream(broker).run())
