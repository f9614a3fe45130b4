"""What handlers do: under the lock of an account (they read, let others run, and write), or right without one."""

from __future__ import annotations

import contextlib
from typing import Any

from sqlalchemy import exists, func, insert, literal, select, text, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import load_only, selectinload

from .tables import (
    AT_MOST,
    BALANCES,
    CODED,
    DETAILS,
    FIRST,
    ITEMS,
    LEDGER,
    LINES,
    MADE,
    MEMBERS,
    NUMBERS,
    ODD,
    PLACES,
    SEATED,
    STAMPED,
    TALLY,
    TOTAL,
    UNIQUE_NUMBERS,
    VERSIONED,
    Account,
    Coded,
    Detail,
    Entry,
    Item,
    Line,
    Made,
    Numbered,
    Odd,
    Other,
    Seat,
    Special,
    Stamped,
    Tally,
    Versioned,
    Worth,
)
from .turn import BETWEEN, CHANGES, FREE, UNDER_LOCK, Event, Turn, work

TALLIES: Any = Tally.__table__
MADES: Any = Made.__table__

# Under the lock of the account: a ledger and its like -----------------------------------------------------------------


def _newest(turn: Turn) -> Any:
    return select(Entry).where(*turn.of(Entry)).order_by(Entry.number.desc()).limit(1)


def _next_line(turn: Turn, number: int, balance: int) -> Entry:
    return Entry(
        slot=turn.slot, account=turn.account, number=number + 1, amount=turn.amount, balance=balance + turn.amount
    )


@work(UNDER_LOCK, LEDGER, weight=8)
def ledger(turn: Turn) -> None:
    """Read the last line, and add the next."""
    last = turn.session.scalars(_newest(turn)).first()
    turn.pause()
    turn.session.add(_next_line(turn, last.number, last.balance) if last else _next_line(turn, 0, 0))


@work(UNDER_LOCK, LEDGER)
def ledger_by_core(turn: Turn) -> None:
    """Read two columns of the last line on the connection, and insert the next there."""
    connection = turn.session.connection()
    last = connection.execute(_newest(turn).with_only_columns(Entry.number, Entry.balance)).first()
    turn.pause()
    number, balance = last or (0, 0)
    values = {"slot": turn.slot, "account": turn.account, "amount": turn.amount}
    connection.execute(insert(Entry).values(number=number + 1, balance=balance + turn.amount, **values))


@work(UNDER_LOCK, LEDGER)
def ledger_by_text(turn: Turn) -> None:
    """Read the last line by a common table expression in SQL text."""
    newest = "SELECT number, balance FROM harmless_entry WHERE slot = :s AND account = :a ORDER BY number DESC LIMIT 1"
    found = turn.session.execute(
        text(f"WITH newest AS ({newest}) SELECT number, balance FROM newest"), {"s": turn.slot, "a": turn.account}
    ).first()
    turn.pause()
    turn.session.add(_next_line(turn, *(found or (0, 0))))


@work(UNDER_LOCK, LEDGER)
def ledger_by_sums(turn: Turn) -> None:
    """Compute the next line from aggregates."""
    number, balance = turn.session.execute(
        select(func.count(), func.coalesce(func.sum(Entry.amount), 0)).select_from(Entry).where(*turn.of(Entry))
    ).one()
    turn.pause()
    turn.session.add(_next_line(turn, number, int(balance)))


@work(UNDER_LOCK, LEDGER)
def ledger_by_stream(turn: Turn) -> None:
    """Read all lines in parts, and sum them up."""
    lines = turn.session.scalars(select(Entry).where(*turn.of(Entry)).execution_options(yield_per=5))
    amounts = [line.amount for line in lines]
    turn.pause()
    turn.session.add(_next_line(turn, len(amounts), sum(amounts)))


@work(UNDER_LOCK, LEDGER, engines=("postgresql", "sqlite"))  # on MariaDB it locks the table for its generated key
def ledger_by_insert_select(turn: Turn) -> None:
    """Insert what a SELECT computes."""
    columns = (
        *(literal(turn.slot), literal(turn.account), func.coalesce(func.max(Entry.number), 0) + 1),
        *(literal(turn.amount), func.coalesce(func.sum(Entry.amount), 0) + turn.amount),
    )
    turn.pause()
    turn.session.execute(
        insert(Entry).from_select(
            ["slot", "account", "number", "amount", "balance"], select(*columns).where(*turn.of(Entry))
        )
    )


