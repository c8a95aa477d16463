"""Members of classic groups: every version of every request, and each error (spec: kafka#joingroup)."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from polywire.broker.access import Where
from polywire.broker.groups import classic
from polywire.broker.permissions import Action
from polywire.broker.settings import BrokerSettings
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, Busy, Denied, ErrorCode, Missing, Unavailable
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.groups import AT_ONCE_MAX, group_error
from polywire.protocols.kafka.messages import SERVED, Api, WireError
from polywire.protocols.kafka.subscription import WRITING, Subscription, read_subscriptions
from polywire.testing.memory_broker import MemoryBroker
from tests.unit.protocols.kafka.group_dialogue import Asker, Reported

JOIN, SYNC = Api.JOIN_GROUP, Api.SYNC_GROUP
LAST = SERVED[JOIN].last


def versions(api: Api) -> range:
    return range(SERVED[api].answered_from, SERVED[api].last + 1)


def read(protocols: list[tuple[str, bytes]]) -> Subscription:
    """Read metadata without slices."""
    found: list[Subscription] = []

    def reading() -> Iterator[None]:
        found.append((yield from read_subscriptions(protocols)))

    deque(reading(), maxlen=0)
    return found[0]


def subscription(*topics: str, version: int = 3) -> bytes:
    """Return the subscription of a consumer."""
    names = b"".join(struct.pack(">h", len(topic.encode())) + topic.encode() for topic in topics)
    return struct.pack(">hi", version, len(topics)) + names + struct.pack(">i", -1)


def begin_join(peer: Asker, member: str = "", *, version: int = LAST, **fields: Any) -> Reported:
    asked: dict[str, Any] = {
        "group_id": "g",
        "session_timeout_ms": 10_000,
        "member_id": member,
        "protocol_type": "consumer",
        "protocols": [schema.request(JOIN).Protocols(name="range", metadata=subscription("t"))],
    }
    if version:
        asked["rebalance_timeout_ms"] = 60_000
    return peer.begin(JOIN, version, **(asked | fields))


def join(peer: Asker, member: str = "", *, version: int = LAST, **fields: Any) -> Any:
    reported = begin_join(peer, member, version=version, **fields)
    peer.memory.run()
    return reported.body


def member_of(peer: Asker, **fields: Any) -> str:
    """Return a member of a new generation."""
    given = join(peer, **fields)
    assert given.error == WireError.MEMBER_ID_REQUIRED
    joined = join(peer, given.member_id, **fields)
    assert joined.error == WireError.NONE
    return str(given.member_id)


def begin_sync(peer: Asker, member: str, generation: int, *, version: int = 5, **fields: Any) -> Reported:
    assignment = schema.request(SYNC).Assignments(member_id=member, assignment=b"mine")
    if version >= 5:
        fields = {"protocol_type": "consumer", "protocol_name": "range"} | fields
    return peer.begin(
        SYNC,
        version,
        group_id="g",
        generation_id=generation,
        member_id=member,
        assignments=[assignment],
        **fields,
    )


def sync(peer: Asker, member: str, generation: int, *, version: int = 5, **fields: Any) -> Any:
    reported = begin_sync(peer, member, generation, version=version, **fields)
    peer.memory.run()
    return reported.body


@pytest.fixture
def peer() -> Asker:
    memory = MemoryBroker()
    memory.broker.ensure_topic("t")
    return Asker(memory)


@pytest.mark.parametrize("version", versions(JOIN))
def test_a_single_member_in_every_version(peer: Asker, version: int) -> None:
    first = join(peer, version=version)
    if version >= 4:
        assert (first.error, first.generation_id) == (WireError.MEMBER_ID_REQUIRED, -1)
        assert first.protocol_name == ("" if version < 7 else None)
        first = join(peer, first.member_id, version=version)
    assert (first.error, first.generation_id, first.protocol_name) == (WireError.NONE, 1, "range")
    assert first.leader == first.member_id
    assert first.member_id.startswith("me-")
    [member] = first.members
    assert (member.member_id, bytes(member.metadata)) == (first.member_id, subscription("t"))
    if version >= 7:
        assert first.protocol_type == "consumer"


@pytest.mark.parametrize("version", versions(SYNC))
def test_the_leader_assigns_in_every_version(peer: Asker, version: int) -> None:
    member = member_of(peer)
    answer = sync(peer, member, 1, version=version)
    assert (answer.error, bytes(answer.assignment)) == (WireError.NONE, b"mine")
    if version >= 5:
        assert (answer.protocol_type, answer.protocol_name) == ("consumer", "range")


@pytest.mark.parametrize("version", versions(Api.HEARTBEAT))
def test_heartbeats_in_every_version(peer: Asker, version: int) -> None:
    member = member_of(peer)
    asked = {"group_id": "g", "generation_id": 1, "member_id": member}
    assert peer.ask(Api.HEARTBEAT, version, **asked).error == WireError.NONE
    assert peer.ask(Api.HEARTBEAT, version, **asked | {"generation_id": 2}).error == WireError.ILLEGAL_GENERATION
    assert peer.ask(Api.HEARTBEAT, version, **asked | {"member_id": "x"}).error == WireError.UNKNOWN_MEMBER_ID
    assert peer.ask(Api.HEARTBEAT, version, **asked | {"group_id": "x"}).error == WireError.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize("version", versions(Api.LEAVE_GROUP))
def test_leaving_in_every_version(peer: Asker, version: int) -> None:
    member = member_of(peer)
    if version < 3:
        asked = {"group_id": "g", "member_id": member}
        assert peer.ask(Api.LEAVE_GROUP, version, **asked).error == WireError.NONE
        assert peer.ask(Api.LEAVE_GROUP, version, **asked).error == WireError.UNKNOWN_MEMBER_ID
        return
    named = schema.request(Api.LEAVE_GROUP).Members
    leaving = [named(member_id=member), named(member_id="x"), named(member_id="", instance_id="y")]
    answer = peer.ask(Api.LEAVE_GROUP, version, group_id="g", members=leaving)
    assert answer.error == WireError.NONE
    assert [one.error for one in answer.members] == [0, WireError.UNKNOWN_MEMBER_ID, WireError.UNKNOWN_MEMBER_ID]


def test_two_members_share_a_generation(peer: Asker) -> None:
    first = member_of(peer)
    sync(peer, first, 1)
    second = join(peer).member_id
    waiting = begin_join(peer, second)
    peer.memory.run()
    assert waiting.bodies == []
    beat = peer.ask(Api.HEARTBEAT, 4, group_id="g", generation_id=1, member_id=first)
    assert beat.error == WireError.REBALANCE_IN_PROGRESS
    again = join(peer, first)
    assert (again.generation_id, waiting.body.generation_id) == (2, 2)
    assert [member.member_id for member in again.members] == [first, second]
    assert waiting.body.members == []
    asked = peer.begin(SYNC, 5, group_id="g", generation_id=2, member_id=second)
    assigned = [schema.request(SYNC).Assignments(member_id=second, assignment=b"x" * 200_000)]
    sync(peer, first, 2, version=4)
    del assigned
    assert asked.body.error == WireError.NONE


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"group_id": ""}, WireError.INVALID_GROUP_ID),
        ({"group_id": "g" * 256}, WireError.INVALID_GROUP_ID),
        ({"session_timeout_ms": 5_999}, WireError.INVALID_SESSION_TIMEOUT),
        ({"session_timeout_ms": 1_800_001}, WireError.INVALID_SESSION_TIMEOUT),
        ({"member_id": "x"}, WireError.UNKNOWN_MEMBER_ID),
        ({"protocols": []}, WireError.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": ""}, WireError.INCONSISTENT_GROUP_PROTOCOL),
    ],
)
def test_refused_joins(peer: Asker, fields: dict[str, Any], code: WireError) -> None:
    for version in versions(JOIN):
        answer = join(peer, version=version, **fields)
        assert (answer.error, answer.generation_id, answer.members) == (code, -1, [])


def test_a_full_group_is_reported() -> None:
    peer = Asker(MemoryBroker(BrokerSettings(members_max=1)))
    member_of(peer)
    assert join(peer).error == WireError.GROUP_MAX_SIZE_REACHED


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Busy(ErrorCode.BUSY, "too many members"), WireError.THROTTLING_QUOTA_EXCEEDED),
        (Busy(ErrorCode.BUSY, "the log is behind", retry_after_ms=50), WireError.COORDINATOR_LOAD_IN_PROGRESS),
        (Unavailable(ErrorCode.STOPPING, "stopping"), WireError.NOT_COORDINATOR),
        (Unavailable(ErrorCode.UNREACHABLE, "unreachable"), WireError.NOT_COORDINATOR),
        (Missing(ErrorCode.MEMBER_MISSING, "no such member"), WireError.UNKNOWN_MEMBER_ID),
    ],
)
def test_temporary_errors_of_groups_use_codes_that_clients_retry(error: BrokerError, code: WireError) -> None:
    """A client does not retry the error of a full group, nor any that mentions a leader."""
    assert group_error(error) is code


def test_assignments_of_another_protocol_or_generation(peer: Asker) -> None:
    member = member_of(peer)
    assert sync(peer, member, 1, protocol_name="other").error == WireError.INCONSISTENT_GROUP_PROTOCOL
    assert sync(peer, member, 2).error == WireError.ILLEGAL_GENERATION
    assert sync(peer, "x", 1).error == WireError.UNKNOWN_MEMBER_ID


def test_a_static_member_returns_under_another_id(peer: Asker) -> None:
    first = join(peer, instance_id="i")
    assert (first.error, first.generation_id) == (WireError.NONE, 1)
    sync(peer, first.member_id, 1, instance_id="i")
    again = join(peer, instance_id="i")
    assert (again.error, again.generation_id, again.skip_assignment) == (WireError.NONE, 1, True)
    assert again.member_id != first.member_id
    beat = {"group_id": "g", "generation_id": 1, "instance_id": "i"}
    assert peer.ask(Api.HEARTBEAT, 4, member_id=first.member_id, **beat).error == WireError.FENCED_INSTANCE_ID
    assert peer.ask(Api.HEARTBEAT, 4, member_id=again.member_id, **beat).error == WireError.NONE


def test_a_name_with_members_of_another_protocol_is_refused(peer: Asker) -> None:
    peer.broker.groups.join("g", "t", "m", wire="flux")
    assert join(peer).error == WireError.INCONSISTENT_GROUP_PROTOCOL


def test_silent_members_are_removed(peer: Asker) -> None:
    member = member_of(peer)
    peer.memory.advance(11)
    beat = peer.ask(Api.HEARTBEAT, 4, group_id="g", generation_id=1, member_id=member)
    assert beat.error == WireError.UNKNOWN_MEMBER_ID


def topics_of(metadata: bytes) -> frozenset[str]:
    return read([("range", metadata)]).topics


def test_topics_of_a_subscription() -> None:
    for version in range(4):
        assert topics_of(subscription("a", "é", version=version)) == {"a", "é"}
    whole = subscription("a", "bc")
    for cut in range(len(whole) - 4):
        assert topics_of(whole[:cut]) == frozenset()
    for broken in (b"", b"\xff" * 6, b"\0\3\x7f\xff\xff\xff", b"\0\0\0\0\0\1\0\1\xff"):
        assert topics_of(broken) == frozenset()


def test_invalid_subscription_metadata_does_not_prevent_joining(peer: Asker) -> None:
    member_of(peer, protocols=[schema.request(JOIN).Protocols(name="range", metadata=b"\xff\xff\xff\xff\xff\xff")])


def test_groups_of_other_types_behave_the_same(peer: Asker) -> None:
    protocols = [schema.request(JOIN).Protocols(name="default", metadata=b"worker")]
    member = member_of(peer, protocol_type="connect", protocols=protocols)
    answer = sync(peer, member, 1, protocol_type="connect", protocol_name="default")
    assert bytes(answer.assignment) == b"mine"


def complete(*topics: str, owned: tuple[tuple[str, tuple[int, ...]], ...] = (), version: int = 3) -> bytes:
    """Return a subscription with every field of its version."""
    reading = struct.pack(">i", len(owned))
    for topic, numbers in owned:
        name = topic.encode()
        reading += struct.pack(f">h{len(name)}si{len(numbers)}i", len(name), name, len(numbers), *numbers)
    return (
        subscription(*topics, version=version) + (reading if version else b"") + (b"\xff\xff\xff\xff" * (version > 1))
    )


def protocol(name: str, metadata: bytes) -> Any:
    return schema.request(JOIN).Protocols(name=name, metadata=metadata)


@pytest.mark.parametrize("version", range(4))
@pytest.mark.parametrize("name", ["range", "roundrobin", "RoundRobinAssigner", "sticky", "cooperative-sticky"])
def test_a_member_in_a_group_of_several_protocols_is_assigned_by_the_broker(
    peer: Asker, name: str, version: int
) -> None:
    count = len(peer.broker.topic("t").partitions)
    assert peer.broker.groups.join("g", "t", "z", wire="flux").partitions == tuple(range(count))
    given = join(peer, protocols=[protocol(name, complete("t", version=version))])
    joined = join(peer, given.member_id, protocols=[protocol(name, complete("t", version=version))])
    assert (joined.error, joined.leader, joined.members, joined.protocol_name) == (WireError.NONE, "broker", [], name)
    answer = sync(peer, given.member_id, joined.generation_id, protocol_name=name)
    mine = range(0, count, 2)
    expected = struct.pack(f">hihsi{len(mine)}ii", 0, 1, 1, b"t", len(mine), *mine, -1)
    assert (answer.error, bytes(answer.assignment)) == (WireError.NONE, expected)
    place = peer.broker.groups.join("g", "t", "z", wire="flux")
    assert place.partitions == tuple(range(1, count, 2))
    peer.broker.groups.leave("g", "t", "z", place.generation, wire="flux")
    beat = {"group_id": "g", "generation_id": joined.generation_id, "member_id": given.member_id}
    assert peer.ask(Api.HEARTBEAT, 4, **beat).error == WireError.REBALANCE_IN_PROGRESS
    alone = join(peer, given.member_id, protocols=[protocol(name, complete("t", version=version))])
    assert alone.leader == given.member_id


@pytest.mark.parametrize(
    ("name", "metadata"),
    [("mine", complete("t")), ("range", complete("t")[:-6]), ("range", complete("t", owned=(("t", (1, 2)),))[:-12])],
)
def test_a_member_that_cannot_be_assigned_is_refused_in_a_shared_group(peer: Asker, name: str, metadata: bytes) -> None:
    peer.broker.groups.join("g", "t", "z", wire="flux")
    refused = join(peer, protocols=[protocol(name, metadata)])
    assert refused.error == WireError.INCONSISTENT_GROUP_PROTOCOL


def test_owned_partitions_are_read_from_subscriptions() -> None:
    both = complete("t", owned=(("t", (1, 2)), ("u", ())))
    cooperative = read([("cooperative-sticky", both)])
    assert cooperative.is_known
    assert cooperative.topics == {"t"}
    assert dict(cooperative.owned) == {"t": (1, 2), "u": ()}
    eager = read([("range", both), ("cooperative-sticky", both)])
    assert (dict(eager.owned), eager.is_known) == ({}, True)
    for cut in range(len(both) - 4):
        assert not read([("range", both[:cut])]).is_known


def test_assignments_round_trip() -> None:
    for partitions in ({}, {"t": [0, 5]}, {"t": [], "é": [2]}):
        written = WRITING.encode(partitions)
        assert {topic: list(held) for topic, held in WRITING.decode(written).items()} == partitions
        for cut in range(len(written) - 4):
            WRITING.decode(written[:cut])
    assert WRITING.decode(b"\0\0\x7f\xff\xff\xff") == {}
    assert WRITING.decode(struct.pack(">hih1si", 0, 1, 1, b"t", 2**31 - 1)) == {}


def protocols_of(*topics: str) -> list[Any]:
    return [schema.request(JOIN).Protocols(name="range", metadata=subscription(*topics))]


def wide_peer() -> tuple[Asker, list[str]]:
    """Return a client of a broker with many topics, and the topics."""
    memory = MemoryBroker()
    topics = [f"t{number}" for number in range(AT_ONCE_MAX + 10)]
    for topic in topics:
        memory.broker.ensure_topic(topic)
    return Asker(memory), topics


def wide_join(peer: Asker, topics: list[str], member: str = "") -> Reported:
    return begin_join(peer, member, protocols=protocols_of(*topics))


def test_many_topics_of_a_member_are_checked_in_slices() -> None:
    peer, topics = wide_peer()
    reported = wide_join(peer, topics)
    assert not reported.bodies, "other requests go first"
    peer.memory.run()
    member = reported.body.member_id
    joined = wide_join(peer, topics, member)
    peer.memory.run()
    assert joined.body.error == WireError.NONE
    synced = begin_sync(peer, member, joined.body.generation_id)
    assert not synced.bodies
    peer.memory.run()
    assert synced.body.assignment == b"mine"
    beaten = peer.begin(Api.HEARTBEAT, 4, group_id="g", generation_id=joined.body.generation_id, member_id=member)
    left = peer.begin(Api.LEAVE_GROUP, 2, group_id="g", member_id=member)
    assert not beaten.bodies
    assert not left.bodies
    peer.memory.run()
    assert (beaten.body.error, left.body.error) == (WireError.NONE, WireError.NONE)
    assert peer.broker.classic.subscribed_topics("g") == frozenset()


def test_a_member_needs_permission_for_all_of_its_many_topics() -> None:
    peer, topics = wide_peer()
    refused = []

    def authorize(action: Action, where: Where = None) -> None:
        if isinstance(where, Topic):
            refused.append(where.name.full)
        if len(refused) == len(topics):
            raise Denied(ErrorCode.DENIED, "not allowed")

    peer.authorize = authorize  # type: ignore[method-assign]
    reported = wide_join(peer, topics)
    peer.memory.run()
    assert reported.body.error == WireError.GROUP_AUTHORIZATION_FAILED
    assert sorted(refused) == sorted(topics)
    assert peer.broker.classic.view("g") is None


def test_a_closed_connection_joins_no_group() -> None:
    peer, topics = wide_peer()
    reported = wide_join(peer, topics)
    assert reported.cancel is not None
    reported.cancel()
    peer.memory.run()
    assert not reported.bodies
    assert peer.broker.classic.view("g") is None


def test_the_number_of_topics_of_a_group_is_bounded(peer: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classic, "TOPICS_MAX", 3)
    member = member_of(peer, protocols=protocols_of("t", "u"))
    assert join(peer, protocols=protocols_of("t", "u")).error == WireError.GROUP_MAX_SIZE_REACHED
    assert join(peer, member, protocols=protocols_of("t", "u", "v")).error == WireError.NONE, (
        "instead of its subscription"
    )
    assert join(peer, member, protocols=protocols_of("t", "u", "v", "w")).error == WireError.GROUP_MAX_SIZE_REACHED
    assert join(peer, member, protocols=protocols_of("w")).error == WireError.NONE
    assert peer.broker.classic.subscribed_topics("g") == {"w"}
