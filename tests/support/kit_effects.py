"""Effects for the tests of `settled`: a payment provider, mistakes that the check must find, and right effects."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

from sqlalchemy import String, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from projector_dedup.effects import Attempt, NotDone, Policy, Rejected, arm, ask, effect, resend, stop

URL = {"provider": ""}
"""Where the provider is; set by the test."""


class Base(DeclarativeBase):
    """The user's metadata."""


class Payment(Base):
    """A payment that was recorded."""

    __tablename__ = "kit_payment"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    order: Mapped[str] = mapped_column("order_id", String(20))
    amount: Mapped[int]


@dataclass(frozen=True)
class Charge:
    """A request."""

    order: str
    amount: int


REQUESTS = [(f"charge-{number}", Charge(f"o{number}", 10 + number)) for number in range(4)]


def paid(requests: Sequence[tuple[str, Charge]]) -> list[tuple[str, int]]:
    """The payments of the requests that are done."""
    return sorted((charge.order, charge.amount) for _, charge in requests)


def read_paid(session: Session) -> list[tuple[str, int]]:
    """The payments in the database."""
    return sorted((each.order, each.amount) for each in session.scalars(select(Payment)))


def post(charge: Charge, attempt: Attempt, key: str | None = None, tag: str | None = None, timeout: float = 3) -> str:
    """Call the provider. Raises ``urllib.error.HTTPError`` and ``OSError``."""
    body = {"order": charge.order, "amount": charge.amount} | ({} if tag is None else {"tag": tag})
    headers = {} if key is None else {"Idempotency-Key": key}
    call = urllib.request.Request(f"{URL['provider']}/deeds", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(call, timeout=attempt.time_left(timeout)) as answer:
            return str(json.load(answer)["id"])
    except urllib.error.HTTPError as error:
        error.close()
        raise


def find(_charge: Charge, attempt: Attempt) -> str:
    """Ask the provider for a deed with the tag."""
    with urllib.request.urlopen(f"{URL['provider']}/deeds?key={attempt.key}", timeout=attempt.time_left(3)) as answer:
        found = json.load(answer)["deeds"]
    if not found:
        raise NotDone
    return str(found[0]["id"])


def book(charge: Charge, _value: str, session: Session) -> None:
    """Record a payment."""
    session.add(Payment(order=charge.order, amount=charge.amount))


RESEND = resend(within=timedelta(hours=23))
MISTAKES: list[Any] = []
RIGHT: list[Any] = []


def case(into: list[Any], unknown: Policy = RESEND, recorded: Callable[..., Any] = book) -> Callable[[Any], Any]:
    """Register an effect as a case, under the name of its function."""

    def register(function: Any) -> Any:
        made = effect(name=f"kit.{function.__name__}", lease=5, unknown=unknown)(function)
        made.recorded(recorded)
        into.append(made)
        return made

    return register


mistake, right = partial(case, MISTAKES), partial(case, RIGHT)


# Mistakes -------------------------------------------------------------------------------------------------------------


@mistake()
def sends_no_key(charge: Charge, attempt: Attempt) -> str:
    """The provider cannot recognise the second call."""
    return post(charge, attempt)


@mistake()
def sends_a_new_key(charge: Charge, attempt: Attempt) -> str:
    """Each attempt has a key of its own."""
    return post(charge, attempt, key=str(uuid4()))


@mistake(unknown=stop)
def says_not_done_after_any_error(charge: Charge, attempt: Attempt) -> str:
    """A lost reply says nothing about the deed, and this provider gets no header with a key."""
    try:
        return post(charge, attempt, tag=attempt.key)
    except OSError as error:
        raise NotDone from error


@mistake()
def calls_each_error_a_rejection(charge: Charge, attempt: Attempt) -> str:
    """A 500 may come after the deed."""
    try:
        return post(charge, attempt, key=attempt.key)
    except urllib.error.HTTPError as error:
        raise Rejected(f"http_{error.code}") from error


@mistake()
def swallows_errors(charge: Charge, attempt: Attempt) -> str:
    """It returns a value although it got none."""
    try:
        return post(charge, attempt, key=attempt.key)
    except OSError:
        return "accepted"


@mistake(unknown=stop)
def repeats_by_itself(charge: Charge, attempt: Attempt) -> str:
    """It calls again, and the provider gets no header with a key."""
    try:
        return post(charge, attempt, tag=attempt.key)
    except OSError:
        return post(charge, attempt, tag=attempt.key)


def _says_yes(_charge: Charge, _attempt: Attempt) -> str:
    return "was done"


@mistake(unknown=ask(_says_yes, after=timedelta(seconds=1), within=timedelta(days=1)))
def asks_nobody(charge: Charge, attempt: Attempt) -> str:
    """Its ask function does not ask."""
    return post(charge, attempt, tag=attempt.key)


def _says_no(_charge: Charge, _attempt: Attempt) -> str:
    raise NotDone


@mistake(unknown=ask(_says_no, after=timedelta(seconds=1), within=timedelta(days=1)))
def asks_nobody_and_repeats(charge: Charge, attempt: Attempt) -> str:
    """Its ask function always says that nothing was done."""
    return post(charge, attempt, tag=attempt.key)


def _book_twice(charge: Charge, value: str, session: Session) -> None:
    book(charge, value, session)
    book(charge, value, session)


@mistake(recorded=_book_twice)
def books_twice(charge: Charge, attempt: Attempt) -> str:
    """Its own rows are wrong."""
    return post(charge, attempt, key=attempt.key)


def _book_and_commit(charge: Charge, value: str, session: Session) -> None:
    book(charge, value, session)
    session.commit()


@mistake(recorded=_book_and_commit)
def commits(charge: Charge, attempt: Attempt) -> str:
    """It commits in ``recorded``."""
    return post(charge, attempt, key=attempt.key)


@mistake()
def never_answers(charge: Charge, attempt: Attempt) -> str:
    """It raises after each call."""
    post(charge, attempt, key=attempt.key)
    raise RuntimeError


@mistake(unknown=stop)
def fails_without_cause(charge: Charge, attempt: Attempt) -> str:
    """A person has to decide about calls that went well."""
    post(charge, attempt, key=attempt.key)
    raise RuntimeError


# Right ones -----------------------------------------------------------------------------------------------------------


def _sent(charge: Charge, attempt: Attempt, **key: Any) -> str:
    try:
        return post(charge, attempt, **key)
    except urllib.error.HTTPError as error:
        if error.code == 402:
            raise Rejected("card_declined") from error
        raise


@right()
def resends(charge: Charge, attempt: Attempt) -> str:
    """The provider deduplicates by the key."""
    return _sent(charge, attempt, key=attempt.key)


@right(unknown=ask(find, after=timedelta(seconds=1), within=timedelta(days=1)))
def asks(charge: Charge, attempt: Attempt) -> str:
    """The provider ignores keys, and lists its deeds by a tag."""
    return _sent(charge, attempt, tag=attempt.key)


@right(unknown=stop)
def stops(charge: Charge, attempt: Attempt) -> str:
    """A person decides what is unknown."""
    return _sent(charge, attempt, tag=attempt.key)


@right(unknown=stop)
def hangs_up(charge: Charge, attempt: Attempt) -> str:
    """Its client has gone when the provider answers late."""
    try:
        return post(charge, attempt, tag=attempt.key, timeout=0.05)
    except urllib.error.HTTPError as error:
        if error.code == 402:
            raise Rejected("card_declined") from error
        raise


@effect(name="kit.receipt", lease=5, unknown=stop)
def receipt(charge: Charge, attempt: Attempt) -> str:
    """Another effect, which nobody settles."""
    return post(charge, attempt, key=attempt.key)


def _book_and_arm(charge: Charge, value: str, session: Session) -> None:
    book(charge, value, session)
    arm(session, receipt, charge, key=f"charge-{charge.order.removeprefix('o')}")


@right(recorded=_book_and_arm)
def arms_another(charge: Charge, attempt: Attempt) -> str:
    """Another effect has the same key."""
    return _sent(charge, attempt, key=attempt.key)


async def _book_async(charge: Charge, value: str, session: AsyncSession) -> None:
    book(charge, value, session.sync_session)


@right(recorded=_book_async)
async def resends_async(charge: Charge, attempt: Attempt) -> str:
    """The same as an async def."""
    return await asyncio.to_thread(_sent, charge, attempt, key=attempt.key)
