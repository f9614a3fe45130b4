"""Plugs into web frameworks, each module named for its framework (docs/http.md). The library itself imports none."""
