"""Celery: a task that delivers events, acknowledged after the commit, and the replay of its dead letters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Unpack
from uuid import UUID

from ..extras import needs

with needs("celery"):
    import celery
    from billiard.einfo import ExceptionWithTraceback
    from billiard.exceptions import Terminated
    from celery.exceptions import Ignore, InvalidTaskError, Reject, Retry
    from celery.signals import worker_init, worker_process_init
    from celery.worker import state
    from celery.worker.request import Request
    from celery.worker.strategy import default
    from kombu import Queue
    from kombu.exceptions import ContentDisallowed, DecodeError

from ..dispatcher import Dispatcher
from ..errors import InvalidMessageIdError, RefusedError
from ..inherited import leave_to_parent
from ..message import Message, logger_of, printable
from ..verdict import Action, verdict_of
from .incoming import Convert, Incoming, json_event, text_of
from .settling import Settled, Settling, SettlingOptions, new_settling

__all__ = ["delivering_task", "forget_connections", "replay"]

logger = logger_of("projector_dedup.consumers")

REASON = "x-rejected-for"
"""The header of a dead letter with the error, shortened; the same as in the other consumers of RabbitMQ."""

CELERYS = (Retry, Ignore, Terminated)
"""Exceptions that Celery itself settles: it publishes a retry, and drops a revoked task."""


def _as_json(value: object) -> str:
    """Return an object that Celery's JSON has decoded as the text that plain JSON has for it."""
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    raise TypeError(f"an event contains {type(value).__name__}, which JSON does not have")


def delivering_task(
    app: celery.Celery,
    name: str,
    dispatcher: Dispatcher,
    *,
    queue: str,
    convert: Convert | None = None,
    **options: Unpack[SettlingOptions],
) -> Any:
    """Register and return a task that delivers an event to a dispatcher: ``task.delay(event, message_id="7")``.

    ``event`` is a value that Celery can serialize, such as a dictionary. **Pass the id of the event, not of the task**:
    an event that is published again is another task. The task also takes a ``type``. If you pass no ``message_id`` or
    no ``type``, the dispatcher finds it in the event. The handler gets the event as Celery deserialized it. With
    ``convert``, it gets the event that this function builds from the JSON, the id and the type.

    The worker acknowledges the task after the commit. Celery requeues it if the worker is lost or exceeds the hard time
    limit. The library retries a task after a delay. It publishes a rejected event, and a message that Celery cannot
    read, to ``<queue>.dead``, with the error in the header ``x-rejected-for``. The other options are
    ``SettlingOptions``. Each child process of a worker opens its own database connections.

    The broker must be RabbitMQ. With another broker, the worker ends at its start, and logs a ``RefusedError``.
    """
    # Raises here, not in a worker.
    settling = new_settling(delivering_task, dispatcher, convert or json_event, options, broker="celery")

    def deliver(
        self: Any,
        event: Any = None,
        message_id: object = None,
        type: object = None,  # noqa: A002  # as in Message
    ) -> None:
        attempt = self.request.retries + 1
        origin, id_name = f"task {name}", "argument message_id of the task"
        incoming = Incoming(b"", message_id, type, attempt=attempt, origin=origin, id_name=id_name)

        def converted(incoming: Incoming) -> object:
            if convert is not None:
                return convert(replace(incoming, body=json.dumps(event, default=_as_json).encode()))
            found = text_of(incoming.message_id, "message id", InvalidMessageIdError)
            return Message(found, event, text_of(incoming.type, "type"))

        settled = Settling(dispatcher, converted, **options, broker="celery").deliver(incoming)
        if settled.reject:
            rejected = Reject(settled.reason, requeue=False)
            rejected.label = settled.label  # for the worker's main process, which publishes the dead letter
            raise rejected
        if not settled.acknowledge:
            if self.request.is_eager:  # without a ``sig``, for which Celery would call the task again at once
                raise Retry(settled.reason, when=settled.delay, is_eager=True)
            try:
                raise self.retry(countdown=settled.delay, throw=False)
            except Reject as unpublished:  # Celery could not publish the retry, and would drop the message
                raise Reject(unpublished.reason, requeue=True) from unpublished

    task = app.task(
        deliver,
        name=name,
        bind=True,
        queue=queue,
        acks_late=True,
        acks_on_failure_or_timeout=False,
        max_retries=None,
        ignore_result=True,
        shared=False,  # otherwise other applications of this process get it too, and may have a task of this name
        typing=False,
        Request=f"{__name__}:SettledRequest",
        Strategy=f"{__name__}:strategy",
        settling=settling,
    )

    def confirm_what_is_published(sender: Any = None, **_: Any) -> None:
        if sender is None or sender.app is app:
            app.conf.broker_transport_options = {**app.conf.broker_transport_options, "confirm_publish": True}

    worker_init.connect(confirm_what_is_published, weak=False)
    worker_process_init.connect(lambda **_: forget_connections(dispatcher), weak=False)
    return task