@work(UNDER_LOCK, LEDGER)
def ledger_by_relationship(turn: Turn) -> None:
    """Append to the children of the parent."""
    parent = turn.session.get_one(Account, turn.account)
    mine = [each for each in parent.entries if each.slot == turn.slot]
    turn.pause()
    parent.entries.append(_next_line(turn, len(mine), sum(each.amount for each in mine)))


@work(UNDER_LOCK, LEDGER, weight=2)
def ledger_by_eager_load(turn: Turn) -> None:
    """Select the parent together with its children, anew."""
    wanted = select(Account).where(Account.id == turn.account).options(selectinload(Account.entries))
    parent = turn.session.scalars(wanted.execution_options(populate_existing=True)).one()
    mine = [each for each in parent.entries if each.slot == turn.slot]
    turn.pause()
    turn.session.add(_next_line(turn, len(mine), sum(each.amount for each in mine)))


@work(UNDER_LOCK, NUMBERS, weight=6)
def running_number(turn: Turn) -> None:
    """Insert the highest number and one."""
    highest = turn.session.scalar(select(func.max(Entry.number)).where(*turn.of(Entry))) or 0
    turn.pause()
    turn.session.add(Entry(slot=turn.slot, account=turn.account, number=highest + 1))


@work(UNDER_LOCK, NUMBERS)
def counted_number(turn: Turn) -> None:
    """Insert the number of rows and one, by Core."""
    number = turn.session.scalar(select(func.count()).select_from(Entry).where(*turn.of(Entry)))
    turn.pause()
    turn.session.execute(insert(Entry).values(slot=turn.slot, account=turn.account, number=(number or 0) + 1))


@work(UNDER_LOCK, STAMPED)
def number_by_insert_select(turn: Turn) -> None:
    """Insert the highest number and one, as a SELECT computes it."""
    columns = (
        *(literal(turn.slot), literal(turn.account), literal(turn.event["number"]), literal(0)),
        func.coalesce(func.max(Stamped.number), 0) + 1,
    )
    turn.pause()
    turn.session.execute(
        insert(Stamped).from_select(
            ["slot", "account", "message", "amount", "number"], select(*columns).where(*turn.of(Stamped))
        )
    )


@work(UNDER_LOCK, UNIQUE_NUMBERS)
def unique_number(turn: Turn) -> None:
    """Insert the highest number and one where the database keeps it unique."""
    highest = turn.session.scalar(select(func.max(Numbered.number)).where(*turn.of(Numbered))) or 0
    turn.pause()
    turn.session.add(Numbered(slot=turn.slot, account=turn.account, number=highest + 1))


@work(UNDER_LOCK, AT_MOST, weight=6)
def at_most(turn: Turn) -> None:
    """Insert a row if there are not enough yet."""
    number = turn.session.scalar(select(func.count()).select_from(Line).where(*turn.of(Line))) or 0
    turn.pause()
    if number < PLACES:
        turn.session.add(Line(slot=turn.slot, account=turn.account, amount=1))


@work(UNDER_LOCK, FIRST)
def the_first(turn: Turn) -> None:
    """Mark the first row of an account."""
    there = turn.session.scalar(select(exists().where(*turn.of(Line))))
    turn.pause()
    turn.session.add(Line(slot=turn.slot, account=turn.account, amount=0 if there else 1))


# Under the lock of the account: a row that is not locked itself -------------------------------------------------------


@work(UNDER_LOCK, TALLY, weight=8)
def adds(turn: Turn) -> None:
    """Get a row and add to it."""
    row = turn.session.get_one(Tally, turn.key)
    turn.pause()
    row.amount += turn.amount


@work(UNDER_LOCK, TOTAL, once=True, weight=6)
def adds_to_the_parent(turn: Turn) -> None:
    """Get the parent and add to it."""
    parent = turn.session.get_one(Account, turn.account)
    turn.pause()
    parent.total += turn.amount


@work(UNDER_LOCK, TOTAL, once=True)
def adds_to_the_parent_by_core(turn: Turn) -> None:
    """Read a column of the parent, and write it by Core."""
    total = turn.session.scalar(select(Account.total).where(Account.id == turn.account)) or 0
    turn.pause()
    turn.session.execute(update(Account).where(Account.id == turn.account).values(total=total + turn.amount))


@work(UNDER_LOCK, TALLY)
def selects_all_and_adds(turn: Turn) -> None:
    """Select all rows of the slot, and add to one."""
    rows = turn.session.scalars(select(Tally).where(Tally.slot == turn.slot)).all()
    turn.pause()
    for row in rows:
        if row.account == turn.account:
            row.amount += turn.amount


