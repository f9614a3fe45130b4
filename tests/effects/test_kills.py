"""A process that is killed at any of its steps: every effect ends as done, as rejected, or in the list."""

from collections import Counter
from collections.abc import Iterator

import pytest

import effect_victim
from databases import ENGINES, USUAL_DRIVERS
from effect_rig import Charge, Till, tills
from projector_dedup.testing.provider import Behaviour, Provider

till = tills()
CELLS = [
    pytest.param(driver, policy, id=f"{driver}-{policy}")
    for driver in USUAL_DRIVERS
    for engine, policy in zip(ENGINES, ("ask", "stop", "resend"), strict=True)
    if driver.engine == engine and driver.is_async is (policy == "stop")
]
"""Each policy and each database once, one of them async. `make effects-proof` walks all 18 cells."""


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    """A provider that remembers its keys, and lists at once what it has done."""
    with Provider(tmp_path_factory.mktemp("provider") / "log.jsonl") as provider:
        yield provider


@pytest.mark.nightly
@pytest.mark.timeout(600)  # some twenty processes that are killed one after the other
@pytest.mark.parametrize(("till", "policy"), CELLS, indirect=["till"])
def test_killed_at_every_step(till: Till, provider: Provider, policy: str) -> None:
    """What the policy permits is done, what it does not is listed; judged by the provider's log and the payments.

    On SQLite, which is quick, also with a provider whose reply is lost, and with one that fails.
    """
    _walk(till, provider, policy, Behaviour.NORMAL)
    if till.harness.engine.dialect.name == "sqlite":
        _walk(till, provider, policy, Behaviour.LOSE_REPLY_AFTER)
        _walk(till, provider, policy, Behaviour.ERROR_BEFORE)


def _walk(till: Till, provider: Provider, policy: str, behaviour: Behaviour) -> None:
    url = till.harness.subject.url.render_as_string(hide_password=False)
    made = effect_victim.Victim("").effect(policy, asynchronous=till.harness.asynchronous)

    def armed(key: str) -> str:
        till.arm(made, Charge(key), key=key)
        provider_key = str(till.row(key).provider_key)
        provider.on_key(provider_key, [behaviour])
        return provider_key

    with effect_victim.Victims(till.harness.subject.url, provider.url) as victims:
        kind = f"{behaviour.value} {till.harness.subject.url.drivername}"  # the provider has known other keys before
        provider_keys = {kind: armed(kind)}
        steps = victims.run(policy, kind)
        for step in range(1, steps + 1):
            key = f"{kind}, at {step}"
            provider_keys[key] = armed(key)
            assert victims.run(policy, key, step) == 0
    for _ in range(7):  # asked too early, asked, sent and lost, and so on: until nothing moves
        till.pass_time(61)
        effect_victim.drive(url, provider.url, policy)
    paid = Counter(order for order, _ in till.payments())
    for key, provider_key in provider_keys.items():
        calls, deeds, row = provider.calls(provider_key), provider.deeds(provider_key), till.row(key)
        assert len(deeds) <= 1, (key, calls)
        if row.outcome is not None:
            assert (paid[key], len(deeds)) == (1, 1), (key, calls)
        else:
            assert policy == "stop", (key, row)
            assert (paid[key], row.next_at, row.stopped_at is None) == (0, None, False), (key, row)
        if policy == "stop":
            assert len(calls) <= 1, (key, calls)
    assert steps >= 15
