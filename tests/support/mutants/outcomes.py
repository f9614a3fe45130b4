"""I5: the outcome of an interrupted COMMIT is asked of the database, and never guessed."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="unknown-commit-is-applied",
        breaks="A COMMIT whose answer was lost is taken for applied, and the message is acknowledged.",
        where="UnitOfWork._commit",
        old="if guard.commit_was_answered:\n                logger",
        new="if guard.commit_was_sent:\n                guard.commit_was_answered = True\n                logger",
        tests=(
            "tests/delivery/test_commit_outcome.py::test_a_cut_commit_is_asked_for_by_claiming_again[before-2-Outcome.APPLIED-postgresql+psycopg2]",
        ),
    ),
    Mutant(
        name="unknown-commit-is-not-asked-about",
        breaks="A COMMIT whose answer was lost is not retried, although a claim would tell its outcome.",
        where="Attempts.delay_after",
        old="self.unknown = error\n",
        new="raise error\n",
        tests=(
            "tests/delivery/test_commit_outcome.py::test_a_cut_commit_is_asked_for_by_claiming_again[before-2-Outcome.APPLIED-postgresql+psycopg2]",
        ),
    ),
    Mutant(
        name="unknown-commit-without-a-marker-is-retried",
        breaks="Without a marker an unknown COMMIT is run again, and what it had committed counts twice.",
        where="Attempts.delay_after",
        old="if not self._marked or not isinstance(",
        new="if not isinstance(",
        tests=(
            "tests/delivery/test_commit_outcome.py::test_without_a_marker_there_is_nobody_to_ask[before-0-postgresql+psycopg]",
        ),
    ),
    Mutant(
        name="postgresql-lost-commit-is-refused",
        breaks="On PostgreSQL the loss of the connection during COMMIT means that nothing was applied.",
        where="PostgreSQL.commit_refused",
        old="sqlstate is not None\n            and not error.connection_invalidated\n            and",
        new="sqlstate is None\n            or",
        tests=(
            "tests/delivery/test_commit_outcome.py::test_a_cut_that_no_retry_could_ask_about_is_unknown[after-durable1-postgresql+psycopg2]",
        ),
    ),
    Mutant(
        name="refused-commit-is-unknown",
        breaks="A COMMIT that the server refused is called unknown, and its own error is hidden.",
        where="_was_refused",
        old="return isinstance(error, DBAPIError) and guard.dialect.commit_refused(error)",
        new="return False",
        tests=(
            "tests/delivery/test_commit_outcome.py::test_a_constraint_that_commit_finds_violated_is_the_users_error[postgresql+psycopg2]",
        ),
    ),
    Mutant(
        name="mariadb-unsent-commit-is-unknown",
        breaks="A COMMIT that mysqlclient did not send is called unknown.",
        where="MariaDB.commit_refused",
        old="return number == _OUT_OF_SYNC or ",
        new="return ",
        tests=(
            "tests/guards/test_guards_ordinary.py::test_a_commit_that_mysqlclient_does_not_send_is_no_unknown_outcome[mariadb+mysqldb]",
        ),
    ),
    Mutant(
        name="sqlite-busy-commit-is-unknown",
        breaks="On SQLite a COMMIT that met a reader is called unknown instead of run again.",
        where="SQLite.commit_refused",
        old='("SQLITE_BUSY", "SQLITE_CONSTRAINT", "SQLITE_FULL")',
        new='("SQLITE_CONSTRAINT",)',
        tests=(
            "tests/databases/test_sqlite.py::test_a_process_that_reads_for_long_is_in_the_way_of_a_rollback_journal_only[delete-sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="exhausted-retries-say-nothing-was-applied",
        breaks="Retries that end after an unknown COMMIT say that nothing was applied.",
        where="Attempts.delay_after",
        old="if self.unknown is not None:\n                raise self.unknown",
        new="if self.unknown is None and False:\n                raise self.unknown",
        tests=(
            "tests/delivery/test_commit_outcome.py::test_a_cut_that_no_retry_could_ask_about_is_unknown[before-durable0-postgresql+psycopg2]",
        ),
    ),
    Mutant(
        name="unknown-is-remembered-after-a-free-claim",
        breaks="A claim that was free proves that the lost COMMIT did not happen, and it is still called unknown.",
        where="Attempts.claimed",
        old="self.unknown = None",
        new="pass",
        tests=(
            "tests/delivery/test_commit_outcome.py::test_after_a_cut_a_free_claim_makes_the_outcome_known[postgresql+psycopg2]",
        ),
    ),
    Mutant(
        name="duplicate-after-unknown-is-not-logged",
        breaks="The log does not tell a duplicate that settles an unknown COMMIT from any other.",
        where="Chunk.log_settled",
        old="duplicate and attempts.unknown is not None",
        new="duplicate and attempts.number < 0",
        tests=("tests/delivery/test_logging.py::test_a_duplicate_after_an_unknown_commit_says_so[postgresql]",),
    ),
    Mutant(
        name="listener-after-commit-fails-the-message",
        breaks="A listener that fails after the COMMIT makes an applied message an error.",
        where="UnitOfWork._commit",
        old="if guard.commit_was_answered:\n                logger.warning(",
        new="if guard.commit_was_answered:\n                raise\n                logger.warning(",
        tests=(
            "tests/delivery/test_commit_outcome.py::test_a_listener_that_fails_after_the_commit_does_not_undo_it[postgresql+psycopg]",
        ),
    ),
    Mutant(
        name="cancellation-interrupts-commit",
        breaks="A cancellation during COMMIT does not wait for the database's answer.",
        where="_shielded",
        old="await asyncio.shield(task)",
        new="await task",
        tests=(
            "tests/delivery/test_interrupts.py::test_a_cancellation_during_commit_or_rollback_waits_for_the_answer[commit-durable0-postgresql+psycopg (async)]",
        ),
    ),
    Mutant(
        name="cancellation-is-swallowed",
        breaks="A task that was cancelled during COMMIT goes on as if nobody had cancelled it.",
        where="_shielded",
        old="raise cancelled\n",
        new="return task.result()\n",
        tests=(
            "tests/delivery/test_interrupts.py::test_a_cancellation_during_commit_or_rollback_waits_for_the_answer[commit-durable0-postgresql+psycopg (async)]",
        ),
    ),
    Mutant(
        name="close-is-interrupted-by-cancellation",
        breaks="A cancellation during ROLLBACK leaves the transaction open in the pool.",
        where="UnitOfWork.close",
        old="self._waiting.to_the_end(partial(self._close, error))",
        new="self._close(error)",
        tests=(
            "tests/delivery/test_interrupts.py::test_a_cancellation_during_commit_or_rollback_waits_for_the_answer[rollback-durable1-postgresql+psycopg (async)]",
        ),
    ),
    Mutant(
        name="refused-commit-keeps-its-marker",
        breaks="On SQLite the retry of a COMMIT that was refused finds its own marker, and calls it a duplicate.",
        where="Guard.leave_nothing_open",
        old="roll_back(self.connection)",
        new="pass",
        tests=(
            "tests/delivery/test_commit_outcome.py::test_a_constraint_that_commit_finds_violated_is_the_users_error_on_sqlite[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="awaiting-shields-nothing",
        breaks="A cancellation reaches COMMIT and ROLLBACK, because nothing runs in a task of its own.",
        where="Awaiting.to_the_end",
        old="await_only(_shielded(greenlet_spawn(step)))",
        new="step()",
        tests=(
            "tests/delivery/test_interrupts.py::test_a_cancellation_during_commit_or_rollback_waits_for_the_answer[commit-durable0-postgresql+psycopg (async)]",
        ),
    ),
    Mutant(
        name="cancellation-interrupts-the-commit-of-a-delivery",
        breaks="A cancellation of a delivery during COMMIT loses the connection, and nobody knows the outcome.",
        where="UnitOfWork.commit_and_close",
        old="self._waiting.to_the_end(self._commit_and_close)",
        new="self._commit_and_close()",
        tests=(
            "tests/delivery/test_interrupts.py::test_a_cancellation_during_commit_or_rollback_waits_for_the_answer[commit-durable0-postgresql+psycopg (async)]",
        ),
    ),
    Mutant(
        name="cancellation-interrupts-a-commit-by-hand",
        breaks="A cancellation of AsyncUnitOfWork.commit loses the connection, and nobody knows the outcome.",
        where="UnitOfWork.commit",
        old="self._waiting.to_the_end(self._commit)",
        new="self._commit()",
        tests=(
            "tests/delivery/test_interrupts.py::test_a_cancelled_commit_of_the_callers_waits_for_the_answer[postgresql+psycopg (async)]",
        ),
    ),
)
