"""Fuzz share groups over Kafka: members, sessions, acquired records, acknowledgements, offsets and settings.

For any requests, a session responds or raises PeerError. Most requests are valid in form, with fields that do not fit
together; some are damaged. When all connections are closed, no record is locked, and the progress is consistent.

Run as ``python -m tests.fuzz.fuzz_shares``; FUZZ_SECONDS limits it, FUZZ_SEED repeats a run. The seed is printed first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Final

from polywire.broker.broker import Broker
from polywire.broker.groups.share import NO_MEMBER
from polywire.broker.topics import Partition
from polywire.delivery_times import DELIVER_AT, EXPIRES_AT
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.messages import SERVED, Api
from polywire.records.columns import Header, Record
from polywire.share_settings import DEFAULTS, NUMBERS, SETTINGS
from polywire.types import TopicName
from tests.fuzz.chance import damaged, fuzz
from tests.unit.protocols.kafka.dialogue import Dialogue, World

INPUTS: Final = 4  # connections of a round
REQUESTS_MAX: Final = 30
GROUPS: Final = ("g", "h", "", "c", "x" * 300)
MEMBERS: Final = ("m0", "m1", "", "x" * 300)
TOPICS: Final = ("t", "t", "u", "dead", "missing", "", "..", "x" * 300)
NUMBERS_64: Final = (-(2**63), -1, 0, 0, 1, 2, 3, 5, 8, 2**31, 2**62, 2**63 - 1)
NUMBERS_32: Final = (-(2**31), -2, -1, 0, 0, 0, 1, 1, 2, 3, 500, 2**31 - 1)
ODD: Final = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\xff\xff\xff\xff\x0f", b"\0")
HOUR_S: Final = 3600.0


class Fuzzed:
    """A connection whose requests have random fields, most of which fit its group, member, session and records."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self._own = chance.choice(("g", "g", "h")), f"m{chance.randrange(3)}"
        self._acquired: list[tuple[bytes, int, int, int]] = []  # topic, partition, first and last offset
        self._world = world
        self._chance = chance
        self.peer: Final[Dialogue] = world.connect()
        self._sent: dict[int, tuple[Api, int]] = {}
        self._number = 0
        self._epoch = self._member_epoch = 0

    def act(self) -> None:
        """Send one request, perhaps damaged, and decode all responses."""
        chance = self._chance
        [api] = chance.choices(list(REQUESTS), [WEIGHTS.get(api, 1) for api in REQUESTS])
        version = chance.randint(SERVED[api].first, SERVED[api].last)
        self._number += 1
        self._sent[self._number] = api, version
        frame = encode_request(api, version, self._number, REQUESTS[api](self), client_id="fuzz")
        if not chance.randrange(12):
            body = damaged(frame[4:], chance, times_max=3, odd=ODD, front=8)
            frame = len(body).to_bytes(4, "big") + body
        self.peer.feed(frame)
        if chance.randrange(4):
            self._world.memory.run()
        for response in self.peer.frames():
            self._read(response)

    def _read(self, frame: bytes) -> None:
        api, version = self._sent[int.from_bytes(frame[:4], "big")]
        _, body = decode_response(api, version, frame)
        if api is Api.SHARE_GROUP_HEARTBEAT:
            self._member_epoch = max(body.member_epoch, 0)
        elif api in (Api.SHARE_FETCH, Api.SHARE_ACKNOWLEDGE) and body.error:
            self._epoch = 0
        elif api is Api.SHARE_FETCH:
            self._acquired += [
                (topic.topic_id, partition.index, run.first_offset, run.last_offset)
                for topic in body.responses
                for partition in topic.partitions
                for run in partition.acquired_records
            ]

    # Fields

    def _topic_id(self) -> bytes:
        names = [topic.id for topic in self._world.memory.broker.topics()]
        return self._chance.choice([*names, *names, bytes(16), b"?" * 16])

    def _group(self) -> str:
        return self._own[0] if self._chance.randrange(12) else self._chance.choice(GROUPS)

    def _member(self) -> str:
        return self._own[1] if self._chance.randrange(16) else self._chance.choice(MEMBERS)

    def _batches(self, made: Any) -> list[Any]:
        chance = self._chance
        if chance.randrange(8):  # in order, as a client sends them
            found, at = [], chance.randrange(4)
            for _ in range(chance.randrange(3)):
                last = at + chance.randrange(3)
                size = chance.choice((1, last - at + 1))
                found.append(made(first_offset=at, last_offset=last, types=chance.choices(range(5), k=size)))
                at = last + 1 + chance.randrange(2)
            return found
        types = chance.choices((-128, -1, 0, 1, 2, 3, 4, 5, 127), k=chance.randrange(4))
        bounds = {"first_offset": chance.choice(NUMBERS_64), "last_offset": chance.choice(NUMBERS_64)}
        return [made(**bounds, types=types) for _ in range(chance.randrange(3))]

    def _partition(self) -> int:
        return self._chance.choice((0, 0, 0, 1, 1, 2, -1, 2**31 - 1))

    def _entries(self, api: Api) -> list[Any]:
        topics = schema.request(api).Topics
        if not self._epoch and self._chance.randrange(10):  # a session begins with all its partitions
            parts = [topics.Partitions(index=index, batches=[]) for index in range(2)]
            return [topics(topic_id=self._topic_id(), partitions=parts)]
        if self._acquired and self._chance.randrange(3):
            topic_id, index, first, last = self._acquired.pop(self._chance.randrange(len(self._acquired)))
            types = self._chance.choices(range(5), k=self._chance.choice((1, last - first + 1)))
            batch = topics.Partitions.Batches(first_offset=first, last_offset=last, types=types)
            return [topics(topic_id=topic_id, partitions=[topics.Partitions(index=index, batches=[batch])])]
        return [
            topics(
                topic_id=self._topic_id(),
                partitions=[
                    topics.Partitions(index=self._partition(), batches=self._batches(topics.Partitions.Batches))
                    for _ in range(self._chance.randrange(3))
                ],
            )
            for _ in range(self._chance.randrange(3))
        ]

    def _next_epoch(self) -> int:
        if not self._chance.randrange(8):
            return self._chance.choice(NUMBERS_32)
        self._epoch += 1
        return self._epoch - 1

    def beat(self) -> Any:
        chance = self._chance
        joins = not self._member_epoch or not chance.randrange(6)
        epoch = 0 if joins else chance.choice((self._member_epoch, self._member_epoch, -1, chance.choice(NUMBERS_32)))
        topics = chance.choices(TOPICS, k=chance.randrange(3)) if joins or not chance.randrange(4) else None
        return schema.request(Api.SHARE_GROUP_HEARTBEAT)(
            group_id=self._group(),
            member_id=self._member(),
            member_epoch=epoch,
            subscribed_topic_names=topics,
            rack_id=chance.choice((None, None, "", "r")),
        )

    def fetch(self) -> Any:
        chance = self._chance
        forgotten = schema.request(Api.SHARE_FETCH).Forgotten
        gone = [forgotten(topic_id=self._topic_id(), partitions=[self._partition()])] * (not chance.randrange(6))
        entries = self._entries(Api.SHARE_FETCH)
        return schema.request(Api.SHARE_FETCH)(
            group_id=self._group(),
            member_id=self._member(),
            session_epoch=self._next_epoch(),
            max_wait_ms=chance.choice((0, 0, 100, 10_000, -1, 2**31 - 1)),
            max_bytes=chance.choice((2**20, 2**20, *NUMBERS_32)),
            max_records=chance.choice((3, 500, *NUMBERS_32)),
            topics=entries,
            forgotten=gone if self._epoch > 1 else [],
        )

    def acknowledge(self) -> Any:
        entries = self._entries(Api.SHARE_ACKNOWLEDGE)
        return schema.request(Api.SHARE_ACKNOWLEDGE)(
            group_id=self._group(),
            member_id=self._member(),
            session_epoch=self._next_epoch() if self._epoch else self._chance.choice(NUMBERS_32),
            topics=entries,
        )

    def describe(self) -> Any:
        return schema.request(Api.SHARE_GROUP_DESCRIBE)(group_ids=self._chance.choices(GROUPS, k=2))

    def describe_offsets(self) -> Any:
        groups = schema.request(Api.DESCRIBE_SHARE_GROUP_OFFSETS).Groups
        topic = groups.Topics(topic_name=self._chance.choice(TOPICS), partitions=[self._partition()])
        topics = self._chance.choice((None, [], [topic], [topic, topic]))
        return schema.request(Api.DESCRIBE_SHARE_GROUP_OFFSETS)(groups=[groups(group_id=self._group(), topics=topics)])

    def alter_offsets(self) -> Any:
        chance, topics = self._chance, schema.request(Api.ALTER_SHARE_GROUP_OFFSETS).Topics
        parts = [
            topics.Partitions(index=self._partition(), start_offset=chance.choice(NUMBERS_64))
            for _ in range(chance.randrange(3))
        ]
        entries = [topics(topic_name=chance.choice(TOPICS), partitions=parts) for _ in range(chance.randrange(3))]
        return schema.request(Api.ALTER_SHARE_GROUP_OFFSETS)(group_id=self._group(), topics=entries)

    def delete_offsets(self) -> Any:
        topics = schema.request(Api.DELETE_SHARE_GROUP_OFFSETS).Topics
        names = self._chance.choices(TOPICS, k=self._chance.randrange(3))
        return schema.request(Api.DELETE_SHARE_GROUP_OFFSETS)(
            group_id=self._group(), topics=[topics(topic_name=name) for name in names]
        )

    def delete_groups(self) -> Any:
        return schema.request(Api.DELETE_GROUPS)(groups_names=[self._group()])

    def configure(self) -> Any:
        chance, resources = self._chance, schema.request(Api.INCREMENTAL_ALTER_CONFIGS).Resources
        names = chance.choices([*DEFAULTS, "unknown", ""], k=chance.randrange(3))
        configs = [
            resources.Configs(name=name, config_operation=chance.choice((0, 0, 0, 1, 2, 9)), value=self._value(name))
            for name in names
        ]
        one = resources(resource_type=32, resource_name=self._group(), configs=configs)
        return schema.request(Api.INCREMENTAL_ALTER_CONFIGS)(resources=[one], validate_only=not chance.randrange(4))

    def _value(self, name: str) -> str | None:
        chance = self._chance
        if not chance.randrange(4):
            return chance.choice((None, "", "-1", "9" * 20, "by_duration:P1D", "by_duration:P", "KEY", "\0"))
        number = NUMBERS.get(name)
        if number is not None:
            return str(chance.choice((number.min, number.default, number.max, number.min - 1)))
        choices = SETTINGS[name].choices if name in SETTINGS else ()
        return chance.choice([*choices, "earliest", "latest", "dead", "by_duration:PT1S"])

    def describe_configs(self) -> Any:
        resources = schema.request(Api.DESCRIBE_CONFIGS).Resources
        names = self._chance.choice((None, [], ["share.order", "unknown"]))
        one = resources(resource_type=32, resource_name=self._group(), configuration_keys=names)
        return schema.request(Api.DESCRIBE_CONFIGS)(resources=[one])

    def produce(self) -> Any:
        chance, topics = self._chance, schema.request(Api.PRODUCE).Topics
        now_ms = self._world.memory.clock.now_us() // 1000
        records = []
        for _ in range(chance.randrange(1, 4)):
            value = chance.choice(
                (b"", b"?", b"-1", b"9" * 30, b"%d" % (now_ms + chance.choice((-5, 5_000, 9_000_000))))
            )
            name = chance.choice((DELIVER_AT, EXPIRES_AT, "h"))
            headers = (Header(name.encode(), value),) if chance.randrange(2) else ()
            records.append(Record(b"v", key=chance.choice((None, b"", b"k", b"l")), headers=headers))
        parts = [topics.Partitions(index=chance.randrange(2), records=encode_batch(records))]
        return schema.request(Api.PRODUCE)(acks=1, topics=[topics(name=chance.choice(("t", "u")), partitions=parts)])


