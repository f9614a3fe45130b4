"""Plugs into web frameworks (docs/http.md) and brokers (docs/consumers), each module named for what it plugs into.

The library itself imports none of them.
"""
