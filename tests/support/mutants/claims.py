"""I1 to I3: the marker commits with the writes, a redelivery is a duplicate, and nothing else is one."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="marker-in-another-transaction",
        breaks="The marker is inserted and committed on a connection of its own, so it stays when the handler fails.",
        where="insert_marker",
        old="return dialect.claim(connection, statement, tables.marker, key, names=len(names))",
        new=(
            "with connection.engine.begin() as another:\n"
            "            return dialect.claim(another, statement, tables.marker, key, names=len(names))"
        ),
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_a_failing_handler_leaves_neither[postgresql+psycopg-before the write]",
        ),
    ),
    Mutant(
        name="marker-committed-before-the-handler",
        breaks="The marker is committed before the handler runs, so a handler that fails is never run again.",
        where="deliver",
        old="attempts.claimed()\n",
        new="attempts.claimed()\n                    uow.commit()\n                    uow._guard.watching = False\n",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_a_failing_handler_leaves_neither[postgresql+psycopg-before the write]",
        ),
    ),
    Mutant(
        name="duplicate-runs-the-handler",
        breaks="A redelivery enters the handler although its claim found the marker.",
        where="Chunk._claim",
        old="return [0] if uow.claim_first(key, handler.formerly) else []",
        new="uow.claim_first(key, handler.formerly)\n            return [0]",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_a_redelivery_never_enters_the_handler[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="postgresql-marker-that-is-there-counts-as-new",
        breaks="On PostgreSQL a claim that inserted no row is new, so every redelivery is applied again.",
        where="PostgreSQL.claim",
        old="return insert_and_count(connection, statement, key) == 1",
        new="return insert_and_count(connection, statement, key) <= 1",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_a_redelivery_never_enters_the_handler[postgresql+psycopg]",
        ),
    ),
    Mutant(
        name="sqlite-marker-that-is-there-counts-as-new",
        breaks="On SQLite a claim that inserted no row is new, so every redelivery is applied again.",
        where="Dialect.claim",
        old="return insert_and_count(connection, statement, key) == names",
        new="return insert_and_count(connection, statement, key) <= names",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_a_redelivery_never_enters_the_handler[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="any-error-of-a-claim-is-a-duplicate",
        breaks="Whatever goes wrong with a claim is taken for a duplicate: a rival's lock loses the message.",
        where="insert_marker",
        old="_raise_what_it_means(error, connection, dialect, tables, wait)\n        raise",
        new="return False",
        tests=(
            "tests/delivery/test_claim.py::test_only_a_row_or_no_row_is_an_outcome[add check (handler <> 'totals')-DBAPIError]",
        ),
    ),
    Mutant(
        name="mariadb-any-error-of-a-claim-is-a-duplicate",
        breaks="On MariaDB an error of the INSERT is a duplicate although no marker is there.",
        where="MariaDB._raise_unless_there",
        old="if found is None:\n            raise error",
        new="if found is None:\n            return",
        tests=("tests/databases/test_mariadb.py::test_a_violation_elsewhere_is_no_duplicate[mariadb+pymysql]",),
    ),
    Mutant(
        name="mariadb-other-unique-violation-is-a-duplicate",
        breaks="On MariaDB the marker that a claim met is not compared with its own id, so a look-alike is lost.",
        where="MariaDB._raise_unless_there",
        old="if not found:",
        new="if found is None:",
        tests=(
            "tests/databases/test_mariadb.py::test_a_collation_that_merges_ids_loses_no_message[mariadb+pymysql-VARCHAR(512) COLLATE utf8mb4_general_ci]",
        ),
    ),
    Mutant(
        name="mariadb-met-marker-is-compared-by-collation",
        breaks="On MariaDB the marker that a claim met is compared as the column's collation does, so 'A' loses 'a'.",
        where="met_by_claim",
        old="cast(message_id, BINARY()) == asked",
        new="message_id == asked",
        tests=(
            "tests/databases/test_mariadb.py::test_a_collation_that_merges_ids_loses_no_message[mariadb+pymysql-VARCHAR(512) COLLATE utf8mb4_general_ci]",
        ),
    ),
    Mutant(
        name="lock-timeout-is-a-duplicate",
        breaks="A claim that waited longer than claim_timeout is a duplicate, and lost if the rival then fails.",
        where="insert_marker",
        old="except DBAPIError as error:\n",
        new=(
            "except DBAPIError as error:\n"
            "        if dialect.classify(error) is Failure.LOCK_TIMEOUT:\n"
            "            return False\n"
        ),
        tests=("tests/delivery/test_contract.py::TestDefault::test_the_wait_can_be_bounded[mariadb+pymysql-False]",),
    ),
    Mutant(
        name="claim-timeout-is-not-sent",
        breaks="claim_timeout is ignored, so a delivery waits for its rival without a bound.",
        where="insert_marker",
        old="statement = _claim_statement(dialect, tables.marker, wait is not None, len(names))",
        new="statement = _claim_statement(dialect, tables.marker, False, len(names))",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_the_wait_can_be_bounded[postgresql+psycopg2-False]",
        ),
        hangs=True,
    ),
    Mutant(
        name="postgresql-conflict-on-any-index",
        breaks="On PostgreSQL the claim names no index, so a marker table without one accepts every redelivery.",
        where="_CONFLICT",
        old='_CONFLICT = ["message_id", "handler"]',
        new="_CONFLICT = None",
        tests=(
            "tests/delivery/test_claim.py::test_only_a_row_or_no_row_is_an_outcome[drop constraint pk_processed_message-MissingTableError]",
        ),
    ),
    Mutant(
        name="claim-that-committed-at-once-goes-on",
        breaks="A claim that the driver committed at once is accepted, so the marker stays when the handler fails.",
        where="UnitOfWork._watch",
        old="if guard.key is not None and status is not Status.OPEN:",
        new="if guard.key is not None and status is None:",
        tests=(
            "tests/delivery/test_claim.py::test_a_listener_that_makes_the_claim_commit_at_once_is_found_out[postgresql+psycopg2-False]",
        ),
    ),
    Mutant(
        name="failed-claim-can-commit",
        breaks="After a claim that failed the session is not watched, so writes can commit without a marker.",
        where="UnitOfWork._commit",
        old="if not self._new:",
        new="if self._committed:",
        tests=(
            "tests/delivery/test_claim.py::test_after_a_claim_that_failed_nothing_can_be_committed[postgresql+psycopg2]",
        ),
    ),
    Mutant(
        name="claim-flushes-pending-objects-first",
        breaks="claim() flushes what is pending, so writes of a duplicate reach the database before it is known.",
        where="claim",
        old="refuse_shared_markers(translate_map(connection), tables)",
        new="session.flush()\n    refuse_shared_markers(translate_map(connection), tables)",
        tests=("tests/delivery/test_contract.py::TestDefault::test_claim_does_not_flush[sqlite+pysqlite]",),
    ),
    Mutant(
        name="claim-inside-a-savepoint",
        breaks="claim() works inside a savepoint, whose rollback takes the marker and keeps the caller's writes.",
        where="claim",
        old="if isinstance(bind, Engine) and connection.in_nested_transaction():",
        new="if session is None:",
        tests=(
            "tests/delivery/test_claim.py::test_claim_refuses_what_is_no_session_and_a_savepoint_of_the_connection[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="former-names-are-not-claimed",
        breaks="A renamed handler claims its new name alone, and applies again what it had applied under the old one.",
        where="Chunk._claim",
        old="uow.claim_first(key, handler.formerly)",
        new="uow.claim_first(key)",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_what_one_version_applied_the_other_skips[sqlite+pysqlite-old-new]",
        ),
    ),
    Mutant(
        name="new-under-one-name-is-new",
        breaks="A message with a marker under one of its handler's names is new if it has none under another.",
        where="claim_names",
        old="if len(new) == names:",
        new="if new:",
        tests=("tests/delivery/test_formerly.py::test_any_marker_of_any_name_makes_a_duplicate[postgresql+psycopg-0]",),
    ),
    Mutant(
        name="names-are-locked-in-the-given-order",
        breaks="Old and new code lock the names of a handler in different orders, so two deliveries deadlock.",
        where="insert_marker",
        old='names = sorted({key["handler"], *formerly})',
        new='names = [key["handler"], *formerly]',
        tests=("tests/delivery/test_formerly.py::test_any_marker_of_any_name_makes_a_duplicate[postgresql+psycopg-0]",),
    ),
)
