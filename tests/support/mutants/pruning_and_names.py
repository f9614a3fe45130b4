"""I10: pruning, renaming and forgetting never reopen a double apply, and say what they did."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="prune-counts-minutes-for-hours",
        breaks="Cleanup deletes markers sixty times too early, and redeliveries are applied again.",
        where="prune",
        old="now - timedelta(hours=retention_hours)",
        new="now - timedelta(minutes=retention_hours)",
        tests=(
            "tests/maintenance/test_retention.py::test_only_markers_older_than_the_retention_are_deleted[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="prune-deletes-what-is-young",
        breaks="Cleanup deletes the markers that are younger than the retention.",
        where="is_expired",
        old='marker.c.processed_at < bindparam("cutoff", type_=_CUTOFF)',
        new='marker.c.processed_at > bindparam("cutoff", type_=_CUTOFF)',
        tests=(
            "tests/maintenance/test_retention.py::test_only_markers_older_than_the_retention_are_deleted[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="prune-of-one-handler-takes-all",
        breaks="Cleanup of one handler deletes the markers of every handler.",
        where="is_expired",
        old='return and_(old, marker.c.handler == bindparam("handler")) if of_handler else old',
        new="return old",
        tests=("tests/maintenance/test_cleaners.py::test_one_handlers_markers_go_alone[postgresql-100]",),
    ),
    Mutant(
        name="prune-below-the-horizon",
        breaks="Cleanup deletes markers of messages that may still return, although the horizon was declared.",
        where="refuse_short_retention",
        old="if horizon is not None and retention_hours < horizon:",
        new="if horizon is not None and retention_hours < 0:",
        tests=("tests/maintenance/test_horizon.py::test_a_shorter_retention_is_refused[sqlite+pysqlite]",),
    ),
    Mutant(
        name="prune-by-one-handler-is-called-complete",
        breaks="A cleanup of one handler writes down that no older marker of any handler is kept.",
        where="prune",
        old="if left is None and handler is None:",
        new="if left is None:",
        tests=(
            "tests/maintenance/test_horizon.py::test_a_run_that_left_markers_claims_nothing[sqlite+pysqlite-bounds0]",
        ),
    ),
    Mutant(
        name="unfinished-prune-is-called-complete",
        breaks="A cleanup that ended early writes down that it deleted everything.",
        where="prune",
        old="if left is None and handler is None:",
        new="if handler is None:",
        tests=(
            "tests/maintenance/test_horizon.py::test_a_run_that_left_markers_claims_nothing[sqlite+pysqlite-bounds1]",
        ),
    ),
    Mutant(
        name="pruned-until-goes-back",
        breaks="A later cleanup with a longer retention makes it forgotten how far was pruned.",
        where="_advancing",
        old='& (state.c.value < bindparam("the_value"))',
        new='& (state.c.value != bindparam("the_value"))',
        tests=("tests/maintenance/test_horizon.py::test_what_was_pruned_once_stays_known[sqlite+pysqlite]",),
    ),
    Mutant(
        name="held-markers-are-taken-for-done",
        breaks="Cleanup says that nothing expired is left although somebody holds markers of a page.",
        where="Batches.delete",
        old="self._held = True",
        new="pass",
        tests=(
            "tests/maintenance/test_cleaners.py::test_what_another_transaction_holds_is_not_taken_for_done[postgresql-20000]",
        ),
    ),
    Mutant(
        name="empty-batch-is-the-end",
        breaks="Cleanup takes a batch that another cleaner holds for the end, and says that nothing is left.",
        where="Batches.left",
        old="if not route.until_empty and not self._held:",
        new="if not self._held:",
        tests=(
            "tests/maintenance/test_cleaners.py::test_what_another_transaction_holds_is_not_taken_for_done[postgresql-200]",
        ),
    ),
    Mutant(
        name="prune-of-a-partition-takes-what-is-young",
        breaks="Cleanup of a partitioned table deletes young markers that lie at the same place in another part.",
        where="picking",
        old='literal_column("ctid") == batch, is_expired(marker, of_handler=of_handler)',
        new='literal_column("ctid") == batch',
        tests=("tests/maintenance/test_cleaners.py::test_a_partitioned_table_loses_nothing_that_is_young",),
    ),
    Mutant(
        name="batch-size-is-not-kept",
        breaks="Cleanup runs more batches than max_batches.",
        where="prune.ended",
        old="run.number >= max_batches",
        new="run.number > max_batches",
        tests=("tests/maintenance/test_cleaners.py::test_a_run_ends_at_its_bounds_and_says_so[sqlite]",),
    ),
    Mutant(
        name="rename-removes-what-has-no-twin",
        breaks="rename --remove-old deletes markers that old code wrote meanwhile and that have no twin.",
        where="_Batch._removing",
        old="return delete(self._marker).where(self._marker.c.handler == self._old, seen)",
        new="return delete(self._marker).where(self._marker.c.handler == self._old, seen | ~seen)",
        tests=("tests/maintenance/test_renaming.py::test_the_old_markers_can_be_removed[postgresql+psycopg2-2]",),
    ),
    Mutant(
        name="rename-makes-markers-young",
        breaks="Twins that rename makes have the time of the run, so cleanup keeps them too long.",
        where="_Batch._copying",
        old='name if each == "handler" else source.c[each] for each in columns',
        new='{"handler": name, "processed_at": literal_column("CURRENT_TIMESTAMP")}.get(each, source.c[each]) for each in columns',
        tests=(
            "tests/maintenance/test_renaming.py::test_every_marker_gets_a_twin_with_its_times[postgresql+psycopg2-1]",
        ),
    ),
    Mutant(
        name="rename-leaves-markers-out",
        breaks="rename passes over markers because it does not go through them in the order of their ids.",
        where="_Batch._looking",
        old=".order_by(source.c.message_id)",
        new=".order_by(source.c.message_id.desc())",
        tests=("tests/maintenance/test_renaming.py::test_every_marker_gets_a_twin_with_its_times[sqlite+pysqlite-1]",),
    ),
    Mutant(
        name="dry-run-of-rename-writes",
        breaks="rename --dry-run copies markers.",
        where="_Batch.run",
        old="if not self._dry_run:\n            if already",
        new="if found:\n            if already",
        tests=("tests/maintenance/test_renaming.py::test_a_dry_run_says_the_same_and_writes_nothing[sqlite+pysqlite]",),
    ),
    Mutant(
        name="forget-takes-other-messages",
        breaks="forget() of one handler deletes the markers of every handler.",
        where="forget",
        old="conditions.append(marker.c.handler == valid_handler(handler))",
        new="pass",
        tests=("tests/cli/test_markers_commands.py::test_forget_of_one_handler[sqlite]",),
    ),
    Mutant(
        name="last-writer-of-the-state-loses",
        breaks="Of two who write the state at once, the value of the last is lost: an old retention stays written.",
        where="write_state",
        old="except IntegrityError:  # somebody else was first\n                pass",
        new="except IntegrityError:  # somebody else was first\n                continue",
        tests=(
            "tests/maintenance/test_state.py::test_the_last_writer_of_a_key_wins_though_another_was_first_to_make_it[postgresql+psycopg]",
        ),
    ),
)
