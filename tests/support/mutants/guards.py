"""I4: a handler that ends or breaks the claim's transaction is prevented or found out, and never `APPLIED`."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="handler-may-commit",
        breaks="A handler's own commit() is not prevented, so half of its work is durable when it fails later.",
        where="Guard.before_commit",
        old="if self.watching:",
        new="if self.commit_was_sent:",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[postgresql+psycopg2-session.commit-returns]",
        ),
    ),
    Mutant(
        name="swallowed-violation-is-forgotten",
        breaks="A handler that swallows the error of its prevented commit is APPLIED.",
        where="Guard.verify",
        old="if self.violation is not None:",
        new="if self.driver_was_exposed:",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[postgresql+psycopg2-session.commit-swallows]",
        ),
    ),
    Mutant(
        name="sql-text-may-commit",
        breaks="A handler that executes the text COMMIT ends the transaction, and is not stopped before.",
        where="Guard.before_statement",
        old="if command := grammar.transaction_command(sql):",
        new="if (command := grammar.transaction_command(sql)) and self.driver_was_exposed:",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[mariadb+pymysql-text 'COMMIT'-returns]",
        ),
    ),
    Mutant(
        name="asyncpg-swallowed-error-commits-nothing",
        breaks="With asyncpg an error that a handler swallowed is not remembered: COMMIT rolls back, and it is APPLIED.",
        where="PostgreSQL.aborts",
        old="return sqlstate_of(error) is not None",
        new="return False",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[postgresql+asyncpg (async)-error swallowed inside nested-swallows]",
        ),
    ),
    Mutant(
        name="failed-statement-is-not-remembered",
        breaks="A failed statement is not reported to the guard, so an error that a handler swallowed is forgotten.",
        where="GuardedConnection._watched",
        old="guard.statement_failed(error)\n",
        new="pass\n",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[postgresql+asyncpg (async)-error swallowed inside nested-swallows]",
        ),
    ),
    Mutant(
        name="mariadb-lock-wait-timeout-rolls-nothing-back",
        breaks="On MariaDB a swallowed lock wait timeout is thought harmless, though the server may have rolled back.",
        where="MariaDB.aborts",
        old="_LOCK_TABLE_FULL, _LOCK_WAIT_TIMEOUT, _NO_SAVEPOINT)",
        new="_LOCK_TABLE_FULL, _NO_SAVEPOINT)",
        tests=(
            "tests/guards/test_guards_ordinary.py::test_a_deadlock_is_retried_whatever_the_handler_makes_of_it[and_is_swallowed-times_out-mariadb+pymysql]",
        ),
    ),
    Mutant(
        name="error-inside-a-savepoint-aborts-the-message",
        breaks="An error that a handler caught around begin_nested() is held against it, as if it aborted everything.",
        where="Guard.savepoint_ended",
        old="if rolled_back:",
        new="if self.driver_was_exposed:",
        tests=(
            "tests/guards/test_guards_ordinary.py::test_a_deadlock_is_retried_whatever_the_handler_makes_of_it[and_its_savepoint_is_rolled_back-times_out-mariadb+pymysql]",
        ),
    ),
    Mutant(
        name="open-savepoint-is-committed-over",
        breaks="A handler that leaves a savepoint open is not told.",
        where="Guard.verify",
        old="self.session.in_nested_transaction()\n            or",
        new="self.driver_was_exposed and",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[sqlite+pysqlite-begin_nested left open-returns]",
        ),
    ),
    Mutant(
        name="second-connection-of-the-session",
        breaks="A session that goes to a second engine writes there in a transaction that commits by itself.",
        where="Guard.connected",
        old="if connection is not self.connection and self.watching and not self.commit_was_answered:",
        new="if self.commit_was_answered:",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[postgresql+psycopg-bind_arguments-returns]",
        ),
    ),
    Mutant(
        name="lent-driver-is-not-asked-about",
        breaks="A handler that took the driver's own connection may have committed there, and nobody asks the server.",
        where="Guard.driver_exposed",
        old="self.require_server_check()",
        new="self._refuse_aborted()",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[mariadb+pymysql-driver cursor COMMIT, BEGIN in nested-returns]",
        ),
    ),
    Mutant(
        name="driver-is-lent-unnoticed",
        breaks="Taking the driver's own connection is not noticed, so what a handler does on it is not looked into.",
        where="GuardedConnection.connection",
        old="self.guard.driver_exposed()\n",
        new="pass\n",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[postgresql+psycopg2-driver cursor COMMIT, BEGIN in nested-returns]",
        ),
    ),
    Mutant(
        name="stored-procedure-may-commit",
        breaks="A stored procedure that commits and begins again goes unnoticed, and the message is half applied.",
        where="Guard.before_statement",
        old="if grammar.hides_commands(sql):",
        new="if self.driver_was_exposed and grammar.hides_commands(sql):",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[mariadb+pymysql-text 'CALL commits_and_begins()'-returns]",
        ),
    ),
    Mutant(
        name="second-statement-of-a-text-fails-unheard",
        breaks="Two statements in one SQL text are sent to MariaDB, whose drivers tell nobody that the second failed.",
        where="Guard.before_statement",
        old="if grammar.hides_errors(sql):",
        new="if self.driver_was_exposed and grammar.hides_errors(sql):",
        tests=(
            "tests/delivery/test_silent_losses.py::test_an_error_that_a_driver_tells_nobody_cannot_happen[False-mariadb+pymysql]",
        ),
    ),
    Mutant(
        name="streamed-result-fails-unheard",
        breaks="An error that comes while a result is streamed is missed, and its transaction is thought whole.",
        where="GuardedConnection._watched",
        old="guard.require_server_check()",
        new="pass",
        tests=(
            "tests/delivery/test_silent_losses.py::test_a_deadlock_while_a_result_is_streamed_is_not_forgotten[mariadb+pymysql]",
        ),
    ),
    Mutant(
        name="transaction-is-not-looked-at-before-commit",
        breaks="What a listener of the user's does right before COMMIT is not looked at.",
        where="GuardedConnection._commit_impl",
        old="guard.verify()",
        new="pass",
        tests=(
            "tests/delivery/test_unit_of_work.py::test_a_listener_that_breaks_the_transaction_at_the_last_moment_is_noticed[postgresql+psycopg]",
        ),
    ),
    Mutant(
        name="strict-asks-nothing",
        breaks="strict=True asks the server nothing, so a commit on the driver's own connection goes unseen.",
        where="UnitOfWork._commit",
        old="asks_server = self._options.strict or guard.server_check_required",
        new="asks_server = guard.server_check_required",
        tests=("tests/guards/test_guards_unseen.py::test_strict_asks_the_server[postgresql+psycopg-hidden_rollback]",),
    ),
    Mutant(
        name="any-transaction-with-the-marker-is-ours",
        breaks="Before COMMIT the marker is looked for in any transaction, so one that was committed below is ours.",
        where="Guard._is_open",
        old="if marked:",
        new="if self.key is None and marked:",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[mariadb+pymysql-driver cursor COMMIT, BEGIN after nested-returns]",
        ),
    ),
    Mutant(
        name="mark-is-set-twice",
        breaks="A transaction that the handler began below is marked as the claim's when the driver is lent again.",
        where="Guard.mark",
        old="if _MARK in self._savepoints:",
        new="if self.connection is None:",
        tests=(
            "tests/guards/test_guards_unseen.py::test_strict_is_not_deceived_by_lending_the_driver_later[mariadb+pymysql]",
        ),
    ),
    Mutant(
        name="mark-is-lost-with-a-savepoint",
        breaks="The mark of the transaction goes with a savepoint and is not set again, so a good message fails.",
        where="Guard.savepoint_ended",
        old="if _MARK in gone:",
        new="if not gone:",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[mariadb+pymysql-driver read in nested-returns]",
        ),
    ),
    Mutant(
        name="durable-violation-says-rolled-back",
        breaks="The error of a handler that had committed says that everything was rolled back.",
        where="Guard._what_is_durable",
        old="committed = self._is_committed()",
        new="committed = False",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[postgresql+psycopg2-driver cursor COMMIT, BEGIN in nested-returns]",
        ),
    ),
    Mutant(
        name="failing-handler-hides-its-commit",
        breaks="A handler that committed and then failed raises its own error, as if a redelivery could mend it.",
        where="UnitOfWork._close",
        old="violation = None if self._committed else guard.made_durable()",
        new="violation = None",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[postgresql+psycopg2-driver cursor COMMIT, BEGIN in nested-fails]",
        ),
    ),
    Mutant(
        name="rollback-hides-a-commit-below",
        breaks="A rollback that follows a commit on the driver's connection hides that commit.",
        where="Guard.before_rollback",
        old="self.ended_below()",
        new="pass",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[postgresql+psycopg2-driver commit, then session.rollback-returns]",
        ),
    ),
    Mutant(
        name="mariadb-implicit-commits-are-let-through",
        breaks="On MariaDB TRUNCATE and ALTER commit the marker with half of the handler's work.",
        where="MariaDB",
        old='r"ALTER|TRUNCATE|RENAME|GRANT|REVOKE|FLUSH|',
        new='r"RENAME|GRANT|REVOKE|FLUSH|',
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[mariadb+pymysql-text 'TRUNCATE TABLE total'-returns]",
        ),
    ),
    Mutant(
        name="command-behind-a-comment-is-not-seen",
        breaks="A COMMIT behind a comment in the SQL text is not seen.",
        where="OPAQUE",
        old=r', r"/\*.*?\*/")',
        new=")",
        tests=(
            "tests/guards/test_guards.py::test_what_becomes_of_a_misbehaviour[postgresql+psycopg2-text '/* done */ COMMIT'-returns]",
        ),
    ),
    Mutant(
        name="table-without-transactions",
        breaks="On MariaDB a read model in MyISAM is written to, and stays written when the message fails.",
        where="Guard.before_statement",
        old="self.dialect.refuse_table(self.connection, written)",
        new="pass",
        tests=(
            "tests/guards/test_guards_ordinary.py::test_a_read_model_without_transactions_is_refused[orm_insert-MyISAM-mariadb+pymysql]",
        ),
    ),
    Mutant(
        name="unmarked-projector-is-not-watched",
        breaks="A projector without idempotent=True is not watched, so its work is lost or halved unheard.",
        where="UnitOfWork.begin",
        old="self._watch(self._open(bind_of_session(self.session), None, one=False), new=True)",
        new="guard = self._open(bind_of_session(self.session), None, one=False)\n        guard.watch()\n        guard.watching, self._new = False, True",
        tests=(
            "tests/guards/test_guards_ordinary.py::test_without_a_marker_the_transaction_is_guarded_too[postgresql+psycopg]",
        ),
    ),
)
