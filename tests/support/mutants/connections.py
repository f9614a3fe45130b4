"""Leaks: no lock, no open transaction, no setting and no reply stays on a connection for whoever has it next."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="claim-timeout-stays-on-the-connection",
        breaks="On PostgreSQL claim_timeout goes on bounding lock waits after its transaction.",
        where="_before",
        old='func.concat(bindparam("wait_ms", type_=Text()), "ms"), True)',
        new='func.concat(bindparam("wait_ms", type_=Text()), "ms"), False)',
        tests=("tests/delivery/test_claim.py::test_the_bound_ends_with_the_transaction",),
    ),
    Mutant(
        name="sqlite-busy-timeout-stays-on-the-connection",
        breaks="On SQLite claim_timeout goes on bounding what waits on the connection later.",
        where="SQLite.begin",
        old='connection.exec_driver_sql(f"PRAGMA busy_timeout = {usual}")',
        new="pass",
        tests=("tests/delivery/test_claim.py::test_the_bound_of_a_claim_ends_with_it_on_sqlite",),
    ),
    Mutant(
        name="mariadb-setting-stays-on-the-connection",
        breaks="On MariaDB others who take the connection from the pool find innodb_snapshot_isolation on.",
        where="switching.switch",
        old="if settings != server.now or overruled:",
        new="if (wanted.snapshots and settings != server.now) or overruled:",
        tests=(
            "tests/databases/test_mariadb_snapshots.py::test_the_setting_is_the_projectors_alone[a pool-mariadb+pymysql]",
        ),
    ),
    Mutant(
        name="sqlite-refused-commit-stays-open-in-the-pool",
        breaks="On SQLite the next to use a connection commits the writes of somebody whose COMMIT was refused.",
        where="_checkout",
        old="dbapi_connection.rollback()",
        new="pass",
        tests=("tests/delivery/test_claim.py::test_what_a_refused_commit_of_somebody_left_open_is_not_adopted",),
    ),
    Mutant(
        name="sqlite-interrupted-statement-keeps-the-lock",
        breaks="On SQLite an interrupted statement keeps the write lock until the garbage collector comes.",
        where="_connect",
        old='if "async_creator_fn" not in keywords:',
        new='if "async_creator_fn" in keywords:',
        tests=(
            "tests/delivery/test_claim.py::test_a_connection_that_is_closed_holds_no_lock_though_a_cursor_is_alive_on_sqlite",
        ),
    ),
    Mutant(
        name="mariadb-replies-are-out-of-step",
        breaks="With PyMySQL an interrupted statement leaves its reply for the next one, which believes it.",
        where="_careful.Careful._to_its_answer",
        old="self._force_close()",
        new="pass",
        tests=(
            "tests/delivery/test_interrupts.py::test_a_delivery_interrupted_by_a_signal_leaves_nothing_behind[mariadb+pymysql-Exception-True]",
        ),
    ),
    Mutant(
        name="mariadb-rollback-is-spared-after-writes",
        breaks="With PyMySQL a ROLLBACK is left out although something was written since the last one.",
        where="_careful.Careful.rollback",
        old="if self._ended and self.open and not self.server_status & IN_TRANSACTION:",
        new="if self.open:",
        tests=(
            "tests/databases/test_mariadb.py::test_a_rollback_is_spared_only_where_there_is_nothing_to_roll_back[mariadb+pymysql]",
        ),
    ),
    Mutant(
        name="session-comes-to-life-again",
        breaks="A session that a handler kept works after its message, in a transaction of its own.",
        where="_private_arguments",
        old='"close_resets_only": False',
        new='"close_resets_only": True',
        tests=(
            "tests/guards/test_guards_ordinary.py::test_a_session_kept_after_its_message_is_dead[postgresql+psycopg]",
        ),
    ),
    Mutant(
        name="guard-stays-on-the-connection",
        breaks="A unit of work is kept alive by its connection, for the garbage collector to find.",
        where="Guard.release",
        old="self.watching, self.session.guard = False, None",
        new="self.watching = False",
        tests=(
            "tests/delivery/test_unit_of_work.py::test_a_delivery_leaves_nothing_to_the_garbage_collector[postgresql+psycopg]",
        ),
    ),
    Mutant(
        name="stale-prepared-statement-fails-the-claim",
        breaks="With psycopg 3 a prepared claim that the server has forgotten fails the message.",
        where="_Together._execute",
        old="error.sqlstate not in _STALE:",
        new="error.sqlstate:",
        tests=("tests/databases/test_psycopg_claim.py::test_a_statement_that_was_forgotten_is_prepared_again",),
    ),
    Mutant(
        name="psycopg-level-of-somebody-else",
        breaks="With psycopg 3 claims begin past settings of the connection that SQLAlchemy would keep.",
        where="can_begin",
        old="and driver.read_only is driver.deferrable is None\n",
        new="",
        tests=("tests/databases/test_psycopg_claim.py::test_what_is_not_usual_stays_as_it_was[postgresql_deferrable]",),
    ),
    Mutant(
        name="dead-connection-is-not-replaced",
        breaks="A claim on a connection that died in the pool fails the message instead of taking another.",
        where="_failure",
        old="return Failure.TRANSIENT if unreachable else Failure.PERMANENT",
        new="return Failure.PERMANENT",
        tests=(
            "tests/delivery/test_commit_outcome.py::test_a_connection_that_was_closed_in_the_pool_is_replaced[no level-postgresql+psycopg2]",
        ),
    ),
)
