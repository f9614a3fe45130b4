"""Session factories whose transaction the library cannot keep together are refused by name, before anything is sent."""

from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.horizontal_shard import ShardedSession

from databases import USUAL_DRIVERS, each_driver
from projector_dedup.errors import UnsafeSessionError
from projector_dedup.outcome import Outcome
from projector_dedup.testing import external_transaction
from projector_dedup.verdict import Action, verdict_of
from rig import NOTHING, Rig, add, added, dispatcher_on, done

usual_drivers = pytest.mark.parametrize("driver", USUAL_DRIVERS, ids=str)


@usual_drivers
def test_a_session_that_chooses_a_shard_for_each_row_is_refused(rig: Rig) -> None:
    """Its rows could be in another database than the marker; the error names the class, and nothing is lost."""
    rig.session_class = ShardedSession
    with pytest.raises(UnsafeSessionError, match="ShardedSession chooses a connection for each row") as refused:
        rig.deliver(add)
    assert verdict_of(refused.value).action is Action.RETRY_LATER
    rig.assert_nothing_is_left()


@each_driver()
def test_a_connection_without_a_transaction_is_rolled_back_too(rig: Rig) -> None:
    """As the docstring of ``external_transaction`` shows it: the library begins the transaction of the test."""

    def test() -> Any:
        connection = rig.engine.connect() if isinstance(rig.engine, Engine) else done(rig.engine.connect().start())
        adds = dispatcher_on(type(rig.factory)(connection), lambda _event, session: add(session))
        with external_transaction(adds) as dispatcher:
            outcomes = [done(dispatcher.deliver(added("m-1"))) for _ in range(2)]
        done(connection.rollback())
        done(connection.close())
        return outcomes

    outcomes = rig.in_one_task(test)
    assert [(each.outcome, each.durable) for each in outcomes] == [(Outcome.APPLIED, False), (Outcome.DUPLICATE, False)]
    rig.assert_settled(NOTHING)


@usual_drivers
def test_an_external_transaction_needs_a_connection(rig: Rig) -> None:
    """On an engine the library would commit for real, and the test would not notice."""
    with external_transaction(rig._dispatcher(add)) as dispatcher:
        with pytest.raises(UnsafeSessionError, match="external_transaction has no effect"):
            rig.result(dispatcher.deliver(added("m-1")))
        assert rig.durable() == NOTHING
