"""Ways to deliver whose costs are counted: a message for itself, a batch, a redelivery, with and without options."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from sqlalchemy import case, select, update
from sqlalchemy.orm import Session

from kit import Added, Harness, Total, add
from meter import LARGE, Deliver
from projector_dedup import Message, Outcome
from projector_dedup.commands import (
    AsyncCall,
    AsyncCommands,
    Call,
    Commands,
    Rejected,
    command,
    default_command_tables,
)
from projector_dedup.errors import BatchFailed

DIGEST = bytes(16)
ROWS = [f"row {number}" for number in range(10)]


def add_or_fail(happened: Added, session: Session) -> None:
    """Ordinary ORM code: one SELECT, one UPDATE."""
    if happened.amount < 0:
        raise ValueError("the message in the middle")
    add(happened, session)


def add_each(happened: list[Added], session: Session) -> None:
    """The handler of one message in a loop, behind one SELECT of all rows."""
    chosen = select(Total).where(Total.key.in_({event.keys[0] for event in happened})).order_by(Total.key)
    _rows = session.scalars(chosen).all()  # the session keeps them while something refers to them
    for event in happened:
        add(event, session)


def add_all(happened: list[Added], session: Session) -> None:
    """One UPDATE of every row."""
    amounts = Counter(event.keys[0] for event in happened)
    added = case(amounts, value=Total.key)
    session.execute(update(Total).where(Total.key.in_(amounts)).values(amount=Total.amount + added))


def no_dedup(harness: Harness, _name: str) -> Deliver:
    """Return a delivery without the library: the handler's code in a transaction of its own."""
    return lambda *_: harness.transact(partial(add_or_fail, Added(("row 0",))))


def one(
    harness: Harness,
    name: str,
    *,
    known: bool = False,
    strict: bool = False,
    claim_timeout: float | None = None,
    missing: bool = False,
    digest: bytes | None = None,
    **settings: Any,
) -> Deliver:
    """A message for itself, new each time or `known`, about a row that is there or `missing`, perhaps with a digest."""
    handler = harness.handler(add_or_fail, name, **settings)
    dispatcher = harness.dispatcher(handler, strict=strict, claim_timeout=claim_timeout)

    def deliver(number: int, _size: int) -> None:
        row = f"{name[-5:]} {number}" if missing else "row 0"
        message = Message("known" if known else f"new-{number}", Added((row,)), digest=digest)
        delivery = harness.deliver(dispatcher, message, None)
        assert delivery.outcome is (Outcome.DUPLICATE if known else Outcome.APPLIED)

    if known:
        harness.deliver(dispatcher, Message("known", Added(("row 0",)), digest=digest), None)
    return deliver


def look(harness: Harness, name: str) -> Deliver:
    """No delivery: one look of ``applied`` for a message that was delivered before."""
    dispatcher = harness.dispatcher(harness.handler(add_or_fail, name))
    harness.deliver(dispatcher, Message("known", Added(("row 0",))), None)
    return lambda *_: harness.run(dispatcher.applied, "known", by=name, timeout=0)


def stream(harness: Harness, name: str) -> Deliver:
    """Ten new messages and a redelivery, all one by one: what a redelivery costs those that follow it."""
    new, again = one(harness, name), one(harness, f"{name} again", known=True)

    def deliver(number: int, size: int) -> None:
        for place in range(10):
            new(10 * number + place, size)
        again(number, size)

    return deliver


def many(
    harness: Harness,
    name: str,
    *,
    known: int = 0,
    fails: bool = False,
    body: Any = add_or_fail,
    batch: bool = False,
    digest: bytes | None = None,
    **settings: Any,
) -> Deliver:
    """A batch on ten rows: all new, every second (2) or each (1) `known`, or the one in the middle `fails`."""
    dispatcher = harness.dispatcher(harness.handler(body, name, batch=batch, **settings))

    def messages(number: int, size: int) -> Iterator[Message]:
        for place in range(size):
            kind = "known" if known and place % known == 0 else f"new-{number}"
            poison = fails and place == size // 2
            yield Message(f"{kind}-{place}", Added((ROWS[place % 10],), -1 if poison else 1), digest=digest)

    def deliver(number: int, size: int) -> None:
        try:
            deliveries = harness.run(dispatcher.deliver_batch, messages(number, size))
        except BatchFailed as failed:
            deliveries = failed.deliveries
        duplicates, failures = size // known if known else 0, int(fails)
        outcomes = [delivery.outcome for delivery in deliveries]
        assert (outcomes.count(Outcome.DUPLICATE), outcomes.count(Outcome.FAILED)) == (duplicates, failures)

    if known:
        harness.run(dispatcher.deliver_batch, [each for each in messages(0, LARGE) if "known" in str(each.id)])
    return deliver


def ask(harness: Harness, name: str, *, known: bool = False, rejects: bool = False, **options: Any) -> Deliver:
    """A command with the same handler, new each time or `known`, perhaps one that it rejects."""

    def body(session: Session) -> None:
        add_or_fail(Added(("row 0",)), session)
        if rejects:
            raise Rejected("no")

    def direct(_command: Added, call: Call) -> None:
        body(call.session)

    async def awaited(_command: Added, call: AsyncCall) -> None:
        await call.session.run_sync(body)

    operation: Any = command(name=name)(awaited) if harness.asynchronous else command(name=name)(direct)
    commands: Any = (AsyncCommands if harness.asynchronous else Commands)(harness.factory, **options)

    def deliver(number: int, _size: int) -> None:
        key = "known" if known else f"new-{number}"
        answer = harness.run(commands.handle, operation, Added(("row 0",)), key=key)
        assert answer.replayed is known

    harness.transact(lambda session: default_command_tables.marker.metadata.create_all(session.connection()))
    if known:
        harness.run(commands.handle, operation, Added(("row 0",)), key="known")
    return deliver


WAYS: dict[str, Callable[[Harness, str], Deliver]] = {
    "no dedup": no_dedup,
    "not idempotent": partial(one, idempotent=False),
    "new message": one,
    "missing row": partial(one, missing=True),
    "redelivery": partial(one, known=True),
    "new message, digest": partial(one, digest=DIGEST),
    "redelivery, digest": partial(one, known=True, digest=DIGEST),
    "ten new, one redelivered": stream,
    "strict": partial(one, strict=True),
    "claim_timeout": partial(one, claim_timeout=1.0),
    "read_models": partial(one, read_models=[Total]),
    "formerly": partial(one, formerly=["its old name"]),
    "batch of 100": many,
    "batch, all known": partial(many, known=1),
    "batch, half known": partial(many, known=2),
    "batch of 100, digests": partial(many, digest=DIGEST),
    "batch, all known, digests": partial(many, known=1, digest=DIGEST),
    "batch, half known, digests": partial(many, known=2, digest=DIGEST),
    "batch, one fails": partial(many, fails=True),
    "batch=True, a loop": partial(many, body=add_each, batch=True),
    "batch=True, one UPDATE": partial(many, body=add_all, batch=True),
    "a look of applied": look,
    "command": ask,
    "command, again": partial(ask, known=True),
    "command, claim_timeout": partial(ask, claim_timeout=1.0),
    "command, rejected": partial(ask, rejects=True),
}
