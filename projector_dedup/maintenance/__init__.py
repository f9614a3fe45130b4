"""The Python API behind the command ``idempotency``: nothing that delivers a message imports it.

``check`` finds what is wrong with the tables, and ``advice`` what nobody looks after. ``nodes`` compares the servers of
one cluster. ``alembic_config`` finds an ``alembic.ini`` that loses our revisions. ``migrate`` makes and changes the
tables, ``ddl`` prints them as SQL. ``cleanup`` deletes expired markers, and ``horizon`` keeps how late a message may
come again. ``stats`` counts markers, ``markers`` finds and deletes those of one message, ``records`` those of a
command's key or of a scope, ``rename`` copies those of a handler to its new name. ``waits`` limits how long all of them
wait for a lock. The other files serve these: ``state`` (the state table), ``kinds`` (tables of projectors and of
commands), ``connection``, ``retrying``, ``cleanup_batches`` and ``times``.
"""
