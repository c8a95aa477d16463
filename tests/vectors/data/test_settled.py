"""Members of settled classic groups continue after a kill of the broker as if nothing had happened (decision 0118)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, WireError
from tests.unit.protocols.kafka.test_groups import subscription
from tests.vectors.data.test_data import LOG, Kept
from tests.vectors.data.test_newer import TOPIC, login
from tests.vectors.data.world import StoredWorld

SETTLED: Final = {
    "settled-static": "first",
    "settled-dynamic": None,
    "settled-later": "second",
}  # later: than the snapshot
GENERATION: Final = 1
OFFSET: Final = 1


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StoredWorld]:
    kept = Kept("state-4", tmp_path / "data")
    world = StoredWorld(kept.path, kept.written_at_us, LOG)
    world.run()
    yield world
    world.broker.close()


def member_of(world: StoredWorld, group: str) -> str:
    view = world.broker.classic.view(group)
    assert view is not None
    (member,) = view.members
    assert member.instance_id == SETTLED[group]
    return member.id


def commit(peer: Any, group: str, member: str, generation: int) -> WireError:
    topics = schema.request(Api.OFFSET_COMMIT).Topics
    asked = [topics(name=TOPIC, partitions=[topics.Partitions(index=0, offset=OFFSET)])]
    reported = peer.ask(Api.OFFSET_COMMIT, 8, group_id=group, member_id=member, generation=generation, topics=asked)
    return WireError(reported.topics[0].partitions[0].error)


@pytest.mark.parametrize("group", SETTLED)
def test_members_continue_in_their_generation(world: StoredWorld, group: str) -> None:
    peer, member = login(world), member_of(world, group)
    asked = {"group_id": group, "generation_id": GENERATION, "member_id": member, "instance_id": SETTLED[group]}
    assert peer.ask(Api.HEARTBEAT, 4, **asked).error == WireError.NONE
    reported = peer.ask(Api.SYNC_GROUP, 5, **asked, protocol_type="consumer", protocol_name="range", assignments=[])
    assert (reported.error, bytes(reported.assignment)) == (WireError.NONE, b"of " + group.encode())
    assert commit(peer, group, member, GENERATION) == WireError.NONE
    assert commit(peer, group, member, GENERATION - 1) == WireError.ILLEGAL_GENERATION


@pytest.mark.parametrize("group", [group for group, instance in SETTLED.items() if instance])
def test_a_static_member_returns_under_another_id(world: StoredWorld, group: str) -> None:
    peer, member = login(world), member_of(world, group)
    protocol = schema.request(Api.JOIN_GROUP).Protocols(name="range", metadata=subscription(TOPIC))
    asked = {"group_id": group, "session_timeout_ms": 30_000, "rebalance_timeout_ms": 60_000, "member_id": ""}
    joined = peer.ask(
        Api.JOIN_GROUP, 7, **asked, instance_id=SETTLED[group], protocol_type="consumer", protocols=[protocol]
    )
    assert (joined.error, joined.generation_id) == (WireError.NONE, GENERATION)
    assert joined.member_id != member
    assert commit(peer, group, member, GENERATION) == WireError.UNKNOWN_MEMBER_ID
    assert commit(peer, group, joined.member_id, GENERATION) == WireError.NONE


def test_a_group_about_to_rebalance_is_not_restored(world: StoredWorld) -> None:
    assert world.broker.classic.view("unsettled") is None
