"""Observers are told what is true, once, and cannot hurt a delivery."""

from .mutant import Mutant

OBSERVER = "tests/delivery/test_observer.py"
METRICS = "tests/integrations/test_observing.py"

MUTANTS = (
    Mutant(
        name="observer-fails-a-delivery",
        breaks="A message that is applied is called failed, because an observer raised.",
        where="Observing.tell",
        old="except Exception as failure:",
        new="except SystemExit as failure:",
        tests=(f"{OBSERVER}::test_an_observer_that_raises_changes_no_delivery[sqlite+pysqlite]",),
    ),
    Mutant(
        name="observer-swallows-an-interrupt",
        breaks="Ctrl-C that meets the observer is lost, and the worker goes on.",
        where="Observing.tell",
        old="except Exception as failure:",
        new="except BaseException as failure:",
        tests=(f"{OBSERVER}::test_an_interrupt_that_meets_an_observer_passes",),
    ),
    Mutant(
        name="observer-that-fails-floods-the-log",
        breaks="An observer that is broken logs a warning for every message.",
        where="Observing.tell",
        old="self._said = True",
        new="pass",
        tests=(f"{OBSERVER}::test_an_observer_that_raises_changes_no_delivery[sqlite+pysqlite]",),
    ),
    Mutant(
        name="observer-that-fails-logs-the-body",
        breaks="The text of an observer's error, which may have the message's body in it, is logged.",
        where="Observing.tell",
        old="type(failure).__name__,",
        new="str(failure),",
        tests=(f"{OBSERVER}::test_an_observer_that_raises_changes_no_delivery[sqlite+pysqlite]",),
    ),
    Mutant(
        name="observer-is-told-before-the-commit",
        breaks="A message is observed as applied that a failing COMMIT rolls back.",
        where="Chunk.calls",
        old="            if several:\n                uow.end_message(keep=shared)\n",
        new="            if self.watch is not None:\n                self.watch.settled(self.outcomes)\n            if several:\n                uow.end_message(keep=shared)\n",
        tests=(f"{OBSERVER}::test_an_observer_sees_what_is_durable[sqlite+pysqlite]",),
    ),
    Mutant(
        name="unrouted-message-is-not-observed",
        breaks="Poison that reaches no handler is in no count.",
        where="Observing.routing.observed",
        old='self.tell("failed", event, error=error)',
        new="pass",
        tests=(f"{OBSERVER}::test_a_message_that_goes_to_no_handler_is_observed[deliver-no id]",),
    ),
    Mutant(
        name="messages-of-a-split-batch-are-told-twice",
        breaks="A message that shares a batch with poison is counted each time that the batch is split.",
        where="_Batch.failed",
        old="        after = now if at is None",
        new="        self._give_up(now, error)\n        after = now if at is None",
        tests=(f"{OBSERVER}::test_a_batch_that_is_split_tells_each_message_once[sqlite+pysqlite]",),
    ),
    Mutant(
        name="messages-that-were-given-up-are-not-observed",
        breaks="Of a batch that is given up, the messages that were not tried any more are in no count.",
        where="_Batch._fail",
        old="for rest in reversed(self._todo):\n                self._give_up(rest, error)",
        new="for rest in self._todo:\n                for index in rest:\n                    self.results[index] = error",
        tests=(f"{OBSERVER}::test_a_batch_that_is_given_up_is_observed_whole",),
    ),
    Mutant(
        name="too-early-is-called-failed",
        breaks="Messages before their time ring the alarm for poison.",
        where="Watch.failed",
        old="isinstance(error, Defer)",
        new="isinstance(error, SystemExit)",
        tests=(f"{OBSERVER}::test_what_is_raised_is_told_apart[sqlite+pysqlite-Defer]",),
    ),
    Mutant(
        name="own-commit-is-called-a-duplicate",
        breaks="A message that was applied by a COMMIT whose answer was lost is in no count of applied ones.",
        where="series_of",
        old='"applied" if observation.after_unknown_commit else',
        new='"applied" if False else',
        tests=(f"{METRICS}::test_a_lost_answer_to_commit_is_counted_as_applied[postgresql]",),
    ),
    Mutant(
        name="unknown-types-make-time-series",
        breaks="Whoever can send messages fills the memory of Prometheus with types that are made up.",
        where="series_of",
        old='return Series("", "", outcome)',
        new='return Series("", observation.message_type or "", outcome)',
        tests=(f"{METRICS}::test_types_that_are_made_up_make_no_time_series",),
    ),
    Mutant(
        name="retry-is-counted-as-a-delivery",
        breaks="A retry is in the histogram of deliveries, so that their number is too high.",
        where="duration_of",
        old='observation.outcome == "retried"',
        new='observation.outcome == "never"',
        tests=(
            f"{METRICS}::test_prometheus_counts_each_outcome[sqlite+pysqlite]",
            f"{METRICS}::test_opentelemetry_has_the_conventions_metric_and_counts[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="message-from-the-future-makes-the-age-fall",
        breaks="A producer whose clock is ahead takes seconds from the sum of ages, which may only grow.",
        where="age_of",
        old="max(0.0, observation.age)",
        new="observation.age",
        tests=(f"{METRICS}::test_prometheus_counts_each_outcome[sqlite+pysqlite]",),
    ),
    Mutant(
        name="span-is-not-told",
        breaks="A trace does not say what became of the message.",
        where="OpenTelemetryObserver.observed",
        old="if span.is_recording():",
        new="if not span.is_recording():",
        tests=(f"{METRICS}::test_the_brokers_span_says_what_became_of_the_message[sqlite+pysqlite]",),
    ),
)
