"""HTTP: a request is answered by the record of the same request to the same service, and by no other."""

from .mutant import Mutant

ENDPOINTS = "tests/integrations/test_endpoints.py"
RECORDED = "tests/integrations/test_recorded.py"

MUTANTS = (
    Mutant(
        name="every-service-has-one-http-operation",
        breaks="Of two services on one database, one answers by the record of the other, and never runs.",
        where="as_operation",
        old="name=name",
        new="name=NAME",
        tests=(f"{RECORDED}::test_services_on_one_database_are_told_apart_by_name[sqlite+pysqlite]",),
    ),
    Mutant(
        name="a-named-endpoint-forgets-its-records",
        breaks="Endpoints that are given a name run again what their older code has recorded.",
        where="as_operation",
        old="formerly=formerly",
        new="formerly=()",
        tests=(f"{RECORDED}::test_a_service_gets_its_name_in_a_rolling_deploy[sqlite+pysqlite]",),
    ),
    Mutant(
        name="another-path-gets-the-answer",
        breaks="Starlette's URL leaves out a tab, and in older versions what is behind a decoded ? or #.",
        where="Exchange.__init__",
        old='request.scope["path"]',
        new="request.url.path",
        tests=(f"{RECORDED}::test_the_whole_path_is_compared[sqlite+aiosqlite (async)-/things/7%09]",),
    ),
    Mutant(
        name="an-upload-that-comes-again-is-another-request",
        breaks="A client that sends a form again chooses another boundary, and is told that its key was reused.",
        where="Received._body",
        old='kind == "multipart/form-data" and',
        new='kind == "" and',
        tests=(f"{RECORDED}::test_a_form_may_come_with_another_boundary[sqlite+pysqlite]",),
    ),
    Mutant(
        name="come-later-is-recorded-for-a-week",
        breaks="A client that was told 429 or 401 once is told so for as long as the record is kept.",
        where="Recording.answer",
        old=" or status in LATER",
        new="",
        tests=(
            f"{RECORDED}::test_what_is_raised_or_says_later_is_rolled_back_and_not_recorded[sqlite+pysqlite-whole-429]",
        ),
    ),
    Mutant(
        name="duplicates-of-a-slow-request-hold-the-pool",
        breaks="A duplicate of a slow request holds its connection for as long as that request runs.",
        where="bounded",
        old="commands.bounded(CLAIM_TIMEOUT)",
        new="commands",
        tests=(f"{RECORDED}::test_a_duplicate_waits_for_a_bounded_time[postgresql+psycopg]",),
    ),
    Mutant(
        name="middleware-does-not-see-the-state",
        breaks="What a recorded endpoint sets in request.state is lost to middleware.",
        where="Exchange.attempt",
        old='self._request.scope.setdefault("state", {})',
        new='dict(self._request.scope).setdefault("state", {})',
        tests=(
            "tests/integrations/test_starlette.py::"
            "test_middleware_sees_what_an_endpoint_sets_in_the_state[sqlite+aiosqlite (async)]",
        ),
    ),
    Mutant(
        name="a-fault-of-the-program-is-the-clients",
        breaks="A program that gives a number as scope blames the client's key, and nobody is told.",
        where="ANSWERED",
        old="UnusableKeyError",
        new="InvalidKeyError",
        tests=(f"{ENDPOINTS}::test_a_scope_that_the_program_gets_wrong_is_500[sqlite+pysqlite-7]",),
    ),
)
