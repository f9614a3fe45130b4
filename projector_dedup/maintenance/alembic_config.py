"""Find an ``alembic.ini`` that loses our revisions: Alembic then says nothing, and makes no tables."""

from __future__ import annotations

import warnings
from os import PathLike
from pathlib import Path

from alembic.config import Config
from alembic.script import ScriptDirectory

from ..dialects.findings import Finding

_BRANCH = "projector_dedup"
_LOCATION = "projector_dedup.migrations:versions"


def check_alembic(config_path: str | PathLike[str]) -> list[Finding]:
    """Return what is wrong with an ``alembic.ini``; nothing if its ``version_locations`` do not name this package.

    Alembic leaves out locations that it cannot find, and ``alembic upgrade heads`` exits with 0 all the same. The
    revisions of the environment are imported; no database is asked.
    """
    path = Path(config_path)
    config = Config(path)
    if _BRANCH not in (config.get_main_option("version_locations") or ""):
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Alembic itself tells its user what the file lacks
            script = ScriptDirectory.from_config(config)
            labelled = {label for revision in script.walk_revisions() for label in revision.branch_labels}
    except Exception as error:  # noqa: BLE001  # the user's own revisions may raise anything
        reason = (str(error).strip().splitlines() or [""])[0]
        return [
            Finding(
                f"{path} names {_BRANCH}, but its revisions could not be read: {type(error).__name__}: {reason}",
                "run this where `alembic heads` works",
                fatal=False,
            )
        ]
    if _BRANCH in labelled:
        return []
    return [
        Finding(
            f"{path} names {_BRANCH} in version_locations, but Alembic does not find it there, and says nothing",
            f"write {_LOCATION} on a line of its own, with `path_separator = newline` (Alembic before 1.16: "
            "version_path_separator): any other splits it at its colon, or leaves several locations together; "
            f"`alembic heads` must show ({_BRANCH})",
        )
    ]
