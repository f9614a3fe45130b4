"""Count the flights in a stream of Redis. It may be killed at any time, and run as often as you like."""

import os
import signal

import redis

from flights import MAX_DELAY, dispatcher
from projector_dedup.integrations.redis import Consumer

client = redis.Redis.from_url(os.environ["REDIS_URL"])
stream = os.environ.get("STREAM", "flights")
consumer = Consumer(client, stream, "airlines", dispatcher(), max_delay=MAX_DELAY, abandoned_after=10)
signal.signal(signal.SIGTERM, consumer.stop)
consumer.run()
