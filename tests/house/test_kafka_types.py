"""The types of Kafka's messages match the table of messages."""

from __future__ import annotations

from tools import kafka_types


def test_the_stub_is_up_to_date() -> None:
    assert kafka_types.STUB.read_text("utf-8") == kafka_types.stub(), "run `python -m tools.kafka_types`"
