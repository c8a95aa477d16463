"""A Kafka client that holds a transactional id, and the visible effects of its transactions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import decode_batches, encode_batch
from polywire.protocols.kafka.messages import SERVED, Api
from polywire.records.columns import Record
from polywire.types import TopicName
from tests.unit.protocols.kafka.dialogue import Dialogue, World

TIMEOUT_MS = 60_000
GROUP = "g"
TRANSACTIONAL = 16  # bit of a batch's attributes


@dataclass
class Producer:
    """A client that believes it holds a transactional id."""

    peer: Dialogue
    id: str = "T"
    number: int = -1
    epoch: int = -1

    @property
    def who(self) -> dict[str, Any]:
        return {"transactional_id": self.id, "producer_id": self.number, "producer_epoch": self.epoch}

    def ask(self, api: Api, version: int | None = None, /, **fields: Any) -> Any:
        """Send a request of this transaction."""
        return self.peer.ask(api, SERVED[api].last if version is None else version, **self.who, **fields)

    def init(self, *, again: bool = False, version: int = 4, timeout_ms: int = TIMEOUT_MS) -> int:
        """Initialize the producer; the id and epoch are set only on success."""
        who = {"producer_id": self.number, "producer_epoch": self.epoch} if again else {}
        answer = self.peer.ask(
            Api.INIT_PRODUCER_ID, version, transactional_id=self.id, transaction_timeout_ms=timeout_ms, **who
        )
        if not answer.error:
            self.number, self.epoch = answer.producer_id, answer.producer_epoch
        return int(answer.error)

    def add(self, *numbers: int, topic: str = "t", version: int | None = None) -> list[int]:
        topics = schema.request(Api.ADD_PARTITIONS_TO_TXN).Topics
        asked = [topics(name=topic, partitions=list(numbers or (0,)))]
        answer = self.ask(Api.ADD_PARTITIONS_TO_TXN, version, topics=asked)
        return [entry.error for reported in answer.topics for entry in reported.partitions]

    def produce(
        self, first: int, *values: bytes, partition: int = 0, topic: str = "t", version: int = 9, acks: int = -1
    ) -> Any:
        """Produce records from this sequence; return the response of their partition."""
        batch = encode_batch(
            [Record(value) for value in values],
            producer_id=self.number,
            producer_epoch=self.epoch,
            base_sequence=first,
            attributes=TRANSACTIONAL,
        )
        topics = schema.request(Api.PRODUCE).Topics
        one = topics(name=topic, partitions=[topics.Partitions(index=partition, records=batch)])
        answer = self.peer.ask(Api.PRODUCE, version, transactional_id=self.id, acks=acks, topics=[one])
        return answer.responses[0].partitions[0]

    def move(self, offset: int, *, group: str = GROUP, topic: str = "t", version: int = 3, **fields: Any) -> int:
        """Add an offset of a group to the transaction."""
        topics = schema.request(Api.TXN_OFFSET_COMMIT).Topics
        one = topics(name=topic, partitions=[topics.Partitions(offset=offset, metadata="m", leader_epoch=3)])
        answer = self.ask(Api.TXN_OFFSET_COMMIT, version, group_id=group, topics=[one], **fields)
        return int(answer.topics[0].partitions[0].error)

    def offsets(self, group: str = GROUP, version: int | None = None) -> int:
        return int(self.ask(Api.ADD_OFFSETS_TO_TXN, version, group_id=group).error)

    def end(self, *, commits: bool = True, version: int | None = None) -> int:
        version = 4 if version is None else version
        return int(self.ask(Api.END_TXN, version, committed=commits).error)

    def finish(self, *, commits: bool = True) -> int:
        """End the transaction in the second version; the producer continues with the returned epoch."""
        answer = self.ask(Api.END_TXN, 5, committed=commits)
        if not answer.error:
            self.number, self.epoch = answer.producer_id, answer.producer_epoch
        return int(answer.error)


def two_topics() -> World:
    """Return a broker with topics ``t`` and ``u``."""
    world = World()
    for name in "tu":
        world.memory.broker.create_topic(TopicName.parse(name), 2)
    return world


def stored(world: World, partition: int = 0, topic: str = "t") -> list[bytes | None]:
    asked = schema.request(Api.FETCH).Topics
    entries = [asked.Partitions(partition=partition, fetch_offset=0, partition_max_bytes=1 << 24)]
    answer = world.connect().ask(Api.FETCH, 12, topics=[asked(topic=topic, partitions=entries)])
    return [record.value for record in decode_batches(answer.responses[0].partitions[0].records)]


def position(world: World, group: str = GROUP, topic: str = "t") -> tuple[int, int, str]:
    asked = schema.request(Api.OFFSET_FETCH).Topics(name=topic, indexes=[0])
    answer = world.connect().ask(Api.OFFSET_FETCH, 7, group_id=group, topics=[asked])
    entry = answer.topics[0].partitions[0]
    return entry.offset, entry.leader_epoch, entry.metadata
