"""Whoever creates the tables may do everything; whoever delivers, checks and cleans up has rights on the rows only."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from databases import USUAL
from projector_dedup import Dispatcher, Outcome, on, projector
from projector_dedup.maintenance.check import check
from projector_dedup.maintenance.cleanup import cleanup
from projector_dedup.maintenance.schema import ddl
from projector_dedup.tables import default_tables


@projector(idempotent=True, name="h")
@on(dict)
def handler(_event: object, session: Session) -> None:
    """Write to the read model."""
    session.execute(text("UPDATE totals SET amount = amount + 1"))


@contextmanager
def application_user(owner: Engine) -> Iterator[URL]:
    """A user of the server with no rights but those that `idempotency schema` names, and those on the read model."""
    name, password = f"pdtest_{secrets.token_hex(4)}", secrets.token_hex(8)
    postgresql = owner.dialect.name == "postgresql"
    user = name if postgresql else f"{name}@'%'"
    create = f"CREATE ROLE {user} LOGIN PASSWORD '{password}'"
    grants = [line.removeprefix("-- ") for line in ddl(owner.dialect.name).splitlines() if line.startswith("-- GRANT")]
    assert len(grants) == 2
    grants.append("GRANT SELECT, UPDATE ON totals TO <application user>")
    if postgresql:
        grants.append("GRANT USAGE ON SCHEMA public TO <application user>")  # the tests' own schema
    with owner.begin() as connection:
        connection.execute(text(create if postgresql else f"CREATE USER {user} IDENTIFIED BY '{password}'"))
    try:
        with owner.begin() as connection:
            for grant in grants:
                connection.execute(text(grant.replace("<application user>", user)))
        yield owner.url.set(username=name, password=password)
    finally:
        with owner.begin() as connection:
            if postgresql:
                connection.execute(text(f"DROP OWNED BY {user}"))
            connection.execute(text(f"DROP {'ROLE' if postgresql else 'USER'} {user}"))


@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_an_application_user_needs_rights_on_rows_only(database: str, request: pytest.FixtureRequest) -> None:
    """A privileged user creates the tables; the other delivers, checks and cleans up, and could not drop anything."""
    owner = create_engine(request.getfixturevalue(database).url(USUAL[database]))
    default_tables.marker.metadata.create_all(owner)
    with owner.begin() as connection:
        connection.execute(text("CREATE TABLE totals (amount INTEGER)"))
        connection.execute(text("INSERT INTO totals VALUES (0)"))
    with application_user(owner) as url:
        engine = create_engine(url)
        dispatcher = Dispatcher(sessionmaker(engine), handler)
        outcomes = [dispatcher.deliver({}, message_id=each).outcome for each in ("m1", "m1", "m2")]
        assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE, Outcome.APPLIED]
        assert not [finding for finding in check(engine) if finding.fatal]
        with engine.begin() as connection:
            age = "UPDATE processed_message SET processed_at = '2020-01-01' WHERE message_id = "
            connection.execute(text(age + ("'m1'" if database == "postgresql" else "unhex('6d31')")))
        assert cleanup(engine) == 1
        for forbidden in ("DROP TABLE processed_message", "ALTER TABLE processed_message ADD x INTEGER"):
            with pytest.raises(DBAPIError), engine.begin() as connection:
                connection.execute(text(forbidden))
        engine.dispose()
    with owner.connect() as connection:
        assert connection.scalar(text("SELECT amount FROM totals")) == 2
        assert connection.scalar(text("SELECT count(*) FROM processed_message")) == 1
    owner.dispose()
