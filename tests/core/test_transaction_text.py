"""Which SQL text is taken for a command that begins or ends a transaction."""

import contextlib
from collections.abc import Callable

import pymysql
import pytest

from databases import Database, mariadb_connection
from projector_dedup.dialects import MariaDB, PostgreSQL
from projector_dedup.transaction_text import Grammar

transaction_command = PostgreSQL.grammar.transaction_command

FUNCTION = "create function f() returns int language plpgsql as $$ begin return 1; end $$"
ATOMIC = "create function f() returns int begin atomic select 1; select case when true then 1 end; end"
TRIGGER = "CREATE TRIGGER t AFTER INSERT ON a BEGIN UPDATE a SET b = CASE WHEN b THEN 1 END; DELETE FROM c; END"
EXECUTES = "create trigger t after insert on a execute function f()"
ROUTINES = pytest.mark.parametrize("routine", [FUNCTION, ATOMIC, TRIGGER, EXECUTES])


@ROUTINES
def test_a_routine_is_allowed(routine: str) -> None:
    """The BEGIN and END of its body begin and end no transaction, quoted or not, first or not."""
    assert transaction_command(routine) is None
    assert transaction_command(f"select 1; {routine}; select 2") is None


@ROUTINES
def test_a_command_beside_a_routine_is_found(routine: str) -> None:
    """Only the routine's own statement is passed over."""
    assert transaction_command(f"{routine}; COMMIT; BEGIN") == "COMMIT"
    assert transaction_command(f"/* */ ROLLBACK; {routine}") == "ROLLBACK"


# MariaDB: the server says what ends a transaction; it must not be what others share with it.

ENDS = [
    "COMMIT", "commit work", "commit and chain", "BEGIN", "start transaction read only", "ROLLBACK",
    "rollback work", "set autocommit = 1", "SET @@session.autocommit = ON", "set @@autocommit := 1",
    "set local autocommit = 1", "set @x = 1, autocommit = 1",
    "set statement max_statement_time = 10 for commit",
    "set statement max_statement_time = 10 for create table s (a int)",
    "set statement max_statement_time = 10 for call p()",
    "set statement max_statement_time = 10 for execute immediate 'commit'",
    "create table c (a int)", "create table if not exists t (a int)", "create or replace table c (a int)",
    "create table d select 1 as a", "create table e like t", "create index i on u (a)", "alter table u comment 'x'",
    "rename table u to v", "truncate table u", "drop table u", "drop table if exists nothing",
    "create view w as select 1", "create or replace view w as select 1", "create sequence q",
    "create temporary sequence q", "create procedure f() select 1",
    "create trigger g before insert on u for each row set @a = 1", "create /* x */ table c (a int)",
    "create temporary table x (a int); drop table x", "create temporary table y (a int); alter table y add b int",
    "create temporary table z (a int); truncate table z", "analyze table t", "analyze local table t",
    "check table t, u",
    "optimize table t", "repair table t", "lock tables t write", "lock table t read, u write",
    "call p()", "execute immediate 'commit'", "execute immediate concat('com', 'mit')",
    "prepare s from 'commit'; execute s", "begin not atomic commit; end", "if 1 then commit; end if",
    "case 1 when 1 then commit; end case", "repeat commit; until 1 end repeat",
    "for i in 1..1 do commit; end for", "while @n is null do set @n = 1; commit; end while",
    "/*! COMMIT */", "/*!50000 COMMIT */", "/*M!100000 COMMIT*/", "/*M! COMMIT */", "/* a *//*! COMMIT */",
    "# a\nCOMMIT", "-- a\nCOMMIT", "--\ta\nCOMMIT", "/* a */commit", "select 1--1;commit", "select 1; commit",
    r"select 'a\\'; commit; select 'b'", "select 'a''b'; commit; select 'c'",
    "select `a;b` from (select 1 as `a;b`) q; commit",
]  # fmt: skip
GOES_ON = [
    "select 1", "savepoint n", "rollback to savepoint m", "ROLLBACK WORK TO m", "set role none",
    "set @x = 'autocommit'",
    "set session transaction isolation level read committed", "set statement max_statement_time = 10 for select 1",
    "create temporary table x (a int)", "create or replace temporary table x (a int)",
    "drop temporary table if exists x",
    "create/**/temporary table x (a int)", "checksum table t",
    "prepare s from 'commit'", "do 1", "analyze select 1", "explain select 1", "analyze update t set a = a",
    "values (1)",
    "with x as (select 1) select * from x", "insert into u values (5) returning a", "handler t open", "show tables",
    "/* commit */ select 1", "# commit\nselect 1", "select 1 # ; commit", "select 1 -- ; commit",
    "/*!99999 select 1; */ select 1",
    r"select 'it\'s; COMMIT'", r'select "\"; COMMIT"', "select 'it''s; COMMIT'", "select 1 as `; COMMIT`",
    r"select '\\', '; commit'",
]  # fmt: skip
TAKEN_FOR_ENDS = [
    "set autocommit = 0",
    "unlock tables",
    "/*! create */ temporary table x (a int)",
    "begin not atomic select 1; end",
    "/*!99999 COMMIT */ select 1",
]
TAKEN_FOR_HIDDEN = ["call r()", "execute immediate 'select 1'"]


