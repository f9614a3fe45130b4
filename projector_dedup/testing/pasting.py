"""Write a regression test: the user's own test, with the schedule that failed."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def regression_test(test: Callable[..., Any], fixture: str, schedule: Sequence[tuple[Any, ...]]) -> Iterator[str]:
    """Yield the lines of a test that runs one schedule, for a test that calls the fixture at one place.

    Yield the argument alone, if the source is not to be had or calls the fixture at several places.
    """
    argument = ["schedule=[", *(f"    {tuple(turn)!r}," for turn in schedule), "]"]
    found = _call(test, fixture)
    if found is None:
        yield "To run this schedule alone, add the argument"
        yield from argument
        return
    source, call = found
    lines = source.splitlines()
    end = (call.end_lineno or 0) - 1
    last, column = lines[end].encode(), (call.end_col_offset or 0) - 1
    before, after = last[:column].decode().rstrip(), last[column:].decode()
    margin = " " * (len(lines[call.lineno - 1]) - len(lines[call.lineno - 1].lstrip()))
    if before and not before.endswith((",", "(")):
        before += ","
    inside = [f"{margin}    {line}" for line in (*argument[:-1], "],")]
    lines[end : end + 1] = [*([before] if before else []), *inside, margin + after]
    name = getattr(test, "__name__", "test")
    yield "A regression test, which runs this schedule alone:"
    yield ""
    yield from "\n".join(lines).replace(f"def {name}(", f"def {name}_again(", 1).splitlines()


def _call(test: Callable[..., Any], fixture: str) -> tuple[str, ast.Call] | None:
    try:
        source = textwrap.dedent(inspect.getsource(test))
        tree = ast.parse(source)
    except (OSError, SyntaxError):
        return None
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == fixture
    ]
    return (source, calls[0]) if len(calls) == 1 else None
