"""The house: tiers, wings, how much one reads for a change, known private names."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TIERS: dict[str, set[str]] = {  # a file or package imports its own tier and those above it in this list
    "words": {
        "outcome",
        "errors",
        "message",
        "asyncio_names",
        "transaction_text",
        "inherited",
        "closing",
        "extras",
        "json_numbers",
    },
    "databases": {"dialects", "tables"},
    "the transaction": {"options", "guard", "reentry", "markers", "late", "bodies", "read_models", "opening"},
    "delivering": {
        *("handler", "building", "waiting", "retry", "unit_of_work", "own_event", "delivery", "batch"),
        *("observer", "projector", "applied", "dispatcher", "verdict"),
    },
    "the public names": {"__init__"},
    "wings": {"commands", "effects", "brokers", "http", "maintenance", "metrics", "rebuild", "testing"},
    "the command": {"cli", "migrations", "__main__"},
}
TIER_OF = {name: number for number, names in enumerate(TIERS.values()) for name in names}

WINGS: dict[str, set[str]] = {  # a wing imports the core, and of the other wings only these
    "commands": set(),
    "effects": {"commands"},
    "brokers": set(),
    "http": {"commands", "brokers"},  # a webhook is a consumer of messages that come by HTTP
    "maintenance": {"commands", "effects", "http"},  # of http, the table of parked requests: a kind of tables
    "metrics": {"maintenance"},
    "rebuild": {"maintenance"},
    "testing": {"commands", "effects"},
}

DRIVERS = {
    "postgresql": {"psycopg", "psycopg2", "asyncpg"},
    "mariadb": {"pymysql", "MySQLdb", "asyncmy", "aiomysql"},
    "sqlite": {"sqlite3", "aiosqlite"},
}
PARTS = {"postgresql": {"psycopg_begin"}}  # what imports a driver that may not be installed

PRIVATE = {
    "_cached_json": "Werkzeug, Request: the decoded body; a view may have changed it, so each attempt decodes it again",
    "_commit_impl": "SQLAlchemy, Connection: COMMIT comes through here, whichever object was told to commit",
    "_for_update_arg": "SQLAlchemy, Select: whether a handler has asked for a lock itself, and for which",
    "_field_defaults": "Python, named tuples: a documented attribute",
    "_fields": "Python, named tuples: there is no other way to tell one from a tuple",
    "_force_close": "PyMySQL: hangs up without a word to the server, as PyMySQL does when it is interrupted",
    "_id": "nats-py, Subscription: the number under which the server sends the messages of a subscription",
    "_on_connect_isolation_level": "SQLAlchemy, Dialect: create_engine(isolation_level=...) leaves no other trace",
    "_pool": "SQLAlchemy, QueuePool: connections that nobody uses; to check one out would ping, recycle or close it",
    "_process_msg": "nats-py, Client: messages come through here as bytes, before nats-py fails at their headers",
    "_rollback_impl": "SQLAlchemy, Connection: ROLLBACK comes through here, as COMMIT through _commit_impl",
}
"""Every private name of SQLAlchemy or of a driver that the library uses, and why there is no public one."""


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
    """The modules that a file names, also in a function or for type checkers: to know is to depend."""
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


def _ours(module: str, path: Path) -> Iterator[str]:
    """The modules of the library that a file names."""
    return (each for each in _imports(module, path) if each.split(".")[0] == "projector_dedup")


def violations(module: str, path: Path) -> list[str]:
    """The imports of a file that lead to a lower tier of the list."""
    here = _unit(module)
    return [
        f"{module} imports {imported}"
        for imported in _ours(module, path)
        if _unit(imported) != here and TIER_OF[_unit(imported)] > TIER_OF[here]
    ]


def test_every_file_has_a_tier() -> None:
    """A new file says where in the house it lives."""
    assert {_unit(module) for module in SOURCES} - TIER_OF.keys() == set()


def test_a_file_imports_its_own_tier_and_those_before() -> None:
    """Nothing knows what stands above it."""
    assert [each for module, path in SOURCES.items() for each in violations(module, path)] == []


def test_no_imports_go_round() -> None:
    """Files and packages below `projector_dedup` can be read one after the other."""
    graph: dict[str, set[str]] = {}
    for module, path in SOURCES.items():
        here = graph.setdefault(_unit(module), set())
        here.update(_unit(imported) for imported in _ours(module, path))
    graph = {unit: needed - {unit} for unit, needed in graph.items()}
    assert tuple(TopologicalSorter(graph).static_order())


def test_an_import_that_leads_up_is_seen_and_one_that_leads_down_is_fine(tmp_path: Path) -> None:
    """An import of a later tier is found, however it is written; earlier tiers and other people's packages are free."""
    up = [
        "from .dispatcher import Dispatcher",
        "from . import Dispatcher",
        "from . import handler",
        "import projector_dedup.cli.main",
        "def later():\n    from projector_dedup.maintenance.stats import ages",
    ]
    down = ["from .errors import Defer", "from . import tables", "import sqlalchemy"]
    for line in up + down:
        (tmp_path / "markers.py").write_text(line)
        assert bool(violations("projector_dedup.markers", tmp_path / "markers.py")) is (line in up), line