@pytest.fixture
def ends(mariadb: Database) -> Callable[[str], bool]:
    """Whether, on the server, some SQL ends the transaction in which it runs."""
    with contextlib.closing(mariadb_connection(mariadb.url())) as connection, connection.cursor() as cursor:
        for table in ("t", "u"):
            cursor.execute(f"create table {table} (a int primary key) engine=InnoDB")
        cursor.execute("create procedure p() commit")
        cursor.execute("create procedure r() select 1")

    def ends(sql: str) -> bool:
        url = mariadb.url()
        with contextlib.closing(
            pymysql.connect(
                host=url.host or "",
                port=url.port or 3306,
                user=url.username,
                password=str(url.password or ""),
                database=url.database,
                client_flag=pymysql.constants.CLIENT.MULTI_STATEMENTS,
            )
        ) as connection:
            cursor = connection.cursor()
            cursor.execute("insert into t values (1)")
            cursor.execute("savepoint m")
            cursor.execute(sql)
            while cursor.nextset():
                pass
            try:
                cursor.execute("release savepoint m")
            except pymysql.err.OperationalError:
                return True
            return False

    return ends


@pytest.mark.parametrize("sql", ENDS)
def test_what_ends_a_transaction_on_mariadb_is_found(sql: str, ends: Callable[[str], bool]) -> None:
    """By its name, or as something that may hide it; and the server does end it."""
    grammar = MariaDB.grammar
    assert grammar.transaction_command(sql) is not None or grammar.hides_commands(sql)
    assert ends(sql)


def test_what_leaves_a_transaction_alone_on_mariadb_is_allowed(ends: Callable[[str], bool]) -> None:
    """Whatever it looks like; and the server does not end it."""
    assert [sql for sql in GOES_ON if MariaDB.grammar.transaction_command(sql) is not None] == []
    assert [sql for sql in GOES_ON if MariaDB.grammar.hides_commands(sql) or ends(sql)] == []


def test_what_is_taken_for_an_end_though_it_is_none(ends: Callable[[str], bool]) -> None:
    """The price of not parsing: a handler must not write it, or pays a savepoint for it."""
    both = TAKEN_FOR_ENDS + TAKEN_FOR_HIDDEN
    assert [sql for sql in both if MariaDB.grammar.transaction_command(sql) is not None] == TAKEN_FOR_ENDS
    assert [sql for sql in both if MariaDB.grammar.hides_commands(sql)] == TAKEN_FOR_HIDDEN
    assert [sql for sql in both if ends(sql)] == []


FELT_BY_OTHERS = [
    "flush tables", "set password = ''", "set default role none", "grant select on t to u", "create user u",
    "drop role r", "backup stage start",
    "start slave", "change master to master_host = 'x'", "install plugin x soname 'y'", "shutdown", "XA START 'x'",
]  # fmt: skip


def test_what_others_would_feel_is_found_unseen() -> None:
    """These are not run here."""
    assert [sql for sql in FELT_BY_OTHERS if MariaDB.grammar.transaction_command(sql) is None] == []


def test_each_database_has_strings_and_comments_of_its_own() -> None:
    """A backslash, a hash and a backtick mean nothing to the standard, by which SQLite is read, nor to PostgreSQL."""
    for sql in (r"select '\'; COMMIT; select 'a'", "select 1 # a\n; COMMIT", "select `a; COMMIT`"):
        assert transaction_command(sql) == Grammar().transaction_command(sql) == "COMMIT"
