"""Ways to lock an account. On SQLite, where nothing locks a row, only a write does."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select, text, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import selectinload

from .tables import Account, Tally
from .turn import Turn, lock

SERVERS = ("postgresql", "mariadb")
HELD = "harmless: what releases the locks of the connection"
FOR_UPDATE = "SELECT id FROM harmless_account WHERE id = :id FOR UPDATE"
ACCOUNTS: Any = Account.__table__


@lock(*SERVERS, weight=8)
def get_for_update(turn: Turn, account: str) -> None:
    """Get the parent with a lock."""
    turn.session.get(Account, account, with_for_update=True)


@lock(*SERVERS)
def get_one_for_update_with_entries(turn: Turn, account: str) -> None:
    """Get the parent with a lock; a second SELECT loads its children."""
    turn.session.get_one(Account, account, with_for_update=True, options=[selectinload(Account.entries)])


@lock(*SERVERS, weight=6)
def select_for_update(turn: Turn, account: str) -> None:
    """Select the parent with a lock."""
    turn.session.scalars(select(Account).where(Account.id == account).with_for_update()).one()


@lock(*SERVERS)
def select_key_for_update(turn: Turn, account: str) -> None:
    """Select a column of the parent with a lock."""
    turn.session.execute(select(Account.id).where(Account.id == account).with_for_update()).one()


@lock("postgresql")
def select_for_no_key_update(turn: Turn, account: str) -> None:
    """Select the parent with the lock of an UPDATE."""
    turn.session.scalars(select(Account).where(Account.id == account).with_for_update(key_share=True)).one()


@lock("postgresql", weight=2)
def select_joined_for_update(turn: Turn, account: str) -> None:
    """Select the parent and another row; lock the parent."""
    joined = select(Account).join(Tally, Tally.account == Account.id, isouter=True).where(Account.id == account)
    turn.session.scalars(joined.with_for_update(of=Account)).all()


@lock("postgresql")
def refresh_for_update(turn: Turn, account: str) -> None:
    """Read the parent, then lock it."""
    turn.session.refresh(turn.session.get_one(Account, account), with_for_update=True)


@lock(*SERVERS, weight=6)
def text_for_update(turn: Turn, account: str) -> None:
    """Lock the parent by SQL text."""
    turn.session.execute(text(FOR_UPDATE), {"id": account})


@lock("postgresql", weight=2)
def cte_for_update(turn: Turn, account: str) -> None:
    """Lock the parent inside a common table expression."""
    turn.session.execute(text(f"/* lock */ WITH locked AS ({FOR_UPDATE}) SELECT id FROM locked"), {"id": account}).all()


@lock(*SERVERS)
def driver_sql_for_update(turn: Turn, account: str) -> None:
    """Lock the parent by SQL of the driver on the session's connection."""
    turn.session.connection().exec_driver_sql(FOR_UPDATE.replace(":id", f"'{account}'")).all()


@lock(*SERVERS)
def core_for_update(turn: Turn, account: str) -> None:
    """Lock the parent by a Core statement on the session's connection."""
    turn.session.connection().execute(select(ACCOUNTS).where(ACCOUNTS.c.id == account).with_for_update()).all()


@lock(*SERVERS)
def for_update_in_a_savepoint(turn: Turn, account: str) -> None:
    """Lock the parent inside a savepoint that is released."""
    with turn.session.begin_nested():
        turn.session.get(Account, account, with_for_update=True)


@lock(*SERVERS, weight=2)
def query_for_update(turn: Turn, account: str) -> None:
    """Lock the parent by a legacy query."""
    turn.session.query(Account).filter_by(id=account).populate_existing().with_for_update().one()


@lock(*SERVERS, weight=2)
def statement_for_update(turn: Turn, account: str) -> None:
    """Load the parent from SQL text that locks it, written over several lines."""
    lines = text("select *\nfrom harmless_account -- the parent\nwhere id = :id\nfor  update")
    turn.session.scalars(select(Account).from_statement(lines), {"id": account}).one()


@lock(*SERVERS, weight=2)
def for_update_again_after_a_savepoint(turn: Turn, account: str) -> None:
    """Lock the parent inside a savepoint that is rolled back, and then again."""
    with turn.session.begin_nested() as nested:
        turn.session.get(Account, account, with_for_update=True)
        nested.rollback()
    turn.session.get(Account, account, with_for_update=True)


@lock(*SERVERS, weight=2)
def nowait_in_a_savepoint(turn: Turn, account: str) -> None:
    """Lock the parent without waiting, again and again."""
    for _ in turn.until_done():
        try:
            with turn.session.begin_nested():
                turn.session.get(Account, account, with_for_update={"nowait": True})
        except DBAPIError:
            turn.pause()
        else:
            return


@lock(*SERVERS, weight=2)
def skip_locked(turn: Turn, account: str) -> None:
    """Select the parent unless it is locked, again and again."""
    wanted = select(Account).where(Account.id == account).with_for_update(skip_locked=True)
    for _ in turn.until_done():
        if turn.session.scalars(wanted).first() is not None:
            return
        turn.pause()


@lock(*SERVERS, weight=1)
def share_then_touch(turn: Turn, account: str) -> None:
    """Lock the parent for reading, and then by an UPDATE: of two at a time one is refused."""
    turn.session.execute(select(Account.id).where(Account.id == account).with_for_update(read=True)).all()
    turn.session.execute(text("UPDATE harmless_account SET touched = touched + 1 WHERE id = :id"), {"id": account})


# By a write -----------------------------------------------------------------------------------------------------------