@work(UNDER_LOCK, TALLY)
def reads_a_column_and_sets(turn: Turn) -> None:
    """Read a column, then set the attribute."""
    amount = turn.session.scalar(select(Tally.amount).where(*turn.of(Tally))) or 0
    turn.pause()
    turn.session.get_one(Tally, turn.key).amount = amount + turn.amount


@work(UNDER_LOCK, TALLY)
def reads_and_writes_by_core(turn: Turn) -> None:
    """Read a column and write it by Core."""
    amount = turn.session.scalar(select(Tally.amount).where(*turn.of(Tally))) or 0
    turn.pause()
    turn.session.execute(update(Tally).where(*turn.of(Tally)).values(amount=amount + turn.amount))


@work(UNDER_LOCK, TALLY)
def reads_and_writes_by_text(turn: Turn) -> None:
    """Read a column and write it by SQL text."""
    own = {"s": turn.slot, "a": turn.account}
    where = "WHERE slot = :s AND account = :a"
    amount = turn.session.execute(text(f"SELECT amount FROM harmless_tally {where}"), own).scalar_one()
    turn.pause()
    turn.session.execute(text(f"UPDATE harmless_tally SET amount = :n {where}"), {"n": amount + turn.amount, **own})


@work(UNDER_LOCK, TALLY)
def reads_and_writes_on_the_connection(turn: Turn) -> None:
    """Read a row and write it on the session's connection."""
    connection = turn.session.connection()
    own = TALLIES.c.slot == turn.slot, TALLIES.c.account == turn.account
    amount = connection.execute(select(TALLIES.c.amount).where(*own)).scalar_one()
    turn.pause()
    connection.execute(update(TALLIES).where(*own).values(amount=amount + turn.amount))


@work(UNDER_LOCK, TALLY, weight=2)
def writes_in_bulk(turn: Turn) -> None:
    """Read a row, and write it by the ORM's bulk UPDATE."""
    amount = turn.session.get_one(Tally, turn.key).amount
    turn.pause()
    turn.session.execute(update(Tally), [{"slot": turn.slot, "account": turn.account, "amount": amount + turn.amount}])


@work(UNDER_LOCK, TALLY, weight=2)
def merges(turn: Turn) -> None:
    """Read a row, and merge a changed copy."""
    amount = turn.session.get_one(Tally, turn.key).amount
    turn.pause()
    turn.session.merge(Tally(slot=turn.slot, account=turn.account, amount=amount + turn.amount))


@work(UNDER_LOCK, TALLY, weight=2)
def replaces(turn: Turn) -> None:
    """Delete a row, and insert it with another amount."""
    row = turn.session.get_one(Tally, turn.key)
    amount = row.amount
    turn.pause()
    turn.session.delete(row)
    turn.session.flush()
    turn.session.add(Tally(slot=turn.slot, account=turn.account, amount=amount + turn.amount))


@work(UNDER_LOCK, TALLY)
def refreshes_and_adds(turn: Turn) -> None:
    """Get a row and refresh it, then add."""
    row = turn.session.get_one(Tally, turn.key)
    turn.session.refresh(row)
    turn.pause()
    row.amount += turn.amount


@work(UNDER_LOCK, TALLY)
def expires_and_adds(turn: Turn) -> None:
    """Expire everything, then read and add."""
    turn.session.expire_all()
    row = turn.session.get_one(Tally, turn.key)
    turn.pause()
    row.amount += turn.amount


@work(UNDER_LOCK, MADE)
def creates_or_adds(turn: Turn) -> None:
    """Get a row and add to it, or insert it."""
    row = turn.session.get(Made, turn.key)
    turn.pause()
    if row is None:
        turn.session.add(Made(slot=turn.slot, account=turn.account, amount=turn.amount))
    else:
        row.amount += turn.amount


@work(UNDER_LOCK, MADE, splits=True)
def inserts_or_gets_and_adds(turn: Turn) -> None:
    """Insert in a savepoint; after a violation get the row and add to it."""
    try:
        with turn.session.begin_nested():
            turn.session.add(Made(slot=turn.slot, account=turn.account, amount=turn.amount))
    except IntegrityError:
        row = turn.session.get_one(Made, turn.key)
        turn.pause()
        row.amount += turn.amount