WEIGHTS: Final = {
    Api.SHARE_FETCH: 12,
    Api.SHARE_ACKNOWLEDGE: 6,
    Api.PRODUCE: 4,
    Api.SHARE_GROUP_HEARTBEAT: 3,
}  # of others: 1
REQUESTS: Final[Mapping[Api, Callable[[Fuzzed], Any]]] = {
    Api.SHARE_GROUP_HEARTBEAT: Fuzzed.beat,
    Api.SHARE_GROUP_DESCRIBE: Fuzzed.describe,
    Api.SHARE_FETCH: Fuzzed.fetch,
    Api.SHARE_ACKNOWLEDGE: Fuzzed.acknowledge,
    Api.DESCRIBE_SHARE_GROUP_OFFSETS: Fuzzed.describe_offsets,
    Api.ALTER_SHARE_GROUP_OFFSETS: Fuzzed.alter_offsets,
    Api.DELETE_SHARE_GROUP_OFFSETS: Fuzzed.delete_offsets,
    Api.DELETE_GROUPS: Fuzzed.delete_groups,
    Api.INCREMENTAL_ALTER_CONFIGS: Fuzzed.configure,
    Api.DESCRIBE_CONFIGS: Fuzzed.describe_configs,
    Api.PRODUCE: Fuzzed.produce,
}


