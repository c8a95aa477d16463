"""Offsets of groups in every version (spec: kafka#offsetcommit, kafka#offsetfetch, kafka#deleting-groups)."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import SERVED, Api, WireError
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import PositionKind
from tests.unit.protocols.kafka.group_dialogue import Asker
from tests.unit.protocols.kafka.test_groups import join, member_of, sync, versions

COMMIT, FETCH = Api.OFFSET_COMMIT, Api.OFFSET_FETCH
NO_TOPIC = b"\1" * 16


@pytest.fixture
def peer() -> Asker:
    memory = MemoryBroker()
    memory.broker.ensure_topic("t")
    memory.broker.ensure_topic("u")
    return Asker(memory)


def named(peer: Asker, topic: str, version: int) -> dict[str, Any]:
    """Return a topic's name or id, as the version requires."""
    if version < 10:
        return {"name": topic}
    found = peer.memory.broker.find_topic(topic)
    return {"topic_id": NO_TOPIC if found is None else found.id}


def commit(
    peer: Asker,
    topic: str = "t",
    index: int = 0,
    offset: int = 5,
    *,
    version: int = 8,
    metadata: str | None = "",
    leader_epoch: int = -1,
    **fields: Any,
) -> WireError:
    """Commit one offset; return its error."""
    made = schema.request(COMMIT).Topics
    one = made.Partitions(index=index, offset=offset, leader_epoch=leader_epoch, metadata=metadata)
    topics = [made(**named(peer, topic, version), partitions=[one])]
    answer = peer.ask(COMMIT, version, **({"group_id": "g", "topics": topics} | fields))
    [[entry]] = [reported.partitions for reported in answer.topics]
    assert entry.index == index
    return WireError(entry.error)


def fetch(peer: Asker, topics: dict[str, list[int]] | None, *, version: int = 8, group: str = "g") -> Any:
    """Return topics of the response, by name or id, with (offset, epoch, metadata, error) by partition."""
    if version < 8:
        made = schema.request(FETCH).Topics
        asked = None if topics is None else [made(name=name, indexes=numbers) for name, numbers in topics.items()]
        answer = peer.ask(FETCH, version, group_id=group, topics=asked)
    else:
        made = schema.request(FETCH).Groups
        asked = (
            None
            if topics is None
            else [made.Topics(**named(peer, name, version), indexes=numbers) for name, numbers in topics.items()]
        )
        [answer] = peer.ask(FETCH, version, groups=[made(group_id=group, topics=asked)]).groups
        assert answer.group_id == group
    assert answer.error == WireError.NONE
    return {
        (reported.topic_id if version >= 10 else reported.name): {
            one.index: (one.offset, one.leader_epoch, one.metadata, one.error) for one in reported.partitions
        }
        for reported in answer.topics
    }


@pytest.mark.parametrize("version", versions(COMMIT))
def test_commits_in_every_version(peer: Asker, version: int) -> None:
    epoch = 3 if version >= 6 else -1
    assert commit(peer, version=version, metadata="where", leader_epoch=epoch) is WireError.NONE
    assert fetch(peer, {"t": [0, 1]}) == {"t": {0: (5, epoch, "where", 0), 1: (-1, -1, "", 0)}}
    missing = WireError.UNKNOWN_TOPIC_ID if version >= 10 else WireError.UNKNOWN_TOPIC_OR_PARTITION
    assert commit(peer, "missing", version=version) is missing
    assert commit(peer, index=3, version=version) is WireError.UNKNOWN_TOPIC_OR_PARTITION
    assert commit(peer, index=-1, version=version) is WireError.UNKNOWN_TOPIC_OR_PARTITION
    assert commit(peer, metadata="x" * 4097, version=version) is WireError.OFFSET_METADATA_TOO_LARGE
    assert commit(peer, metadata="x" * 4096, version=version) is WireError.NONE
    assert commit(peer, metadata=None, version=version) is WireError.NONE


