"""Commands run once. Everybody who calls again with the same key gets the recorded answer (docs/commands.md)."""

from .codecs import Codec, json, raw, typed_json
from .errors import (
    DuplicateCommandError,
    Handled,
    InvalidKeyError,
    KeyReusedError,
    Rejected,
    Rejection,
    ResultError,
    ResultUnreadableError,
    UnusableKeyError,
)
from .fingerprint import fields
from .operation import (
    AsyncCall,
    AsyncCommand,
    Call,
    Command,
    command,
    derived_id,
    derived_key,
)
from .record import CommandTables, default_command_tables, make_command_tables
from .runner import AsyncBegun, AsyncCommands, Begun, Commands, abegin_command, begin_command

__all__ = [
    "AsyncBegun",
    "AsyncCall",
    "AsyncCommand",
    "AsyncCommands",
    "Begun",
    "Call",
    "Codec",
    "Command",
    "CommandTables",
    "Commands",
    "DuplicateCommandError",
    "Handled",
    "InvalidKeyError",
    "KeyReusedError",
    "Rejected",
    "Rejection",
    "ResultError",
    "ResultUnreadableError",
    "UnusableKeyError",
    "abegin_command",
    "begin_command",
    "command",
    "default_command_tables",
    "derived_id",
    "derived_key",
    "fields",
    "json",
    "make_command_tables",
    "raw",
    "typed_json",
]
