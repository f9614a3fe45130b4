"""Celery: acknowledged after the commit, nothing dropped, and no connection shared by two processes."""

from .mutant import Mutant

TESTS = "tests/consumers/test_celery.py::"

MUTANTS = (
    Mutant(
        name="celery-acknowledges-early",
        breaks="A task is acknowledged before it runs: a killed worker loses it.",
        where="delivering_task",
        old="acks_late=True",
        new="acks_late=False",
        tests=(f"{TESTS}test_a_worker_that_is_lost_leaves_its_event",),
        hangs=True,
    ),
    Mutant(
        name="celery-lost-worker-is-a-failure",
        breaks="An event whose worker was killed is dropped.",
        where="delivering_task",
        old="reject_on_worker_lost=True",
        new="reject_on_worker_lost=False",
        tests=(f"{TESTS}test_a_worker_that_is_lost_leaves_its_event",),
        hangs=True,
    ),
    Mutant(
        name="celery-children-share-a-connection",
        breaks="The children of a worker use the connection of its parent, and get each other's answers.",
        where="forget_connections",
        old="bound.engine.dispose(close=False)",
        new="bound.engine.pool.status()",
        tests=(f"{TESTS}test_a_process_that_forks_by_itself",),
    ),
    Mutant(
        name="celery-drops-what-it-cannot-read",
        breaks="A message whose body is garbage is acknowledged by Celery, and nobody sees it again.",
        where="strategy",
        old="except (DecodeError, ContentDisallowed, InvalidTaskError) as error:",
        new="except ZeroDivisionError as error:",
        tests=(f"{TESTS}test_what_is_rejected_is_a_dead_letter_with_its_reason",),
        hangs=True,
    ),
    Mutant(
        name="celery-id-of-the-task",
        breaks="The id of the task is taken for that of the event: published again, it is applied again.",
        where="delivering_task",
        old='incoming = Incoming(b"", message_id,',
        new='incoming = Incoming(b"", self.request.id,',
        tests=(f"{TESTS}test_an_event_published_again_is_another_task_and_applied_once",),
        hangs=True,
    ),
)
