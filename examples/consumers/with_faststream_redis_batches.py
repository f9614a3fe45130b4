"""Count the flights in a stream of Redis, with FastStream, 20 in one transaction. Kill it at any time."""

import asyncio
import os

from faststream import FastStream
from faststream.redis import RedisBroker

from flights import MAX_DELAY, async_dispatcher
from projector_dedup.integrations.faststream.redis import subscribe

broker = RedisBroker(os.environ["REDIS_URL"])
application = FastStream(broker)
stream = os.environ.get("STREAM", "flights")
dispatcher = async_dispatcher()
subscribe(application, broker, stream, "airlines", dispatcher, batch=20, max_delay=MAX_DELAY, abandoned_after=10)
asyncio.run(application.run())
