"""The entry point of the command `idempotency`, which has one subcommand for each task."""

from __future__ import annotations

import io
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click
import sqlalchemy

try:
    from .check import check
    from .cleanup import cleanup, horizon
    from .consume import consume
    from .dead import dead
    from .effects import effects
    from .options import EXIT_CODES
    from .output import Failed, fitted, without_secrets
    from .parked import parked
    from .rebuild import rebuild
    from .rows import forget, rename, show
    from .schema import schema
except ModuleNotFoundError as error:
    if not str(error.name).startswith("rich"):
        raise
    sys.exit("Error: rich, which draws its tables, is not installed; run: pip install 'projector-dedup[cli]'")


class _Group(click.Group):
    """A group of commands. Their errors are printed without a traceback and without passwords."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]  # click's has two more arguments, which we pass on
        for name in ("stdin", "stdout", "stderr"):
            if getattr(sys, name) is None:  # closed, as by `>&-`; a socket must not get its number either
                setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
        try:
            code = super().main(args, prog_name, **{**extra, "standalone_mode": False})
        except click.ClickException as error:
            text = io.StringIO()
            error.show(text)
            is_ours = isinstance(
                error, (Failed, click.exceptions.NoArgsIsHelpError)
            )  # the text does not quote the user's input
            said = text.getvalue() if is_ours else without_secrets(text.getvalue())
            click.echo(fitted(said, sys.stderr), nl=False, err=True)
            code = error.exit_code
        except click.Abort:
            click.echo("Interrupted.", err=True)
            code = 1
        except BrokenPipeError:  # the reader, for example `| head`, has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        sys.exit(code if isinstance(code, int) else 0)


def _version() -> str:
    try:
        return version("projector-dedup")
    except PackageNotFoundError:
        return "(not installed)"


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
)
@click.version_option(
    _version(),
    message=f"projector-dedup %(version)s (SQLAlchemy {sqlalchemy.__version__}, Python {platform.python_version()})",
)
def main() -> None:
    """Check the tables of projector-dedup, delete old markers, and inspect markers.

    Run `check` after each deployment, and `cleanup` every day from cron. The other commands are for operators.

    \b
    Examples:
      idempotency check --database-url postgresql+psycopg://app@db/orders
      PROJECTOR_DEDUP_DATABASE_URL=... idempotency cleanup --retention-hours 168
      PROJECTOR_DEDUP_DATABASE_URL=... idempotency show payment-1
    """


for _command in (check, schema, cleanup, horizon, show, forget, rename, rebuild, effects, consume, dead, parked):
    main.add_command(_command)
