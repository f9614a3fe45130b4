"""Count the flights in a queue of Celery. It may be killed at any time, and run as often as you like.

``celery -A with_celery worker -n one@%h`` consumes; ``count_flight.delay(event, message_id=...)`` publishes.
"""

import os

from celery import Celery

from flights import MAX_DELAY, dispatcher
from projector_dedup.integrations.celery import delivering_task

queue = os.environ.get("QUEUE", "flights")
app = Celery("flights", broker=os.environ["AMQP_URL"])
app.conf.update(task_default_queue=queue, broker_transport_options={"confirm_publish": True})
count_flight = delivering_task(app, "flights.count", dispatcher(), queue=queue, max_delay=MAX_DELAY)

if __name__ == "__main__":
    options = ["--concurrency", "2", "--loglevel", "WARNING", "--without-mingle", "--without-gossip"]
    app.worker_main(["worker", "-n", f"{os.getpid()}@%h", *options])
