"""A record is of one scope, one operation and one key; on every database."""

from hashlib import sha256
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.orm import Session

from command_rig import USUAL_ONES, Desk, Placed, PlaceOrder, desks, place
from projector_dedup.commands import (
    Call,
    DuplicateCommandError,
    InvalidKeyError,
    derived_id,
    derived_key,
)
from projector_dedup.commands.record import RecordKey
from projector_dedup.errors import HandlerDefinitionError
from projector_dedup.verdict import Action, verdict_of

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


desk = desks(USUAL_ONES)


@given(TEXTS | st.none(), TEXTS, TEXTS | st.none(), TEXTS)
def test_no_two_keys_are_stored_as_one(scope: str | None, key: str, other_scope: str | None, other_key: str) -> None:
    """Delimiters and digits in them change nothing."""
    same = RecordKey.of(key, scope).stored == RecordKey.of(other_key, other_scope).stored
    assert same == ((scope, key) == (other_scope, other_key))


@pytest.mark.parametrize(
    ("scope", "key", "stored"),
    [
        ("a", "b:c", "1:ab:c"),
        ("a:b", "c", "3:a:bc"),
        ("a", "bc", "1:abc"),
        ("ab", "c", "2:abc"),
        (None, "1:ab", "0:1:ab"),
        ("1", ":ab", "1:1:ab"),
        ("", "ab", None),
        (None, "", None),
        (None, "x" * 511, None),
        ("x" * 300, "x" * 300, None),
    ],
)
def test_a_delimiter_in_a_key_makes_no_other_scope(scope: str | None, key: str, stored: str | None) -> None:
    """Each is stored in its own way, or refused: empty ones, and those that are too long."""
    if stored is None:
        with pytest.raises(InvalidKeyError):
            RecordKey.of(key, scope)
    else:
        assert RecordKey.of(key, scope).stored == stored


@pytest.mark.parametrize("stored", ["k1", "k:1", ":k", "9:k", "1:k", "00:k", "-1:k", "²:kk"])
def test_a_stored_text_of_somebody_else_is_read_as_a_key(stored: str) -> None:
    """No key of ours is stored so; whoever lists the rows must not fail because of it."""
    assert RecordKey.read(stored) == RecordKey(stored, None, stored)


def test_a_long_key_and_a_long_scope_leave_room_in_a_text() -> None:
    """An error keeps 500 characters, and what comes behind the key must be among them."""
    assert len(str(RecordKey.of("k" * 200, "s" * 200))) < 200


@pytest.mark.parametrize("key", [1, b"k", 1.5, object(), True, ["k"]])
def test_only_texts_and_uuids_are_keys(key: object) -> None:
    """Databases disagree on how anything else becomes text."""
    with pytest.raises(InvalidKeyError, match="text or UUID"):
        RecordKey.of(key, None)


def test_keys_that_look_alike_are_different(desk: Desk) -> None:
    """Case, accents and blanks count, in the key and in the scope."""
    operation = desk.operation()
    keys = ["a", "A", "a ", "e", "\N{LATIN SMALL LETTER E WITH ACUTE}", "01", "1"]
    for scope in (None, "t", "T"):
        for key in keys:
            assert not desk.handle(operation, key=key, scope=scope).replayed
    assert len(desk.records()) == len(desk.orders()) == 3 * len(keys)
    assert all(desk.handle(operation, key=key, scope="t").replayed for key in keys)


def test_a_tenant_does_not_see_the_answer_of_another(desk: Desk) -> None:
    """One key in two scopes is two commands."""
    operation = desk.operation()
    one, other = (desk.handle(operation, PlaceOrder(amount), scope=scope) for amount, scope in ((1, "t1"), (2, "t2")))
    assert (one.result.left, other.result.left) == (999_999, 999_997)
    assert not other.replayed


def test_a_uuid_is_the_text_of_it(desk: Desk) -> None:
    """Whoever parses the key and whoever does not ask for the same command."""
    operation, key = desk.operation(), uuid4()
    assert not desk.handle(operation, key=key, scope=key).replayed
    assert desk.handle(operation, key=str(key), scope=str(key)).replayed


