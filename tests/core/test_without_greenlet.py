"""greenlet is an extra: whoever uses synchronous drivers only does not need it."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["greenlet"] = None  # as if it were not installed
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker
from projector_dedup import AsyncDispatcher, Dispatcher, on, projector
from projector_dedup.errors import UnsafeSessionError
from projector_dedup.tables import default_metadata

@projector(idempotent=True, name="nothing")
@on(dict)
def handler(event: dict, session: Session) -> None:
    pass

engine = create_engine("sqlite:///" + sys.argv[1])
default_metadata.create_all(engine)
dispatcher = Dispatcher(sessionmaker(engine), handler)
print(*(dispatcher.deliver({}, message_id="m1").outcome.value for _ in range(2)))
try:
    AsyncDispatcher(sessionmaker(engine), handler)
except UnsafeSessionError as error:
    print(error)
"""


def test_the_synchronous_half_works_without_greenlet(tmp_path: object) -> None:
    """Importing, delivering, recognising a duplicate; what asks for asyncio is told what it lacks."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{tmp_path}/test.sqlite3"], capture_output=True, text=True, check=False
    )
    assert run.stderr == ""
    outcomes, refusal = run.stdout.splitlines()
    assert outcomes == "applied duplicate"
    assert "AsyncDispatcher takes an async_sessionmaker" in refusal
