"""`forget` beside lost connections."""

from typing import Any

import pytest
from sqlalchemy import create_engine

from cut_proxy import CutProxy
from databases import Database
from marked import fill, left, tables
from projector_dedup.maintenance.rows import forget


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_a_lost_commit_is_run_again(server: str, where: Any, request: pytest.FixtureRequest) -> None:
    """And the number is that of the markers that are gone, whichever attempt has deleted them."""
    database: Database = request.getfixturevalue(server)
    direct = create_engine(database.url())
    fill(direct, {"first": [1, 2], "second": [1]})
    with CutProxy(database.url()) as proxy:
        engine = create_engine(proxy.through(database.url()))
        proxy.cut_commit(where)
        assert forget(engine, "0", tables=tables) == 2
        assert proxy.cuts == 1
        engine.dispose()
    assert left(direct) == ["1"]
    direct.dispose()
