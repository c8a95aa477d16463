"""Share groups over Kafka: members, sessions, acquired records, acknowledgements, offsets and settings (spec: kafka#share-groups)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import decode_batches, encode_batch
from polywire.protocols.kafka.client_codec import decode_response
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.kafka.share_sessions import EPOCH_MAX
from polywire.protocols.runtime.slices import AT_ONCE_MAX
from polywire.records.columns import Header, Record
from polywire.records.rows import from_records
from polywire.types import Level, Outcome, TopicName
from tests.unit.protocols.kafka.dialogue import Dialogue, World
from tests.unit.protocols.kafka.requests import frame_of
from tests.unit.protocols.kafka.test_fetch import CountedSlices

GROUP = 32  # resource with settings
Batch = tuple[int, int, Sequence[int]]


class Share(World):
    """A topic with two partitions, and a group that reads it from its beginning."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.memory.broker.create_topic(TopicName.parse("t"), 2)
        self.memory.broker.shares.directory.configure("g", {"share.auto.offset.reset": "earliest"})
        self.memory.run()
        self.admin = self.connect()
        if count:
            self.produce(count)

    @property
    def topic_id(self) -> bytes:
        return self.memory.broker.topic("t").id

    def produce(self, count: int) -> None:
        topics = schema.request(Api.PRODUCE).Topics
        records = encode_batch([Record(b"v%d" % number, key=b"k") for number in range(count)])
        one = topics(name="t", partitions=[topics.Partitions(index=0, records=records)])
        assert self.admin.ask(Api.PRODUCE, 9, acks=1, topics=[one]).responses[0].partitions[0].error == 0


@pytest.fixture
def share() -> Share:
    return Share()


def entries(api: Api, topic_id: bytes, batches: Sequence[Batch]) -> list[Any]:
    topics = schema.request(api).Topics
    made = [topics.Partitions.Batches(first_offset=a, last_offset=b, types=list(types)) for a, b, types in batches]
    return [topics(topic_id=topic_id, partitions=[topics.Partitions(index=0, batches=made)])]


def fetch(
    peer: Dialogue, share: Share, epoch: int, batches: Sequence[Batch] = (), *, member: str = "m", **fields: Any
) -> Any:
    topics = entries(Api.SHARE_FETCH, share.topic_id, batches) if epoch == 0 or batches else []
    asked = {"group_id": "g", "member_id": member, "session_epoch": epoch, "max_records": 500, "topics": topics}
    return peer.ask(Api.SHARE_FETCH, **asked | fields)


def acknowledge(peer: Dialogue, share: Share, epoch: int, batches: Sequence[Batch]) -> Any:
    topics = entries(Api.SHARE_ACKNOWLEDGE, share.topic_id, batches)
    return peer.ask(Api.SHARE_ACKNOWLEDGE, group_id="g", member_id="m", session_epoch=epoch, topics=topics)


def part(answer: Any) -> Any:
    assert answer.error == WireError.NONE
    [topic] = answer.responses
    [partition] = topic.partitions
    return partition


def acquired(answer: Any) -> list[tuple[int, int, int]]:
    return [(run.first_offset, run.last_offset, run.delivery_count) for run in part(answer).acquired_records]


def beat(peer: Dialogue, member: str = "m", epoch: int = 0, **fields: Any) -> Any:
    topics = {"subscribed_topic_names": ["t"]} if epoch == 0 else {}
    return peer.ask(
        Api.SHARE_GROUP_HEARTBEAT, **{"group_id": "g", "member_id": member, "member_epoch": epoch} | topics | fields
    )


