"""Find an ``alembic.ini`` that loses our revisions, and revisions of others beside ours: Alembic says nothing."""

from __future__ import annotations

import configparser
import os
import re
import warnings
from collections.abc import Iterator
from importlib.resources import files
from os import PathLike
from pathlib import Path

import alembic
from alembic.config import Config
from alembic.script import ScriptDirectory

from ..commands import CommandTables
from ..dialects import Finding, advice
from ..tables import DedupTables

_BRANCH = "projector_dedup"
_LOCATION = "projector_dedup.migrations:versions"
_SEPARATORS = {"os": os.pathsep, "space": " ", "newline": "\n", ":": ":", ";": ";"}
_LEGACY = re.compile(r", *|(?: +)")  # how Alembic splits where no separator is named


def check_alembic(config_path: str | PathLike[str], *, run: bool = False) -> list[Finding]:
    """Return what is wrong with an ``alembic.ini``; nothing if its ``version_locations`` do not name this package.

    Alembic leaves out locations that it cannot find, and ``alembic upgrade heads`` exits with 0 all the same. The file
    is only read. With ``run`` the revisions that it leads to are imported, as Alembic does: that runs the code of
    whoever wrote them. No database is asked.
    """
    path = Path(config_path)
    try:
        options = _options(path)
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        return [
            advice(
                f"{path} could not be read: {reason}",
                "Alembic cannot read it either; each option stands once in its section: where a block was pasted below "
                "what `alembic init` wrote, remove the older line, such as a second path_separator",
            )
        ]
    locations = options.get("version_locations", "")
    if _BRANCH not in locations:
        return []
    try:
        found = _imported(path) if run else any(_leads_to_ours(each, path) for each in _split(locations, options))
    except Exception as error:  # noqa: BLE001  # the user's own revisions may raise anything
        reason = (str(error).strip().splitlines() or [""])[0]
        return [
            advice(
                f"{path} names {_BRANCH}, but its revisions could not be read: {type(error).__name__}: {reason}",
                "run this where `alembic heads` works",
            )
        ]
    if found:
        return []
    return [
        Finding(
            f"{path} names {_BRANCH} in version_locations, but Alembic does not find it there, and says nothing",
            f"write {_LOCATION} on a line of its own, with `path_separator = newline` (Alembic before 1.16: "
            "version_path_separator): any other splits it at its colon, or leaves several locations together; "
            f"`alembic heads` must show ({_BRANCH})",
        )
    ]


def check_installed_revisions() -> list[Finding]:
    """Return that somebody else's revisions lie in the folder of ours; nothing if there are none.

    Alembic writes the first revision of a project there if the project has none, and nobody says where it belongs.
    """
    versions = _installed_versions()
    numbers = {each.rpartition("_")[2] for each in (*DedupTables.revisions, *CommandTables.revisions)}
    theirs = sorted(
        file.name
        for file in versions.glob("*.py")
        if file.name != "__init__.py" and not file.name.startswith(tuple(f"{number}_processed_" for number in numbers))
    )
    if not theirs:
        return []
    return [
        advice(
            f"{', '.join(theirs)} in {versions} is not ours: Alembic wrote a revision of yours into the installed "
            "package",
            "move it into the folder of your own revisions, before the next installation deletes it; from then on "
            "`alembic revision --head <your branch>@head`, and for the first one of a project `--head base "
            "--version-path <your folder>`",
        )
    ]


def _installed_versions() -> Path:
    return Path(str(files(_LOCATION.partition(":")[0]).joinpath("versions"))).resolve()


def _options(path: Path) -> dict[str, str]:
    """Return the options of the section ``alembic``, as they are written.

    Raises ``configparser.Error``, ``OSError`` or ``UnicodeDecodeError`` for a file that Alembic could not read either.
    """
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(path.read_text(encoding="utf-8"), source=path.name)
    return dict(parser["alembic"]) if parser.has_section("alembic") else {}


def _split(locations: str, options: dict[str, str]) -> list[str]:
    """Return the single locations, split as the installed Alembic does it."""
    separator = next((options[name] for name in _separator_options() if name in options), None)
    if separator is None:
        return _LEGACY.split(locations)
    return [each.strip() for each in locations.split(_SEPARATORS.get(separator.strip(), "\0"))]


def _separator_options() -> Iterator[str]:
    if tuple(int(number) for number in re.findall(r"\d+", alembic.__version__)[:2]) >= (1, 16):
        yield "path_separator"
    yield "version_path_separator"


def _leads_to_ours(location: str, config: Path) -> bool:
    """True if Alembic finds our revisions at the location: by our package, or by the path of our folder."""
    package, *below = location.split(":")
    if below and package.partition(".")[0] == _BRANCH:
        place = Path(str(files(package).joinpath(*below)))
    else:
        place = Path(location.replace("%(here)s", str(config.absolute().parent)).replace("%%", "%"))
    return place.resolve() == _installed_versions()


def _imported(path: Path) -> bool:
    """Import all revisions, and return True if our branch is among them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Alembic itself tells its user what the file lacks
        script = ScriptDirectory.from_config(Config(path))
        return any(_BRANCH in revision.branch_labels for revision in script.walk_revisions())
