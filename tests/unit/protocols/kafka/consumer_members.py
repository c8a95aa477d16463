"""A member of a consumer group over several processes, which reads what it is assigned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api
from tests.unit.protocols.kafka.test_processes import Client, Processes

HEARTBEAT = Api.CONSUMER_GROUP_HEARTBEAT
OWNED = schema.request(HEARTBEAT).TopicPartitions


@dataclass
class Consumer:
    """A member of a group, connected to the group's coordinator."""

    processes: Processes
    group: str
    id: str
    topics: list[str] = field(default_factory=list)
    pattern: str | None = None
    epoch: int = 0
    reading: dict[bytes, list[int]] = field(default_factory=dict)
    owned: dict[bytes, list[int]] | None = None

    def __post_init__(self) -> None:
        self.client = Client(self.processes, self.processes.shards.shard_by_hash(self.group))

    def fields(self, **fields: Any) -> dict[str, Any]:
        """Return the fields of the next heartbeat: everything when it joins, otherwise changes only."""
        asked: dict[str, Any] = {"group_id": self.group, "member_id": self.id, "member_epoch": self.epoch}
        if not self.epoch:
            asked |= {"rebalance_timeout_ms": 60_000, "subscribed_topic_names": self.topics, "topic_partitions": []}
            asked["subscribed_topic_regex"] = self.pattern
        elif self.owned != self.reading:
            asked["topic_partitions"] = [OWNED(topic_id=id_, partitions=held) for id_, held in self.reading.items()]
        return asked | fields

    def beat(self, **fields: Any) -> Any:
        """Send a heartbeat and apply the response."""
        reported = self.client.ask(HEARTBEAT, 1, **self.fields(**fields))
        self.reported(reported)
        return reported

    def reported(self, reported: Any) -> None:
        """Apply a response."""
        if reported.error:
            self.epoch, self.reading, self.owned = 0, {}, None
            return
        self.owned = {id_: list(held) for id_, held in self.reading.items()}
        self.epoch = reported.member_epoch
        if reported.assignment is not None:
            self.reading = {one.topic_id: list(one.partitions) for one in reported.assignment.topic_partitions}

    def reads(self) -> dict[str, list[int]]:
        """Return the partitions that it reads, by topic name."""
        names = {topic.id: topic.name.full for broker in self.processes.shards.brokers for topic in broker.topics()}
        return {names[id_]: held for id_, held in sorted(self.reading.items(), key=lambda one: names[one[0]])}


def settle(*members: Consumer, rounds: int = 8) -> None:
    """Send heartbeats of all members until their assignments are complete."""
    for _ in range(rounds):
        for member in members:
            assert not member.beat().error
        members[0].processes.loop.advance(1.0)
