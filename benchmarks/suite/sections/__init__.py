"""What is measured; a section is a module with a ``KEY`` and ``measure(bench)``."""

from __future__ import annotations

from . import rates

SECTIONS = {section.KEY: section.measure for section in (rates,)}
