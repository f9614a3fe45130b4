"""Two messages with one id: the library tells a redelivery from another message by a digest of the body."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import MetaData, select, text
from sqlalchemy.orm import Session

from contract import ISOLATION
from databases import DRIVERS, USUAL_DRIVERS, Driver
from kit import Added, Harness, Held, add
from projector_dedup import Message, Outcome
from projector_dedup.bodies import log_lacking
from projector_dedup.errors import BatchFailed, InvalidMessageError, OtherBodyError
from projector_dedup.observer import Observation
from projector_dedup.tables import DEFAULT_NAME, default_tables, key_tables
from projector_dedup.testing import external_transaction
from projector_dedup.verdict import Action, verdict_of
from reach import reach
from ready import ready

LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
SUBJECTS = [pytest.param((driver, None), id=str(driver)) for driver in DRIVERS] + [
    pytest.param((driver, level), id=f"{driver}, {level}", marks=pytest.mark.nightly)
    for driver in USUAL_DRIVERS
    if driver.engine != "sqlite"
    for level in LEVELS
]


@pytest.fixture(params=SUBJECTS)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """A harness on every driver, and at every level on the usual ones."""
    driver, level = request.param
    with ready(reach(request, driver, **(ISOLATION[f"{level} on dispatcher"] if level else {}))) as made:
        yield made


@pytest.fixture
def usual(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """A harness on a usual driver."""
    driver: Driver = request.param
    with ready(reach(request, driver)) as made:
        yield made


on_the_usual = pytest.mark.parametrize("usual", USUAL_DRIVERS, ids=str, indirect=True)


class Seen:
    """An observer that keeps the outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def observed(self, observation: Observation) -> None:
        """Keep the outcome, unless the message will run again."""
        if observation.outcome != "retried":
            self.outcomes.append(observation.outcome)


def sent(message_id: str, body: str | None, **values: Any) -> Message:
    """A message whose body had these bytes; None: nobody knows them."""
    digest = None if body is None else hashlib.sha256(body.encode()).digest()
    return Message(message_id, Added(), digest=digest, **values)


def outcomes(harness: Harness, dispatcher: Any, *messages: Message) -> list[str]:
    """What became of a batch."""
    try:
        found = harness.run(dispatcher.deliver_batch, list(messages))
    except BatchFailed as failed:
        found = failed.deliveries
    return [each.outcome.value for each in found]


def digests(harness: Harness) -> dict[str, bytes | None]:
    """The digests in the markers, as another connection sees them."""
    marker = default_tables.marker
    rows = harness.transact(lambda session: session.execute(select(marker.c.message_id, marker.c.digest)).all())
    return {row.message_id: None if row.digest is None else bytes(row.digest) for row in rows}


# On every driver ------------------------------------------------------------------------------------------------------


