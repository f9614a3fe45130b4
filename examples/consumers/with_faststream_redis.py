"""Count the flights in a stream of Redis, with FastStream. Kill it at any time, and run as many as you like."""

import asyncio
import os

from faststream import FastStream
from faststream.redis import RedisBroker

from flights import MAX_DELAY, async_dispatcher
from projector_dedup.integrations.faststream.redis import subscribe

broker = RedisBroker(os.environ["REDIS_URL"])
application = FastStream(broker)
stream = os.environ.get("STREAM", "flights")
subscribe(application, broker, stream, "airlines", async_dispatcher(), max_delay=MAX_DELAY, abandoned_after=10)
asyncio.run(application.run())
