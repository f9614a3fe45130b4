"""Kafka: two processes of the example, killed again and again, are exact. The cluster is librdkafka's mock."""

import json
from pathlib import Path

import pytest

from consumer_rig import prove
from databases import Database
from kafka_cluster import kafka_cluster
from kafka_rig import Kafka

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_consumers_are_exact(postgresql: Database, tmp_path: Path) -> None:
    """Two processes, 22 of them killed, poison, garbage, messages before their time: the read model equals the file."""
    with kafka_cluster(tmp_path) as cluster:
        topic = Kafka(cluster)
        prove(
            "with_kafka.py",
            topic,
            postgresql,
            {"KAFKA": json.dumps(topic.config), "TOPIC": topic.topic},
        )
        topic.close()


def test_the_page_has_the_example() -> None:
    """Verbatim: what is read is what is tested."""
    program = (ROOT / "examples/consumers/with_kafka.py").read_text(encoding="utf-8")
    assert f"```python\n{program}```" in (ROOT / "docs/consumers/kafka.md").read_text(encoding="utf-8")
