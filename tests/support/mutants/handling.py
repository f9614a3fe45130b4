"""C1 to C16: a command is done once, and everybody who asks again gets the recorded answer."""

from .mutant import Mutant

HANDLE = "tests/commands/test_handle.py"
RECORDS = "tests/commands/test_records.py"

MUTANTS = (
    Mutant(
        name="answer-is-not-recorded",
        breaks="A command commits without its answer, and nobody who asks again gets one.",
        where="Once._record",
        old="self._uow.last = recording(",
        new="recording(",
        tests=(f"{HANDLE}::test_a_command_is_done_once_and_answered_as_often_as_it_is_asked[sqlite+pysqlite]",),
    ),
    Mutant(
        name="command-runs-for-everybody",
        breaks="Whoever asks again has the command done again.",
        where="Once.claim",
        old="if uow.claim_first(marker_key(stored, self.identity), names[1:], recall=recall):",
        new='if uow.claim_first(marker_key(stored, self.identity), names[1:], recall=recall) or setattr(uow, "_new", True) is None:',
        tests=(f"{HANDLE}::test_a_command_is_done_once_and_answered_as_often_as_it_is_asked[sqlite+pysqlite]",),
    ),
    Mutant(
        name="record-is-written-before-the-handlers-work",
        breaks="The answer is recorded in a transaction of its own, and stays when the writes are rolled back.",
        where="Guard.run_last",
        old="self.last.run(self._where_claimed())",
        new="self.last.run(self.connection.engine.connect())",
        tests=(f"{HANDLE}::test_a_command_is_done_once_and_answered_as_often_as_it_is_asked[postgresql+psycopg2]",),
    ),
    Mutant(
        name="other-command-gets-the-answer",
        breaks="A key that comes with another command gets the answer of the first.",
        where="recalled",
        old="bytes(row.fingerprint) not in fingerprints:",
        new="row.fingerprint == b'':",
        tests=(
            "tests/commands/test_fingerprints.py::test_another_command_under_the_same_key_is_refused[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="default-makes-another-command",
        breaks="A field that is added with a default turns retries of a rolling deploy into errors.",
        where="_members",
        old="if field.name in always or not _is_default(getattr(value, field.name), field)",
        new="if field.init",
        tests=(
            "tests/commands/test_fingerprints.py::"
            "test_a_field_that_is_new_and_has_its_default_makes_no_other_command[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="scope-and-key-run-together",
        breaks="Tenant 'a' with key 'bc' gets the answer of tenant 'ab' with key 'c'.",
        where="RecordKey.of",
        old="stored = f\"{len(within or '')}:{within or ''}{text}\"",
        new="stored = f\"{within or ''}:{text}\"",
        tests=("tests/commands/test_keys.py::test_a_delimiter_in_a_key_makes_no_other_scope",),
    ),
    Mutant(
        name="finished-record-is-written-over",
        breaks="A handler that writes an answer of its own has it replaced, and two callers get two answers.",
        where="_update",
        old=".where(_is_record(record, names), record.c.outcome.is_(None))  # an outcome is never written over",
        new=".where(_is_record(record, names))",
        tests=(f"{RECORDS}::test_a_handler_that_touches_its_own_record_is_found_out[sqlite+pysqlite-outcome]",),
    ),
    Mutant(
        name="record-that-is-gone-is-not-missed",
        breaks="A handler that deletes its record commits, and the command is done again for the next caller.",
        where="LastChange.run",
        old="if changed != self.rows:",
        new="if changed < 0:",
        tests=(
            f"{RECORDS}::test_a_handler_that_touches_its_own_record_is_found_out[sqlite+pysqlite-delete]",
            f"{RECORDS}::test_a_handler_that_touches_its_own_record_is_found_out[mariadb+pymysql-delete]",
        ),
    ),
    Mutant(
        name="record-that-is-gone-commits-with-psycopg",
        breaks="With psycopg 3, where COMMIT goes with the record, a record that is gone is heard of after the COMMIT.",
        where="PostgreSQL.changing",
        old="case((found == rows, 1), else_=0)",
        new="case((found == rows, 1), else_=1)",
        tests=(f"{RECORDS}::test_a_handler_that_touches_its_own_record_is_found_out[postgresql+psycopg-delete]",),
    ),
    Mutant(
        name="record-that-is-gone-is-a-commit-in-doubt",
        breaks="With psycopg 3 a record that is gone is told as a COMMIT whose outcome is unknown, and run again.",
        where="_was_refused",
        old="if isinstance(error, TransactionViolatedError):",
        new="if isinstance(error, SystemExit):",
        tests=(f"{RECORDS}::test_a_handler_that_touches_its_own_record_is_found_out[postgresql+psycopg-delete]",),
    ),
    Mutant(
        name="record-follows-the-handlers-schema-map",
        breaks="A handler that chooses another schema for its tables cannot record its answer.",
        where="Guard.run_last",
        old="self.last.run(self._where_claimed())",
        new="self.last.run(self.connection)",
        tests=(f"{RECORDS}::test_the_record_goes_where_the_claim_was_made[sqlite+pysqlite]",),
    ),
    Mutant(
        name="commit-overtakes-a-listener",
        breaks="With psycopg 3 what a listener writes behind the record is in another transaction than the command.",
        where="Psycopg.commit_goes_along",
        old="if not _names_parameters(connection) or hears_of_statements(connection):",
        new="if not _names_parameters(connection):",
        tests=(f"{RECORDS}::test_a_listener_that_writes_before_the_commit_writes_with_it[postgresql+psycopg]",),
    ),
    Mutant(
        name="raised-rejection-is-not-recorded",
        breaks="A command that was rejected is tried again for everybody who asks again.",
        where="Refused.calls",
        old="self._record(self.asked.rejected(self._rejection))",
        new="self.record = self.asked.rejected(self._rejection)",
        tests=(f"{HANDLE}::test_a_rejection_that_is_raised_is_recorded_without_writes[sqlite+pysqlite]",),
    ),
    Mutant(
        name="first-caller-gets-what-was-not-stored",
        breaks="The first caller gets a value that nobody who asks again will get.",
        where="Asked._stored",
        old="same = not codec.exact or is_same(read, value)",
        new="same = True",
        tests=(
            "tests/commands/test_codecs.py::test_what_cannot_be_recorded_is_not_done[sqlite+pysqlite-too large a whole number]",
        ),
    ),
    Mutant(
        name="renamed-field-is-replayed-as-its-default",
        breaks="A result whose field was renamed comes back with the default of the new field.",
        where="_refuse_renamed",
        old="if defaults and len(dropped) > len(new) - len(defaults):",
        new="if dropped is None:",
        tests=(
            "tests/commands/test_codecs.py::test_a_field_that_was_renamed_is_not_replayed_as_its_default[dataclass-sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="field-that-names-its-former-name-is-refused",
        breaks="A field that reads its former name by an alias makes older records unreadable.",
        where="_refuse_renamed",
        old="if defaults and len(dropped) > len(new) - len(defaults):",
        new="if dropped and new:",
        tests=(
            "tests/commands/test_codecs.py::test_a_record_of_older_code_is_read[typed-json-a field is renamed and says so-sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="default-that-is-drawn-anew-is-taken-for-the-record-s",
        breaks="A renamed field whose default is a factory gives another answer to everyone who asks again.",
        where="_refuse_renamed",
        old="name in found and read[name] == once_more.get(name)",
        new="name in found",
        tests=(
            "tests/commands/test_codecs.py::test_a_field_that_was_renamed_is_not_replayed_as_its_default[a default that is drawn anew-sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="aliases-cannot-be-recorded",
        breaks="A Pydantic result with aliases is a ResultError for everybody.",
        where="_of_pydantic",
        old="by_alias=True, by_name=True",
        new="by_alias=True",
        tests=(
            "tests/commands/test_codecs.py::test_everybody_gets_an_equal_value_of_the_same_type[sqlite+pysqlite-aliases]",
        ),
    ),
    Mutant(
        name="hour-that-comes-twice-is-refused",
        breaks="A moment of the hour in which clocks are set back cannot be recorded.",
        where="is_same",
        old="return one == other or one.isoformat() == other.isoformat()",
        new="return one == other",
        tests=(
            "tests/commands/test_codecs.py::test_a_moment_of_the_hour_that_comes_twice_is_recorded[in a list-sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="codec-is-not-tried-before-the-commit",
        breaks="A result that its codec cannot read is committed, and nobody gets an answer.",
        where="Asked._stored",
        old="read = codec.loads(data)",
        new="read = codec.loads(data) if codec.exact else value",
        tests=(
            "tests/commands/test_codecs.py::test_a_codec_that_fails_applies_nothing[reads nothing-sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="text-for-bytes-is-a-bare-error",
        breaks="A codec whose dumps returns text fails with a TypeError of Python's.",
        where="Asked._stored",
        old="if not isinstance(stored, (bytes, bytearray, memoryview)):",
        new="if stored is None:",
        tests=("tests/commands/test_codecs.py::test_a_codec_that_fails_applies_nothing[stores text-sqlite+pysqlite]",),
    ),
    Mutant(
        name="long-names-of-codecs-are-taken",
        breaks="A codec whose name does not fit its column fails at the first result.",
        where="_check_codec_name",
        old="if isinstance(name, str)",
        new="if True or isinstance(name, str)",
        tests=("tests/commands/test_codecs.py::test_a_codecs_name_is_one_that_can_be_stored",),
    ),
    Mutant(
        name="decimal-in-a-rejection-is-an-error",
        breaks="A rejection that tells an amount is an error on each attempt.",
        where="as_json",
        old="if isinstance(value, (Decimal, UUID)):",
        new="if isinstance(value, UUID):",
        tests=(
            "tests/commands/test_codecs.py::test_the_detail_of_a_rejection_becomes_what_json_has[k1-sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="large-result-is-cut",
        breaks="A result that is too large is cut, and cannot be read again.",
        where="Asked._stored",
        old="if len(data) > self.max_result_bytes:",
        new="data = data[: self.max_result_bytes]\n        if len(data) > self.max_result_bytes:",
        tests=("tests/commands/test_codecs.py::test_what_cannot_be_recorded_is_not_done[sqlite+pysqlite-too long]",),
    ),
    Mutant(
        name="claim-without-an-outcome-is-an-answer",
        breaks="A key that was claimed and committed without an outcome is answered with nothing.",
        where="recalled",
        old="if row.outcome is None:",
        new="if row.outcome == 0:",
        tests=(
            "tests/commands/test_begin_command.py::"
            "test_a_command_without_a_record_is_not_committed_as_done[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="record-under-the-new-name-only",
        breaks="While an operation is renamed, old code finds a record without an answer.",
        where="Once._record",
        old="asked.operation.names, record)",
        new="asked.operation.names[:1], record)",
        tests=(
            "tests/commands/test_operation_names.py::test_old_and_new_code_give_each_others_answers[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="other-names-stay-without-an-outcome",
        breaks="A duplicate in the caller's transaction leaves a record under the new name that has no answer.",
        where="_claim",
        old="if len(names) > 1:",
        new="if len(names) > 9:",
        tests=(
            "tests/commands/test_operation_names.py::"
            "test_a_duplicate_in_the_callers_transaction_leaves_no_record_without_an_outcome[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="duplicate-of-a-command-waits-for-no-standby",
        breaks="An answer that only the primary has is given away, and a failover may take it back.",
        where="UnitOfWork._end_duplicate",
        old="self._run_last(guard, recall, commits=commits)\n",
        new="recall.run(guard.connection)\n            return\n",
        tests=("tests/databases/test_standby.py::test_a_duplicate_waits_for_the_standby[command-postgresql+psycopg]",),
    ),
    Mutant(
        name="present-answers-before-the-past",
        breaks="An operation with a default is run again for everybody who asks again.",
        where="_Settings._handle",
        old="work.record.outcome == DEFAULT:",
        new="work.record.outcome == -1:",
        tests=(f"{HANDLE}::test_the_present_answers_where_no_result_is_stored[sqlite+pysqlite]",),
    ),
    Mutant(
        name="default-answers-nothing-in-the-callers-transaction",
        breaks="Who asks again for an operation with a default, in a transaction of its own, gets None.",
        where="begin_command",
        old="if _is_default(work):",
        new="if work.record is None:",
        tests=("tests/commands/test_begin_command.py::test_who_asks_again_gets_the_present_answer",),
    ),
    Mutant(
        name="async-process-manager-records-nothing",
        breaks="A command that an async process manager issues is committed without its answer.",
        where="AsyncBegun.record",
        old="return await self.call.session.run_sync(_record, self._asked, result)",
        new="return Handled(None, result)  # type: ignore[arg-type]",
        tests=(
            "tests/commands/test_begin_command.py::test_an_async_process_manager_issues_a_command_once[sqlite+aiosqlite (async)-result]",
        ),
    ),
    Mutant(
        name="default-of-the-wrong-colour",
        breaks="A default that nobody awaits is found out by the first caller who asks again.",
        where="_check_default",
        old="if awaited != asynchronous:",
        new="if awaited is None:",
        tests=("tests/commands/test_operation_names.py::test_a_default_that_does_not_fit_is_refused",),
    ),
    Mutant(
        name="raised-rejection-keeps-its-writes",
        breaks="A handler that raises a rejection has its writes committed.",
        where="Once._called",
        old="self._take(self.asked.operation.function(self.asked.command, call))",
        new="""try:
            returned = self.asked.operation.function(self.asked.command, call)
        except Rejected as rejected:
            returned = Rejection(rejected.code, rejected.detail)
        self._take(returned)""",
        tests=("tests/commands/test_orders.py::test_two_callers_in_every_order[sqlite+pysqlite]",),
    ),
    Mutant(
        name="rejection-counts-against-a-rivals-answer",
        breaks="A caller whose handler has rejected is told so, although a rival's run was recorded meanwhile.",
        where="_Settings._handle",
        old="        answer = handled(work, durable=durable)",
        new="        work.record = asked.rejected(work._rejection) if isinstance(work, Refused) else work.record\n        answer = handled(work, durable=durable)",
        tests=("tests/commands/test_orders.py::test_a_rival_may_run_before_a_rejection_is_recorded[sqlite+pysqlite]",),
    ),
    Mutant(
        name="named-error-is-not-tried-again",
        breaks="A version that a rival made meanwhile fails the command, although the policy names the store's error.",
        where="Attempts.delay_after",
        old="Failure.TRANSIENT if isinstance(error, self._policy.also) else ",
        new="",
        tests=(
            "tests/commands/test_version_conflicts.py::test_an_error_that_stays_is_told_in_the_end[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="poison-in-a-command-is-a-bare-error",
        breaks="A moment that no year holds in UTC is an OverflowError of Python's, for which a client is told 500.",
        where="digest",
        old="except (OverflowError, RecursionError, ValueError) as error:",
        new="except RecursionError as error:",
        tests=(
            "tests/commands/test_closed_losses.py::test_a_command_that_cannot_be_compared_is_named[after 9999 in UTC]",
        ),
    ),
    Mutant(
        name="deposit-is-answered-to-withdraw",
        breaks="A command of another type with the same fields gets the answer of the first.",
        where="canonical",
        old="if types and _has_class(value) else form",
        new="if types is None else form",
        tests=(
            "tests/commands/test_fingerprints.py::test_a_command_of_another_type_is_another_command[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="types-in-a-pydantic-command-are-lost",
        breaks="A Pydantic command that is paid by card is answered to the one that is paid in cash.",
        where="_of_field",
        old="if _has_class(value):",
        new="if value is None:",
        tests=("tests/commands/test_fingerprints.py::test_different_commands_have_different_fingerprints",),
    ),
    Mutant(
        name="discriminator-with-a-default-is-dropped",
        breaks="Two classes of one name, which only a discriminator tells apart, are one command.",
        where="_discriminators",
        old="if get_origin(hint) is Literal and len(get_args(hint)) == 1",
        new="if hint is None",
        tests=("tests/commands/test_fingerprints.py::test_different_commands_have_different_fingerprints",),
    ),
    Mutant(
        name="records-from-before-types-are-refused",
        breaks="After an upgrade, whoever asks again for a command of before is told that the key was used for another.",
        where="fingerprints",
        old="return (recorded,) if older == recorded else (recorded, older)",
        new="return (recorded,)",
        tests=(
            "tests/commands/test_fingerprints.py::test_a_record_from_before_types_counted_is_recognised[sqlite+pysqlite]",
        ),
    ),
    Mutant(
        name="long-decimals-are-rounded",
        breaks="Two commands whose amounts differ in the thirtieth digit are one, and the second gets the first's answer.",
        where="_decimal",
        old='text = format(value if value else Decimal(0), "f")',
        new='text = format(value.normalize() if value else Decimal(0), "f")',
        tests=("tests/commands/test_fingerprints.py::test_different_commands_have_different_fingerprints",),
    ),
    Mutant(
        name="other-schema-is-a-bare-error",
        breaks="A handler that chooses another schema for the rest of its transaction fails with an error of the driver's.",
        where="_NOT_THERE",
        old='"42P01"',
        new='"42P0X"',
        tests=(
            "tests/commands/test_closed_losses.py::test_a_handler_that_chooses_another_schema_for_the_rest[by SQLAlchemy-nothing--postgresql+psycopg2]",
        ),
    ),
    Mutant(
        name="record-that-was-pruned-under-its-duplicate",
        breaks="A command whose record is pruned while it is asked for again fails, instead of being new.",
        where="recalled",
        old="raise OvertakenError(",
        new="raise KeyReusedError(",
        tests=(
            "tests/commands/test_pruned_records.py::test_a_record_that_is_pruned_between_claim_and_recall[postgresql+psycopg-READ COMMITTED-False]",
        ),
    ),
)
