"""The brokers that the tests of consumers run on: where they are, or why a test is left out."""

import os

from reached import reached


def broker(name: str) -> str:
    """Return the URL of a broker; the test ends here, skipped or failed, if none was given.

    Whoever has connected to it tells: `reached.saw(name, version)`.
    """
    variable = f"PROJECTOR_DEDUP_TEST_{name.upper()}_URL"
    if not (url := os.environ.get(variable)):
        reached.give_up(name, name, f"{variable} is not given")
    return url