def test_a_member_from_its_join_to_its_end(share: Share) -> None:
    peer = share.connect()
    joined = beat(peer)
    assert (joined.error, joined.member_id, joined.heartbeat_interval_ms) == (WireError.NONE, "m", 5_000)
    [topic] = joined.assignment.topic_partitions
    assert (topic.topic_id, list(topic.partitions)) == (share.topic_id, [0, 1])
    assert beat(peer, epoch=joined.member_epoch).assignment is None
    assert beat(peer, epoch=99).error == WireError.FENCED_MEMBER_EPOCH
    assert beat(peer, "other", 1).error == WireError.UNKNOWN_MEMBER_ID
    [group] = peer.ask(Api.SHARE_GROUP_DESCRIBE, group_ids=["g"], want_operations=True).groups
    assert (group.group_state, group.assignor_name, len(group.members)) == ("Stable", "simple", 1)
    assert group.operations > 0
    [listed] = peer.ask(Api.LIST_GROUPS, types_filter=["share"]).groups
    assert (listed.group_id, listed.group_type, listed.protocol_type) == ("g", "share", "share")
    assert peer.ask(Api.DELETE_GROUPS, groups_names=["g"]).results[0].error == WireError.NON_EMPTY_GROUP
    assert beat(peer, epoch=-1).member_epoch == -1
    assert peer.ask(Api.DELETE_GROUPS, groups_names=["g"]).results[0].error == WireError.NONE
    assert peer.ask(Api.LIST_GROUPS, types_filter=["share"]).groups == []
    [gone] = peer.ask(Api.SHARE_GROUP_DESCRIBE, group_ids=["g"]).groups
    assert gone.error == WireError.GROUP_ID_NOT_FOUND


@pytest.mark.parametrize(
    "fields",
    [{"group_id": ""}, {"member_id": ""}, {"member_epoch": -2}, {"rack_id": ""}, {"subscribed_topic_names": None}],
)
def test_invalid_heartbeats(share: Share, fields: dict[str, Any]) -> None:
    assert beat(share.connect(), **fields).error == WireError.INVALID_REQUEST


def test_a_consumer_group_cannot_become_a_share_group(share: Share) -> None:
    share.memory.broker.groups.join("c", "t", "m", wire="flux")
    assert beat(share.connect(), group_id="c").error == WireError.GROUP_ID_NOT_FOUND


def test_records_are_acquired_and_acknowledged_with_the_next_fetch(share: Share) -> None:
    peer, other = share.connect(), share.connect()
    first = fetch(peer, share, 0, max_records=4)
    assert (acquired(first), first.lock_timeout_ms) == ([(0, 3, 1)], 30_000)
    assert part(first).records
    assert acquired(fetch(other, share, 0, member="o")) == [(4, 5, 1)]
    types = [Outcome.ACCEPT, Outcome.RELEASE, Outcome.REJECT, Outcome.GAP]
    second = fetch(peer, share, 1, [(0, 3, types)])
    assert (acquired(second), part(second).acknowledge_error) == ([(1, 1, 2)], WireError.NONE)
    wrong = fetch(peer, share, 2, [(4, 4, [Outcome.ACCEPT])])
    assert (part(wrong).acknowledge_error, acquired(wrong)) == (WireError.INVALID_RECORD_STATE, [])
    done = part(acknowledge(peer, share, 3, [(1, 1, [Outcome.ACCEPT])]))
    assert done.error == WireError.NONE
    progress = share.memory.broker.shares.offsets("g", share.memory.broker.topic("t").partitions[0])
    assert progress is not None
    assert progress[:3] == (4, 6, 2)


def test_a_fetch_waits_for_records(share: Share) -> None:
    peer = share.connect()
    fetch(peer, share, 0)
    asked: dict[str, Any] = {
        "group_id": "g",
        "member_id": "m",
        "session_epoch": 1,
        "max_records": 10,
        "max_wait_ms": 1_000,
    }
    peer.tell(Api.SHARE_FETCH, 2, schema.request(Api.SHARE_FETCH)(**asked))
    peer.pass_by()
    assert peer.take() == b""
    share.produce(2)
    share.memory.run()
    assert peer.take()
    assert fetch(peer, share, 2).responses == []