def forget_connections(dispatcher: Dispatcher) -> None:
    """Make a forked process open its own database connections, without closing those of its parent.

    The first delivery does this by itself. Call the function earlier if other code of the child uses the engine first.
    In the children of a Celery worker, the library calls it.
    """
    options = dispatcher.session_factory.kw
    for bound in (options.get("bind"), *(options.get("binds") or {}).values()):
        if bound is not None:
            leave_to_parent(bound.engine)


def replay(app: celery.Celery, queue: str) -> int:
    """Publish the present dead letters of ``queue`` again, and return their number.

    Fix the cause first. Replay while the markers are kept: a message that was applied before is then a duplicate.
    ``replay`` acknowledges each dead letter after RabbitMQ has confirmed its copy in the queue.
    """
    with app.connection_for_write(transport_options={"confirm_publish": True}) as connection:
        channel = connection.default_channel
        waiting = _dead(queue)(channel)
        count = waiting.queue_declare().message_count
        for number in range(count):
            message = waiting.get()
            if message is None:
                return number
            headers = {key: value for key, value in message.headers.items() if key not in (REASON, "retries", "eta")}
            _publish(connection.Producer(channel), queue, message, {**headers, "retries": 0})
            message.ack()
        return int(count)


class SettledRequest(Request):  # type: ignore[misc]  # Celery has no types
    """A received task. If it is rejected or cannot be called, it is published as a dead letter first."""

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Publish a dead letter if the message caused the failure; requeue it if its worker was lost or interrupted.

        Celery's own method depends on its version and on the settings of the application, and may lose the message.
        """
        error = exc_info.exception
        error = getattr(error, "exc", error) if isinstance(error, ExceptionWithTraceback) else error
        if isinstance(error, CELERYS):
            return super().on_failure(exc_info, send_failed_event, return_ok)
        verdict = verdict_of(error)
        innocent = getattr(error, "requeue", False) or verdict.action is not Action.REJECT
        state.task_ready(self)
        if not innocent:
            if isinstance(error, Reject):
                settled = Settled(verdict, str(error.reason), getattr(error, "label", None))
            else:
                settled = self.task.settling.unread(error)
            if _publish_dead_letter(self.task, self.message, settled):
                return self.acknowledge()
        return self.reject(requeue=True)


def strategy(task: Any, app: celery.Celery, consumer: Any) -> Callable[..., Any]:
    """Return the function that receives the task's messages. It publishes a dead letter where Celery would drop one.

    Celery calls this function when a worker starts. Raises ``RefusedError``, which ends the worker, if the broker is
    not RabbitMQ.
    """
    broker = consumer.connection.transport.driver_type  # asked here: the settings may not be complete any earlier
    if broker != "amqp":
        raise RefusedError(
            f"the task {task.name} needs RabbitMQ, and the broker of this worker is {broker}, which does not confirm "
            'what is published: a retry or a dead letter could be lost; set broker_url="amqp://...". Without Celery, '
            "projector_dedup.brokers has consumers for other brokers"
        )
    receive = default(task, app, consumer)

    def receive_or_reject(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **more: Any) -> Any:
        try:
            return receive(message, body, ack, reject, callbacks, **more)
        except (DecodeError, ContentDisallowed, InvalidTaskError) as error:
            settled = task.settling.unread(error)
            logger.error("a message of task %s cannot be read, and is rejected: %s", task.name, settled.reason)
            if _publish_dead_letter(task, message, settled):
                return ack(logger, consumer.connection_errors)
            return reject(logger, consumer.connection_errors, requeue=True)

    return receive_or_reject


def _publish_dead_letter(task: Any, message: Any, settled: Settled) -> bool:
    """Publish a message of the task as a dead letter. Return True if the broker has confirmed the copy."""
    dead, headers = _dead(task.queue), {**message.headers, REASON: settled.reason}
    try:
        with task.app.producer_pool.acquire(block=True) as producer:
            _publish(producer, dead.name, message, headers, declare=[dead])
    except Exception:
        name = printable(task.queue)
        logger.exception(
            "a dead letter of queue %s could not be published: the broker delivers its message again", name
        )
        return False
    task.settling.kept(settled)
    return True


def _dead(queue: str) -> Queue:
    return Queue(f"{queue}.dead", routing_key=f"{queue}.dead", durable=True)


def _publish(producer: Any, queue: str, message: Any, headers: dict[str, Any], **more: Any) -> None:
    """Publish a copy of a message to a queue, with the message's properties and the given headers."""
    kept = {name: message.properties.get(name) for name in ("correlation_id", "reply_to", "priority")}
    producer.publish(
        message.body,
        exchange="",
        routing_key=queue,
        headers=headers,
        content_type=message.content_type or "application/data",
        content_encoding=message.content_encoding or "binary",
        delivery_mode=2,
        mandatory=True,
        retry=True,
        retry_policy={"max_retries": 3},
        **{name: value for name, value in kept.items() if value is not None},
        **more,
    )
