"""Consumers: each module connects a client of a broker to a dispatcher (docs/consumers).

``pika``, ``aio_pika``, ``kafka``, ``nats``, ``redis``, ``sqs`` and ``pubsub`` have a ``Consumer``. It delivers each
message, acknowledges it after the COMMIT, has the broker redeliver what failed, and keeps what is rejected in a
dead-letter queue. ``celery`` and ``faststream`` connect to the workers that these have. For a broker without a module
here, write a consumer with ``incoming`` (from bytes to an event) and ``settling`` (what to do with a message that
failed). ``typed_events`` builds the classes of your events.

Each module needs the extra of its name.
"""