def test_a_renewal_prolongs_the_lock_and_acquires_nothing(share: Share) -> None:
    peer = share.connect()
    fetch(peer, share, 0, max_records=1)
    share.memory.advance(20)
    renewed = fetch(peer, share, 1, [(0, 0, [Outcome.RENEW])], is_renew=True)
    assert (part(renewed).acknowledge_error, acquired(renewed)) == (WireError.NONE, [])
    share.memory.advance(20)
    assert part(acknowledge(peer, share, 2, [(0, 0, [Outcome.ACCEPT])])).error == WireError.NONE
    fetch(peer, share, 3, max_records=1)
    share.memory.advance(31)
    late = acknowledge(peer, share, 4, [(1, 1, [Outcome.ACCEPT])])
    assert part(late).error == WireError.INVALID_RECORD_STATE


@pytest.mark.parametrize("closes", [True, False])
def test_the_end_of_a_session_releases_its_records(share: Share, closes: bool) -> None:
    peer, other = share.connect(), share.connect()
    fetch(peer, share, 0)
    if closes:
        assert fetch(peer, share, -1, [(0, 0, [Outcome.ACCEPT])]).error == WireError.NONE
    else:
        assert part(acknowledge(peer, share, 1, [(0, 0, [Outcome.ACCEPT])])).error == WireError.NONE
        peer.session.close()
    assert acquired(fetch(other, share, 0, member="o")) == [(1, 5, 2)]


def test_errors_of_sessions(share: Share) -> None:
    peer = share.connect()
    assert fetch(peer, share, 1).error == WireError.SHARE_SESSION_NOT_FOUND
    assert fetch(peer, share, 0, [(0, 0, [1])]).error == WireError.INVALID_REQUEST
    fetch(peer, share, 0, max_records=1)
    assert fetch(peer, share, 3).error == WireError.INVALID_SHARE_SESSION_EPOCH
    assert fetch(peer, share, 1, member="other").error == WireError.SHARE_SESSION_NOT_FOUND
    assert fetch(peer, share, 1, group_id=None).error == WireError.INVALID_REQUEST
    assert acknowledge(peer, share, 0, []).error == WireError.INVALID_SHARE_SESSION_EPOCH
    assert fetch(peer, share, 1).error == WireError.NONE
    replacing = share.connect()
    assert acquired(fetch(replacing, share, 0, max_records=1))
    assert fetch(peer, share, 2).error == WireError.SHARE_SESSION_NOT_FOUND


def test_epochs_of_a_session_wrap(share: Share) -> None:
    peer = share.connect()
    fetch(peer, share, 0)
    session = next(iter(share.factory.shared.share_sessions._sessions.values()))
    session.epoch = EPOCH_MAX
    assert fetch(peer, share, EPOCH_MAX).error == WireError.NONE
    assert fetch(peer, share, 1).error == WireError.NONE


@pytest.mark.parametrize(
    "batches",
    [
        [(1, 0, [1])],
        [(-1, 0, [1])],
        [(0, 2, [1, 1])],
        [(0, 0, [])],
        [(0, 0, [5])],
        [(2, 3, [1]), (0, 1, [1])],
        [(0, 1, [1]), (1, 2, [1])],
    ],
)
def test_malformed_acknowledgements(share: Share, batches: Sequence[Batch]) -> None:
    peer = share.connect()
    fetch(peer, share, 0)
    assert part(acknowledge(peer, share, 1, batches)).error == WireError.INVALID_REQUEST
    assert part(acknowledge(peer, share, 2, [(0, 5, [1])])).error == WireError.NONE


