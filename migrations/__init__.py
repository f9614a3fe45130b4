"""Alembic scripts that create the library's own tables."""
