"""Rebuild a read model: fill a new generation of a projector from the history, beside live traffic (docs/rebuild.md).

``rebuild`` delivers the history to the new generation, which the application has registered with ``building``.
``lacking`` compares the markers of both generations, and finds the messages that the new one lacks. The state of an
open rebuild is in the state table (``maintenance.rebuilds``).
"""
