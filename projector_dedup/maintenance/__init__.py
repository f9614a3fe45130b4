"""The Python API behind the command ``idempotency``: nothing that delivers a message imports it.

- ``cleanup`` deletes expired markers; ``horizon`` is how late a message may come again.
- ``check`` finds what is wrong with the tables; ``stats`` has the age of the markers, and the gauges for Prometheus.
- ``rows`` finds and deletes the rows of a message or a key, and renames those of a handler.
- ``effects`` finds unfinished effects, and writes a person's decision.
- ``schema`` prints the tables as SQL.
- ``databases`` has what differs between databases, ``running`` retries after transient errors, and ``state`` is the
  state table with the schema version.
"""
