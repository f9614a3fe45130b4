"""A broker that is not there is told: a skip with its name, or a failure where it is required."""

import pytest

import reached
from brokers import broker


@pytest.mark.parametrize("name", ["rabbitmq", "nats", "redis"])
def test_a_broker_that_was_not_given_is_told_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test that asked for it is left out; with PROJECTOR_DEDUP_TEST_REQUIRE it fails."""
    monkeypatch.setattr(reached.reached, "_news", [])  # the lines at the end of this run must not tell of it
    monkeypatch.delenv(f"PROJECTOR_DEDUP_TEST_{name.upper()}_URL", raising=False)
    monkeypatch.setattr(reached, "REQUIRED", set[str]())
    with pytest.raises(pytest.skip.Exception, match=f"^{name}: PROJECTOR_DEDUP_TEST_{name.upper()}_URL is not given"):
        broker(name)
    monkeypatch.setattr(reached, "REQUIRED", {name})
    with pytest.raises(pytest.fail.Exception, match=f"^{name} is required here"):
        broker(name)


def test_brokers_are_parts_that_a_run_reports_on() -> None:
    """PROJECTOR_DEDUP_TEST_REQUIRE takes their names."""
    assert {"rabbitmq", "nats", "redis"} <= set(reached.PARTS.values())
