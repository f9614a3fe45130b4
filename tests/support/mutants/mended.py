"""Defects that were found and mended: each mutant takes one mend back."""

from .mutant import Mutant

MUTANTS = (
    # What one engine, server or transaction said, and another was believed to say too.
    Mutant(
        name="mariadb-first-server-speaks-for-all",
        breaks="On MariaDB what the first connection's server said is believed of the server behind every other one.",
        where="switching.switch",
        old="server = _asked(dialect, dbapi_connection, record.driver_connection)",
        new="server = dialect.first = getattr(dialect, 'first', None) or _asked(dialect, dbapi_connection, record.driver_connection)",
        tests=(
            "tests/databases/test_other_server.py::test_a_server_that_is_not_dependable_behind_the_same_address[mariadb+pymysql]",
        ),
    ),
    Mutant(
        name="mariadb-level-stays-on-the-connection",
        breaks="On MariaDB others who take the connection from the pool find the isolation level of a unit of work.",
        where="Server.settings_for",
        old="None if self.now[1] is None else self.level",
        new="None",
        tests=("tests/databases/test_other_server.py::test_what_is_set_is_given_back[mariadb+pymysql]",),
    ),
    Mutant(
        name="pooler-is-asked-for-once",
        breaks="An address that moves to PgBouncer after the first connection is not noticed.",
        where="refusing.refuse",
        old="_ASKED in record.info",
        new="vars(dialect).setdefault(_ASKED, record) is not record",
        tests=("tests/databases/test_pgbouncer.py::test_an_address_that_moves_to_a_pooler[new-postgresql+psycopg]",),
    ),
    Mutant(
        name="declared-row-outlives-a-statement",
        breaks="A handler gets the row that was read ahead although a statement of its own has changed it since.",
        where="GuardedSession.before_statement",
        old="self.kept.clear()",
        new="pass",
        tests=("tests/delivery/test_reads.py::test_a_row_that_a_statement_has_changed_is_read_again[sqlite]",),
    ),
    Mutant(
        name="mariadb-tables-of-another-database-are-believed",
        breaks="On MariaDB a tenant's marker table without a key is used, because another tenant's was in order.",
        where="forget_if_moved",
        old="(*begins, pool.checkout, engine.engine_connect, engine.begin)",
        new="begins",
        tests=(
            "tests/databases/test_other_server.py::test_a_tenant_without_the_key_is_refused[checkout-mariadb+pymysql]",
        ),
    ),
    # A synchronous standby.
    Mutant(
        name="duplicate-writes-nothing-for-the-standby",
        breaks="The COMMIT of a duplicate does not wait for the standby, so a failover loses what was acknowledged.",
        where="WRITTEN_FOR_STANDBY",
        old="pg_logical_emit_message(true, 'projector_dedup', '')",
        new="NULL::pg_lsn",
        tests=("tests/databases/test_standby.py::test_a_duplicate_waits_for_the_standby[alone-postgresql+psycopg2]",),
    ),
    Mutant(
        name="duplicate-is-rolled-back",
        breaks="A duplicate ends by a ROLLBACK, which waits for no standby.",
        where="UnitOfWork._end_duplicate",
        old="commits = guard.dialect.commits_duplicates and self.durable",
        new="commits = not guard.dialect.commits_duplicates and self.durable",
        tests=("tests/databases/test_standby.py::test_a_duplicate_waits_for_the_standby[alone-postgresql+psycopg2]",),
    ),
    Mutant(
        name="ended-wait-for-the-standby-is-ignored",
        breaks="A COMMIT that was told not to wait for the standby any more is taken for one that the standby has.",
        where="confirming",
        old="if ended:",
        new="if ended is None:",
        tests=(
            "tests/databases/test_standby.py::test_a_wait_that_is_ended_begins_again[new-postgresql+psycopg-pg_cancel_backend]",
        ),
    ),
    # What is set for a transaction, and the questions to it.
    Mutant(
        name="level-undoes-what-a-listener-has-set",
        breaks="A listener's SET LOCAL, of the tenant say, is rolled back when the isolation level is chosen.",
        where="_Taking._choose_level",
        old="if not (self.was_open and self._dialect.begins_with_level and self._level in LEVELS):",
        new="if not connection.in_transaction():",
        tests=(
            "tests/delivery/test_tenants.py::test_what_a_listener_has_set_holds_at_the_level_that_is_asked_for[by_checkout-SET LOCAL-postgresql+psycopg2]",
        ),
    ),
    Mutant(
        name="batch-carries-a-setting-on",
        breaks="In a batch the next message is written to the schema that a handler chose by SET LOCAL for its own.",
        where="GuardedConnection._watched",
        old="sets_for_transaction(sql_sent(result))",
        new='sets_for_transaction("")',
        tests=(
            "tests/batches/test_batch_settings.py::test_a_schema_that_a_handler_chooses_is_its_own_messages[by_text-True-postgresql+psycopg2]",
        ),
    ),
    Mutant(
        name="batch-does-not-look-at-scalar",
        breaks="In a batch a setting made by scalar() of SQL text holds for the messages behind it.",
        where="GuardedConnection.scalar",
        old="if isinstance(statement, DefaultGenerator):",
        new="if not isinstance(statement, Select):",
        tests=(
            "tests/batches/test_batch_settings.py::test_a_schema_that_a_handler_chooses_is_its_own_messages[by_scalar_of_text-True-postgresql+psycopg2]",
        ),
    ),
    Mutant(
        name="listener-that-asks-for-the-driver-is-asked-again",
        breaks="A listener to statements that looks at the connection is called by the guard's own question for ever.",
        where="Guard.driver_exposed",
        old="self.driver_was_exposed = True",
        new="self.server_check_required = True",
        tests=(
            "tests/guards/test_guards_ordinary.py::test_a_listener_to_statements_may_look_at_the_connection[connection-usual-mariadb+pymysql]",
        ),
    ),
    Mutant(
        name="mariadb-new-session-of-a-driver-is-not-asked",
        breaks="A PyMySQL connection that connected anew by itself is taken to refuse lost updates as its first session did.",
        where="switching.switch",
        old="server is None or server.session != record.driver_connection.thread_id()",
        new="server is None",
        tests=(
            "tests/databases/test_other_server.py::test_a_driver_that_connects_anew_by_itself_is_asked_again[mariadb+pymysql]",
        ),
    ),
    Mutant(
        name="any-transaction-is-taken-for-the-claims",
        breaks="A transaction that a handler began after it had committed the claim's is taken for that, and committed.",
        where="Guard._is_open",
        old="self.dialect.transaction_id(connection) == self._transaction_id",
        new="self.dialect.transaction_id(connection) is not None",
        tests=(
            "tests/delivery/test_where_claimed.py::test_another_transaction_is_seen_under_another_role[True-COMMIT-postgresql+psycopg2]",
        ),
    ),
    Mutant(
        name="committed-marker-is-looked-for-elsewhere",
        breaks="On MariaDB a commit of the handler's is reported as rolled back, if it uses another database by then.",
        where="Guard._is_committed",
        old="if self._place is not None:",
        new='if self._place == "":',
        tests=(
            "tests/delivery/test_where_claimed.py::test_on_mariadb_what_was_committed_is_told_though_another_database_is_used[as_raw-elsewhere-COMMIT-mariadb+pymysql]",
        ),
    ),
    # Errors, and what is left of the connection.
    Mutant(
        name="message-with-an-impossible-moment",
        breaks="A message whose occurred_at no database can store fails at each delivery instead of where it is made.",
        where="Message.__post_init__",
        old="moment_in_utc(self.occurred_at)",
        new="pass",
        tests=("tests/delivery/test_poison.py::test_what_is_no_moment_is_refused_where_the_message_is_made",),
    ),
    Mutant(
        name="refused-rollback-leaks-the-connection",
        breaks="A connection whose server refuses ROLLBACK stays out of its pool for good.",
        where="UnitOfWork._close_session",
        old="drop(self._session.taken if self.durable else ())",
        new="pass",
        tests=(
            "tests/delivery/test_refused_rollback.py::test_the_handlers_error_is_raised_and_no_connection_is_lost[mariadb+pymysql]",
        ),
    ),
    Mutant(
        name="read-only-server-stays-in-the-pool",
        breaks="Connections to a server that has become a standby are used again, and no message is applied.",
        where="UnitOfWork._close",
        old="guard.must_disconnect = True",
        new="pass",
        tests=("tests/delivery/test_read_only.py::test_deliveries_reach_the_new_primary[postgresql+psycopg2]",),
    ),
    Mutant(
        name="outdated-plan-is-final",
        breaks="On PostgreSQL a message fails after an ALTER TABLE, because a statement had been prepared before.",
        where="PostgreSQL.classify",
        old="routine_of(error) == _REPLANNING",
        new="routine_of(error) is None",
        tests=(
            "tests/databases/test_outdated_plans.py::test_messages_are_applied_whatever_was_prepared[postgresql+psycopg]",
        ),
    ),
    Mutant(
        name="late-unique-violation-is-the-users-error",
        breaks="A first unique violation after other conflicts is called a bug, so a rival's message is lost as poison.",
        where="Attempts.delay_after",
        old="if self._violations.get(_words(cause), 0) == self.number:",
        new="if self._violations.get(_words(cause), 0):",
        tests=(
            "tests/delivery/test_retry.py::test_a_violation_that_comes_too_late_to_be_tried_again_is_no_bug_yet[postgresql]",
        ),
    ),
    Mutant(
        name="psycopg-claim-in-any-paramstyle",
        breaks="With psycopg 3 and another paramstyle than its own every claim fails.",
        where="_names_parameters",
        old='connection.dialect.paramstyle == "pyformat"',
        new="connection",
        tests=(
            "tests/databases/test_paramstyle.py::test_messages_are_claimed_in_any_style[postgresql+psycopg-format]",
        ),
    ),
    # Deliveries inside a handler, and databases in memory.
    Mutant(
        name="delivery-inside-a-handler",
        breaks="A delivery inside a handler is not refused, and may wait for the handler's own locks for ever.",
        where="refuse_within_handler",
        old="if handling.forbids(bind, session):",
        new="if session is not None and handling.forbids(bind, session):",
        tests=(
            "tests/delivery/test_reentry.py::test_a_delivery_inside_a_handler_is_refused[postgresql+psycopg2-other message-marked]",
        ),
    ),
    Mutant(
        name="what-a-flush-listener-adds-is-lost",
        breaks="At the end of a message of a batch, what a listener to its flush has added is forgotten unwritten.",
        where="UnitOfWork.end_message",
        old="if not (session.identity_map.check_modified() or session.new or session.deleted):",
        new="if session.new is not None:",
        tests=("tests/batches/test_batch.py::test_what_a_listener_to_a_flush_adds_is_written_too[sqlite+pysqlite]",),
    ),
    Mutant(
        name="copies-of-an-engine-are-warned-of-again",
        breaks="A level that loses updates is warned of for every message where each session has an engine copy.",
        where="_warn_of_lost_updates",
        old="_warned_of.setdefault(connection.dialect, set())",
        new="_warned_of.setdefault(connection.engine, set())  # type: ignore[arg-type]",
        tests=(
            "tests/delivery/test_logging.py::test_a_level_is_warned_of_once_for_all_copies_of_an_engine[postgresql]",
        ),
    ),
    Mutant(
        name="listener-without-network-is-not-tried-again",
        breaks="An OSError of a listener that is called when the transaction begins is raised at once.",
        where="UnitOfWork._open",
        old="refuse_within_handler(bind)\n",
        new="refuse_within_handler(bind)\n        self.dialect = dialect_of(bind)\n",
        tests=("tests/delivery/test_retry.py::test_a_listener_that_cannot_reach_its_directory_is_tried_again",),
    ),
)
