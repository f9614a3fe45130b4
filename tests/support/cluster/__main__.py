"""The command behind `make cluster`: which servers, how many messages, and where the results go."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from galera import GaleraCluster, GaleraUnavailableError, galera_cluster

from . import contract, failover, page, plain, writers
from .load import Ran

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "cluster-run.md"
SEED, MESSAGES, PLAIN_SECONDS = 2026, 1_200, 10.0


def main() -> int:
    """Return 0 if everything was as promised."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # every server is ended, as it is by Ctrl-C
    logging.disable(logging.ERROR)  # a killed server is not news here
    began, record = time.monotonic(), page.Record(options.seed)
    try:
        for name in options.servers or SERVERS:
            SERVERS[name](record, options)
    except (GaleraUnavailableError, ImportError) as missing:
        print(f"make cluster: {missing}", file=sys.stderr)
        return 1
    record.seconds = time.monotonic() - began
    print(f"\n{record.verdict}")
    if not (options.servers or options.messages != MESSAGES):
        PAGE.write_text(page.rendered(record), encoding="utf-8")
        print(f"Written: {PAGE.relative_to(ROOT)}", file=sys.stderr)
    return 0 if record.as_promised else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make cluster", description="Clusters on this machine, faults under load, totals from the input."
    )
    parser.add_argument("servers", nargs="*", help=f"of {', '.join(SERVERS)}; all by default, which writes {PAGE.name}")
    parser.add_argument("--messages", type=int, default=MESSAGES, help="in each run; another number writes no page")
    parser.add_argument(
        "--seed", type=int, default=SEED, help="of the messages, their order and the handlers' failures"
    )
    options = parser.parse_args()
    if unknown := set(options.servers) - set(SERVERS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(SERVERS)}")
    return options


def _postgresql(record: page.Record, options: argparse.Namespace) -> None:
    with _section(record, "postgresql") as add:
        for ran in failover.runs(options.seed, options.messages):
            add(ran)


def _galera(record: page.Record, options: argparse.Namespace) -> None:
    with galera_cluster({}, {}, {}) as cluster, _section(record, "galera") as add:
        _describe(record, cluster)
        for ran in writers.runs(cluster, options.seed, options.messages):
            add(ran)
        for each in plain.runs(cluster, options.seed, PLAIN_SECONDS):
            record.plain.append(each)
            print(f"plain transactions: {each}", flush=True)
        record.contract = contract.through(cluster.nodes[0], ROOT)
        print(f"the contract, through one node: {record.contract}", flush=True)


SERVERS: dict[str, Callable[[page.Record, argparse.Namespace], None]] = {"postgresql": _postgresql, "galera": _galera}


def _describe(record: page.Record, cluster: GaleraCluster) -> None:
    node = cluster.nodes[0]
    ((version,),) = node.execute("SELECT version()")
    provider = (node.status("wsrep_provider_version") or "").partition("(")[0]  # behind it, a revision nobody set
    record.versions += [f"MariaDB {version.partition('-')[0]}", f"Galera {provider}"]


@contextlib.contextmanager
def _section(record: page.Record, name: str) -> Iterator[Callable[[Ran], None]]:
    def add(ran: Ran) -> None:
        record.ran.setdefault(name, []).append(ran)
        print(page.line(ran), flush=True)

    print(f"== {name}", flush=True)
    yield add


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (KeyboardInterrupt, subprocess.CalledProcessError) as reason:
        sys.exit(f"make cluster: {str(reason) or 'stopped'}")
