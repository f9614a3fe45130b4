"""The command and the tables: exit codes that cron can trust, checks that find what loses messages, migrations."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="failure-exits-0",
        breaks="A command that failed exits with 0, and cron tells nobody.",
        where="_Group.main",
        old="code = error.exit_code",
        new="code = 0",
        tests=("tests/cli/test_cli.py::test_a_missing_table_is_told_with_its_remedy[sqlite-check]",),
    ),
    Mutant(
        name="check-of-wrong-tables-exits-0",
        breaks="`idempotency check` prints the problem and exits with 0, so a deployment goes on.",
        where="check",
        old="if fatal:\n        raise",
        new="if fatal < 0:\n        raise",
        tests=("tests/cli/test_cli.py::test_a_missing_table_is_told_with_its_remedy[sqlite-check]",),
    ),
    Mutant(
        name="forget-command-takes-every-handler",
        breaks="`idempotency forget --handler` deletes the markers of every handler of the message.",
        where="_Wanted.chosen",
        old="if self.handler in (None, each.handler)]",
        new="if each.handler]",
        tests=("tests/cli/test_markers_commands.py::test_forget_says_what_a_redelivery_will_do[sqlite]",),
    ),
    Mutant(
        name="dry-run-of-cleanup-deletes",
        breaks="`idempotency cleanup --dry-run` deletes.",
        where="_cleaned",
        old="if dry_run:",
        new="if False:",
        tests=("tests/maintenance/test_cleanup.py::test_a_dry_run_deletes_nothing[sqlite]",),
    ),
    Mutant(
        name="check-misses-the-unique-index",
        breaks="A marker table without its unique index passes `idempotency check`.",
        where="check_table",
        old="if set(actual) != set(expected) and set(expected) not in unique:",
        new="if set(actual) != set(expected) and not expected:",
        tests=(
            "tests/maintenance/test_schema.py::test_check_says_what_is_wrong[sqlite-ddl2-has no unique index over (message_id, handler)]",
        ),
    ),
    Mutant(
        name="check-misses-short-columns",
        breaks="A marker table whose columns cut ids passes `idempotency check`.",
        where="check_table",
        old="if wanted is not None and length is not None and length < wanted:",
        new="if wanted is not None and length is not None and length < 0:",
        tests=(
            "tests/databases/test_mariadb_tables.py::test_check_finds_what_loses_messages[mariadb+pymysql-MODIFY message_id VARBINARY(511) NOT NULL-message_id takes 511 characters or bytes, not 512-cut]",
        ),
    ),
    Mutant(
        name="check-misses-look-alikes",
        breaks="A marker table that takes look-alike ids for one passes `idempotency check`.",
        where="_check_comparison",
        old="if not all(new):",
        new="if not new:",
        tests=("tests/maintenance/test_schema.py::test_check_finds_a_collation_that_merges_ids",),
    ),
    Mutant(
        name="check-misses-cut-results",
        breaks="A table of commands that cuts or converts results passes `idempotency check`.",
        where="_check_comparison",
        old="return [] if kept else",
        new="return [] if new else",
        tests=(
            "tests/maintenance/test_command_tables.py::test_a_column_that_changes_what_it_keeps_is_found[sqlite-outcome-{'sqlite': 'TEXT'}]",
        ),
    ),
    Mutant(
        name="migrate-adopts-wrong-tables",
        breaks="`idempotency migrate` adopts tables that lose messages, and calls them ready.",
        where="_Owner._refuse_wrong",
        old="if finding.fatal:",
        new="if finding.fatal and not present:",
        tests=("tests/maintenance/test_migrate.py::test_tables_that_are_wrong_are_left_alone[sqlite]",),
    ),
    Mutant(
        name="migrate-makes-dropped-tables-anew",
        breaks="`idempotency migrate` calls tables ready that somebody dropped.",
        where="_Owner._refuse_wrong",
        old="if version is not None and len(present) < 2:",
        new="if version is not None and len(present) < 0:",
        tests=(
            "tests/maintenance/test_migrate.py::test_tables_that_were_dropped_behind_its_back_are_not_called_ready[sqlite]",
        ),
    ),
    Mutant(
        name="handlers-unknown-to-the-application",
        breaks="check --app does not tell of markers whose handler was renamed, and which are applied again.",
        where="_unknown",
        old="if unknown:",
        new="if unknown is None:",
        tests=("tests/maintenance/test_check.py::test_handlers_that_the_application_does_not_know",),
    ),
)
