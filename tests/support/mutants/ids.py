"""I7: two different ids are never taken for one, and each message is claimed under its own."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="mariadb-ids-compare-by-collation",
        breaks="On MariaDB ids are text of the database's collation, so 'a', 'A' and 'a ' are one message.",
        where="exact_text",
        old="_TextAsBytes(length)",
        new="mysql.VARCHAR(length)",
        tests=("tests/delivery/test_ids.py::test_distinct_ids_stay_distinct[mariadb]",),
    ),
    Mutant(
        name="long-ids-are-cut",
        breaks="Ids of more than 512 bytes are cut, so two that begin alike are one message.",
        where="_bounded",
        old="if size > limit:\n",
        new="if size > limit:\n        return text[:limit]\n    if size < 0:\n",
        tests=("tests/delivery/test_ids.py::test_what_is_no_id_is_refused_before_any_statement[postgresql]",),
    ),
    Mutant(
        name="numbers-are-ids",
        breaks="The ids 1 and '1' are one message.",
        where="valid_message_id",
        old="if value is None:",
        new="if isinstance(value, int):\n        return str(value)\n    if value is None:",
        tests=("tests/delivery/test_ids.py::test_what_is_no_id_is_refused_before_any_statement[postgresql]",),
    ),
    Mutant(
        name="nul-is-let-through",
        breaks="An id with a NUL character is let through to the database, which cuts it or fails.",
        where="_bounded",
        old='if "\\0" in text:',
        new="if limit < 0:",
        tests=("tests/delivery/test_ids.py::test_what_is_no_id_is_refused_before_any_statement[postgresql]",),
    ),
    Mutant(
        name="uuid-has-two-spellings",
        breaks="A UUID and its canonical text are two messages.",
        where="valid_message_id",
        old="return uuid.UUID.__str__(value)",
        new="return value.hex",
        tests=("tests/delivery/test_ids.py::test_a_uuid_is_its_canonical_text[postgresql]",),
    ),
    Mutant(
        name="composite-ids-run-together",
        breaks="The parts of a composite id run together, so (a, bc) and (ab, c) are one message.",
        where="_composite",
        old='texts.append(f"{len(text)}:{text}")',
        new='texts.append(f"{text}:")',
        tests=("tests/delivery/test_projector.py::test_composite_ids_cannot_be_confused",),
    ),
    Mutant(
        name="composite-part-of-any-type",
        breaks="The offsets 1 and True of a Kafka record are one message.",
        where="_composite",
        old="if not isinstance(value, kind_of_part) or isinstance(value, bool):",
        new="if not isinstance(value, kind_of_part):",
        tests=("tests/delivery/test_projector.py::test_a_part_of_a_composite_id_is_of_its_own_type[int]",),
    ),
    Mutant(
        name="cloudevents-without-source",
        breaks="A CloudEvent is known by its id alone, which another source may use too.",
        where="cloudevents",
        old='{"source": str, "id": str}',
        new='{"id": str}',
        tests=(
            "tests/delivery/test_projector.py::test_extractors_find_an_id_or_the_message_is_refused[cloudevents-event4-1:s1:1]",
        ),
    ),
    Mutant(
        name="kafka-without-partition",
        breaks="A Kafka record is known by topic and offset alone, which each partition counts for itself.",
        where="kafka",
        old='"partition": int, ',
        new="",
        tests=(
            "tests/delivery/test_projector.py::test_extractors_find_an_id_or_the_message_is_refused[kafka-event7-1:t1:01:7]",
        ),
    ),
    Mutant(
        name="missing-id-is-hashed",
        breaks="hashed() makes an id of an empty one, so all messages without an id are one.",
        where="hashed",
        old='if value is None or value == "":',
        new="if value is None:",
        tests=(
            "tests/delivery/test_projector.py::test_extractors_find_an_id_or_the_message_is_refused[extract-event16-None]",
        ),
    ),
    Mutant(
        name="given-id-does-not-win",
        breaks="The message_id that is given to deliver() is ignored for an envelope with an id of its own.",
        where="envelope",
        old="return event if message_id is None else replace(event, id=message_id)",
        new="return event",
        tests=("tests/delivery/test_projector.py::test_a_handler_gets_the_body_or_on_request_the_envelope",),
    ),
    Mutant(
        name="tenants-share-one-marker-table",
        breaks="A schema_translate_map that moves the read model alone makes tenants share their message ids.",
        where="refuse_shared_markers",
        old="if translated and schema not in translated:",
        new="if translated and schema in translated and False:",
        tests=(
            "tests/delivery/test_placement.py::test_a_map_that_moves_the_read_model_alone_is_refused[postgresql+psycopg]",
        ),
    ),
    Mutant(
        name="occurred-at-loses-its-zone",
        breaks="The moment at which an event occurred is stored in the writer's time zone instead of UTC.",
        where="moment_in_utc",
        old="datetime.time(value)) - offset)",
        new="datetime.time(value)))",
        tests=(
            "tests/databases/test_mariadb_tables.py::test_occurred_at_is_the_same_moment[(Driver(drivername='mariadb+pymysql', module='pymysql', is_async=False), '+05:00')]",
        ),
    ),
)