@work(UNDER_LOCK, MADE, splits=True)
def inserts_or_populates_and_adds(turn: Turn) -> None:
    """Insert in a savepoint; after a violation read the row anew and add to it."""
    try:
        with turn.session.begin_nested():
            turn.session.add(Made(slot=turn.slot, account=turn.account, amount=turn.amount))
    except IntegrityError:
        turn.session.get_one(Made, turn.key, populate_existing=True).amount += turn.amount


@work(UNDER_LOCK, ODD, weight=5)
def adds_beside_odd_values(turn: Turn) -> None:
    """Add to a number, a decimal and a document of a row with values that equal nothing."""
    row = turn.session.get_one(Odd, turn.key)
    turn.pause()
    row.amount += turn.amount
    row.price += turn.amount
    row.document = {**row.document, "sum": row.document["sum"] + turn.amount}


@work(UNDER_LOCK, ODD, weight=2)
def adds_to_a_partly_loaded_row(turn: Turn) -> None:
    """Add to columns of a row of which the others were not loaded."""
    wanted = select(Odd).where(*turn.of(Odd)).options(load_only(Odd.amount, Odd.price))
    row = turn.session.scalars(wanted).one()
    turn.pause()
    row.amount += turn.amount
    row.price += turn.amount
    document: Any = turn.session.scalar(select(Odd.document).where(*turn.of(Odd)))
    row.document = {**document, "sum": document["sum"] + turn.amount}


@work(UNDER_LOCK, ITEMS)
def adds_in_two_tables(turn: Turn) -> None:
    """Add to the columns of an entity with joined inheritance."""
    row = turn.session.get_one(Item, turn.key)
    turn.pause()
    row.amount += turn.amount
    assert isinstance(row, Special)
    row.bonus += turn.amount


# Right without a lock of the account: one statement, or the row itself is locked --------------------------------------


@work(FREE, TALLY, weight=6)
def updates(turn: Turn) -> None:
    """Add in one statement of the ORM."""
    turn.session.execute(update(Tally).where(*turn.of(Tally)).values(amount=Tally.amount + turn.amount))


@work(FREE, TALLY)
def updates_on_the_connection(turn: Turn) -> None:
    """Add in one Core statement on the connection."""
    own = TALLIES.c.slot == turn.slot, TALLIES.c.account == turn.account
    turn.session.connection().execute(update(TALLIES).where(*own).values(amount=TALLIES.c.amount + turn.amount))


@work(FREE, TALLY)
def sets_an_expression(turn: Turn) -> None:
    """Add by an SQL expression in an attribute."""
    turn.session.get_one(Tally, turn.key).amount = Tally.amount + turn.amount


@work(FREE, TALLY, engines=("postgresql", "mariadb"), weight=6)
def locks_the_row_and_adds(turn: Turn) -> None:
    """Get a row with a lock, and add to it."""
    row = turn.session.get_one(Tally, turn.key, with_for_update=True)
    turn.pause()
    row.amount += turn.amount


@work(FREE, TALLY, engines=("postgresql", "mariadb"))
def locks_the_row_and_writes_by_core(turn: Turn) -> None:
    """Read a column with a lock, and write it by Core."""
    amount = turn.session.scalar(select(Tally.amount).where(*turn.of(Tally)).with_for_update()) or 0
    turn.pause()
    turn.session.execute(update(Tally).where(*turn.of(Tally)).values(amount=amount + turn.amount))


@work(FREE, TALLY, BALANCES)
def updates_and_reads(turn: Turn) -> None:
    """Add in one statement, then read the sum, and insert it as the balance of a ledger."""
    turn.session.execute(update(Tally).where(*turn.of(Tally)).values(amount=Tally.amount + turn.amount))
    turn.pause()
    balance = turn.session.scalar(select(Tally.amount).where(*turn.of(Tally)))
    turn.session.add(Entry(slot=turn.slot, account=turn.account, amount=turn.amount, balance=balance))


@work(FREE, TALLY, BALANCES, engines=("postgresql", "sqlite"))
def updates_returning(turn: Turn) -> None:
    """Add in one statement that returns the sum, and insert it as the balance of a ledger."""
    changed = update(Tally).where(*turn.of(Tally)).values(amount=Tally.amount + turn.amount).returning(Tally.amount)
    balance = turn.session.execute(changed).scalar_one()
    turn.pause()
    turn.session.add(Entry(slot=turn.slot, account=turn.account, amount=turn.amount, balance=balance))


@work(FREE, TALLY, LEDGER)
def updates_then_ledger(turn: Turn) -> None:
    """Add in one statement, which locks the row, then read the last line of a ledger."""
    updates(turn)
    turn.pause()
    ledger(turn)