def test_a_scope_may_be_demanded(desk: Desk) -> None:
    """A program that forgets it is refused before anything runs, and no command is rejected for that."""
    operation, commands = desk.operation(), desk.commands(scope="required")
    with pytest.raises(HandlerDefinitionError, match="without a scope") as refused:
        desk.handle(operation, commands=commands)
    assert verdict_of(refused.value).action is Action.RETRY_LATER
    assert not desk.handle(operation, commands=commands, scope="t").replayed
    assert not desk.handle(operation, commands=commands, key=None).replayed


def test_a_key_may_be_demanded(desk: Desk) -> None:
    """By the operation that must not run twice."""
    with pytest.raises(InvalidKeyError, match="key="):
        desk.handle(desk.operation(key="required"), key=None)
    assert desk.ran == []


def test_a_key_alone_may_make_a_duplicate(desk: Desk) -> None:
    """Where the order is not compared, asking again can be an error that has the first answer."""
    operation = desk.operation(fingerprint=None)
    first = desk.handle(operation, PlaceOrder(note="o12345"), key="11111", raise_on_duplicate=True)
    with pytest.raises(DuplicateCommandError, match="handled before") as told:
        desk.handle(operation, PlaceOrder(note="o54321"), key="11111", raise_on_duplicate=True)
    assert (told.value.original.result, told.value.original.replayed) == (first.result, True)
    assert desk.orders() == ["o12345"]


def test_a_key_in_another_operation_is_new(desk: Desk) -> None:
    """A key is unique within its operation, and no further."""
    for name in ("desk.place", "desk.return"):
        assert not desk.handle(desk.operation(name=name), PlaceOrder(note=name), key="11111").replayed
    assert desk.orders() == ["desk.place", "desk.return"]


# Names that follow from a key ---------------------------------------------------------------------------------------


@given(st.lists(TEXTS, min_size=1, max_size=4), st.lists(TEXTS, min_size=1, max_size=4))
def test_derived_keys_are_one_for_one(parts: list[str], others: list[str]) -> None:
    """Other parts give another key and another id, however they are cut."""
    assert (derived_key(*parts) == derived_key(*others)) == (parts == others)
    assert (derived_id(*parts) == derived_id(*others)) == (parts == others)
    assert len(derived_key(*parts).encode()) <= 200


def test_what_is_derived_never_changes() -> None:
    """Ids of things that exist are made from them: this is their form for good."""
    assert derived_key("ship", "e-1") == "4:ship3:e-1"
    assert derived_key("x" * 300) == f"sha256:{sha256(b'300:' + b'x' * 300).hexdigest()}"
    assert derived_id("ship", "e-1") == UUID("80d15338-cb97-5f42-8f7a-7bbeb383bc60")
    call = Call(Session(), "k", "t", "op")
    assert call.derived_id("order") == UUID("f597373d-be80-551a-a705-a30603d0b937")
    assert call.key_for("bank") == "b907e903-559b-5fb4-aca5-7ccd2a1126e4"


@pytest.mark.parametrize("parts", [(), (1,), ("a", None)])
def test_only_texts_are_derived_from(parts: tuple[object, ...]) -> None:
    """Anything else is refused."""
    with pytest.raises(InvalidKeyError):
        derived_key(*parts)  # type: ignore[arg-type]


def test_nothing_is_derived_without_a_key() -> None:
    """It would be another thing in each run."""
    with pytest.raises(InvalidKeyError, match="no key"):
        Call(Session(), None).derived_id("order")


def test_a_handler_derives_the_same_in_every_retry(desk: Desk) -> None:
    """And another thing in another scope, operation or key."""
    seen = []

    def note(order: PlaceOrder, call: Call) -> Placed:
        seen.append((call.derived_id("order"), call.key_for("bank")))
        if len(seen) == 1:
            raise ValueError("once more")
        return place(order, call)

    operation = desk.operation(note)
    with pytest.raises(ValueError, match="once more"):
        desk.handle(operation, scope="t")
    desk.handle(operation, scope="t")
    desk.handle(operation, scope="u")
    desk.handle(operation, key="k2", scope="t")
    assert seen[0] == seen[1]
    assert len({value for pair in seen[1:] for value in pair}) == 6