def test_another_body_under_a_known_id_is_told(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """The same bytes again are an ordinary duplicate; so is a message of which one digest is not known."""
    seen = Seen()
    dispatcher = harness.dispatcher(observer=seen)
    for message in (sent("1", "a"), sent("1", "a"), sent("1", "b"), sent("1", None), sent("2", None), sent("2", "a")):
        harness.deliver(dispatcher, message, None)
    assert seen.outcomes == ["applied", "duplicate", "other_body", "duplicate", "applied", "duplicate"]
    (record,) = [
        each for each in caplog.records if each.getMessage().startswith("duplicate") and each.levelname == "WARNING"
    ]
    assert record.getMessage() == (
        "duplicate: message 1 has another body than the one that totals applied: its digest begins with 3e23e8160039, "
        "and that of the applied body with ca978112ca1b"
    )
    assert digests(harness) == {"1": hashlib.sha256(b"a").digest()[:16], "2": None}
    assert harness.totals() == {"a": 2}


def test_a_batch_tells_another_body_too(harness: Harness) -> None:
    """Of markers that are there, and of two messages in the batch; only their digests count, not their order."""
    seen = Seen()
    dispatcher = harness.dispatcher(observer=seen)
    assert outcomes(harness, dispatcher, sent("1", "a"), sent("2", "a"), sent("3", None)) == ["applied"] * 3
    seen.outcomes.clear()
    batch = [sent("4", "b"), sent("1", "b"), sent("2", "a"), sent("3", "b"), sent("4", "c"), sent("4", "b")]
    assert outcomes(harness, dispatcher, *batch) == ["applied", *["duplicate"] * 5]
    assert seen.outcomes == ["applied", "other_body", "duplicate", "duplicate", "other_body", "duplicate"]
    seen.outcomes.clear()
    assert outcomes(harness, dispatcher, *batch[1:]) == ["duplicate"] * 5
    assert seen.outcomes == ["other_body", "duplicate", "duplicate", "other_body", "duplicate"]
    assert harness.totals() == {"a": 4}


def test_a_batch_tells_what_single_messages_tell(harness: Harness) -> None:
    """Also behind a message without a digest; and a marker without one compares with nothing in either way."""
    bodies: list[list[str | None]] = [[None, "b"], [None, "a"], ["a", None, "b"], ["b", "a"], ["b", "b"]]
    found: list[list[list[str]]] = []
    for batched in (True, False):
        found.append([])
        for applied in ("a", None):
            for number, each in enumerate(bodies):
                seen, message_id = Seen(), f"{batched}-{applied}-{number}"
                dispatcher = harness.dispatcher(observer=seen)
                harness.deliver(dispatcher, sent(message_id, applied), None)
                messages = [sent(message_id, body) for body in each]
                if batched:
                    outcomes(harness, dispatcher, *messages)
                else:
                    for message in messages:
                        harness.deliver(dispatcher, message, None)
                found[-1].append(seen.outcomes[1:])
    assert found[0] == found[1]
    assert found[0][0] == ["duplicate", "other_body"]
    assert found[0][len(bodies)] == ["duplicate", "duplicate"]
    assert found[0][len(bodies) + 3] == ["duplicate", "duplicate"]


def test_another_body_can_be_rejected(harness: Harness) -> None:
    """Alone and in a batch, where every other message is applied; nothing of the rejected one remains."""
    seen = Seen()
    dispatcher = harness.dispatcher(observer=seen, other_body="reject")
    harness.deliver(dispatcher, sent("1", "a"), None)
    with pytest.raises(OtherBodyError, match="message 1 has another body") as refused:
        harness.deliver(dispatcher, sent("1", "b"), None)
    assert verdict_of(refused.value).action is Action.REJECT
    assert seen.outcomes == ["applied", "other_body"]
    batch = [sent("2", "a"), sent("1", "b"), sent("1", "a"), sent("3", "a"), sent("3", "b")]
    assert outcomes(harness, dispatcher, *batch) == ["applied", "failed", "duplicate", "applied", "failed"]
    assert harness.markers() == [("1", "totals"), ("2", "totals"), ("3", "totals")]
    assert harness.totals() == {"a": 3}


def test_a_rival_with_another_body_is_told(harness: Harness) -> None:
    """It waits for the first delivery, and sees the digest that this one committed, at every isolation level."""
    seen, held = Seen(), Held(harness)
    dispatcher = harness.dispatcher(harness.handler(held), observer=seen)
    winner = harness.start(harness.deliver, dispatcher, sent("1", "a"), None)
    held.gate.arrival()
    loser = harness.start(harness.deliver, dispatcher, sent("1", "b"), None)
    harness.waits()
    held.gate.open()
    assert [winner.result().outcome, loser.result().outcome] == [Outcome.APPLIED, Outcome.DUPLICATE]
    assert sorted(seen.outcomes) == ["applied", "other_body"]
    assert (held.runs, harness.totals()) == (1, {"a": 1})


def test_a_former_name_is_compared_too(harness: Harness) -> None:
    """The marker of either name has the digest; what this claim inserts itself does not count."""
    seen = Seen()
    old = harness.dispatcher(harness.handler(name="before"))
    new = harness.dispatcher(harness.handler(formerly=["before"]), observer=seen)
    harness.deliver(old, sent("1", "a"), None)
    for body in ("a", "b"):
        harness.deliver(new, sent("1", body), None)
    harness.deliver(new, sent("2", "a"), None)
    harness.deliver(new, sent("2", "b"), None)
    assert seen.outcomes == ["duplicate", "other_body", "applied", "other_body"]
    seen.outcomes.clear()
    outcomes(harness, new, sent("1", "b"), sent("2", "b"), sent("1", "a"))
    assert seen.outcomes == ["other_body", "other_body", "duplicate"]


# Versions beside each other -------------------------------------------------------------------------------------------


def test_old_and_new_code_share_the_new_tables(harness: Harness) -> None:
    """The code of the version before knows no digest. Its markers compare with nothing, and so do its messages."""
    before, seen = key_tables(MetaData(), DEFAULT_NAME, None), Seen()
    old, new = harness.dispatcher(tables=before), harness.dispatcher(observer=seen)
    assert harness.deliver(old, Added(), "1").outcome is Outcome.APPLIED
    harness.deliver(new, sent("1", "b"), None)
    harness.deliver(new, sent("2", "a"), None)
    assert harness.deliver(old, Added(), "2").outcome is Outcome.DUPLICATE
    found = harness.run(old.deliver_batch, [Message(each, Added()) for each in ("1", "2", "3")])
    assert [each.outcome.value for each in found] == ["duplicate", "duplicate", "applied"]
    assert seen.outcomes == ["duplicate", "applied"]
    assert harness.totals() == {"a": 3}


def test_new_code_runs_on_the_tables_of_the_version_before(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """Without a digest, as one line says; each claim with one is tried twice. It finds the column when it is added."""
    log_lacking.cache_clear()
    harness.transact(lambda session: session.execute(text("ALTER TABLE processed_message DROP COLUMN digest")))
    seen, runs = Seen(), [0]

    def body(happened: Added, session: Session) -> None:
        runs[0] += 1
        add(happened, session)

    dispatcher = harness.dispatcher(harness.handler(body), observer=seen)
    for each in ("a", "b"):
        harness.deliver(dispatcher, sent("1", each), None)
    assert outcomes(harness, dispatcher, sent("1", "b"), sent("2", "b"), sent("2", "c")) == [
        *("duplicate", "applied", "duplicate")
    ]
    other = harness.dispatcher(observer=seen)  # a batch is its first delivery
    assert outcomes(harness, other, sent("2", "b"), sent("3", "b"), sent("1", "c")) == [
        *("duplicate", "applied", "duplicate")
    ]
    assert "other_body" not in seen.outcomes
    (told,) = [each for each in caplog.records if "processed_message has no column digest" in each.getMessage()]
    assert (told.levelname, "`idempotency schema --upgrade`" in told.getMessage()) == ("WARNING", True)
    assert (runs, harness.totals()) == ([2], {"a": 3})
    kind = {"postgresql": "BYTEA", "mariadb": "MEDIUMBLOB", "sqlite": "BLOB"}[harness.engine.dialect.name]
    harness.transact(lambda session: session.execute(text(f"ALTER TABLE processed_message ADD COLUMN digest {kind}")))
    harness.deliver(dispatcher, sent("4", "a"), None)
    assert digests(harness)["4"] is not None
    seen.outcomes.clear()
    for each in ("a", "b"):
        harness.deliver(dispatcher, sent("5", each), None)
    assert seen.outcomes == ["applied", "other_body"]


@on_the_usual
def test_an_external_transaction_compares_and_goes_on_without_the_column(usual: Harness) -> None:
    """In a test of the user's, whose transaction a failing statement must not end."""
    for column in (True, False):
        if not column:
            usual.transact(lambda session: session.execute(text("ALTER TABLE processed_message DROP COLUMN digest")))
        seen = Seen()
        with usual.outer_transaction() as factory:
            dispatcher = usual.dispatcher(factory=factory, observer=seen)
            with external_transaction(dispatcher):
                for body in ("a", "b"):
                    usual.deliver(dispatcher, sent("1", body), None)
        assert seen.outcomes == ["applied", "other_body" if column else "duplicate"]
        assert usual.markers() == []


# What is given --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest", [b"short", "a text of more than sixteen", 17])
def test_what_is_no_digest_is_refused(digest: Any) -> None:
    """Before anything is delivered."""
    with pytest.raises(InvalidMessageError, match="at least 16 bytes"):
        Message("1", {}, digest=digest)


@on_the_usual
def test_ignored_digests_are_not_stored(usual: Harness) -> None:
    """A producer that writes an event again with other bytes is no reason for a warning then."""
    seen = Seen()
    dispatcher = usual.dispatcher(observer=seen, other_body="ignore")
    for body in ("a", "b"):
        usual.deliver(dispatcher, sent("1", body), None)
    outcomes(usual, dispatcher, sent("1", "c"), sent("2", "a"), sent("2", "b"))
    assert seen.outcomes == ["applied", "duplicate", "duplicate", "applied", "duplicate"]
    assert digests(usual) == {"1": None, "2": None}
    with pytest.raises(ValueError, match="other_body must be"):
        usual.dispatcher(other_body="raise")
