"""Batches: each message is applied once, has the result that is its own, and sees what those before it wrote."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="batch-results-of-other-messages",
        breaks="The messages of a batch get each other's outcomes.",
        where="_Batch.settled",
        old="zip(self._now, self._chunk.outcomes, strict=True)",
        new="zip(self._now, reversed(self._chunk.outcomes), strict=True)",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_a_failing_message_takes_no_other_with_it[sqlite+pysqlite-at once-{0, 4, 7}]",
        ),
    ),
    Mutant(
        name="batch-forgets-a-half",
        breaks="Of a batch that failed only the first half is tried again.",
        where="_Batch.failed",
        old="pieces = [after[:middle], after[middle:]]",
        new="pieces = [after[:middle]]",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_a_failing_message_takes_no_other_with_it[sqlite+pysqlite-at once-{0, 4, 7}]",
        ),
    ),
    Mutant(
        name="batch-is-tried-in-another-order",
        breaks="The parts of a batch that failed are applied in another order than that of delivery.",
        where="_Batch.failed",
        old="[piece for piece in reversed(pieces) if piece]",
        new="[piece for piece in pieces if piece]",
        tests=("tests/batches/test_batch.py::test_what_is_left_of_a_batch_is_applied_in_its_order[sqlite+pysqlite]",),
    ),
    Mutant(
        name="batch-goes-on-after-a-durable-violation",
        breaks="A batch of which something was committed is tried again, and applied twice or skipped unheard.",
        where="_Batch._concerns_all",
        old='if getattr(error, "durable", False):',
        new='if getattr(error, "durable", False) is None:',
        tests=("tests/batches/test_batch.py::test_a_commit_of_the_handlers_own_is_told_of_every_message",),
    ),
    Mutant(
        name="batch-failure-is-acknowledged",
        breaks="deliver_batch() returns although messages failed.",
        where="BatchResults.settled_deliveries",
        old="if errors:",
        new="if len(errors) > len(deliveries):",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_a_failing_message_takes_no_other_with_it[sqlite+pysqlite-at once-{0, 4, 7}]",
        ),
    ),
    Mutant(
        name="batch-result-for-the-next-message",
        breaks="The result of a message in a batch is given to another message.",
        where="BatchResults.handled",
        old="zip(self._wanted[handler.identity], became, strict=True)",
        new="zip(self._wanted[handler.identity], [*became[1:], *became[:1]], strict=True)",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_a_batch_applies_each_message_once[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="batch-handles-the-last-of-two",
        breaks="Of a message that comes twice in a batch the later is handled, after those between them.",
        where="Chunk._claim",
        old="index, message in reversed([*enumerate(self.messages)])",
        new="index, message in enumerate(self.messages)",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_a_batch_applies_each_message_once[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="batch-new-under-one-name",
        breaks="In a batch a message that is known by one name of its handler is applied again under another.",
        where="insert_markers",
        old="if all((message_id, name) in inserted for name in names)]",
        new="if any((message_id, name) in inserted for name in names)]",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_what_was_applied_under_a_former_name_is_a_duplicate[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="batch-markers-in-any-order",
        breaks="Two batches of the same messages lock their markers in different orders, and deadlock.",
        where="insert_markers",
        old="in_order = sorted(claims if wait is None else (_bounded(key, wait) for key in claims), key=key_of)",
        new="in_order = list(claims if wait is None else (_bounded(key, wait) for key in claims))",
        tests=("tests/batches/test_batch.py::test_markers_are_claimed_in_one_order",),
    ),
    Mutant(
        name="batch-session-is-not-emptied",
        breaks="A message of a batch finds the objects of the one before it in its session, with their stale values.",
        where="UnitOfWork.end_message",
        old="session.expunge_all()",
        new="pass",
        tests=("tests/batches/test_batch.py::test_each_message_of_a_batch_finds_its_session_empty[sqlite+pysqlite]",),
    ),
    Mutant(
        name="batch-statement-misses-earlier-writes",
        breaks="In a shared session, a handler's statement does not find what earlier messages have changed by the ORM.",
        where="SharedSession.before_statement",
        old="self.flush()",
        new="pass",
        tests=("tests/batches/test_shared_session.py::test_a_statement_sees_what_earlier_messages_have_changed[text-sqlite]",),
    ),
    Mutant(
        name="batch-writes-are-forgotten",
        breaks="What a message of a batch has changed is forgotten before it was written.",
        where="UnitOfWork.end_message",
        old="session.flush()\n            if not (session.identity_map.check_modified() or session.new or session.deleted):\n                break",
        new="break",
        tests=("tests/delivery/test_contract.py::TestDefault::test_a_batch_applies_each_message_once[sqlite+pysqlite]",),
    ),
    Mutant(
        name="batch-rows-are-stale",
        breaks="In a shared session, a handler gets a row as it was before a statement of an earlier message changed it.",
        where="SharedSession.before_statement",
        old="self.expire_all()",
        new="pass",
        tests=("tests/batches/test_shared_session.py::test_what_a_statement_writes_is_seen_by_later_messages[text-sqlite]",),
    ),
)
