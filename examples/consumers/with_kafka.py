"""Count the flights in a topic of Kafka. It may be killed at any time, and run as often as you like.

$KAFKA is the configuration: {"bootstrap.servers": "localhost:9092", "group.id": "airlines"}.
``python with_kafka.py begin`` gives a new group its first positions, once.
"""

import json
import os
import signal
import sys

from flights import MAX_DELAY, dispatcher
from projector_dedup.integrations.kafka import Consumer, begin

config, topics = json.loads(os.environ["KAFKA"]), [os.environ.get("TOPIC", "flights")]
if sys.argv[1:] == ["begin"]:
    begin(config, topics)
else:
    consumer = Consumer(config, topics, dispatcher(), max_delay=MAX_DELAY)
    signal.signal(signal.SIGTERM, consumer.stop)
    consumer.run()