@work(FREE, TALLY, engines=("postgresql", "sqlite"))
def compares_and_sets(turn: Turn) -> None:
    """Read a column, and write it if it is still the same, again and again."""
    for _ in turn.until_done():
        amount = turn.session.scalar(select(Tally.amount).where(*turn.of(Tally))) or 0
        turn.pause()
        changed: Any = turn.session.execute(
            update(Tally).where(*turn.of(Tally), Tally.amount == amount).values(amount=amount + turn.amount)
        )
        if changed.rowcount:
            return


@work(FREE, VERSIONED)
def adds_with_a_version(turn: Turn) -> None:
    """Get a row with a version, and add to it."""
    row = turn.session.get_one(Versioned, turn.key)
    turn.pause()
    row.amount += turn.amount


@work(FREE, SEATED, engines=("postgresql", "mariadb"), weight=3)
def takes_a_free_row(turn: Turn) -> None:
    """Lock any row that is free and not locked, and take it."""
    free = select(Seat).where(Seat.slot == turn.slot, Seat.taken_by.is_(None)).order_by(Seat.number).limit(1)
    seat = turn.session.scalars(free.with_for_update(skip_locked=True)).one()
    turn.pause()
    seat.taken_by = turn.event["number"]


# Right without a lock of the account: insert or update ----------------------------------------------------------------


def _add_to_made(turn: Turn, amount: int) -> None:
    turn.session.execute(update(Made).where(*turn.of(Made)).values(amount=Made.amount + amount))


def _upsert(turn: Turn, amount: int) -> None:
    name = turn.session.get_bind().dialect.name
    values = {"slot": turn.slot, "account": turn.account, "amount": amount}
    changed = {"amount": Made.amount + amount}
    if name == "mariadb":
        turn.session.execute(mysql.insert(Made).on_duplicate_key_update(changed).values(values))
    else:
        statement: Any = {"postgresql": postgresql, "sqlite": sqlite}[name].insert(Made)
        turn.session.execute(
            statement.on_conflict_do_update(index_elements=["slot", "account"], set_=changed).values(values)
        )


@work(FREE, MADE, weight=6)
def upserts(turn: Turn) -> None:
    """Insert or update in one statement."""
    _upsert(turn, turn.amount)


@work(FREE, MADE, weight=8, splits=True)
def inserts_or_updates(turn: Turn) -> None:
    """Insert in a savepoint; after a violation update by the ORM."""
    try:
        with turn.session.begin_nested():
            turn.session.add(Made(slot=turn.slot, account=turn.account, amount=turn.amount))
    except IntegrityError:
        _add_to_made(turn, turn.amount)


@work(FREE, MADE, splits=True)
def inserts_or_updates_by_core(turn: Turn) -> None:
    """Insert by Core in a savepoint; after a violation update by Core on the connection."""
    own = MADES.c.slot == turn.slot, MADES.c.account == turn.account
    try:
        with turn.session.begin_nested():
            turn.session.execute(insert(MADES).values(slot=turn.slot, account=turn.account, amount=turn.amount))
    except IntegrityError:
        turn.session.connection().execute(update(MADES).where(*own).values(amount=MADES.c.amount + turn.amount))


@work(FREE, MADE, engines=("postgresql", "mariadb"), splits=True)
def inserts_or_locks_and_adds(turn: Turn) -> None:
    """Insert in a savepoint; after a violation get the row with a lock and add to it."""
    try:
        with turn.session.begin_nested():
            turn.session.add(Made(slot=turn.slot, account=turn.account, amount=turn.amount))
            turn.session.flush()
    except IntegrityError:
        turn.session.get_one(Made, turn.key, with_for_update=True).amount += turn.amount


@work(FREE, MADE, splits=True)
def inserts_and_then_updates(turn: Turn) -> None:
    """Insert an empty row in a savepoint and ignore a violation, then update."""
    with contextlib.suppress(IntegrityError), turn.session.begin_nested():
        turn.session.add(Made(slot=turn.slot, account=turn.account, amount=0))
    turn.pause()
    _add_to_made(turn, turn.amount)


@work(FREE, MADE, engines=("postgresql", "mariadb"), splits=True)
def gets_or_creates(turn: Turn) -> None:
    """Get a row with a lock, or create it in a savepoint, again and again."""
    for _ in turn.until_done():
        row = turn.session.get(Made, turn.key, with_for_update=True)
        if row is None:
            with contextlib.suppress(IntegrityError), turn.session.begin_nested():
                turn.session.add(Made(slot=turn.slot, account=turn.account, amount=turn.amount))
                turn.session.flush()
                return
        else:
            row.amount += turn.amount
            return


