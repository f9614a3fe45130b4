"""The Python API behind the command ``idempotency``: nothing that delivers a message imports it.

- ``cleanup`` deletes expired markers, and declares how late a message may come again.
- ``check`` finds what is wrong with the tables; ``stats`` has the age of the markers, and the gauges for Prometheus.
- ``rows`` finds and deletes the rows of a message or a key, and renames those of a handler.
- ``effects`` finds unfinished effects, and writes a person's decision.
- ``schema`` prints the tables as SQL, and compares their version with that of this code.
- ``databases`` has the DELETE of each database, ``running`` retries after transient errors, ``state`` reads and writes
  the state table, and ``rebuilds`` the open rebuilds in it.
"""
