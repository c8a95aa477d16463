"""Producer ids, and sequences that wrap around (spec: kafka#idempotent-producers)."""

from __future__ import annotations

import pytest

from polywire.broker.producers import WRAP
from polywire.protocols.kafka.checks import stamp_sequence
from polywire.protocols.kafka.messages import Api, WireError
from polywire.records.columns import BatchHeader
from polywire.records.header import read_header
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level
from tests.unit.broker.answers import batch_by
from tests.unit.protocols.kafka.group_dialogue import Asker
from tests.unit.protocols.kafka.test_groups import versions

INIT = Api.INIT_PRODUCER_ID


@pytest.mark.parametrize("version", versions(INIT))
def test_every_request_gets_a_new_id(memory: MemoryBroker, version: int) -> None:
    asked = {"transactional_id": None, "transaction_timeout_ms": -1}
    if version >= 3:
        asked |= {"producer_id": 5, "producer_epoch": 9}
    answers = [Asker(memory).ask(INIT, version, **asked) for _ in range(3)]
    assert [(answer.error, answer.producer_epoch) for answer in answers] == [(WireError.NONE, 0)] * 3
    assert len({answer.producer_id for answer in answers}) == 3


def test_sequences_continue_after_wrapping_around(memory: MemoryBroker) -> None:
    partition = memory.broker.ensure_topic("t").partitions[0]
    stored: list[BatchHeader] = []
    for sequence in (WRAP - 3, 0, 3):
        batch = batch_by(b"k" + (1).to_bytes(8, "big"), 0, sequence, 3)
        stamp_sequence(memory.broker, partition, batch, producer_id=1, producer_epoch=0, sequence=sequence)
        memory.broker.produce(partition, batch, level=Level.WRITTEN, done=None)
        memory.run()
        stored.append(read_header(batch))
    assert [header.base_sequence for header in stored] == [WRAP - 3, WRAP, WRAP + 3]


@pytest.fixture
def memory() -> MemoryBroker:
    return MemoryBroker()
