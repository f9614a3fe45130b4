"""The Python API behind the command ``idempotency``: nothing that delivers a message imports it.

``schema`` prints the tables as SQL. ``check`` finds what is wrong with them, or looked
after by nobody. ``cleanup`` deletes expired markers, and keeps how late a message may come again. ``stats`` counts
markers. ``rows`` finds and deletes those of a message, a command's key or a scope, and renames those of a handler.
``running`` retries after transient errors; ``state`` is the state table.
"""