@work(FREE, MADE, engines=("postgresql",), splits=True)
def looks_or_creates(turn: Turn) -> None:
    """Look for a row without a lock, or create it in a savepoint, again and again; then update."""
    for _ in turn.until_done():
        if turn.session.scalar(select(Made.amount).where(*turn.of(Made))) is not None:
            break
        with contextlib.suppress(IntegrityError), turn.session.begin_nested():
            turn.session.execute(insert(Made).values(slot=turn.slot, account=turn.account, amount=0))
            break
    _add_to_made(turn, turn.amount)


@work(FREE, MADE)
def looks_and_inserts(turn: Turn) -> None:
    """Look for a row, then insert or update; a violation is retried with the whole transaction."""
    there = turn.session.get(Made, turn.key) is not None
    turn.pause()
    if there:
        _add_to_made(turn, turn.amount)
    else:
        turn.session.add(Made(slot=turn.slot, account=turn.account, amount=turn.amount))
        turn.session.flush()


@work(FREE, MADE, splits=True)
def updates_or_inserts(turn: Turn) -> None:
    """Update; if there was no row, insert it in a savepoint; after a violation update again."""
    add = update(Made).where(*turn.of(Made)).values(amount=Made.amount + turn.amount)
    done: Any = turn.session.execute(add)
    turn.pause()
    if not done.rowcount:
        try:
            with turn.session.begin_nested():
                turn.session.add(Made(slot=turn.slot, account=turn.account, amount=turn.amount))
        except IntegrityError:
            turn.session.execute(add)


@work(FREE, MADE, engines=("postgresql", "mariadb"), splits=True)
def inserts_or_adds_if_there(turn: Turn) -> None:
    """Insert in a savepoint; after a violation get the row with a lock, and add if it is there."""
    try:
        with turn.session.begin_nested():
            turn.session.add(Made(slot=turn.slot, account=turn.account, amount=turn.amount))
    except IntegrityError:
        row = turn.session.get(Made, turn.key, with_for_update=True)
        if row is not None:
            row.amount += turn.amount


@work(FREE, MADE, engines=("postgresql", "mariadb"), splits=True)
def selects_or_creates(turn: Turn) -> None:
    """Select a row with a lock; if there is none, insert it in a savepoint; after a violation select it again."""
    wanted = select(Made).where(*turn.of(Made)).with_for_update()
    row = turn.session.scalars(wanted).one_or_none()
    turn.pause()
    if row is None:
        try:
            with turn.session.begin_nested():
                row = Made(slot=turn.slot, account=turn.account, amount=0)
                turn.session.add(row)
        except IntegrityError:
            row = turn.session.scalars(wanted).one()
    row.amount += turn.amount


@work(FREE, MADE, splits=True)
def inserts_several_or_each(turn: Turn) -> None:
    """Insert two rows in one savepoint; after a violation each in its own, ignoring violations; then update."""
    accounts = sorted({turn.event["account"], turn.event["other"]})
    try:
        with turn.session.begin_nested():
            turn.session.add_all(Made(slot=turn.slot, account=account, amount=0) for account in accounts)
    except IntegrityError:
        for account in accounts:
            with contextlib.suppress(IntegrityError), turn.session.begin_nested():
                turn.session.add(Made(slot=turn.slot, account=account, amount=0))
    _add_to_made(turn, turn.amount)


@work(FREE, CODED, splits=True)
def inserts_or_updates_by_another_key(turn: Turn) -> None:
    """Insert in a savepoint; after a violation of a key that is not the primary one, update."""
    try:
        with turn.session.begin_nested():
            turn.session.add(Coded(slot=turn.slot, account=turn.account, amount=turn.amount))
    except IntegrityError:
        turn.session.execute(update(Coded).where(*turn.of(Coded)).values(amount=Coded.amount + turn.amount))


@work(FREE, DETAILS, splits=True)
def creates_a_parent_on_demand(turn: Turn) -> None:
    """Insert a row in a savepoint; if its parent is missing, create that first, ignoring a violation."""
    try:
        with turn.session.begin_nested():
            turn.session.add(Detail(slot=turn.slot, account=turn.account, amount=turn.amount))
    except IntegrityError:
        with contextlib.suppress(IntegrityError), turn.session.begin_nested():
            turn.session.add(Made(slot=turn.slot, account=turn.account, amount=0))
        turn.session.add(Detail(slot=turn.slot, account=turn.account, amount=turn.amount))


