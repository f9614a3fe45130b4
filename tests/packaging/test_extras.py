"""A module that is imported without the package it needs says which extra to install."""

import json
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WINGS = ("brokers", "http", "metrics")

NEEDED = {  # by each module: the package that is looked for first, and the extra that installs it
    "brokers.aio_pika": ("aio_pika", "aio-pika"),
    "brokers.celery": ("celery", "celery"),
    "brokers.faststream": ("faststream", "faststream"),
    "brokers.faststream.nats": ("faststream", "faststream"),
    "brokers.faststream.rabbit": ("faststream", "faststream"),
    "http.flask": ("flask", "flask"),
    "brokers.kafka": ("confluent_kafka", "kafka"),
    "brokers.nats": ("nats", "nats"),
    "metrics.opentelemetry": ("opentelemetry", "opentelemetry"),
    "brokers.pika": ("pika", "pika"),
    "metrics.prometheus": ("prometheus_client", "prometheus"),
    "metrics.prometheus_tables": ("prometheus_client", "prometheus"),
    "brokers.pubsub": ("google", "pubsub"),
    "brokers.redis": ("redis", "redis"),
    "brokers.sqs": ("botocore", "sqs"),
    "http.starlette": ("starlette", "starlette"),
    "brokers.typed_events": ("pydantic", "events"),
}
NO_PACKAGE = {
    *("brokers.dead_letters", "brokers.incoming", "brokers.rabbitmq", "brokers.running", "brokers.settling"),
    *("http.parked", "http.recording", "http.webhook"),
}

PROGRAM = """
import importlib, json, sys
sys.path[:0] = sys.argv[1:3]
said = {}
for name in sys.argv[3:]:
    try:
        importlib.import_module("projector_dedup." + name)
        said[name] = ["", ""]
    except ImportError as error:
        said[name] = [error.name, str(error)]
print(json.dumps(said))
"""


def _importable_without_extras(folder: Path) -> Path:
    """Return a folder in which Python finds SQLAlchemy, and no package of an extra."""
    for name in ("sqlalchemy", "greenlet", "typing_extensions"):
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        found = Path(spec.origin)
        found = found.parent if found.name == "__init__.py" else found
        (folder / found.name).symlink_to(found)
    return folder


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What each module says where only SQLAlchemy is installed: the package that is missing, and the text."""
    folder = _importable_without_extras(tmp_path_factory.mktemp("bare"))
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(ROOT), str(folder), *NEEDED, *sorted(NO_PACKAGE)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stderr == ""
    return {name: (missing, text) for name, (missing, text) in json.loads(run.stdout).items()}


def test_a_module_without_its_package_names_the_extra(said: dict[str, tuple[str, str]]) -> None:
    """As a line to run, and the extra is one of ours; the rest needs none: consumers of one's own are built on it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {extra for _, extra in NEEDED.values()} <= extras.keys()
    assert said == dict.fromkeys(NO_PACKAGE, ("", "")) | {
        name: (package, f"{package} is not installed; run: pip install 'projector-dedup[{extra}]'")
        for name, (package, extra) in NEEDED.items()
    }


def test_every_module_is_tried() -> None:
    """A new one gets its line above."""
    package = ROOT / "projector_dedup"
    stems = {path.relative_to(package).with_suffix("") for wing in WINGS for path in (package / wing).rglob("*.py")}
    names = {".".join(stem.parts).removesuffix(".__init__") for stem in stems} - {*WINGS}
    assert names == {*NEEDED, *NO_PACKAGE}


def _bounds(requirements: list[object]) -> dict[str, str]:
    """Return the lowest version of each package, as the requirements say it."""
    named = [str(each).partition(">=") for each in requirements if ">=" in str(each)]
    return {name.partition("[")[0].strip().lower(): version.split(",")[0] for name, _, version in named}


def test_the_tests_need_no_other_version_than_the_extras() -> None:
    """The tests install a package at the bound of its extra: a higher one would hide what users meet at the lower."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = _bounds([each for extra in project["project"]["optional-dependencies"].values() for each in extra])
    dev = _bounds(project["dependency-groups"]["dev"])
    assert {name: dev[name] for name in dev.keys() & extras.keys()} == {
        name: extras[name] for name in dev.keys() & extras.keys()
    }
