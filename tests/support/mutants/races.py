"""I6: two messages that meet on one row both count, and what passes is tried again."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="lost-updates-are-not-detected",
        breaks="Units of work run at the server's default level, where one of two messages on one row is lost.",
        where="_usual_level",
        old="return detecting if marked else None",
        new="return None",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_what_two_messages_read_before_either_wrote[postgresql+psycopg2-by default-by_get]",
        ),
    ),
    Mutant(
        name="begin-without-the-level",
        breaks="With psycopg 3 the transaction begins at the server's level, and one of two messages is lost.",
        where="beginning",
        old="return _Executing(driver, begin=_BEGIN[_LEVELS[level]])",
        new='return _Executing(driver, begin=b"BEGIN")',
        tests=("tests/databases/test_psycopg_claim.py::test_begin_says_the_level_and_comes_with_the_claim",),
    ),
    Mutant(
        name="mariadb-snapshot-isolation-stays-off",
        breaks="On MariaDB innodb_snapshot_isolation is not switched on, and a stale write overwrites a rival's.",
        where="Opening.__enter__",
        old="_wanted.set(self._is_wanted)",
        new="_wanted.set(self._is_wanted._replace(snapshots=False))",
        tests=("tests/databases/test_other_server.py::test_two_messages_on_one_row_both_count[level-mariadb+pymysql]",),
    ),
    Mutant(
        name="mariadb-unreliable-release-is-relied-on",
        breaks="MariaDB releases that let some stale writes slip through are relied on.",
        where="_is_dependable",
        old="release >= DEPENDABLE.get((series[0], series[1]), sys.maxsize)",
        new="tuple(series) >= min(DEPENDABLE)",
        tests=(
            "tests/databases/test_mariadb_snapshots.py::test_a_server_that_lets_some_updates_slip_through_is_not_relied_on[mariadb+pymysql]",
        ),
    ),
    Mutant(
        name="postgresql-serialization-failure-is-final",
        breaks="On PostgreSQL a serialization failure is not tried again.",
        where="_TRANSIENT",
        old='"40001",',
        new="",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_what_two_messages_read_before_either_wrote[postgresql+psycopg2-by default-by_get]",
        ),
    ),
    Mutant(
        name="mariadb-changed-record-is-final",
        breaks="On MariaDB a row that was changed since the snapshot is not tried again.",
        where="_TRANSIENT",
        old="_RECORD_CHANGED,",
        new="",
        tests=("tests/databases/test_other_server.py::test_two_messages_on_one_row_both_count[level-mariadb+pymysql]",),
    ),
    Mutant(
        name="race-to-create-a-row-fails",
        breaks="Of two messages that create one row, the second fails instead of being run again.",
        where="_UNIQUE",
        old='{"23505", "23P01"}',
        new='{"23P01"}',
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_what_two_messages_read_before_either_wrote[postgresql+psycopg2-by default-by_creating]",
        ),
    ),
    Mutant(
        name="unique-violation-is-retried-for-ever",
        breaks="A handler's own unique violation is run again to the end of the policy, and its error is hidden.",
        where="Attempts.delay_after",
        old="if self._violations[violation] > self._policy.unique_violations:",
        new="if self._violations[violation] > self._policy.attempts:",
        tests=("tests/delivery/test_retry.py::test_the_same_unique_violation_is_the_users_error[postgresql+psycopg]",),
    ),
    Mutant(
        name="slow-winner-costs-the-retries",
        breaks="The time for retries runs from the first attempt, so a rival's slow handler uses it up.",
        where="Attempts.__init__",
        old="self._deadline: float | None = None",
        new="self._deadline: float | None = time.monotonic() + policy.within",
        tests=("tests/delivery/test_retry.py::test_a_slow_winner_does_not_cost_the_loser_its_retries[postgresql]",),
    ),
    Mutant(
        name="wrapped-conflict-is-not-retried",
        breaks="A conflict that a handler turned into an error of its own is not tried again.",
        where="UnitOfWork.cause_of",
        old="return (self._guard.aborted_by if self._guard is not None else None) or error",
        new="return error",
        tests=(
            "tests/guards/test_guards_ordinary.py::test_a_serialization_failure_is_retried_whatever_the_handler_makes_of_it[postgresql+psycopg-is_swallowed]",
        ),
    ),
    Mutant(
        name="read-models-are-not-locked",
        breaks="Entities in read_models are read without a lock at READ COMMITTED, and updates are lost.",
        where="_lock",
        old="state.statement = statement.with_for_update(key_share=True, of=tuple(lockable))",
        new="state.statement = statement",
        tests=(
            "tests/delivery/test_contract.py::TestDefault::test_what_two_messages_read_before_either_wrote[postgresql+psycopg-read_models-by_get]",
        ),
    ),
    Mutant(
        name="unlocked-write-is-let-through",
        breaks="A declared entity that was not read under lock is written, over a rival's update.",
        where="LockingSession.may_write",
        old="            return False",
        new="            return True",
        tests=(
            "tests/guards/test_locking.py::test_what_cannot_be_locked_is_refused[postgresql-joined_from_elsewhere]",
        ),
    ),
    Mutant(
        name="lock-of-a-rolled-back-savepoint-counts",
        breaks="A row whose lock went with a savepoint is written as if it were still locked.",
        where="_savepoint_is_rolled_back",
        old="session.locked_instances &= locked",
        new="pass",
        tests=(
            "tests/guards/test_locking.py::test_what_cannot_be_locked_is_refused[postgresql-after_a_savepoint_was_rolled_back]",
        ),
    ),
    Mutant(
        name="aggregate-is-read-unlocked",
        breaks="A SELECT that cannot lock a declared entity is run without a lock instead of refused.",
        where="_lock",
        old="if not {_table(source) for source in named} <= {_table(source) for source in lockable}:\n"
        "        raise _cannot_lock(named)",
        new="if not lockable:\n        return",
        tests=("tests/guards/test_locking.py::test_what_cannot_be_locked_is_refused[postgresql-on_the_nullable_side]",),
    ),
    Mutant(
        name="undeclared-rows-are-written-unlocked",
        breaks="With `read_models` on PostgreSQL the updates of every other entity are lost, without an error.",
        where="LockingSession.may_write",
        old="return self.conflicts_are_found or state.mapper.version_id_col is not None",
        new="return True",
        tests=(
            "tests/guards/test_locking.py::test_an_undeclared_row_is_not_written_without_a_lock[postgresql-undeclared_by_get-None]",
        ),
    ),
    Mutant(
        name="own-rows-are-taken-for-a-rival-s",
        breaks="A handler with `read_models` may not change a row that it has inserted itself.",
        where="LockingSession.may_write",
        old=" or state.key in self.inserted",
        new="",
        tests=(
            "tests/guards/test_locking.py::test_a_row_that_nobody_else_can_change_unnoticed_is_written[postgresql-transferred_between_new_rows-all]",
        ),
    ),
    Mutant(
        name="an-inserted-row-outlives-its-savepoint",
        breaks="A rival's row is written without a lock, because a row of its key was inserted in a savepoint that is gone.",
        where="_savepoint_is_rolled_back",
        old="session.inserted &= inserted",
        new="pass",
        tests=(
            "tests/guards/test_locking.py::test_an_undeclared_row_is_not_written_without_a_lock[postgresql-inserted_in_a_savepoint_that_was_rolled_back-None]",
        ),
    ),
    Mutant(
        name="row-of-an-eager-load-counts-as-locked",
        breaks="A parent that came by joinedload is written over a rival's update.",
        where="_remember",
        old=" and not came_along",
        new="",
        tests=(
            "tests/guards/test_locking.py::test_a_row_that_came_with_another_has_no_lock[parent_by_joinedload-declared]",
        ),
    ),
    Mutant(
        name="relationship-inherits-a-lock",
        breaks="A parent that came by selectinload behind a locked read is written over a rival's update.",
        where="_lock_what_is_read",
        old="    state.update_execution_options(**{_LOCKED: locked})",
        new="    if locked:\n        state.update_execution_options(**{_LOCKED: locked})",
        tests=(
            "tests/guards/test_locking.py::test_a_row_that_came_with_another_has_no_lock[parent_by_selectinload_of_a_locked_read-undeclared]",
        ),
    ),
    Mutant(
        name="what-the-flush-adds-is-not-looked-at",
        breaks="A child that a relationship deletes is deleted over a rival's update.",
        where="_refuse_what_the_flush_added",
        old="if not only_listed and state.key is not None:",
        new="if state.key is session:",
        tests=(
            "tests/guards/test_locking.py::test_a_row_that_came_with_another_has_no_lock[child_that_the_flush_deletes-undeclared]",
        ),
    ),
    Mutant(
        name="savepoint-of-the-connection-keeps-its-locks",
        breaks="A row whose lock went with a savepoint of the connection is written as if it were locked.",
        where="LockingSession.before_rollback_to_savepoint",
        old="if not self.in_nested_transaction():",
        new="if self.guard is None:",
        tests=(
            "tests/guards/test_locking.py::test_a_row_that_came_with_another_has_no_lock[lock_that_a_savepoint_of_the_connection_took-declared]",
        ),
    ),
    Mutant(
        name="a-shared-lock-is-enough",
        breaks="A row that was read FOR SHARE is written, as another message does at the same time.",
        where="_lock",
        old="frozenset() if asked.read else ",
        new="",
        tests=(
            "tests/guards/test_locking.py::test_an_undeclared_row_is_not_written_without_a_lock[postgresql-undeclared_by_a_shared_lock-None]",
        ),
    ),
    Mutant(
        name="sqlite-reads-before-it-locks",
        breaks="On SQLite a transaction without a marker reads before it locks, and fails or loses an update.",
        where="SQLite.begin",
        old='if marker is None or driver.isolation_level is None:\n                connection.exec_driver_sql("BEGIN IMMEDIATE")',
        new='if marker is None or driver.isolation_level is None:\n                connection.exec_driver_sql("BEGIN")',
        tests=(
            "tests/delivery/test_claim.py::test_nobody_writes_between_what_a_handler_reads_and_writes_on_sqlite[False]",
        ),
    ),
    Mutant(
        name="chosen-weak-level-is-not-warned-of",
        breaks="A level that the user chose and that loses updates is not warned of.",
        where="_warn_of_lost_updates",
        old="if options.warn and",
        new="if not options.warn and",
        tests=("tests/delivery/test_logging.py::test_a_chosen_read_committed_is_warned_of_once[postgresql]",),
    ),
)
