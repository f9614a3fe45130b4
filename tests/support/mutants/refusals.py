"""I8: what could not be deduplicated is refused loudly."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="autocommit-is-accepted",
        breaks="An engine in AUTOCOMMIT is accepted, which commits marker and writes one by one.",
        where="Dialect.refuse_unsafe",
        old="if driver is not None and connection.dialect.detect_autocommit_setting(driver):",
        new="if driver is None:",
        tests=(
            "tests/delivery/test_claim.py::test_autocommit_never_tears_marker_and_write_apart[postgresql+psycopg2-create_engine]",
        ),
    ),
    Mutant(
        name="sqlite-autocommit-is-accepted",
        breaks="A SQLite engine in AUTOCOMMIT is accepted, which commits marker and writes one by one.",
        where="SQLite.refuse_unsafe",
        old='if chosen_level(connection) == "AUTOCOMMIT" or self.commits_nothing(connection):',
        new="if self.commits_nothing(connection):",
        tests=(
            "tests/delivery/test_claim.py::test_autocommit_never_tears_marker_and_write_apart[sqlite+pysqlite-create_engine]",
        ),
    ),
    Mutant(
        name="shared-connection-is-accepted",
        breaks="An engine that gives all threads one connection is accepted, where one commits another's marker.",
        where="refuse_sharing",
        old="if isinstance(pool, StaticPool):",
        new="if connection.closed:",
        tests=("tests/delivery/test_claim.py::test_a_shared_connection_is_refused",),
    ),
    Mutant(
        name="somebody-elses-transaction-is-joined",
        breaks="A session that is bound to a Connection is accepted, whose owner may roll APPLIED messages back.",
        where="open_connection",
        old="elif options.external:",
        new="elif not options.strict:",
        tests=("tests/delivery/test_claim.py::test_a_session_on_a_connection_is_refused[postgresql+psycopg2]",),
    ),
    Mutant(
        name="external-transaction-is-called-durable",
        breaks="Inside an outer transaction that will be rolled back, messages are called durable.",
        where="Results.settled",
        old="self._durable = self._durable and durable",
        new="self._durable = True",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_an_external_transaction_takes_everything_back[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="external-transactions-stay-permitted",
        breaks="After external_transaction() the dispatcher goes on accepting somebody else's transaction.",
        where="external_transaction",
        old="dispatcher.permit_external_transaction(before)",
        new="pass",
        tests=(
            "tests/delivery/test_projector.py::test_an_external_transaction_within_another_leaves_the_outer_one_open",
        ),
    ),
    Mutant(
        name="read-model-on-another-engine",
        breaks="A declared read model on another engine is accepted, which cannot commit with the marker.",
        where="refuse_elsewhere",
        old="if its_bind is not bind:",
        new="if its_bind is None and bind is None:",
        tests=(
            "tests/delivery/test_placement.py::test_a_declared_read_model_on_another_engine_is_refused_before_the_claim[postgresql+psycopg-by_binds]",
        ),
    ),
    Mutant(
        name="claim-on-another-bind",
        breaks="claim() inserts the marker on another engine than the session's, where it commits by itself.",
        where="claim",
        old="if elsewhere:",
        new="if session is None:",
        tests=("tests/delivery/test_claim.py::test_a_read_model_on_another_engine_is_refused[sqlite+pysqlite]",),
    ),
    Mutant(
        name="session-that-was-used-before",
        breaks="A session that was used before the claim is accepted, whose earlier reads are stale.",
        where="open_connection",
        old="if session.in_transaction():",
        new="if session is None:",
        tests=(
            "tests/delivery/test_claim.py::test_a_session_that_was_used_before_the_claim_is_refused[postgresql+psycopg]",
        ),
    ),
    Mutant(
        name="async-handler-is-not-awaited",
        breaks="A handler's coroutine is dropped unawaited, and the message is APPLIED without its work.",
        where="check_result",
        old="if awaitable == asynchronous and",
        new="if",
        tests=("tests/delivery/test_projector.py::test_a_function_that_returns_a_coroutine_is_refused",),
    ),
    Mutant(
        name="two-handlers-of-one-name",
        breaks="Two handlers share one identity, and each skips what the other applied.",
        where="_Routing.__init__",
        old="if handler.identity in self._handlers:",
        new="if handler is None:",
        tests=("tests/delivery/test_projector.py::test_two_handlers_of_one_identity_are_refused",),
    ),
    Mutant(
        name="two-handlers-of-one-former-name",
        breaks="Two handlers have one former name, and each skips what the other applied.",
        where="refuse_shared_names",
        old="if not (shared and one.idempotent and other.idempotent):",
        new="if one is not other:",
        tests=(
            "tests/delivery/test_formerly.py::test_two_handlers_of_one_former_name_are_refused[one0-other0-rest.add]",
        ),
    ),
    Mutant(
        name="identity-of-main",
        breaks="A handler in __main__ is accepted without a name, and has another identity under python -m.",
        where="handler_of",
        old="if settings.idempotent and not pinned:",
        new="if settings.idempotent and pinned is None:",
        tests=(
            "tests/delivery/test_projector.py::test_an_identity_that_changes_with_the_way_of_starting_is_refused[here]",
        ),
    ),
    Mutant(
        name="pooler-mixes-prepared-statements",
        breaks="Numbered prepared statements are accepted behind PgBouncer, where a client runs another's.",
        where="Psycopg.refuse_pooler",
        old="if backend != driver_connection.info.backend_pid:",
        new="if backend is None:",
        tests=("tests/databases/test_pgbouncer.py::test_numbered_statements_are_refused[postgresql+psycopg]",),
    ),
    Mutant(
        name="marker-table-without-transactions",
        breaks="On MariaDB a marker table in MyISAM is accepted, which keeps the marker of a failed message.",
        where="refuse_unfit",
        old="if not found.has_transactions:",
        new="if not found.engine:",
        tests=(
            "tests/databases/test_mariadb.py::test_a_marker_table_without_transactions_is_refused[mariadb+pymysql-MyISAM]",
        ),
    ),
    Mutant(
        name="mariadb-marker-table-without-a-unique-index",
        breaks="On MariaDB a marker table without its unique index is accepted, and a redelivery is applied again.",
        where="refuse_unfit",
        old="if marker and not found.is_unique:",
        new="if marker and not found.engine:",
        tests=(
            "tests/databases/test_mariadb.py::test_a_table_that_is_not_ours_is_named[mariadb+pymysql-ALTER TABLE processed_message DROP PRIMARY KEY]",
        ),
    ),
    Mutant(
        name="untried-database-accepts-a-marker-twice",
        breaks="An untried database whose table takes one marker twice is accepted.",
        where="_Preflight.run",
        old='not self._dialect.claim(self._connection, self._statement, self._marker, self._key("probe"))',
        new='self._dialect.claim(self._connection, self._statement, self._marker, self._key("probe")) in (True, False)',
        tests=(
            "tests/databases/test_portable.py::test_a_table_that_would_lose_messages_is_refused[PostgreSQL without the index]",
        ),
    ),
    Mutant(
        name="untried-database-takes-look-alikes-for-one",
        breaks="An untried database that takes look-alike ids for one is accepted.",
        where="_Preflight.run",
        old="self._must(not merged,",
        new="self._must(True,",
        tests=(
            "tests/databases/test_portable.py::test_a_table_that_would_lose_messages_is_refused[an index over the id alone]",
        ),
    ),
    Mutant(
        name="untried-database-keeps-what-was-rolled-back",
        breaks="An untried database that keeps what was rolled back is accepted.",
        where="_Preflight.taken_back",
        old="self._must(not self._delete_what_is_left(settle), _STAYS)",
        new="self._delete_what_is_left(settle)",
        tests=("tests/databases/test_portable.py::test_autocommit_is_refused[untried_sqlite+pysqlite-create_engine]",),
    ),
    Mutant(
        name="read-uncommitted-look",
        breaks="At READ UNCOMMITTED a batch takes the marker of a delivery that is rolled back for a duplicate's.",
        where="look_then_insert",
        old='if connection.get_isolation_level() == "READ UNCOMMITTED":',
        new='if connection.get_isolation_level() == "AUTOCOMMIT":',
        tests=("tests/batches/test_batch.py::test_a_look_that_could_see_what_is_rolled_back_is_refused",),
    ),
    Mutant(
        name="second-handler-of-one-name-replaces-the-first",
        breaks="Two @on methods of one name in a class are accepted, and the events of the first are skipped.",
        where="refuse_second_of_one_name",
        old="if hasattr(before, mark) or",
        new="if hasattr(before, mark) and",
        tests=("tests/delivery/test_projector.py::test_two_handlers_of_one_name_are_refused",),
    ),
    Mutant(
        name="handler-with-other-parameters-is-accepted",
        breaks="A handler that cannot be called with an event and a session is accepted, and each message fails.",
        where="check_parameters",
        old="signature.bind(None, None)",
        new="signature.bind_partial()",
        tests=(
            "tests/delivery/test_projector.py::test_a_handler_with_other_parameters_is_refused_when_the_projector_is_made[none]",
        ),
    ),
)
