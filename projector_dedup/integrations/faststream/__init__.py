"""FastStream: for each broker, subscribers whose messages go to a dispatcher, and are acknowledged after the commit.

Needs the extra ``faststream``, and FastStream's own for the broker.
"""

from ..extras import needs

with needs("faststream"):
    import faststream  # noqa: F401  # its submodules name what they lack of a broker's client themselves
