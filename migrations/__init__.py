"""The Alembic environment and the revisions that create the library's own tables."""
