"""A Galera cluster, where every node takes writes: messages meet on different nodes."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, create_engine
from sqlalchemy.orm import Session

from command import idempotency
from databases import Database, until
from galera import GaleraCluster, GaleraNode, GaleraUnavailableError, galera_cluster
from kit import PATIENCE, Added, Harness, Held, Subject, Total, add
from owning import run_script
from projector_dedup import Outcome, make_tables
from projector_dedup.maintenance.schema import ddl
from reached import reached

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[GaleraCluster]:
    """Two nodes, one applier each, so that what comes behind a transaction that waits waits, too."""
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(galera_cluster({"wsrep_slave_threads": 1}, {"wsrep_slave_threads": 1}))
        except GaleraUnavailableError as reason:
            reached.give_up("galera", "galera", str(reason))
        reached.saw("galera", found.nodes[0].status("wsrep_provider_version") or "")
        yield found


@pytest.fixture
def harnesses(cluster: GaleraCluster) -> Iterator[list[Harness]]:
    """One for each node; the tables are there on both, and empty."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(Harness(Subject(node.url))) for node in cluster.nodes]
        found[0].create_tables()
        found[0].transact(lambda session: session.add(Total(key="a", amount=0)))
        until(lambda: found[1].totals() == {"a": 0})
        yield found
        found[0].drop_tables()


@pytest.fixture
def engine(cluster: GaleraCluster, harnesses: list[Harness]) -> Engine:
    """The first node."""
    assert harnesses[0].engine.url == cluster.nodes[0].url
    return harnesses[0].engine


@contextlib.contextmanager
def lagging(cluster: GaleraCluster, node: GaleraNode) -> Iterator[Callable[[], None]]:
    """Let a node fall behind the others: it has their transactions, and does not apply them. Yields what ends that."""
    other = next(each for each in cluster.nodes if each is not node)
    node.execute("CREATE OR REPLACE TABLE readmodel.brake (id INT PRIMARY KEY)")
    ended = threading.Event()
    with contextlib.closing(node.connect()) as holder:
        cursor = holder.cursor()
        cursor.execute("LOCK TABLES readmodel.brake READ")
        other.execute("INSERT INTO readmodel.brake VALUES (1)")

        def end() -> None:
            if not ended.is_set():
                ended.set()
                cursor.execute("UNLOCK TABLES")

        try:
            yield end
        finally:
            end()


def refusals(node: GaleraNode) -> int:
    """How many transactions of the node were refused: at COMMIT, or because another node's came first."""
    return sum(int(node.status(f"wsrep_local_{name}") or 0) for name in ("cert_failures", "bf_aborts"))


# Messages that meet on different nodes -------------------------------------------------------------------------------


def test_a_rival_on_another_node_does_not_wait_and_one_of_them_applies(harnesses: list[Harness]) -> None:
    """A lock is the node's own: both run the handler, the first COMMIT wins, and the other one is a duplicate."""
    first, second = harnesses
    held = Held(first)
    slow = first.start(first.deliver, first.dispatcher(first.handler(held)))
    held.gate.arrival()
    assert second.deliver(second.dispatcher()).outcome is Outcome.APPLIED
    until(lambda: first.totals() == {"a": 1})
    held.gate.open()
    assert slow.result().outcome is Outcome.DUPLICATE
    assert [(each.totals(), each.markers()) for each in harnesses] == [({"a": 1}, [("m1", "totals")])] * 2


