"""What a figure depends on besides the code: the machine, and the versions."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from .servers import Server

_PACKAGES = ("SQLAlchemy", "psycopg", "asyncpg", "protean", "eventsourcing", "PyMySQL")


def describe(servers: list[Server]) -> dict[str, str]:
    """For the head of the report; nothing that would name the machine or its owner."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "processor": f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GB",
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        "packages": ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name))),
        "servers": ", ".join(server.version for server in servers),
        "their settings": "; ".join(
            f"{name} {value}" for server in servers for name, value in server.settings().items()
        ),
        "load before": f"{os.getloadavg()[0]:.1f}",
    }


def _processor() -> str:
    with_names = Path("/proc/cpuinfo")
    if with_names.exists():
        for line in with_names.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