@pytest.mark.parametrize("version", versions(FETCH))
def test_fetches_in_every_version(peer: Asker, version: int) -> None:
    commit(peer, leader_epoch=2, metadata="m")
    commit(peer, "u", 1, 9)
    epoch = 2 if version >= 5 else -1
    key = {topic: named(peer, topic, version).get("topic_id", topic) for topic in ("t", "u")}
    assert fetch(peer, {"t": [0]}, version=version) == {key["t"]: {0: (5, epoch, "m", 0)}}
    assert fetch(peer, {"t": [7]}, version=version, group="unknown") == {key["t"]: {7: (-1, -1, "", 0)}}
    unknown = WireError.UNKNOWN_TOPIC_ID if version >= 10 else WireError.NONE
    [reported] = fetch(peer, {"missing": [0]}, version=version).values()
    assert reported == {0: (-1, -1, "", unknown)}
    if version >= 2:
        everything = {key["t"]: {0: (5, epoch, "m", 0)}, key["u"]: {1: (9, -1, "", 0)}}
        assert fetch(peer, None, version=version) == everything
        assert fetch(peer, None, version=version, group="unknown") == {}


def test_any_offset_can_be_committed(peer: Asker) -> None:
    for offset in (10**12, 0, -7, 2**63 - 1):
        assert commit(peer, offset=offset) is WireError.NONE
        assert fetch(peer, {"t": [0]})["t"][0][0] == offset


def test_while_there_are_members_only_they_commit(peer: Asker) -> None:
    member = member_of(peer)
    mine: dict[str, Any] = {"generation": 1, "member_id": member}
    assert commit(peer, **mine) is WireError.REBALANCE_IN_PROGRESS
    sync(peer, member, 1)
    assert commit(peer, **mine) is WireError.NONE
    assert commit(peer) is WireError.UNKNOWN_MEMBER_ID
    assert commit(peer, **mine | {"generation": 2}) is WireError.ILLEGAL_GENERATION
    assert commit(peer, **mine | {"member_id": "x"}) is WireError.UNKNOWN_MEMBER_ID
    join(peer)
    assert commit(peer, **mine) is WireError.NONE


def test_an_unknown_generation_is_refused(peer: Asker) -> None:
    assert commit(peer, generation=1, member_id="x") is WireError.ILLEGAL_GENERATION
    assert commit(peer, group_id="") is WireError.INVALID_GROUP_ID


def test_offsets_are_shared_by_all_protocols(peer: Asker) -> None:
    peer.broker.commit_position("t", 1, PositionKind.GROUP, "g", 3)
    assert fetch(peer, None) == {"t": {1: (3, -1, "", 0)}}
    commit(peer, index=1, offset=8)
    assert peer.broker.position("t", 1, PositionKind.GROUP, "g") == 8


def test_offsets_survive_a_restart(peer: Asker) -> None:
    commit(peer, metadata="m", leader_epoch=1)
    peer.memory.restart()
    assert fetch(peer, None) == {"t": {0: (5, 1, "m", 0)}}


def delete(peer: Asker, *topics: str, group: str = "g") -> Any:
    made = schema.request(Api.OFFSET_DELETE).Topics
    asked = [made(name=topic, partitions=[made.Partitions(index=0)]) for topic in topics]
    return peer.ask(Api.OFFSET_DELETE, 0, group_id=group, topics=asked)


def test_single_offsets_are_deleted(peer: Asker) -> None:
    commit(peer)
    commit(peer, "u")
    answer = delete(peer, "t", "missing")
    assert [one.error for reported in answer.topics for one in reported.partitions] == [
        0,
        WireError.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert list(fetch(peer, None)) == ["u"]
    assert delete(peer, "t", group="unknown").error == WireError.GROUP_ID_NOT_FOUND


def test_offsets_in_use_by_members_are_not_deleted(peer: Asker) -> None:
    commit(peer)
    commit(peer, "u")
    member_of(peer)
    answer = delete(peer, "t", "u")
    assert [one.error for reported in answer.topics for one in reported.partitions] == [
        WireError.GROUP_SUBSCRIBED_TO_TOPIC,
        0,
    ]


def test_many_groups_are_fetched_at_once(peer: Asker) -> None:
    commit(peer)
    made = schema.request(FETCH).Groups
    groups = [made(group_id=name, topics=None) for name in ("g", "other")]
    answer = peer.ask(FETCH, SERVED[FETCH].last, groups=groups, require_stable=True)
    assert [(group.group_id, len(group.topics)) for group in answer.groups] == [("g", 1), ("other", 0)]
