"""The option --app: import `module:dispatcher` and read the identities of that dispatcher's handlers."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from operator import attrgetter
from typing import Any

import click

from projector_dedup import AsyncDispatcher, Dispatcher

from .errors import Failed, one_line, reason

EXAMPLE = "myapp.consumer:dispatcher"


def identities_of(places: tuple[str, ...], *, debug: bool) -> frozenset[str] | None:
    """Import the dispatchers and return the identities of all their handlers; None if ``places`` is empty.

    Puts the current folder on ``sys.path``. Raises `click.BadParameter` for a place that is not ``module:name``, and
    `Failed` if it cannot be imported, or is no dispatcher.
    """
    if not places:
        return None
    for place in places:
        module, _, name = place.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
            raise click.BadParameter(f"{place!r} is not MODULE:DISPATCHER, such as {EXAMPLE}", param_hint="--app")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, and the script of an installed command does not
    with one_line(debug=debug):
        return frozenset().union(*(_dispatcher(place).identities for place in places))


def _dispatcher(place: str) -> Dispatcher | AsyncDispatcher:
    module, _, name = place.partition(":")
    try:
        found: Any = attrgetter(name)(import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(place, "to import it", error) from error
        raise Failed(
            f"--app {place}: there is no module {error.name}; run the command where the application is imported from, "
            "with the application's own Python"
        ) from error
    except AttributeError as error:
        raise _failed(place, "to find it", error) from error
    except Exception as error:  # whatever the user's module does
        raise _failed(place, "to import it", error) from error
    if callable(found) and not isinstance(found, (Dispatcher, AsyncDispatcher)):
        try:
            found = found()
        except Exception as error:
            raise _failed(place, "to call it", error) from error
    if not isinstance(found, (Dispatcher, AsyncDispatcher)):
        raise Failed(
            f"--app {place} is {_kind(found)}; name a Dispatcher, an AsyncDispatcher, or a function without arguments "
            "that returns one"
        )
    return found


def _failed(place: str, what: str, error: Exception) -> Failed:
    return Failed(f"--app {place}: {what} failed with {type(error).__name__}: {reason(error)} (--debug shows where)")


def _kind(found: object) -> str:
    name = type(found).__name__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"
