"""The public names are those of `projector_dedup.__all__`, and nothing else."""

import inspect
import types

from sqlalchemy import MetaData

import projector_dedup
from projector_dedup.commands import make_command_tables


def test_all_is_sorted() -> None:
    """A reader finds a name where the alphabet puts it."""
    assert list(projector_dedup.__all__) == sorted(projector_dedup.__all__)


def test_all_is_complete() -> None:
    """Every public name of the package is exported on purpose, and every exported name is there."""
    public = {
        name
        for name, value in vars(projector_dedup).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - {"annotations"} == {name for name in projector_dedup.__all__ if not name.startswith("__")}


def test_every_exported_member_says_what_it_promises() -> None:
    """A class or function has a docstring of its own, neither inherited nor made by dataclass."""
    for name in projector_dedup.__all__:
        member = getattr(projector_dedup, name)
        if inspect.isclass(member) or inspect.isfunction(member):
            doc = (member.__dict__.get("__doc__") if inspect.isclass(member) else member.__doc__) or ""
            assert doc.strip(), f"{name} has no docstring"
            assert not doc.startswith(f"{name}("), f"{name} has only the docstring that dataclass makes"


def test_completion_shows_the_public_names() -> None:
    """`dir()`, which interactive interpreters complete by, has no internal module."""
    assert dir(projector_dedup) == sorted(projector_dedup.__all__)


def test_help_does_not_print_a_table() -> None:
    """The tables are a default of several signatures, and have a name there, not their columns."""
    signature = str(inspect.signature(projector_dedup.Dispatcher))
    assert "= <DedupTables processed_message>," in signature
    assert "Column(" not in signature
    assert repr(make_command_tables(MetaData(), "done", "shop")) == "<CommandTables shop.done>"
