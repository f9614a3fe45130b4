"""The Alembic revisions that create the library's own tables, and the options that name the tables."""
