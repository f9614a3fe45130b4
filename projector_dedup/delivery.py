"""Deliver a message: claim it, run the handler, commit, and retry after a transient error.

``deliver`` is the core of this library. It uses ``unit_of_work`` (claim and commit), ``retry`` (which errors are
retried) and ``waiting`` (threads or asyncio). The unit of work uses ``opening`` (session and isolation level),
``markers`` (the claim) and ``guard`` (what a handler must not do).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

from .bodies import SHOWN, log_lacking
from .errors import BeyondRetention, MissingTableError, OtherBodyError, ProjectorDedupError
from .handler import Handler
from .late import Instant
from .markers import bind_of_marker, valid_key
from .message import Message, id_text, logged_id, logger_of, moment_in_utc, printable, stored_id, valid_digest
from .observer import Observing, Watch
from .options import RetryPolicy, UnitOptions
from .outcome import Outcome
from .own_event import Originals
from .reentry import Handling
from .retry import Attempts
from .unit_of_work import UnitOfWork
from .waiting import Waiting

logger = logger_of("projector_dedup")


_lowered: set[tuple[str, bool]] = set()
"""Handlers for which the library has logged that they run a second time, and whether a lock was the reason."""


def log_lowered(identity: str, *, by_lock: bool) -> None:
    """Log, once for each handler and reason, that it runs a second time, at READ COMMITTED."""
    if (identity, by_lock) in _lowered:
        return
    _lowered.add((identity, by_lock))
    if by_lock:
        logger.info(
            "handler %s takes a lock and then reads, so the library runs it again at READ COMMITTED, where its lock "
            "protects what it reads. If its locks protect every row that it changes, declare isolation='READ "
            "COMMITTED', and the handler runs once",
            identity,
        )
    else:
        logger.info(
            "handler %s violates a constraint, perhaps by a row that its snapshot hides, so the library runs it again "
            "at READ COMMITTED",
            identity,
        )


class Work(Protocol):
    """The work of one unit of work: deliver a chunk of messages, or run a command. The object stores the outcome."""

    identity: str  #: of the handler, for error messages
    marked: bool  #: True if it claims a marker, so that a retry can find out whether an interrupted COMMIT happened
    connected: bool  #: set at each failure: False if no connection could be opened

    def claim(self, uow: UnitOfWork) -> bool:
        """Begin the transaction, with a claim if the work is marked. Return True if the handler must run.

        If ``claim`` returns False, all messages are duplicates, and the transaction has ended.
        """

    def calls(self, uow: UnitOfWork) -> Iterator[Callable[[], Any]]:
        """Yield the calls of the handler, on the session of the claim."""

    def log_settled(self, attempts: Attempts) -> None:
        """Log the outcome."""

    def log_retry(self, error: Exception, attempts: Attempts) -> None:
        """Log a retry after ``error``. If a COMMIT got no answer, note which messages it may have applied."""


def deliver(work: Work, factory: Any, options: UnitOptions, policy: RetryPolicy, waiting: Waiting) -> bool:
    """Apply ``work`` once, with retries, or raise the last error.

    Return True if the result is durable. It is False only inside ``testing.external_transaction``.
    """
    attempts, lacking = Attempts(policy, marked=work.marked), False
    while True:
        uow = UnitOfWork.opened(factory, options, waiting)
        try:
            with uow:
                # 1 Claim first: a concurrent delivery waits here. False: a duplicate, whose transaction has ended.
                if work.claim(uow):
                    attempts.claimed()
                    with Handling(uow.session):
                        for call in work.calls(uow):  # 2 the handler, on the same session
                            waiting.call_handler(work.identity, call)
                        uow.commit_and_close()  # 3 marker and writes, together
            work.log_settled(attempts)
            if lacking:
                marker = options.tables.marker
                log_lacking(str(bind_of_marker(uow.session, options.tables).engine.url), marker.fullname)
            return uow.durable
        except Exception as error:  # noqa: BLE001  # delay_after raises it, unless a retry is due
            if uow.claiming_digest and isinstance(error, MissingTableError):
                options, lacking = replace(options, other_body="ignore"), True  # or the whole table is missing
                continue
            overtaken, accepted = uow.overtaken, options.accepted
            work.connected = uow.dialect is not None
            if isinstance(error, ProjectorDedupError) and hasattr(error, "done"):
                error.done = False  # the handler called a command that ran before; this transaction was rolled back
            lowers = overtaken is not None and overtaken.isolation is not None and uow.durable
            if overtaken is not None and lowers and not getattr(error, "durable", False):
                options = replace(options, lowered=True)
                log_lowered(work.identity, by_lock=overtaken.by_lock)
                continue  # at once, and not counted: it happens only once
            if overtaken is not None and accepted is not None:
                options = replace(options, accepted=accepted | {overtaken.text})
            delay = attempts.delay_after(error, uow.cause_of(error), uow.dialect, commit_was_sent=uow.commit_was_sent)
            work.log_retry(error, attempts)
        waiting.sleep(delay)


class Chunk:
    """One message, or several messages of a batch, delivered in one unit of work, and the outcome of each."""

    def __init__(
        self,
        handler: Handler,
        messages: Sequence[Message],
        originals: Originals,
        observing: Observing | None = None,
    ) -> None:
        self.identity, self.marked = handler.identity, handler.idempotent
        self.messages = messages
        self.outcomes: list[Outcome] = []
        #: index of the message whose handler runs; None while no handler, or one for all messages, runs
        self.at: int | None = None
        self.connected = True
        self.claimed = False  # the database has answered the last claim
        #: by index of each duplicate whose body is not that of the applied message: the digest of that message
        self.others: dict[int, bytes] = {}
        self.in_doubt: set[int] = set()  # indexes of the messages that a COMMIT without an answer may have applied
        self.watch = None if observing is None else Watch(observing, handler, messages)
        self._handler = handler
        self._originals = originals
        self._new: list[int] = []  # indexes of the new messages
        self._compared = False  # True: the claim has written digests

    def claim(self, uow: UnitOfWork) -> bool:
        """Begin the transaction, with a claim if the handler is idempotent. Return True if any message is new.

        If a message is in the chunk twice, the handler gets the first one. Raises ``BeyondRetention`` if a new message
        is late. With ``late="skip"``, a late message that is alone in its chunk is skipped. Raises ``OtherBodyError``
        for a duplicate with another body if the dispatcher rejects it.
        """
        self.at, self.claimed, self._new = None, False, []
        dated = self.marked and any(message.occurred_at is not None for message in self.messages)
        claimed = Instant.now() if dated else None
        self._new = self._claim(uow)
        if self._new:
            self.in_doubt = set()  # the claim found no marker, so the interrupted COMMIT did not happen
        moment = None
        if claimed is not None and any(self.messages[index].occurred_at is not None for index in self._new):
            moment = uow.late_moment(claimed)
        self.claimed = True
        self.outcomes = [Outcome.DUPLICATE] * len(self.messages)
        for index in self._new:
            self.outcomes[index] = Outcome.APPLIED
        if moment is not None:
            self._refuse_late(moment, skip=uow.lateness is not None and uow.lateness.skip)
        self.others = self._other_bodies(uow.others) if self._compared else {}
        if self.others and uow.other_body == "reject":
            self.at = min(self.others)
            raise OtherBodyError(
                f"{self._other(self.at)}. If the producer gave one id to two events, publish this one again with an id "
                "of its own, unless another handler has applied it: `idempotency show` prints the digest of each. If "
                "the producer wrote the same event again with other bytes, the event is applied: drop this message"
            )
        return bool(self._new)

    def _other_bodies(self, stored: Mapping[str, bytes | None]) -> dict[int, bytes]:
        """Return, by index, the digest of each message with the id of another one. Some are ``stored``, by id."""
        found: dict[int, bytes] = {}
        known: dict[str | None, bytes | None] = dict(stored.items())
        for index, message in enumerate(self.messages if stored or len(self.messages) > 1 else ()):
            digest = None if message.digest is None else valid_digest(message.digest)
            first = known.setdefault(id_text(message), digest)
            if first is not None and digest is not None and first != digest:
                found[index] = first
        return found

    def _other(self, index: int) -> str:
        """Return the text about a duplicate with another body, with the first digits of both digests."""
        message = self.messages[index]
        own, applied = ((digest or b"").hex()[:SHOWN] for digest in (message.digest, self.others[index]))
        return (
            f"message {logged_id(message)} has another body than the one that {printable(self.identity)} applied: its "
            f"digest begins with {own}, and that of the applied body with {applied}"
        )

    def _refuse_late(self, moment: datetime, *, skip: bool) -> None:
        """Raise ``BeyondRetention`` for the first new message that occurred before ``moment``, or skip it.

        A message is skipped only if it is alone, because the rollback of its marker would also undo other messages.
        """
        for index in self._new:
            at = self.messages[index].occurred_at
            if at is None or moment_in_utc(at) >= moment:
                continue
            if skip and len(self.messages) == 1:
                self._new, self.outcomes = [], [Outcome.SKIPPED]
                return
            self.at = index
            raise BeyondRetention(
                f"message {logged_id(self.messages[index])} occurred at {moment_in_utc(at)}. Markers of messages from "
                f"before {moment} may be deleted, so {printable(self.identity)} may have applied it; if it has not, or "
                "if the handler is new and reads the history of a topic, use a dispatcher that has late='apply'"
            )

    def _claim(self, uow: UnitOfWork) -> list[int]:
        """Return the indexes of the new messages. A handler without ``idempotent=True`` gets all messages."""
        handler = self._handler
        if not handler.idempotent:
            uow.begin()
            return list(range(len(self.messages)))
        given = any(each.digest is not None for each in self.messages)
        compared = self._compared = given and uow.other_body != "ignore"
        keys = [
            valid_key(
                stored_id(each.id, each.source), handler.identity, each.occurred_at, each.digest if compared else None
            )
            for each in self.messages
        ]
        if compared:  # one statement claims them all
            keys = [{"digest": None, **key} for key in keys]
        if len(keys) == 1:
            return [0] if uow.claim_key(keys[0], handler.formerly) else []
        firsts = {key["message_id"]: index for index, key in reversed([*enumerate(keys)])}
        found = uow.claim_keys({message_id: keys[index] for message_id, index in firsts.items()}, handler.formerly)
        return sorted(firsts[message_id] for message_id in found)

    def calls(self, uow: UnitOfWork) -> Iterator[Callable[[], Any]]:
        """Yield the handler's calls for the new messages, in their order.

        The handler is called once for each message, with an empty session, as if the message were alone. With
        ``@on(batch=True)`` one call gets all messages.
        """
        handler, several = self._handler, len(self._new) > 1
        new = [self.messages[index] for index in self._new]
        if handler.on.batch:
            events = [self._event_of(message) for message in new]
            yield lambda: handler.function(events, uow.handlers_session)
            return
        if several:
            uow.share()
        for index, message in zip(self._new, new, strict=True):
            self.at = index
            event = self._event_of(message)
            yield lambda event=event: handler.function(event, uow.handlers_session)  # type: ignore[misc]
            if several:
                uow.end_message()
        self.at = None

    def _event_of(self, message: Message) -> Any:
        """Return what the handler gets for the message. No other attempt and no other handler gets this object."""
        return self._originals.event_of(message, envelope=self._handler.on.envelope)

    def log_settled(self, attempts: Attempts) -> None:
        """Log the outcome of each message: at DEBUG if it was applied, else at INFO. Another body is a WARNING."""
        if not (self.others or logger.isEnabledFor(logging.INFO)):
            return
        for index, (message, outcome) in enumerate(zip(self.messages, self.outcomes, strict=True)):
            duplicate = outcome is Outcome.DUPLICATE
            level = logging.DEBUG if outcome is Outcome.APPLIED else logging.INFO
            if index in self.others:
                logger.warning("duplicate: %s", self._other(index), extra=self._extra(message, "other_body", attempts))
                continue
            if not logger.isEnabledFor(level):  # escaping the texts below takes time for every message
                continue
            after_unknown = duplicate and index in self.in_doubt
            logger.log(
                level,
                "%s%s: message %s, handler %s",
                outcome.value,
                " (after_unknown_commit)" if after_unknown else "",
                logged_id(message),
                printable(self.identity),
                extra=self._extra(message, outcome.value, attempts) | {"after_unknown_commit": after_unknown},
            )

    def log_retry(self, error: Exception, attempts: Attempts) -> None:
        """Log a retry and its cause at INFO, and report it to the observer. Note which messages are in doubt."""
        if attempts.unknown is error:
            self.in_doubt = set(self._new)
        others = f" and {len(self.messages) - 1} more" if len(self.messages) > 1 else ""
        logger.info(
            "retry after %s: message %s%s, handler %s",
            type(error).__name__,
            logged_id(self.messages[0]),
            others,
            self.identity,
            extra=self._extra(self.messages[0], "retry", attempts),
        )
        if self.watch is not None:
            self.watch.retried(error, attempts)

    def _extra(self, message: Message, outcome: str, attempts: Attempts) -> dict[str, Any]:
        return {
            "message_id": logged_id(message),
            "handler": printable(self.identity),
            "outcome": outcome,
            "attempts": attempts.number,
        }
