"""What effects cost: round trips, counted at the wire, and rows, as the database plans its statements."""

from functools import partial
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.orm import Session

from databases import USUAL_DRIVERS, Database
from effect_rig import TABLE, Till, tills
from meter import metered

till = tills([each for each in USUAL_DRIVERS if not each.is_async])

# In a plan: the index is read, and of it only the rows that have a time.
BOUNDED = {"postgresql": "Index Cond: (next_at ", "mariadb": " range ", "mysql": " range ", "sqlite": "(next_at"}
NUMBERS = {
    "postgresql": "generate_series(1, 2000) n(n)",
    "mariadb": "(SELECT seq AS n FROM seq_1_to_2000) n",
    "mysql": "(WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 1000) SELECT n FROM r) n",
    "sqlite": "(WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 2000) SELECT n FROM r) n",
}


def test_round_trips_on_psycopg(postgresql: Database) -> None:
    """Two transactions for ``run``: one takes the row, the other records; ``arm`` is one statement."""
    with metered(postgresql.url()) as meter:
        till = Till(meter.harness)
        till.create_tables()
        charge = till.effect()

        def armed(number: int, _size: int) -> None:
            till.arm(charge, key=f"armed {number}")

        def settled(_number: int, _size: int) -> None:
            till.settle(charge, limit=1)

        ran = meter.cost_of(lambda number, size: till.run(charge, key=f"{number} {size}"))
        again = meter.cost_of(lambda _number, _size: till.run(charge, key="0 10"))
        arming = meter.cost_of(armed)
        for number in range(20):
            till.arm(charge, key=f"due {number}")
        settling = meter.cost_of(settled)
    # BEGIN, limit, INSERT, COMMIT; BEGIN, limit, UPDATE, INSERT of the payment, COMMIT
    assert (ran.statements, ran.trips) == (5, 9), ran.sent
    assert (again.statements, again.trips) == (3, 5), again.sent
    assert (arming.statements, arming.trips) == (1, 3), arming.sent
    assert settling.statements == 8, settling.sent  # finds, locks, takes, records, the payment, and a limit for three


def test_what_is_due_is_found_by_an_index(till: Till) -> None:
    """Of 2,000 effects that are done none is read; on MySQL, whose recursion ends there, of 1,000."""
    charge, engine = till.effect(), till.harness.engine
    till.arm(charge)
    mariadb = engine.dialect.name in ("mariadb", "mysql")
    key = "concat(message_id, n.n)" if mariadb else "message_id || n.n"
    changed = {"message_id": key, "next_at": "NULL", "processed_at": "CURRENT_TIMESTAMP", "outcome": "1"}
    columns = [column.name if mariadb else f'"{column.name}"' for column in TABLE.columns]
    values = [changed.get(column.name, name) for column, name in zip(TABLE.columns, columns, strict=True)]
    copied = f"SELECT {', '.join(values)} FROM external_effect, {NUMBERS[engine.dialect.name]}"
    copies = f"INSERT INTO external_effect ({', '.join(columns)}) {copied}"
    analyze = "ANALYZE TABLE external_effect" if mariadb else "ANALYZE external_effect"
    for statement in (copies, analyze):
        till.harness.transact(partial(_execute, statement))
    sent: list[tuple[str, Any]] = []

    @event.listens_for(engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("SELECT") and "next_at <= " in statement:
            sent.append((statement, parameters))

    assert till.settle(charge) == "1 done"
    assert ["LIMIT" in statement for statement, _ in sent[:2]] == [True, False]  # known names, and then others
    explain = "EXPLAIN QUERY PLAN " if engine.dialect.name == "sqlite" else "EXPLAIN "
    for statement, parameters in sent[:2]:
        with engine.connect() as connection:
            rows = connection.exec_driver_sql(explain + statement, parameters).all()
        plan = "\n".join(" ".join(str(part) for part in row) for row in rows)
        assert "ix_external_effect_next_at" in plan, plan
        assert BOUNDED[engine.dialect.name] in plan, plan


def _execute(statement: str, session: Session) -> None:
    session.execute(text(statement))
