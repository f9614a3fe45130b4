"""FastStream: nothing is acknowledged before the commit, and nothing is lost between FastStream and the dispatcher."""

from .mutant import Mutant

TESTS = "tests/consumers/test_faststream.py"
NATS = "tests/consumers/test_faststream_nats.py"

MUTANTS = (
    Mutant(
        name="faststream-acknowledges-first",
        breaks="A message is acknowledged before it is applied, and lost if the worker dies.",
        where="subscribe.settle",
        old="        settled = await settling",
        new="        await raw.ack()\n        settled = await settling",
        tests=(f"{TESTS}::test_a_message_is_not_acknowledged_before_the_commit",),
    ),
    Mutant(
        name="faststream-makes-the-id-up",
        breaks="A message without an id is applied under a random one, again with each delivery.",
        where="subscribe.settle",
        old="incoming_of(raw.body, raw, work.name)",
        new="incoming_of(raw.body, type('', (), {**{n: getattr(raw, n) for n in ('headers', 'type', 'timestamp', "
        "'content_type')}, 'message_id': message.message_id}), work.name)",
        tests=(f"{TESTS}::test_a_message_without_any_id_is_rejected",),
    ),
    Mutant(
        name="faststream-decodes-first",
        breaks="A body that FastStream cannot decode is neither rejected nor delivered again.",
        where="AS_IT_CAME",
        old='"decoder": _decode,',
        new="",
        tests=(f"{TESTS}::test_nothing_of_the_applications_fails_before_the_dispatcher",),
    ),
    Mutant(
        name="copy-is-not-confirmed",
        breaks="A message is acknowledged although its copy went nowhere.",
        where="subscribe",
        old="on_return_raises=True",
        new="on_return_raises=False",
        tests=(f"{TESTS}::test_a_message_that_cannot_be_copied_is_given_back",),
    ),
    Mutant(
        name="message-that-cannot-be-copied-is-kept",
        breaks="A message whose copy fails stays with the consumer, unsettled, for as long as it runs.",
        where="subscribe.settle",
        old="await raw.nack(requeue=True)",
        new="pass",
        tests=(f"{TESTS}::test_a_message_that_cannot_be_copied_is_given_back",),
    ),
    Mutant(
        name="deferred-copy-goes-without-its-count",
        breaks="A message that comes too early, and whose headers fill a frame, comes again for ever: max_attempts is unheard.",
        where="headers_of_copy",
        old="if settled.reject else (ours,):",
        new="if True else (ours,):",
        tests=(f"{TESTS}::test_headers_that_leave_no_room_for_a_copy_are_left_out_and_named[p1-marked0]",),
    ),
    Mutant(
        name="faststream-does-not-name-the-remedy",
        breaks="A message that aio-pika cannot read closes FastStream's connection, and the log does not say what to do.",
        where="subscribe.start",
        old="connection.close_callbacks.add(",
        new="repr(",
        tests=(f"{TESTS}::test_what_aio_pika_cannot_read_is_logged_with_the_remedy",),
    ),
    Mutant(
        name="nats-is-acknowledged-first",
        breaks="A message of JetStream is acknowledged before it is applied, and lost if the worker dies.",
        where="Consumer.settle",
        old="            await self._answer(message, await",
        new="            await message.ack()\n            await self._answer(message, await",
        tests=(f"{NATS}::test_a_message_is_not_acknowledged_before_the_commit[None]",),
    ),
    Mutant(
        name="faststream-takes-any-durable-consumer",
        breaks="A durable consumer with a max_deliver is used, and the server drops messages unheard.",
        where="subscribe.start",
        old="await consumer.open()",
        new="pass",
        tests=(f"{NATS}::test_a_consumer_that_would_lose_messages_ends_the_application[drops-None]",),
        hangs=True,
    ),
    Mutant(
        name="faststream-fetches-before-it-refuses",
        breaks="Each start with a durable consumer that is refused costs the messages of a fetch.",
        where="subscribe.start",
        old="""        await consumer.open()
        consumers[:] = [consumer]
        pull = Pull(subscriber.connection, stream, durable)
        await pull.open()""",
        new="""        consumers[:] = [consumer]
        pull = Pull(subscriber.connection, stream, durable)
        await pull.open()
        await pull.fetch(1, 0.5)
        await consumer.open()""",
        tests=(f"{NATS}::test_a_consumer_that_would_lose_messages_ends_the_application[drops-None]",),
    ),
    Mutant(
        name="faststream-nats-fetches-by-itself",
        breaks="FastStream fetches by nats-py, beside us: a message with a status, or one that is no text, ends both.",
        where="subscribe.start",
        old="subscriber.subscription = pull",
        new="subscriber.subscription = None",
        tests=(f"{NATS}::test_whatever_a_client_sends_is_applied_delayed_or_a_dead_letter[None]",),
        hangs=True,
    ),
    Mutant(
        name="faststream-nats-batch-is-acknowledged-first",
        breaks="A batch of JetStream is acknowledged before it is applied, and lost if the worker dies.",
        where="Consumer.settle_batch",
        old="            answers = await",
        new="            for each in messages:\n                await each.ack()\n            answers = await",
        tests=(f"{NATS}::test_a_message_is_not_acknowledged_before_the_commit[10]",),
    ),
    Mutant(
        name="faststream-nats-batch-has-one-answer",
        breaks="One poisoned message takes its batch with it to the dead letters, or is acknowledged with the others.",
        where="Consumer.settle_batch",
        old="await self._answer(message, settled)",
        new="await self._answer(message, answers[0])",
        tests=(f"{NATS}::test_poison_and_what_comes_too_early[6]",),
        hangs=True,
    ),
    Mutant(
        name="faststream-nats-delivers-one-by-one",
        breaks="Every message of a batch has a transaction of its own.",
        where="Consumer.settle_batch",
        old="answers = await self._settling.adeliver_batch([_incoming(each, self._stream) for each in messages])",
        new="answers = [await self._settling.adeliver(_incoming(each, self._stream)) for each in messages]",
        tests=(f"{NATS}::test_a_batch_is_one_transaction",),
    ),
    Mutant(
        name="copy-without-room-is-sent",
        breaks="A message whose copy does not fit into a frame has RabbitMQ close the connection, again and again.",
        where="copyable",
        old="if (room := room - sizes[name]) >= 0:",
        new="if name in sizes:",
        tests=(f"{TESTS}::test_headers_that_leave_no_room_for_a_copy_are_left_out_and_named[None-marked1]",),
    ),
)
