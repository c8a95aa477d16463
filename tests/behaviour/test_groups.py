"""Groups, members and offsets, over every protocol that has them."""

from __future__ import annotations

import pytest

from polywire.client.base import Ability
from polywire.errors import BrokerError, Conflict
from polywire.records.columns import Record
from tests.behaviour.compatibility import needs
from tests.behaviour.conftest import WireClients, share, shared_group


@needs(Ability.GROUPS)
async def test_one_member_owns_everything(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    await client.produce(topic, [Record(value=b"v", key=b"k")])
    membership = await client.join(f"group-of-{topic}", topic, "m1")
    assert membership.partitions == (0, 1, 2)


@needs(Ability.GROUPS, Ability.GENERATIONS)
async def test_two_members_share_without_overlap(clients: WireClients, topic: str) -> None:
    first, second = await clients.open(), await clients.open()
    await first.produce(topic, [Record(value=b"v", key=b"k")])
    group = f"group-of-{topic}"
    before = await first.join(group, topic, "m1")
    two = await second.join(group, topic, "m2")
    assert two.generation > before.generation
    with pytest.raises(Conflict):
        await first.heartbeat(group, topic, "m1", before.generation)
    two, one = await share(group, topic, {"m2": second, "m1": first})
    assert await second.heartbeat(group, topic, "m2", two.generation) == two
    assert await first.heartbeat(group, topic, "m1", one.generation) == one


@needs(Ability.GROUPS)
async def test_a_member_that_leaves_releases_its_partitions(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    await client.produce(topic, [Record(value=b"v", key=b"k")])
    group = f"group-of-{topic}"
    await client.join(group, topic, "m1")
    two = await client.join(group, topic, "m2")
    await client.leave(group, topic, "m2", two.generation)
    again = await client.join(group, topic, "m1")
    assert again.partitions == (0, 1, 2)


@needs(Ability.GENERATIONS, Ability.POSITIONS)
async def test_commits_are_fenced_by_generation_and_owner(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    await client.produce(topic, [Record(value=b"v", key=b"k")])
    group = f"group-of-{topic}"
    old = await client.join(group, topic, "m1")
    await client.commit(group, topic, 0, 1, member="m1", generation=old.generation)
    two, one = await share(group, topic, {"m2": client, "m1": client})
    with pytest.raises(BrokerError):
        await client.commit(group, topic, one.partitions[0], 2, member="m1", generation=old.generation)
    with pytest.raises(BrokerError):
        await client.commit(group, topic, two.partitions[0], 2, member="m1", generation=one.generation)
    assert await client.position(group, topic, 0) == 1


@needs(Ability.GENERATIONS, Ability.POSITIONS, Ability.AT_ONCE)
async def test_commits_are_fenced_before_their_member_knows(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    await client.produce(topic, [Record(value=b"v", key=b"k")])
    group = f"group-of-{topic}"
    old = await client.join(group, topic, "m1")
    await client.join(group, topic, "m2")
    with pytest.raises(BrokerError):
        await client.commit(group, topic, 0, 2, member="m1", generation=old.generation)


@needs(Ability.GROUPS, Ability.POSITIONS)
async def test_an_offset_never_committed(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    await client.produce(topic, [Record(value=b"v", key=b"k")])
    assert await client.position(f"group-of-{topic}", topic, 0) in (None, 0)


@needs(Ability.GENERATIONS, Ability.POSITIONS)
async def test_members_of_different_protocols_share_a_group(
    writers: WireClients, readers: WireClients, topic: str
) -> None:
    one, two = await writers.open(), await readers.open()
    await one.produce(topic, [Record(value=b"v", key=b"k")])
    group = await shared_group(writers, readers, topic)
    before = await one.join(group, topic, "m1")
    await two.join(group, topic, "m2")
    with pytest.raises(BrokerError):
        await one.heartbeat(group, topic, "m1", before.generation)
    second, first = await share(group, topic, {"m2": two, "m1": one})
    owned = second.partitions[0]
    await two.commit(group, topic, owned, 1, member="m2", generation=second.generation)
    assert await one.position(group, topic, owned) == 1
    with pytest.raises(BrokerError):
        await one.commit(group, topic, owned, 2, member="m1", generation=first.generation)
    await two.leave(group, topic, "m2", second.generation)
    assert (await one.join(group, topic, "m1")).partitions == (0, 1, 2)
