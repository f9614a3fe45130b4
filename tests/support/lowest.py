"""Print the lowest versions that the project allows, as constraints for pip: `make lowest` installs these."""

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[.*\])?>=([\d.]+(?:b\d+)?)")


def constraints() -> list[str]:
    """Return `name==version` for each package that the library, its extras or its tests ask for."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    asked = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    for extra in project["project"]["optional-dependencies"].values():
        asked += extra
    found = (REQUIREMENT.match(str(each)) for each in asked)
    return sorted({f"{match[1]}=={match[2]}" for match in found if match is not None})


if __name__ == "__main__":
    print("\n".join(constraints()))  # noqa: T201  # what it is for
