"""Count the flights in a stream of NATS JetStream, with FastStream. Kill it at any time, run as many as you like."""

import asyncio
import os

from faststream import FastStream
from faststream.nats import NatsBroker

from flights import async_dispatcher
from projector_dedup.integrations.faststream.nats import subscribe

stream = os.environ.get("STREAM", "flights")
broker = NatsBroker(os.environ["NATS_URL"])
subscribe(broker, stream, f"{stream}.>", "airlines", async_dispatcher())
asyncio.run(FastStream(broker).run())
