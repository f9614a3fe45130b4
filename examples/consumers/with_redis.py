"""Count the flights in a stream of Redis. It may be killed at any time, and run as often as you like."""

import os
import signal

import redis

from flights import dispatcher
from projector_dedup.integrations.redis import Consumer

client = redis.Redis.from_url(os.environ["REDIS_URL"])
consumer = Consumer(client, os.environ.get("STREAM", "flights"), "airlines", dispatcher(), abandoned_after=10)
signal.signal(signal.SIGTERM, consumer.stop)
consumer.run()