@lock(weight=2)
def touch_by_bulk(turn: Turn, account: str) -> None:
    """Update the parent by a statement of the ORM."""
    turn.session.execute(update(Account).where(Account.id == account).values(touched=Account.touched + 1))


@lock(weight=2)
def touch_by_text(turn: Turn, account: str) -> None:
    """Update the parent by SQL text; nothing of it changes."""
    turn.session.execute(text("UPDATE harmless_account SET touched = touched WHERE id = :id"), {"id": account})


@lock(weight=2)
def touch_by_core(turn: Turn, account: str) -> None:
    """Update the parent by a Core statement on the session's connection."""
    touched = ACCOUNTS.c.touched
    turn.session.connection().execute(update(ACCOUNTS).where(ACCOUNTS.c.id == account).values(touched=touched + 1))


@lock(weight=2)
def touch_by_upsert(turn: Turn, account: str) -> None:
    """Insert or update the parent."""
    name = turn.session.get_bind().dialect.name
    values, changed = {"id": account, "total": 0, "touched": 0}, {"touched": Account.touched + 1}
    if name == "mariadb":
        turn.session.execute(mysql.insert(Account).on_duplicate_key_update(changed).values(values))
    else:
        insert: Any = {"postgresql": postgresql, "sqlite": sqlite}[name].insert(Account)
        turn.session.execute(insert.on_conflict_do_update(index_elements=["id"], set_=changed).values(values))


@lock("postgresql", "sqlite", weight=2)
def touch_returning(turn: Turn, account: str) -> None:
    """Update the parent by a statement that returns it."""
    touched = update(Account).where(Account.id == account).values(touched=Account.touched + 1)
    turn.session.scalars(touched.returning(Account)).one()


# Without a row --------------------------------------------------------------------------------------------------------


@lock("postgresql", weight=6)
def advisory_by_text(turn: Turn, account: str) -> None:
    """Take an advisory lock by SQL text."""
    turn.session.execute(text("SELECT pg_advisory_xact_lock(hashtext(:id))"), {"id": account})


@lock("postgresql")
def advisory_by_function(turn: Turn, account: str) -> None:
    """Take an advisory lock by `func`."""
    turn.session.scalar(select(func.pg_advisory_xact_lock(41, func.hashtext(account))))


@lock("postgresql", weight=2)
def advisory_tried(turn: Turn, account: str) -> None:
    """Try to take an advisory lock, again and again."""
    for _ in turn.until_done():
        if turn.session.scalar(select(func.pg_try_advisory_xact_lock(func.hashtext(account)))):
            return
        turn.pause()


@lock("postgresql", weight=2)
def advisory_of_the_connection(turn: Turn, account: str) -> None:
    """Take an advisory lock of the connection, which the pool releases (`release_own_locks`)."""
    turn.session.connection().info[HELD] = "SELECT pg_advisory_unlock_all()"
    turn.session.execute(text("SELECT pg_advisory_lock(hashtext(:id))"), {"id": account})


@lock("postgresql")
def table_exclusively(turn: Turn, _account: str) -> None:
    """Lock the table of parents."""
    turn.session.execute(text("LOCK TABLE harmless_account IN EXCLUSIVE MODE"))


@lock("postgresql", weight=2)
def table_against_writes(turn: Turn, _account: str) -> None:
    """Lock the table of parents against changes."""
    turn.session.execute(text("lock harmless_account in share row exclusive mode"))


@lock("mariadb", weight=8)
def named_by_text(turn: Turn, account: str) -> None:
    """Take a lock of the connection, which the pool releases (`release_own_locks`)."""
    turn.session.connection().info[HELD] = "DO RELEASE_ALL_LOCKS()"
    if not turn.session.scalar(text("SELECT GET_LOCK(CONCAT(DATABASE(), :id), 5)"), {"id": account}):
        raise TimeoutError("GET_LOCK")


@lock("mariadb")
def named_by_function(turn: Turn, account: str) -> None:
    """Take a lock of the connection by `func`."""
    turn.session.connection().info[HELD] = "DO RELEASE_ALL_LOCKS()"
    if not turn.session.scalar(select(func.get_lock(func.concat(func.database(), account), 5))):
        raise TimeoutError("GET_LOCK")


def release_own_locks(dbapi_connection: Any, record: Any, *_: object) -> None:
    """Release the locks of a connection after its transaction, when the pool takes it back."""
    if statement := record.info.pop(HELD, None):
        cursor = dbapi_connection.cursor()
        cursor.execute(statement)
        cursor.close()
        dbapi_connection.rollback()


# What remains: nobody can see these -----------------------------------------------------------------------------------

LOCK_FUNCTION = f"""CREATE OR REPLACE FUNCTION harmless_lock(wanted text) RETURNS void LANGUAGE plpgsql AS
$$ BEGIN PERFORM {FOR_UPDATE.removeprefix("SELECT").replace(":id", "wanted")}; END $$"""


@lock("postgresql", weight=2, remains="a lock inside a function of the database")
def inside_a_function(turn: Turn, account: str) -> None:
    """Call a function that locks the parent."""
    turn.session.execute(text("SELECT harmless_lock(:id)"), {"id": account})


@lock(*SERVERS, weight=2, remains="a lock on the driver's own connection")
def on_the_drivers_connection(turn: Turn, account: str) -> None:
    """Lock the parent below SQLAlchemy."""
    cursor = turn.session.connection().connection.cursor()
    cursor.execute(FOR_UPDATE.replace(":id", f"'{account}'"))
    cursor.fetchall()
    cursor.close()
