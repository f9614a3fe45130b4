"""What the state table is told, it knows; two who tell it at once leave one value."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from sqlalchemy import Engine, event

from marked import metadata, one_of_each_engine, tables  # noqa: F401  # a fixture
from projector_dedup.maintenance.state import read_state, write_state


def test_a_value_is_set_changed_and_forgotten(engine: Engine) -> None:
    """Keys that nobody wrote are not there."""
    metadata.create_all(engine)
    seen = []
    for values in ({"a": "1", "b": "2"}, {"a": "3"}, {"a": None, "c": None}):
        with engine.begin() as connection:
            write_state(connection, tables, values)
        with engine.connect() as connection:
            seen.append(read_state(connection, tables))
    assert seen == [{"a": "1", "b": "2"}, {"a": "3", "b": "2"}, {"b": "2"}]


def test_two_writers_leave_one_value(engine: Engine) -> None:
    """Both begin where the key is not there yet; none fails."""
    metadata.create_all(engine)
    barrier = Barrier(2)

    def write(value: str) -> None:
        with engine.begin() as connection:
            barrier.wait()
            write_state(connection, tables, {"key": value})

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, ["one", "two"]))
    with engine.connect() as connection:
        assert read_state(connection, tables)["key"] in ("one", "two")


def test_the_last_writer_of_a_key_wins_though_another_was_first_to_make_it(engine: Engine) -> None:
    """The row comes between its look and its INSERT; it is changed then."""
    metadata.create_all(engine)
    rival = iter(["from the rival"])

    def meet(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT"):
            for value in rival:
                with engine.begin() as other:
                    write_state(other, tables, {"key": value})

    event.listen(engine, "before_cursor_execute", meet)
    with engine.begin() as connection:
        write_state(connection, tables, {"key": "the last"})
    with engine.connect() as connection:
        assert read_state(connection, tables) == {"key": "the last"}
    assert next(rival, None) is None
