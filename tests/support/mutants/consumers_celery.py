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
        name="celery-lost-worker-is-poison",
        breaks="An event whose worker was killed is a dead letter.",
        where="NAMED",
        old='"billiard.exceptions.WorkerLostError": Answer(LATER,',
        new='"billiard.exceptions.WorkerLostError": Answer(REJECT,',
        tests=(f"{TESTS}test_a_worker_that_is_lost_leaves_its_event",),
        hangs=True,
    ),
    Mutant(
        name="celery-drops-at-the-time-limit",
        breaks="An event is dropped if it hits Celery's hard time limit, or if its handler ends its process.",
        where="SettledRequest.on_failure",
        old="        return self.reject(requeue=True)",
        new="        return self.reject(requeue=False)",
        tests=(f"{TESTS}test_an_event_that_is_interrupted_comes_again",),
        hangs=True,
    ),
    Mutant(
        name="celery-soft-time-limit-is-poison",
        breaks="An event that hits Celery's soft time limit is a dead letter.",
        where="NAMED",
        old='"billiard.exceptions.SoftTimeLimitExceeded": Answer(LATER,',
        new='"billiard.exceptions.SoftTimeLimitExceeded": Answer(REJECT,',
        tests=(f"{TESTS}test_an_event_that_is_interrupted_comes_again",),
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
    Mutant(
        name="celery-task-of-another-application",
        breaks="Of two applications in one process, one gives its events to the dispatcher of the other.",
        where="delivering_task",
        old="shared=False",
        new="shared=True",
        tests=("tests/consumers/test_every_consumer.py::test_what_is_applied_or_was_applied_is_acknowledged[celery]",),
    ),
)