def test_a_redelivery_on_a_node_that_lags_is_refused_by_the_cluster(
    cluster: GaleraCluster, harnesses: list[Harness]
) -> None:
    """The node has not got the marker yet, at wsrep_sync_wait = 0: the handler runs, and its COMMIT is refused."""
    first, second = harnesses
    assert cluster.nodes[1].execute("SELECT @@GLOBAL.wsrep_sync_wait") == [(0,)]
    with lagging(cluster, cluster.nodes[1]) as end:
        assert first.deliver(first.dispatcher()).outcome is Outcome.APPLIED
        assert (first.totals(), second.totals(), second.markers()) == ({"a": 1}, {"a": 0}, [])
        before, delivery = refusals(cluster.nodes[1]), _committing(cluster.nodes[1], second, "m1")
        end()
        assert delivery.result().outcome is Outcome.DUPLICATE
    assert refusals(cluster.nodes[1]) > before
    until(lambda: second.totals() == {"a": 1})
    assert first.totals() == {"a": 1}


def test_another_message_on_a_node_that_lags_loses_no_update(cluster: GaleraCluster, harnesses: list[Harness]) -> None:
    """The handler reads a row that the other node has changed already: the COMMIT is refused, and it runs again."""
    first, second = harnesses
    with lagging(cluster, cluster.nodes[1]) as end:
        first.deliver(first.dispatcher())
        assert second.totals() == {"a": 0}
        before, delivery = refusals(cluster.nodes[1]), _committing(cluster.nodes[1], second, "m2")
        end()
        assert delivery.result().outcome is Outcome.APPLIED
    assert refusals(cluster.nodes[1]) > before
    assert second.totals() == {"a": 2}
    until(lambda: first.totals() == {"a": 2})


def _committing(node: GaleraNode, harness: Harness, message_id: str) -> Future[Any]:
    """Begin to deliver a message to a node that lags, and return when its COMMIT waits for the cluster's answer."""
    delivery = harness.start(harness.deliver, harness.dispatcher(), Added(), message_id)
    waits = "SELECT 1 FROM information_schema.processlist WHERE info = 'COMMIT'"
    until(lambda: bool(node.execute(waits)) or delivery.done())
    assert not delivery.done(), delivery.exception() or delivery.result()
    return delivery


def test_a_row_that_changes_after_it_was_read_loses_no_update(harnesses: list[Harness]) -> None:
    """The other node's change arrives between a handler's SELECT and its UPDATE: error 1020, and it runs again."""
    first, second = harnesses
    held = threading.Event()
    came = threading.Event()
    runs: list[int] = []

    def read_and_stop(happened: Added, session: Session) -> None:
        read = session.get_one(Total, "a").amount
        runs.append(read)
        if len(runs) == 1:
            came.set()
            assert held.wait(PATIENCE)
        add(happened, session)

    delivery = second.start(second.deliver, second.dispatcher(second.handler(read_and_stop)), Added(), "m2")
    assert came.wait(PATIENCE)
    first.deliver(first.dispatcher(), Added(), "m1")
    until(lambda: second.totals() == {"a": 1})
    held.set()
    assert delivery.result().outcome is Outcome.APPLIED
    assert (runs, second.totals()) == ([0, 1], {"a": 2})


@pytest.mark.usefixtures("harnesses")
def test_tables_that_are_created_through_one_node_are_on_the_other(cluster: GaleraCluster) -> None:
    """With the state table and its version; the other node is ready at once."""
    first, second, *_ = cluster.nodes
    engine = create_engine(first.url)
    run_script(engine, ddl("mariadb", make_tables(MetaData(), "moved")))
    engine.dispose()
    url = second.url.render_as_string(hide_password=False)
    assert idempotency("check", "--database-url", url, "--table", "moved").returncode == 0


def test_no_server_of_the_tests_deletes_temporary_tables_of_another(cluster: GaleraCluster, mariadb: Database) -> None:
    """Each does so when it starts, with those in its folder for them: a server that runs may crash over that."""
    with create_engine(mariadb.url()).connect() as connection:
        folders = {connection.exec_driver_sql("SELECT @@tmpdir").scalar()}
    for node in cluster.nodes:
        ((folder,),) = node.execute("SELECT @@tmpdir")
        folders.add(folder)
    assert len(folders) == 1 + len(cluster.nodes)
