"""The revisions of the tables. Users may name this package in the ``version_locations`` of their Alembic."""
