"""Which SQL text is taken for a command that begins or ends a transaction."""

import pytest

from projector_dedup.transaction_text import transaction_command

FUNCTION = "create function f() returns int language plpgsql as $$ begin return 1; end $$"
ATOMIC = "create function f() returns int begin atomic select 1; select case when true then 1 end; end"
TRIGGER = "CREATE TRIGGER t AFTER INSERT ON a BEGIN UPDATE a SET b = CASE WHEN b THEN 1 END; DELETE FROM c; END"
EXECUTES = "create trigger t after insert on a execute function f()"
ROUTINES = pytest.mark.parametrize("routine", [FUNCTION, ATOMIC, TRIGGER, EXECUTES])


@ROUTINES
def test_a_routine_is_allowed(routine: str) -> None:
    """The BEGIN and END of its body begin and end no transaction, quoted or not, first or not."""
    assert transaction_command(routine) is None
    assert transaction_command(f"select 1; {routine}; select 2") is None


@ROUTINES
def test_a_command_beside_a_routine_is_found(routine: str) -> None:
    """Only the routine's own statement is passed over."""
    assert transaction_command(f"{routine}; COMMIT; BEGIN") == "COMMIT"
    assert transaction_command(f"/* */ ROLLBACK; {routine}") == "ROLLBACK"
