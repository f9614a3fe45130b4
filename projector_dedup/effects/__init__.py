"""Effects are calls to other systems, such as a payment. Each ends done, rejected or unknown (docs/effects.md)."""

from ..commands.errors import Rejected
from .arming import aarm, arm
from .definition import AsyncEffect, Attempt, Effect, effect
from .errors import (
    DoubleEffectError,
    EffectUnknown,
    LeaseLostError,
    NotArmedError,
    NotDone,
    NotRecordedError,
    StillUnknown,
)
from .policy import Ask, Policy, Resend, Stop, ask, resend, stop
from .record import EffectTables, default_effect_tables, make_effect_tables
from .runner import AsyncEffects, Effects, Settled

__all__ = [
    "Ask",
    "AsyncEffect",
    "AsyncEffects",
    "Attempt",
    "DoubleEffectError",
    "Effect",
    "EffectTables",
    "EffectUnknown",
    "Effects",
    "LeaseLostError",
    "NotArmedError",
    "NotDone",
    "NotRecordedError",
    "Policy",
    "Rejected",
    "Resend",
    "Settled",
    "StillUnknown",
    "Stop",
    "aarm",
    "arm",
    "ask",
    "default_effect_tables",
    "effect",
    "make_effect_tables",
    "resend",
    "stop",
]
