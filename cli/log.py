"""Log lines for machines: a JSON object in each line, on stdout."""

from __future__ import annotations

import json
from typing import Any

import click


def log_json(event: str, **facts: Any) -> None:
    """Print a JSON object in one line: ``event`` first, then ``facts`` in the order given."""
    click.echo(json.dumps({"event": event, **facts}))
