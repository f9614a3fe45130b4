"""Count the flights in a queue of RabbitMQ, with pika. It may be killed at any time, and run as often as you like."""

import os
import signal

import pika

from flights import MAX_DELAY, dispatcher
from projector_dedup.integrations.pika import Consumer

server, queue = pika.URLParameters(os.environ["AMQP_URL"]), os.environ.get("QUEUE", "flights")
consumer = Consumer(server, queue, dispatcher(), max_delay=MAX_DELAY)
signal.signal(signal.SIGTERM, consumer.stop)
consumer.run()