@work(FREE, MADE)
def inserts_unless_there_or_updates(turn: Turn) -> None:
    """Insert in one statement that does nothing if the row is there; then update."""
    done: Any = turn.session.execute(_insert_unless_there(turn, turn.amount))
    turn.pause()
    if not done.rowcount:
        _add_to_made(turn, turn.amount)


def _one(event: Event) -> Worth:
    return [(event["account"], 1)]


@work(FREE, MEMBERS, splits=True)
def inserts_and_ignores(turn: Turn) -> None:
    """Insert in a savepoint, and ignore a violation."""
    with contextlib.suppress(IntegrityError), turn.session.begin_nested():
        turn.session.add(Made(slot=turn.slot, account=turn.account, amount=1))


@work(FREE, MEMBERS, BALANCES, engines=("postgresql",), splits=True, worth=_one)
def inserts_and_counts(turn: Turn) -> None:
    """Insert in a savepoint and ignore a violation, then lock the row and count the lines of a ledger."""
    with contextlib.suppress(IntegrityError), turn.session.begin_nested():
        turn.session.add(Made(slot=turn.slot, account=turn.account, amount=1))
    turn.session.get_one(Made, turn.key, with_for_update=True)
    number = turn.session.scalar(select(func.count()).select_from(Entry).where(*turn.of(Entry))) or 0
    turn.pause()
    turn.session.add(Entry(slot=turn.slot, account=turn.account, amount=1, balance=number + 1))


def _insert_unless_there(turn: Turn, amount: int) -> Any:
    verb, end = {
        "postgresql": ("INSERT", "ON CONFLICT DO NOTHING"),
        "sqlite": ("INSERT OR IGNORE", ""),
        "mariadb": ("INSERT IGNORE", ""),
    }[turn.session.get_bind().dialect.name]
    statement = text(f"{verb} INTO harmless_made (slot, account, amount) VALUES (:s, :a, :n) {end}")
    return statement.bindparams(s=turn.slot, a=turn.account, n=amount)


@work(FREE, MEMBERS, weight=2)
def inserts_unless_there(turn: Turn) -> None:
    """Insert in one statement that does nothing if the row is there."""
    turn.session.execute(_insert_unless_there(turn, 1))


@work(FREE, TALLY, MEMBERS, engines=("postgresql",), weight=2)
def inserts_unless_there_and_reads(turn: Turn) -> None:
    """Insert unless the row is there; read it, which must be there then, and add elsewhere."""
    inserts_unless_there(turn)
    turn.session.get_one(Made, turn.key)
    updates(turn)


# Right without a lock of the account: lines, of which the bad ones are skipped ----------------------------------------


def _good(event: Event) -> Worth:
    return [
        (event["account"], line["amount"])
        for line in event["lines"]
        if line["amount"] is not None and line["amount"] >= 0
    ]


def _checked(amount: int | None) -> int:
    if amount is None:
        raise ValueError("no amount")
    return amount


@work(FREE, LINES, MADE, weight=8, splits=True, worth=_good)
def skips_bad_lines(turn: Turn) -> None:
    """Apply each line in a savepoint; skip what fails, whatever it is."""
    for line in turn.event["lines"]:
        with contextlib.suppress(ValueError, DBAPIError), turn.session.begin_nested():
            turn.session.add(Line(slot=turn.slot, account=turn.account, amount=_checked(line["amount"])))
            turn.session.flush()
            _upsert(turn, line["amount"])
            turn.pause()


@work(FREE, LINES, TALLY, weight=6, splits=True, worth=_good)
def skips_lines_and_updates(turn: Turn) -> None:
    """Apply each line in a savepoint by Core; count what fails."""
    failed = 0
    for line in turn.event["lines"]:
        try:
            with turn.session.begin_nested():
                turn.session.execute(
                    update(Tally).where(*turn.of(Tally)).values(amount=Tally.amount + _checked(line["amount"]))
                )
                turn.session.execute(insert(Line).values(slot=turn.slot, account=turn.account, amount=line["amount"]))
        except Exception:  # noqa: BLE001  # as such loops are written
            failed += 1


