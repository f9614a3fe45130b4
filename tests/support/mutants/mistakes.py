"""Small mistakes of whoever writes or installs a program: the error says what to write instead."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="missing-package-without-its-extra",
        breaks="An integration that is imported without its package names a module that the user has never heard of.",
        where="needs",
        old="except ModuleNotFoundError as error:",
        new="except ZeroDivisionError as error:",
        tests=("tests/packaging/test_extras.py::test_an_integration_without_its_package_names_the_extra[kafka]",),
    ),
    Mutant(
        name="redis-field-that-is-read-is-not-named",
        breaks="An entry of a Redis stream without a body is rejected as no JSON, and nobody says which field was read.",
        where="_incoming",
        old="""body_name='field "body" of the entry',""",
        new="",
        tests=("tests/consumers/test_redis.py::test_poison_is_kept_with_its_reason_and_replayed_after_the_mend",),
    ),
    Mutant(
        name="address-is-taken-for-a-client",
        breaks="A consumer that is given an address in place of a client fails later, by an attribute that no text has.",
        where="expect",
        old="if not isinstance(value, kind):",
        new="if value is None:",
        tests=("tests/consumers/test_wrong_arguments.py::test_an_address_in_place_of_a_client_is_refused[pika]",),
    ),
    Mutant(
        name="command-without-parentheses-is-let-through",
        breaks="@command without parentheses makes something of a function that no Commands can handle.",
        where="command",
        old="if misplaced:",
        new="if False:",
        tests=(
            "tests/commands/test_operation_names.py::test_a_decorator_that_is_written_wrongly_says_how_to_write_it",
        ),
    ),
    Mutant(
        name="tables-of-commands-are-passed-over",
        breaks="Whoever looks at a database with tables of commands is not told that nobody has looked at those.",
        where="commands_beside",
        old="if there else",
        new="if not there else",
        tests=(
            "tests/cli/test_records_commands.py::test_tables_of_commands_beside_those_of_projectors_are_named[sqlite-check]",
        ),
    ),
    Mutant(
        name="id-in-the-body-is-not-logged",
        breaks="The log line of a rejected message whose id is in its body names no id, so that nobody finds the message.",
        where="Settling._name",
        old="if value is None:",
        new="if value == ():",
        tests=("tests/consumers/test_settling.py::test_an_id_in_the_body_is_logged[sync-single]",),
    ),
    Mutant(
        name="extractor-fails-in-the-log-line",
        breaks="A consumer ends because the extractor of ids, which failed in the delivery, fails again for the log line.",
        where="Settling._name",
        old="except Exception:",
        new="except ZeroDivisionError:",
        tests=(
            "tests/consumers/test_settling.py::test_an_extractor_that_fails_does_not_stop_the_consumer[sync-single]",
        ),
    ),
)
