"""The contract suite of the library, through one node of a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from galera import GaleraNode

SELECTED = "TestDefault and pymysql"


def through(node: GaleraNode, root: Path) -> str:
    """Run the contract on a node; return the last line but one of what pytest printed: "passed: 120 tests, ..."."""
    url = node.url.set(drivername="mariadb", database=None).render_as_string()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PROJECTOR_DEDUP_TEST_")},
        "PROJECTOR_DEDUP_TEST_MARIADB_URL": url,
    }
    command = [sys.executable, "-m", "pytest", "-n", "0", "tests/delivery/test_contract.py", "-k", SELECTED]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    passed = next((line for line in done.stdout.splitlines() if line.startswith("passed: ")), done.stdout[-2000:])
    return passed.removeprefix("passed: ").partition(", in ")[0] + ("" if done.returncode == 0 else " (FAILED)")