@work(FREE, LINES, splits=True, worth=_good)
def skips_lines_only(turn: Turn) -> None:
    """Insert each line in a savepoint; skip the lines that the database refuses."""
    for line in turn.event["lines"]:
        if line["amount"] is not None:
            with contextlib.suppress(IntegrityError, DBAPIError), turn.session.begin_nested():
                turn.session.add(Line(slot=turn.slot, account=turn.account, amount=line["amount"]))


@work(UNDER_LOCK, LINES, TALLY, splits=True, weight=6, worth=_good)
def skips_lines_and_adds(turn: Turn) -> None:
    """Apply each line in a savepoint by the ORM; skip what fails."""
    for line in turn.event["lines"]:
        with contextlib.suppress(ValueError, DBAPIError), turn.session.begin_nested():
            row = turn.session.get_one(Tally, turn.key)
            turn.pause()
            row.amount += _checked(line["amount"])
            turn.session.add(Line(slot=turn.slot, account=turn.account, amount=line["amount"]))


# Savepoints as text: what remains -------------------------------------------------------------------------------------


@work(FREE, MADE, engines=("postgresql",), splits=True, weight=1, remains="a savepoint as text")
def inserts_or_updates_by_text(turn: Turn) -> None:
    """Insert behind a savepoint of SQL text; after a violation roll back to it and update."""
    turn.session.execute(text("SAVEPOINT own"))
    try:
        turn.session.execute(insert(Made).values(slot=turn.slot, account=turn.account, amount=turn.amount))
    except IntegrityError:
        turn.session.execute(text("ROLLBACK TO SAVEPOINT own"))
        _add_to_made(turn, turn.amount)


# Nothing --------------------------------------------------------------------------------------------------------------


@work(BETWEEN)
def flushes(turn: Turn) -> None:
    """Flush."""
    turn.session.flush()


@work(BETWEEN)
def expires(turn: Turn) -> None:
    """Flush, and expire everything."""
    turn.session.flush()
    turn.session.expire_all()


@work(BETWEEN, weight=2)
def expunges(turn: Turn) -> None:
    """Flush, and forget everything."""
    turn.session.flush()
    turn.session.expunge_all()


@work(BETWEEN, weight=2)
def asks_nothing(turn: Turn) -> None:
    """Send a SELECT without a table."""
    turn.session.execute(text("SELECT 1"))


@work(BETWEEN, engines=("postgresql",))
def reads_another(turn: Turn) -> None:
    """Read a row that nobody changes."""
    turn.session.get_one(Other, 1)


@work(BETWEEN, engines=("postgresql",))
def reads_the_tally(turn: Turn) -> None:
    """Read a column of a row that others change."""
    turn.session.scalar(select(Tally.amount).where(*turn.of(Tally)))


@work(BETWEEN, engines=("postgresql",), splits=True)
def reads_in_a_savepoint(turn: Turn) -> None:
    """Read inside a savepoint that is rolled back."""
    with contextlib.suppress(ValueError), turn.session.begin_nested():
        turn.session.execute(select(func.count()).select_from(Entry)).all()
        raise ValueError("as it is meant")


# Changes of the event -------------------------------------------------------------------------------------------------


def _multiplied(event: Event) -> Worth:
    event["amount"] *= 100
    return []


def _lines_doubled(event: Event) -> Worth:
    for line in event["lines"]:
        line["amount"] = 2 * line["amount"] if line["amount"] else line["amount"]
    return []


def _line_appended(event: Event) -> Worth:
    event["lines"].append({"amount": 7})
    return []


def _line_popped(event: Event) -> Worth:
    event["lines"].pop()
    return []


def _note_popped(event: Event) -> Worth:
    event.pop("note")
    return []


@work(CHANGES, worth=_multiplied, changes_event=True, forms=("dict", "open"))
def multiplies(turn: Turn) -> None:
    """Change a number of the event."""
    _multiplied(turn.event)


@work(CHANGES, worth=_lines_doubled, changes_event=True)
def doubles_lines(turn: Turn) -> None:
    """Change numbers deep in the event."""
    _lines_doubled(turn.event)


@work(CHANGES, worth=_line_appended, changes_event=True)
def appends_a_line(turn: Turn) -> None:
    """Append to a list of the event."""
    _line_appended(turn.event)


@work(CHANGES, worth=_line_popped, changes_event=True)
def pops_a_line(turn: Turn) -> None:
    """Remove from a list of the event."""
    _line_popped(turn.event)


@work(CHANGES, worth=_note_popped, changes_event=True, forms=("dict",))
def pops_a_note(turn: Turn) -> None:
    """Remove a key of the event."""
    _note_popped(turn.event)