def check_progress(world: World) -> None:
    """Check the progress of all groups: no member holds a record, and nothing is beyond the end."""
    broker = world.memory.broker
    names = broker.shares.directory.names()
    assert NO_MEMBER not in names
    for partition in [partition for topic in broker.topics() for partition in topic.partitions]:
        for group in names:
            check_partition(broker, group, partition)


def check_partition(broker: Broker, group: str, partition: Partition) -> None:
    """Check the progress of a group in a partition."""
    offsets = broker.shares.offsets(group, partition)
    if offsets is None:
        return
    assert not offsets.acquired, f"records stay locked: {offsets.acquired}"
    assert 0 <= offsets.start <= offsets.end <= partition.log.next_offset
    progress = broker._state.shares.find(group, partition.incarnation)
    assert progress is not None
    assert all(0 <= at < offsets.end and count >= 0 for at, count in progress.counts.items())
    assert progress.due_ms.keys() <= progress.counts.keys()


def check_all(chance: random.Random) -> None:
    """Run one round."""
    world = World()
    broker = world.memory.broker
    for name in ("t", "u", "dead"):
        broker.create_topic(TopicName.parse(name), 2)
    broker.groups.join("c", "t", "m", wire="fuzz")
    broker.shares.directory.configure("g", {"share.auto.offset.reset": "earliest"})
    world.memory.run()
    peers = [Fuzzed(world, chance) for _ in range(INPUTS)]
    for _ in range(chance.randrange(REQUESTS_MAX * INPUTS)):
        peer = chance.choice(peers)
        if not peer.peer.closed:
            peer.act()
        if not chance.randrange(20):
            world.memory.advance(chance.choice((0.1, 5.0, 40.0)))
    for peer in peers:
        if not peer.peer.closed and chance.randrange(2):
            peer.peer.finish()
        peer.peer.session.close()
    world.memory.advance(HOUR_S + 60)  # the longest session timeout
    check_progress(world)
    world.restart()
    check_progress(world)


if __name__ == "__main__":
    fuzz(check_all)