def test_partitions_that_cannot_be_read(share: Share) -> None:
    peer = share.connect()
    topics = schema.request(Api.SHARE_FETCH).Topics
    unknown = topics(topic_id=b"?" * 16, partitions=[topics.Partitions(index=0, batches=[])])
    missing = topics(topic_id=share.topic_id, partitions=[topics.Partitions(index=9, batches=[])])
    answer = fetch(peer, share, 0, topics=[unknown, missing])
    assert [topic.partitions[0].error for topic in answer.responses] == [
        WireError.UNKNOWN_TOPIC_ID,
        WireError.UNKNOWN_TOPIC_OR_PARTITION,
    ]


def offsets(peer: Dialogue, topics: Any = None) -> Any:
    groups = schema.request(Api.DESCRIBE_SHARE_GROUP_OFFSETS).Groups
    [group] = peer.ask(Api.DESCRIBE_SHARE_GROUP_OFFSETS, groups=[groups(group_id="g", topics=topics)]).groups
    return group


def test_offsets_are_described_changed_and_deleted(share: Share) -> None:
    peer = share.connect()
    assert offsets(peer).error == WireError.GROUP_ID_NOT_FOUND
    fetch(peer, share, 0)
    fetch(peer, share, -1, [(0, 3, [1])])
    [topic] = offsets(peer).topics
    assert [(part.index, part.start_offset, part.lag) for part in topic.partitions] == [(0, 4, 2)]
    altered = schema.request(Api.ALTER_SHARE_GROUP_OFFSETS).Topics
    parts = [altered.Partitions(index=0, start_offset=1), altered.Partitions(index=5, start_offset=1)]
    answer = peer.ask(Api.ALTER_SHARE_GROUP_OFFSETS, group_id="g", topics=[altered(topic_name="t", partitions=parts)])
    assert answer.error == WireError.NONE
    assert [part.error for part in answer.responses[0].partitions] == [0, WireError.UNKNOWN_TOPIC_OR_PARTITION]
    assert offsets(peer).topics[0].partitions[0].start_offset == 1
    gone = schema.request(Api.DELETE_SHARE_GROUP_OFFSETS).Topics(topic_name="t")
    assert peer.ask(Api.DELETE_SHARE_GROUP_OFFSETS, group_id="g", topics=[gone]).error == WireError.NONE
    assert offsets(peer).topics == []


def config(peer: Dialogue, name: str, value: str | None, operation: int = 0) -> int:
    resources = schema.request(Api.INCREMENTAL_ALTER_CONFIGS).Resources
    change = resources.Configs(name=name, config_operation=operation, value=value)
    one = resources(resource_type=GROUP, resource_name="g", configs=[change])
    [answer] = peer.ask(Api.INCREMENTAL_ALTER_CONFIGS, resources=[one]).responses
    code: int = answer.error
    return code


def test_settings_of_a_group(share: Share) -> None:
    peer = share.connect()
    assert config(peer, "share.delivery.count.limit", "7") == WireError.NONE
    assert config(peer, "share.delivery.count.limit", "0") == WireError.INVALID_CONFIG
    assert config(peer, "share.unknown", "0") == WireError.INVALID_CONFIG
    described = schema.request(Api.DESCRIBE_CONFIGS).Resources(resource_type=GROUP, resource_name="g")
    [found] = peer.ask(Api.DESCRIBE_CONFIGS, resources=[described]).results
    values = {entry.name: (entry.value, entry.config_source) for entry in found.configs}
    assert values["share.delivery.count.limit"] == ("7", 8)
    assert values["share.session.timeout.ms"] == ("45000", 5)
    listed = peer.ask(Api.LIST_CONFIG_RESOURCES, resource_types=[GROUP]).config_resources
    assert [(one.resource_name, one.resource_type) for one in listed] == [("g", GROUP)]
    assert config(peer, "share.delivery.count.limit", None, operation=1) == WireError.NONE
    assert share.memory.broker.shares.directory.stored_settings("g") == {"share.auto.offset.reset": "earliest"}


