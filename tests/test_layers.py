"""The house has floors: a file imports lower floors only, and every file is small enough to hold in mind."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 250

FLOORS: tuple[set[str], ...] = (  # from the ground up; a name is a file or a whole package
    {"outcome", "findings", "closing", "row_source"},
    {"errors"},
    {"message"},
    {"asyncio_names", "transaction_text", "extractors"},
    {"reads"},
    {"dialects"},
    {"tables", "isolation"},
    {"guards"},
    {"preflight", "reentry"},
    {"markers", "retry", "state"},
    {"read_ahead"},
    {"sessions", "duplicates"},
    {"work"},
    {"unit_of_work", "schema", "inventory", "retrying"},
    {"handler", "renaming", "migrate", "ddl", "alembic_config", "horizon", "cleaning", "upkeep"},
    {"apply"},
    {"projector", "batch", "retention"},
    {"results"},
    {"dispatcher"},
    {"__init__"},  # what `from projector_dedup import ...` gives
    {"testing", "integrations"},
    {"cli", "migrations"},
    {"__main__"},
)
FLOOR_OF = {name: number for number, floor in enumerate(FLOORS) for name in floor}


def _sources() -> dict[str, Path]:
    """Every module as it is installed, e.g. `projector_dedup.cli.main`, and its file."""
    found = {}
    for folder, package in {
        "projector_dedup": "projector_dedup",
        "cli": "projector_dedup.cli",
        "migrations": "projector_dedup.migrations",
    }.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


SOURCES = _sources()


def _unit(module: str) -> str:
    """The file or package directly below `projector_dedup` that a module belongs to."""
    return [*module.split("."), "__init__"][1]


def _imports(module: str, path: Path) -> Iterator[str]:
    """The modules of ours that a file names, also in a function or for type checkers: to know is to depend."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                yield submodule if submodule in SOURCES else source


def violations(module: str, path: Path) -> list[str]:
    """The imports of a file that do not lead down."""
    here = _unit(module)
    wrong = []
    for imported in _imports(module, path):
        ours, there = imported.split(".")[0] == "projector_dedup", _unit(imported)
        if ours and there != here and FLOOR_OF[there] >= FLOOR_OF[here]:
            wrong.append(f"{module} (floor {FLOOR_OF[here]}) imports {imported} (floor {FLOOR_OF[there]})")
    return wrong


def test_every_file_has_a_floor() -> None:
    """A new file says where in the house it lives."""
    assert {_unit(module) for module in SOURCES} - FLOOR_OF.keys() == set()


@pytest.mark.parametrize("module", SOURCES)
def test_a_file_imports_lower_floors_only(module: str) -> None:
    """Nothing knows what stands above it or beside it, except inside one package."""
    assert violations(module, SOURCES[module]) == []


@pytest.mark.parametrize(
    "line",
    [
        "from .dispatcher import Dispatcher",
        "from . import Dispatcher",
        "from . import guards, work",
        "import projector_dedup.cli.main",
        "def later():\n    from projector_dedup.unit_of_work import UnitOfWork",
    ],
)
def test_an_import_that_leads_up_is_seen(line: str, tmp_path: Path) -> None:
    """However it is written, an import of the same or a higher floor is found."""
    (tmp_path / "markers.py").write_text(line)
    assert violations("projector_dedup.markers", tmp_path / "markers.py") != []


@pytest.mark.parametrize("line", ["from .errors import Defer", "from . import tables", "import sqlalchemy"])
def test_an_import_that_leads_down_is_fine(line: str, tmp_path: Path) -> None:
    """Lower floors and other people's packages are free."""
    (tmp_path / "markers.py").write_text(line)
    assert violations("projector_dedup.markers", tmp_path / "markers.py") == []


@pytest.mark.parametrize("module", [name for name in SOURCES if _unit(name) not in {"cli", "migrations"}])
def test_no_file_outgrows_a_reader(module: str) -> None:
    """Beyond 250 lines the idea in a file is wrong before the file is."""
    lines = SOURCES[module].read_bytes().count(b"\n")
    assert lines <= MAX_LINES


def test_one_import_leads_into_reading_ahead() -> None:
    """The library knows its rows by the port ``row_source`` alone, and delivers without the package."""
    importers = [
        module
        for module, path in SOURCES.items()
        if _unit(module) != "read_ahead" and any(_unit(each) == "read_ahead" for each in _imports(module, path))
    ]
    assert importers == ["projector_dedup.handler"]
