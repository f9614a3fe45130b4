"""Session factories whose transaction the library cannot keep together are refused by name, before anything is sent."""

import pytest
from sqlalchemy.ext.horizontal_shard import ShardedSession

from databases import USUAL_DRIVERS
from projector_dedup.errors import UnsafeSessionError
from projector_dedup.testing import external_transaction
from projector_dedup.verdict import Action, verdict_of
from rig import NOTHING, Rig, add, added

usual_drivers = pytest.mark.parametrize("driver", USUAL_DRIVERS, ids=str)


@usual_drivers
def test_a_session_that_chooses_a_shard_for_each_row_is_refused(rig: Rig) -> None:
    """Its rows could be in another database than the marker; the error names the class, and nothing is lost."""
    rig.session_class = ShardedSession
    with pytest.raises(UnsafeSessionError, match="ShardedSession chooses a connection for each row") as refused:
        rig.deliver(add)
    assert verdict_of(refused.value).action is Action.RETRY_LATER
    rig.assert_nothing_is_left()


@usual_drivers
def test_an_external_transaction_needs_a_connection(rig: Rig) -> None:
    """On an engine the library would commit for real, and the test would not notice."""
    with external_transaction(rig._dispatcher(add)) as dispatcher:
        with pytest.raises(UnsafeSessionError, match="external_transaction has no effect"):
            rig.result(dispatcher.deliver(added("m-1")))
        assert rig.durable() == NOTHING