# Doors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_imports_the_core_and_few_other_wings(wing: str) -> None:
    """Whoever changes a wing reads it, and those that stand beside it in ``WINGS``."""
    wanted = {_unit(each) for module, path in SOURCES.items() if _unit(module) == wing for each in _ours(module, path)}
    assert wanted.intersection(WINGS) - {wing} <= WINGS[wing]


GAUGES = "projector_dedup.metrics.prometheus_tables"


def test_no_worker_imports_maintenance() -> None:
    """Of the metrics only the gauges do, which no other module imports: a worker counts without them."""
    metrics = {module for module in SOURCES if _unit(module) == "metrics" and module != GAUGES}
    imported = {_unit(each) for module in metrics for each in _ours(module, SOURCES[module])}
    assert "maintenance" not in imported
    assert [module for module, path in SOURCES.items() if GAUGES in _ours(module, path)] == []


@pytest.mark.parametrize("database", DRIVERS)
def test_a_database_is_known_in_its_own_file_only(database: str) -> None:
    """No database imports another one's file, nor anybody else's driver; the door of ``dialects`` registers all."""
    inside = {f"projector_dedup.dialects.{name}" for name in (database, *PARTS.get(database, ()))}
    outside = {
        (module, imported)
        for module, path in SOURCES.items()
        if module not in inside and module != "projector_dedup.dialects" and _unit(module) not in {"cli", "testing"}
        for imported in _imports(module, path)
        if imported in inside or imported.split(".")[0] in DRIVERS[database]
    }
    assert outside == set()


# What one reads for a change ---------------------------------------------------------------------------------------


def test_a_change_needs_no_more_reading_than_the_map_says() -> None:
    """docs/architecture.md names the files to read for each change, their number, and the most lines they may have."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## What you read for a change\n")[2]
    changes = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (\d+) \| ([\d,]+) \|$", table, re.MULTILINE)
    assert len(changes) == 12
    over: list[str] = []
    for change, read, files, lines in changes:
        paths = [ROOT / ("" if name.startswith("cli/") else "projector_dedup") / name for name in _names(read)]
        found = sum(path.read_bytes().count(b"\n") for path in paths)
        if len(paths) != int(files) or found > int(lines.replace(",", "")):
            over.append(f"{change}: {len(paths)} files with {found:,} lines; the table says {files} and {lines}")
    assert over == []


def _names(read: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py)`", read)


# Private names of others ---------------------------------------------------------------------------------------------


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and len(name) > 1


def _named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _own_names(tree: ast.AST) -> Iterator[str]:
    """The private names that a file defines: functions, classes, variables, attributes of self."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _named(node.value, "self"):
            yield node.attr


def foreign_private_names(source: str, own: set[str]) -> set[str]:
    """The private names in a file that are somebody else's: read, overridden, imported, or asked for by ``getattr``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _named(node.value, "os"):
            overrides = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
            if overrides or node.attr not in own:
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update(alias.name for alias in node.names if _is_private(alias.name))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "hasattr", "setattr"}:
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(name.value) and name.value not in own:
                found.add(str(name.value))
    return found


def test_every_private_name_of_others_is_written_down() -> None:
    """A release of SQLAlchemy or of a driver may drop one: a new one needs a line, and a reason, in ``PRIVATE``."""
    trees = {path: path.read_text(encoding="utf-8") for path in SOURCES.values()}
    own = {name for text in trees.values() for name in _own_names(ast.parse(text))}
    found = {name for text in trees.values() for name in foreign_private_names(text, own)}
    assert found == PRIVATE.keys()


def test_a_private_name_of_others_is_found() -> None:
    """Each way to use one is seen."""
    for source in (
        "statement._for_update_arg",
        "super()._commit_impl()",
        "from sqlalchemy.orm import _x",
        "getattr(engine, '_proxied', None)",
    ):
        assert foreign_private_names(source, {"_commit_impl"}) != set(), source
