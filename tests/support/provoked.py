"""Errors of the three databases, provoked for real where a test can, and raised by SQL where it cannot."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import URL, Connection, NullPool, create_engine

from projector_dedup.dialects import Failure

LATER, NOW, REJECTED = Failure.LATER, Failure.TRANSIENT, Failure.PERMANENT


@dataclass(frozen=True)
class Provoked:
    """An error by its code, what it means, and the statements of which the last one raises it.

    `elsewhere` is run before on another connection, which stays open meanwhile.
    """

    code: str
    means: Failure
    statements: tuple[str, ...]
    elsewhere: str = ""

    def __str__(self) -> str:
        return self.code

    def run(self, connection: Connection) -> None:
        """Run the statements; the last one raises."""
        for statement in self.statements:
            connection.exec_driver_sql(statement)


def _raised(code: str, means: Failure) -> Provoked:
    return Provoked(code, means, (f"DO $$ BEGIN RAISE EXCEPTION 'provoked' USING ERRCODE = '{code}'; END $$",))


def _signalled(number: int, means: Failure) -> Provoked:
    return Provoked(str(number), means, (f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {number}",))


TABLE = "CREATE TABLE provoked (id INTEGER PRIMARY KEY, little SMALLINT NOT NULL, word VARCHAR(3), CHECK (little > 0))"
FIRST = "INSERT INTO provoked VALUES (1, 1, 'one')"

_ON_MARIADB = (
    Provoked("1317", LATER, ("KILL QUERY CONNECTION_ID()",)),
    Provoked(
        "1114",
        LATER,
        (
            "SET max_heap_table_size = 16384",
            "CREATE TEMPORARY TABLE small (word CHAR(255)) ENGINE=MEMORY",
            "INSERT INTO small SELECT seq FROM seq_1_to_5000",
        ),
    ),
    Provoked("1927", NOW, ("KILL CONNECTION_ID()", "SELECT 1")),
    Provoked(
        "1205",
        Failure.LOCK_TIMEOUT,
        ("SET innodb_lock_wait_timeout = 1", FIRST),
        FIRST,
    ),
    Provoked(
        "1969",
        Failure.LOCK_TIMEOUT,
        ("SET STATEMENT max_statement_time = 0.05 FOR SELECT max(mod(seq, 7)) FROM seq_1_to_1000000000",),
    ),
    Provoked("1062", Failure.UNIQUE, (FIRST, FIRST)),
    Provoked("1048", Failure.NO_TABLE, ("INSERT INTO provoked VALUES (2, NULL, 'two')",)),
    Provoked("4025", REJECTED, ("INSERT INTO provoked VALUES (2, -1, 'two')",)),
    Provoked("1264", REJECTED, ("INSERT INTO provoked VALUES (2, 40000, 'two')",)),
    Provoked("1406", Failure.NO_TABLE, ("INSERT INTO provoked VALUES (2, 1, 'three')",)),
    Provoked("1146", Failure.NO_TABLE, ("SELECT * FROM nothing_of_this_name",)),
    *(_signalled(number, LATER) for number in (1021, 3, 1026, 1037, 1038, 1041, 3024, 1044, 1045, 1129, 1226, 1698)),
    *(_signalled(number, NOW) for number in (1213, 1020, 1040, 1203, 1053, 1206, 1412, 1684, 1047)),
    *(_signalled(number, Failure.READ_ONLY) for number in (1290, 1792, 1836)),
    *(_signalled(number, LATER) for number in (1030, 1034, 1637)),
    _signalled(1615, NOW),
)
_ON_MARIADB_ALONE = ("1114", "1927", "1969", "4025")  # tables of numbers, the limit of a statement, two other numbers

PROVOKED = {
    "postgresql": (
        Provoked("57014", LATER, ("SET statement_timeout = 50", "SELECT pg_sleep(600)")),
        Provoked("57014", LATER, ("SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(600)",)),
        Provoked("57P01", NOW, ("SELECT pg_terminate_backend(pg_backend_pid()), pg_sleep(600)",)),
        Provoked("55P03", Failure.LOCK_TIMEOUT, ("SET lock_timeout = 50", FIRST), "LOCK TABLE provoked"),
        Provoked("25006", Failure.READ_ONLY, ("SET TRANSACTION READ ONLY", FIRST)),
        Provoked("23505", Failure.UNIQUE, (FIRST, FIRST)),
        Provoked("23502", Failure.NO_TABLE, ("INSERT INTO provoked VALUES (2, NULL, 'two')",)),
        Provoked("23514", REJECTED, ("INSERT INTO provoked VALUES (2, -1, 'two')",)),
        Provoked("22001", Failure.NO_TABLE, ("INSERT INTO provoked VALUES (2, 1, 'three')",)),
        Provoked("22003", REJECTED, ("INSERT INTO provoked VALUES (2, 40000, 'two')",)),
        Provoked("22012", REJECTED, ("SELECT 1 / 0",)),
        Provoked("42P01", Failure.NO_TABLE, ("SELECT * FROM nothing_of_this_name",)),
        *(_raised(code, LATER) for code in ("53100", "53200", "53400", "58030", "25P04", "28000", "28P01", "3D000")),
        *(_raised(code, NOW) for code in ("40001", "40P01", "53300", "57P03")),
        Provoked("26000", NOW, ("EXECUTE nothing_of_this_name",)),
        Provoked("42P05", NOW, ("PREPARE twice AS SELECT 1", "PREPARE twice AS SELECT 1")),
        *(_raised(code, LATER) for code in ("XX000", "55006")),
    ),
    "mariadb": _ON_MARIADB,
    "mysql": (
        *(each for each in _ON_MARIADB if each.code not in _ON_MARIADB_ALONE),
        Provoked("3819", REJECTED, ("INSERT INTO provoked VALUES (2, -1, 'two')",)),
        Provoked("3024", LATER, ("SELECT /*+ MAX_EXECUTION_TIME(50) */ sleep(600) FROM information_schema.tables",)),
        *(_signalled(number, NOW) for number in (3032, 3058, 3101, 3168, 3169)),
        *(_signalled(number, Failure.READ_ONLY) for number in (3098, 3100, 4094)),
        *(_signalled(number, Failure.READ_ONLY) for number in (3781, 3782, 3783, 3796, 3797, 3798, 3799)),
    ),
    "sqlite": (
        Provoked("SQLITE_BUSY", Failure.LOCK_TIMEOUT, ("PRAGMA busy_timeout = 0", FIRST), "BEGIN IMMEDIATE"),
        Provoked(
            "SQLITE_FULL",
            LATER,
            ("PRAGMA max_page_count = 4", "INSERT INTO provoked VALUES (1, 1, zeroblob(1000000))"),
        ),
        Provoked("SQLITE_READONLY", LATER, ("PRAGMA query_only = 1", FIRST)),
        Provoked("SQLITE_CONSTRAINT_PRIMARYKEY", Failure.UNIQUE, (FIRST, FIRST)),
        Provoked("SQLITE_CONSTRAINT_NOTNULL", Failure.NO_TABLE, ("INSERT INTO provoked VALUES (2, NULL, 'two')",)),
        Provoked("SQLITE_CONSTRAINT_CHECK", REJECTED, ("INSERT INTO provoked VALUES (2, -1, 'two')",)),
        Provoked("SQLITE_NOTADB", LATER, (f"ATTACH '{__file__}' AS other", "SELECT * FROM other.sqlite_master")),
        Provoked("SQLITE_ERROR", Failure.NO_TABLE, ("SELECT * FROM nothing_of_this_name",)),
    ),
}
"""By the name of the engine, and for MySQL, which stands in for MariaDB."""


def make_provoked(url: URL) -> None:
    """Make the table of the statements."""
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql(TABLE)


@contextmanager
def held(url: URL, error: Provoked) -> Iterator[None]:
    """Hold open what `error` wants to be run elsewhere."""
    with create_engine(url, poolclass=NullPool).connect() as connection:
        if error.elsewhere:
            connection.exec_driver_sql(error.elsewhere)
        yield
