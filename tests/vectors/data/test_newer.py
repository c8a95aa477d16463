"""State of Kafka clients in a stored data directory: transactions, members and SCRAM logins continue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from polywire.broker.scram import Mechanism
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import decode_batches
from polywire.protocols.kafka.messages import Api, WireError
from tests.unit.protocols.kafka.test_auth import scram
from tests.unit.protocols.kafka.transaction_dialogue import Producer
from tests.vectors.data.test_data import LOG, Kept
from tests.vectors.data.world import StoredWorld

TOPIC: Final = "next-topic"
PASSWORD: Final = "pencil"  # of the user called scott


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StoredWorld]:
    kept = Kept("state-3", tmp_path / "data")
    world = StoredWorld(kept.path, kept.written_at_us, LOG)
    world.run()
    yield world
    world.broker.close()


def login(world: StoredWorld, name: str = "scott") -> Any:
    """Return a connection of this user."""
    peer = world.connect()
    answer, signature = scram(peer, Mechanism.SHA_512, name, PASSWORD)
    assert (answer.error, bytes(answer.auth_bytes)) == (WireError.NONE, signature)
    return peer


def values(peer: Any, partition: int) -> list[bytes | None]:
    """Return what can be read of a partition, in as many responses as necessary."""
    asked = schema.request(Api.FETCH).Topics
    found: list[bytes | None] = []
    while True:
        entries = [asked.Partitions(partition=partition, fetch_offset=len(found), partition_max_bytes=1 << 20)]
        answer = peer.ask(Api.FETCH, 12, topics=[asked(topic=TOPIC, partitions=entries)])
        records = decode_batches(answer.responses[0].partitions[0].records or b"", offset=len(found))
        if not records:
            return found
        found += [record.value for record in records]


def position(peer: Any, group: str, partition: int, topic: str = TOPIC) -> tuple[int, str | None]:
    asked = schema.request(Api.OFFSET_FETCH).Topics(name=topic, indexes=[partition])
    entry = peer.ask(Api.OFFSET_FETCH, 7, group_id=group, topics=[asked]).topics[0].partitions[0]
    return entry.offset, entry.metadata


@pytest.mark.parametrize("mechanism", Mechanism)
def test_scram_logs_in_with_stored_verifiers(world: StoredWorld, mechanism: Mechanism) -> None:
    answer, signature = scram(world.connect(), mechanism, "scott", PASSWORD)
    assert (answer.error, bytes(answer.auth_bytes)) == (WireError.NONE, signature)
    refused, _ = scram(world.connect(), mechanism, "scott", "tiger")
    assert refused.error == WireError.SASL_AUTHENTICATION_FAILED


def test_only_committed_records_and_offsets_are_there(world: StoredWorld) -> None:
    peer = login(world)
    assert [values(peer, number) for number in range(3)] == [[b"committed a", b"committed b"], [b"committed c"], []]
    assert position(peer, "done-group", 0) == (5, "m")
    assert position(peer, "done-other-group", 0, "next-other") == (6, "m")
    assert position(peer, "gone-group", 0)[0] == position(peer, "open-group", 0)[0] == -1


OPEN: Final = {
    "open-sealed": (12884901891, 2, b"undecided sealed"),
    "open-journal": (12884901892, 1, b"undecided in the journal"),
}


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize("commits", [True, False], ids=["committed", "aborted"])
def test_an_open_transaction_ends(world: StoredWorld, name: str, commits: bool) -> None:
    peer = login(world)
    number, partition, value = OPEN[name]
    before = values(peer, partition)
    assert Producer(peer, name, number, 0).end(commits=commits, version=3) == 0
    assert values(peer, partition) == before + [value] * commits
    if name == "open-sealed":
        assert position(peer, "open-group", 0)[0] == (7 if commits else -1)


def test_a_fenced_producer_stays_fenced(world: StoredWorld) -> None:
    peer = login(world)
    assert Producer(peer, "fenced", 12884901893, 0).add(0, topic=TOPIC) == [WireError.PRODUCER_FENCED]
    assert Producer(peer, "fenced", 12884901893, 1).add(0, topic=TOPIC) == [0]


def test_members_of_a_newer_group_return(world: StoredWorld) -> None:
    peer = login(world)
    assert position(peer, "next-group", 0) == (4, "of a newer member")
    assert position(peer, "next-group", 2)[0] == 2
    assert position(peer, "classic-group", 1, "next-other") == (3, "of a classic member")
    view = world.broker.groups.view("next-group", TOPIC)
    assert view is not None
    assert [member.id for member in view.members] == ["m1", "m2"]
    asked = {"group_id": "next-group", "member_id": "m1", "member_epoch": 0, "rebalance_timeout_ms": 60_000}
    joined = peer.ask(
        Api.CONSUMER_GROUP_HEARTBEAT, 1, **asked, subscribed_topic_names=[TOPIC, "next-other"], topic_partitions=[]
    )
    assert joined.error == WireError.NONE
    held = {number for topic in joined.assignment.topic_partitions for number in topic.partitions}
    assert held <= {0, 1, 2}
    assert held
    shared = world.broker.groups.view("shared-group", TOPIC)
    assert shared is not None
    assert {(member.id, member.wire) for member in shared.members} == {("native", "polywire"), ("m3", "kafka")}
