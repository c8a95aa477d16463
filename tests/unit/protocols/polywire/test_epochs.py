"""Publishes that commit offsets of groups with their records, and epochs that fence a writer's earlier processes."""

from __future__ import annotations

import pytest

from polywire.broker.access import ConfiguredUser
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import EVERYTHING, parse_grants
from polywire.broker.settings import BrokerSettings
from polywire.errors import Conflict, Denied, ErrorCode, Invalid, Missing
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Head, Verb
from tests.unit.protocols.polywire.peer import Peer, batch_of
from tests.unit.protocols.polywire.test_auth import log_in

TOKEN, OTHER = b"1" * 16, b"2" * 16
HASH = hash_password("wonderland")


@pytest.fixture
def peer() -> Peer:
    return made()


def made(settings: BrokerSettings | None = None) -> Peer:
    peer = Peer(settings)
    for name in ("in", "out"):
        peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic(name, 2)).decode(messages.TopicDescription)
    return peer


def begin(peer: Peer, writer: str = "w", epoch_min: int = 0) -> int:
    return peer.ask(Verb.BEGIN_EPOCH, messages.BeginEpoch(writer, epoch_min)).decode(messages.EpochBegun).epoch


def stage(peer: Peer, token: bytes = TOKEN, writer: str = "", number: int = 0) -> None:
    head = messages.Stage(token, "out", 0, writer=writer, number=number)
    peer.ask(Verb.STAGE, head, batch_of(b"v")).decode(messages.Staged)


def publish(
    peer: Peer, number: int, *groups: messages.GroupOffsets, tokens: list[bytes] | None = None, epoch: int = 0
) -> messages.Published:
    head = messages.Publish("w", number, [TOKEN] if tokens is None else tokens, list(groups), epoch)
    return peer.ask(Verb.PUBLISH, head).decode(messages.Published)


def offsets(
    values: dict[int, int], *, name: str = "in", member: str = "", generation: int = -1
) -> messages.GroupOffsets:
    return messages.GroupOffsets(name, "g", member, generation, values)


def position(peer: Peer, partition: int = 0) -> int | None:
    head = messages.AskPosition("in", partition, 1, "g")
    return peer.ask(Verb.POSITION, head).decode(messages.Position).offset


def stored(peer: Peer) -> int:
    [topic] = peer.ask(Verb.BOUNDS, messages.AskBounds(["out"])).decode(messages.BoundsList).topics
    return sum(partition.next_offset for partition in topic.partitions)


def test_records_and_offsets_are_published_together_and_once(peer: Peer) -> None:
    stage(peer)
    assert not publish(peer, 1, offsets({0: 7, 1: 9})).duplicate
    assert (stored(peer), position(peer), position(peer, 1)) == (1, 7, 9)
    peer.ask(Verb.COMMIT, messages.Commit("in", 0, 1, "g", 8)).decode(Head)
    assert publish(peer, 1, offsets({0: 7, 1: 9})).duplicate
    assert (stored(peer), position(peer)) == (1, 8)


def test_a_rejected_offset_publishes_nothing(peer: Peer) -> None:
    joined = peer.ask(Verb.JOIN, messages.Join("g", "in", "m")).decode(messages.Membership)
    stage(peer)
    generation = joined.generation
    for groups, code in [
        ([offsets({0: 1}, member="m", generation=generation + 1)], ErrorCode.GENERATION_STALE),
        ([offsets({0: 1}, member="other", generation=generation)], ErrorCode.MEMBER_MISSING),
        ([offsets({5: 1}, member="m", generation=generation)], ErrorCode.PARTITION_MISSING),
        ([offsets({0: 1}), offsets({1: 1}, name="gone")], ErrorCode.TOPIC_MISSING),
        ([offsets({0: 1}), offsets({1: 1})], ErrorCode.INVALID_REQUEST),
    ]:
        with pytest.raises((Conflict, Missing, Invalid)) as caught:
            publish(peer, 1, *groups)
        assert caught.value.code is code
        assert (stored(peer), position(peer)) == (0, None)
    other = peer.ask(Verb.JOIN, messages.Join("g", "in", "n")).decode(messages.Membership)
    with pytest.raises(Conflict, match="not assigned to this member"):
        publish(peer, 1, offsets(dict.fromkeys(other.partitions, 1), member="m", generation=other.generation))
    publish(peer, 1, offsets(dict.fromkeys(other.partitions, 3), member="n", generation=other.generation))
    assert (stored(peer), position(peer, other.partitions[0])) == (1, 3)


def test_offsets_have_a_limit() -> None:
    peer = made(BrokerSettings(transaction_positions_max=1))
    stage(peer)
    with pytest.raises(Invalid, match="too many offsets"):
        publish(peer, 1, offsets({0: 1, 1: 1}))
    publish(peer, 1, offsets({0: 1}))


def test_a_new_epoch_fences_earlier_ones(peer: Peer) -> None:
    assert begin(peer) == 1
    stage(peer)
    assert not publish(peer, 1, epoch=1).duplicate
    assert begin(peer) == 2
    stage(peer)
    for number in (1, 2):  # the retry of a publish, and another one
        with pytest.raises(Conflict) as caught:
            publish(peer, number, offsets({0: 1}), epoch=1)
        assert caught.value.code is ErrorCode.PRODUCER_FENCED
        assert "current_epoch=2" in caught.value.message
    assert (stored(peer), position(peer)) == (1, None)
    assert not publish(peer, 1, epoch=2).duplicate
    assert publish(peer, 1, tokens=[], epoch=2).duplicate


def test_an_epoch_begins_above_the_minimum(peer: Peer) -> None:
    assert begin(peer, epoch_min=5) == 5
    assert begin(peer, epoch_min=5) == 6
    with pytest.raises(Invalid):
        begin(peer, epoch_min=2**63 - 1)
    assert begin(peer) == 7


def test_batches_of_a_fenced_process_are_dropped(peer: Peer) -> None:
    epoch = begin(peer)
    stage(peer, TOKEN, "w", 1)
    stage(peer, OTHER, "x", 1)
    assert begin(peer) == epoch + 1
    with pytest.raises(Missing) as caught:
        publish(peer, 1, epoch=epoch + 1)
    assert caught.value.code is ErrorCode.STAGE_MISSING
    assert not publish(peer, 1, tokens=[OTHER], epoch=epoch + 1).duplicate


def test_a_writer_is_fenced_only_by_its_owner() -> None:
    peer = made()
    peer.broker.access.configure(
        [ConfiguredUser("alice", HASH, EVERYTHING), ConfiguredUser("bob", HASH, parse_grants(["produce"]))]
    )
    bob = peer.another()
    for connection, name in ((peer, "alice"), (bob, "bob")):
        log_in(connection, name)
    begin(peer)
    with pytest.raises(Denied):
        begin(bob)
    begin(bob, "x")
    with pytest.raises(Denied):
        bob.ask(Verb.PUBLISH, messages.Publish("x", 1, [], [offsets({0: 1})], 1)).decode(messages.Published)
    assert position(peer) is None