def test_every_request_survives_being_cut_short() -> None:
    share = Share()
    frame = frame_of(
        Api.SHARE_FETCH,
        group_id="g",
        member_id="m",
        topics=entries(Api.SHARE_FETCH, share.topic_id, [(0, 1, [1, 2])]),
    )
    for size in range(12, len(frame) - 4):
        peer = share.connect()
        peer.feed((size).to_bytes(4, "big") + frame[4 : 4 + size])
        peer.pass_by()
        assert peer.gave_up is not None
    assert share.memory.broker.shares.partitions("g") == []


def test_a_small_request_gets_few_records_of_a_large_batch(share: Share) -> None:
    peer = share.connect()
    fetched = part(fetch(peer, share, 0, max_records=2))
    assert [record.value for record in decode_batches(fetched.records)] == [b"v0", b"v1"]
    second = part(fetch(peer, share, 1, [(0, 1, [1])], max_records=3))
    assert [record.value for record in decode_batches(second.records)] == [b"v2", b"v3", b"v4"]
    assert acquired(fetch(peer, share, 2, [(2, 4, [1])], max_records=3)) == [(5, 5, 1)]


WIDE = 3 * AT_ONCE_MAX


class Wide(Share):
    """A topic with many partitions of one record each, and slices that end after one step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.memory.broker.create_topic(TopicName.parse("w"), WIDE)
        for number in range(WIDE):
            self.put(number)
        self.slices: list[int] = []
        monkeypatch.setattr(self.memory.broker, "sliced", CountedSlices(self.memory.broker.sliced, self.slices))
        monkeypatch.setattr("polywire.protocols.runtime.acquiring.QUANTUM_S", -1.0)

    @property
    def topic_id(self) -> bytes:
        return self.memory.broker.topic("w").id

    def put(self, number: int) -> None:
        partition = self.memory.broker.topic("w").partitions[number]
        self.memory.broker.produce(partition, from_records([Record(b"v")]), level=Level.WRITTEN, done=None)
        self.memory.run()

    def topics(self, api: Api, batches: Sequence[Batch] = ()) -> list[Any]:
        topics = schema.request(api).Topics
        [entry] = entries(api, self.topic_id, batches)
        batch = entry.partitions[0].batches
        made = [topics.Partitions(index=number, batches=batch) for number in range(WIDE)]
        return [topics(topic_id=self.topic_id, partitions=made)]


def test_a_session_with_many_partitions_is_served_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Wide(monkeypatch)
    peer = share.connect()
    asked: dict[str, Any] = {"group_id": "g", "member_id": "m", "max_records": 500, "max_wait_ms": 1_000}
    fetched = peer.ask(Api.SHARE_FETCH, session_epoch=0, topics=share.topics(Api.SHARE_FETCH), **asked)
    assert sum(len(one.acquired_records) for one in fetched.responses[0].partitions) == WIDE
    assert len(share.slices) > 2 * (WIDE - AT_ONCE_MAX), "each partition is added and read in a step"
    share.slices.clear()
    renewed = share.topics(Api.SHARE_FETCH, [(0, 0, [int(Outcome.RENEW)])])
    fetched = peer.ask(Api.SHARE_FETCH, session_epoch=1, topics=renewed, is_renew=True, **asked)
    assert [one.acknowledge_error for one in fetched.responses[0].partitions] == [WireError.NONE] * WIDE
    assert len(share.slices) > WIDE - AT_ONCE_MAX
    share.slices.clear()
    ended = share.topics(Api.SHARE_ACKNOWLEDGE, [(0, 0, [int(Outcome.ACCEPT)])])
    answer = peer.ask(Api.SHARE_ACKNOWLEDGE, group_id="g", member_id="m", session_epoch=2, topics=ended)
    assert [one.error for one in answer.responses[0].partitions] == [WireError.NONE] * WIDE
    assert len(share.slices) > WIDE - AT_ONCE_MAX
    share.slices.clear()
    peer.tell(Api.SHARE_FETCH, 1, schema.request(Api.SHARE_FETCH)(session_epoch=3, topics=[], **asked))
    peer.pass_by()
    assert not peer.sent
    assert len(share.slices) > 2 * (WIDE - AT_ONCE_MAX), "each partition is read and watched in a step"
    share.put(WIDE - 1)
    peer.pass_by()
    fetched = decode_response(Api.SHARE_FETCH, 1, next(peer.frames()))[1]
    assert [one.index for one in fetched.responses[0].partitions] == [WIDE - 1]
    closed = peer.ask(Api.SHARE_FETCH, session_epoch=-1, **asked)
    assert (closed.error, closed.responses) == (WireError.NONE, [])


def test_a_session_with_too_many_partitions_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Wide(monkeypatch)
    monkeypatch.setattr("polywire.protocols.kafka.share_fetch.PARTITIONS_MAX", WIDE - 1)
    peer = share.connect()
    asked: dict[str, Any] = {"group_id": "g", "member_id": "m", "max_records": 500}
    refused = peer.ask(Api.SHARE_FETCH, session_epoch=0, topics=share.topics(Api.SHARE_FETCH), **asked)
    assert (refused.error, refused.responses) == (WireError.INVALID_REQUEST, [])
    assert peer.ask(Api.SHARE_FETCH, session_epoch=1, **asked).error == WireError.SHARE_SESSION_NOT_FOUND


def test_a_closed_connection_ends_a_request_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Wide(monkeypatch)
    peer = share.connect()
    body = schema.request(Api.SHARE_FETCH)(
        group_id="g", member_id="m", session_epoch=0, max_records=500, topics=share.topics(Api.SHARE_FETCH)
    )
    peer.tell(Api.SHARE_FETCH, 1, body)
    peer.session.close()
    peer.pass_by()
    assert share.memory.broker.shares.partitions("g") == []


def test_records_have_delays_and_an_order_per_key() -> None:
    share = Share(1)
    share.memory.broker.shares.directory.configure("g", {"share.auto.offset.reset": "earliest", "share.order": "key"})
    due_ms = share.memory.clock.now_us() // 1000 + 10_000
    header = Header(b"deliver.at", str(due_ms).encode())
    topics = schema.request(Api.PRODUCE).Topics
    made = [Record(b"later", headers=(header,)), Record(b"2", key=b"k"), Record(b"3")]
    one = topics(name="t", partitions=[topics.Partitions(index=0, records=encode_batch(made))])
    assert share.admin.ask(Api.PRODUCE, 9, acks=1, topics=[one]).responses[0].partitions[0].error == 0
    peer = share.connect()
    assert acquired(fetch(peer, share, 0)) == [(0, 0, 1), (3, 3, 1)]
    assert acquired(fetch(peer, share, 1, [(0, 0, [Outcome.ACCEPT]), (3, 3, [Outcome.ACCEPT])])) == [(2, 2, 1)]
    share.memory.advance(11)
    assert acquired(fetch(peer, share, 2, [(2, 2, [Outcome.ACCEPT])], max_wait_ms=500)) == [(1, 1, 1)]


def test_a_fetch_that_rejects_a_record_acquires_nothing_while_it_is_copied(share: Share) -> None:
    """The copy may take long, for example while its topic is missing, and the locks would expire."""
    settings = {"share.auto.offset.reset": "earliest", "errors.deadletterqueue.topic.name": "dead"}
    share.memory.broker.shares.directory.configure("g", settings)
    peer = share.connect()
    fetch(peer, share, 0, max_records=2)
    rejected = part(fetch(peer, share, 1, [(0, 1, [Outcome.REJECT, Outcome.ACCEPT])], max_records=2))
    assert (rejected.acknowledge_error, rejected.acquired_records) == (WireError.NONE, [])
    assert share.memory.broker.topic("dead").partitions[0].log.next_offset == 1
    assert acquired(fetch(peer, share, 2, max_records=2)) == [(2, 3, 1)]
