"""The replication factor of a topic, and the number of replicas that ``acks=all`` waits for."""

from __future__ import annotations

import pytest

from polywire.errors import Invalid
from polywire.protocols.flux.context import FluxSettings
from polywire.server.config import ServeConfig
from tests.unit.protocols.flux.dialogue import Dialogue, World


def reported(peer: Dialogue, topic: str, replica: int, offset: int = 0) -> str:
    return peer.ask(f"V1|1|REPLICA_FETCH|{topic} 1 {replica} {offset}").removeprefix("V1|1|")


NO_REPLICA = "ERR|BAD_REQUEST|invalid replica id"


@pytest.mark.parametrize("factor", [1, 2, 3, 5])
def test_followers_match_the_factor_of_the_topic(factor: int) -> None:
    world = World()
    peer = world.connect()
    peer.ask(f"V1|1|ADMIN_CREATE_TOPIC|t 3 {factor}")
    peer.ask("V1|1|PRODUCE|t a:x")
    for restart in (False, True):
        if restart:
            world.restart()
            peer = world.connect()
        for replica in range(1, factor):
            assert reported(peer, "t", replica).startswith(f"OK|replica={replica} "), restart
        assert reported(peer, "t", factor) == NO_REPLICA
        assert reported(peer, "t", 0) == NO_REPLICA
    topic = world.memory.broker.topic("t")
    assert topic.settings.replication_factor == factor
    assert peer.ask(f"V1|1|BROKER_REPLICA_ACK|t 1 {factor} 0").endswith(NO_REPLICA)


def test_automatically_created_topics_have_the_configured_factor() -> None:
    peer = World(flux=FluxSettings(replication_factor=2)).connect()
    peer.ask("V1|1|PRODUCE|t a:x")
    assert reported(peer, "t", 1).endswith("isr=[0 1] under_replicated=false")
    assert reported(peer, "t", 2) == NO_REPLICA
    assert reported(peer, "missing", 2) == NO_REPLICA
    assert reported(peer, "missing", 1) == "ERR|BAD_REQUEST|invalid partition"


def test_a_recreated_topic_has_the_new_factor() -> None:
    world = World()
    peer = world.connect()
    peer.ask("V1|1|ADMIN_CREATE_TOPIC|t 3 4")
    peer.ask("V1|1|PRODUCE|t a:x")
    assert reported(peer, "t", 3).endswith("isr=[0 3] under_replicated=false")
    assert reported(peer, "t", 1).endswith("isr=[0 1 3] under_replicated=false")
    answer = peer.ask("V1|1|ADMIN_CREATE_TOPIC|t 3 2")
    assert answer.startswith("V1|1|OK|topic=t partitions=3 replication_factor=2 term=1 ")
    assert reported(peer, "t", 3) == NO_REPLICA
    assert reported(peer, "t", 1).endswith("isr=[0 1] under_replicated=false"), (
        "a broker that is no replica is not in sync"
    )
    world.restart()
    peer = world.connect()
    assert reported(peer, "t", 2) == NO_REPLICA
    assert world.memory.broker.topic("t").settings.replication_factor == 2
    peer.ask("V1|1|ADMIN_CREATE_TOPIC|t 5 6")
    assert reported(peer, "t", 5).startswith("OK|replica=5 ")


def test_creating_an_automatically_created_topic_sets_its_factor() -> None:
    peer = World().connect()
    peer.ask("V1|1|PRODUCE|t a:x")
    peer.ask("V1|1|ADMIN_CREATE_TOPIC|t 3 2")
    assert reported(peer, "t", 2) == NO_REPLICA


def test_raising_the_factor_does_not_complete_waiting_produces() -> None:
    """acks=all waits for the configured minimum of in-sync replicas, whatever the topic's factor is."""
    world = World(flux=FluxSettings(min_isr=3))
    peer = world.connect()
    peer.ask("V1|1|ADMIN_CREATE_TOPIC|t 3 5")
    peer.feed(b"V1|1|PRODUCE|t a:x acks=all\n")
    peer.pass_by()
    other = peer.beside()
    assert reported(other, "t", 4).endswith("isr=[0 4] under_replicated=true")
    peer.pass_by()
    assert peer.take() == b""
    assert reported(other, "t", 2).endswith("isr=[0 2 4] under_replicated=false")
    peer.pass_by()
    assert peer.take() == b"V1|1|OK|partition=1 offset=0 hw=0\n"


@pytest.mark.parametrize(("factor", "enough"), [(1, False), (2, True)])
def test_too_few_in_sync_replicas_time_out(factor: int, enough: bool) -> None:
    world = World()
    peer = world.connect()
    peer.ask(f"V1|1|ADMIN_CREATE_TOPIC|t 3 {factor}")
    peer.feed(b"V1|1|PRODUCE|t a:x acks=all\n")
    peer.pass_by()
    reported(peer.beside(), "t", 1)
    world.memory.advance(2.1)
    assert (b"|OK|" in (answer := peer.take())) is enough
    assert enough or answer == b"V1|1|ERR|REPLICATION_TIMEOUT|acks=all timeout\n"


def test_one_replica_can_be_enough() -> None:
    peer = World(flux=FluxSettings(min_isr=1)).connect()
    assert peer.ask("V1|1|PRODUCE|t a:x acks=all") == "V1|1|OK|partition=1 offset=0 hw=0"


@pytest.mark.parametrize(
    ("factor", "least", "is_fine"),
    [(3, 2, True), (1, 1, True), (1_000, 1_000, True), (2, 3, False), (0, 0, False), (3, 0, False), (1_001, 2, False)],
)
def test_min_isr_must_not_exceed_the_factor(factor: int, least: int, is_fine: bool) -> None:
    config = ServeConfig(flux_replication_factor=factor, flux_min_isr=least)
    if is_fine:
        config.listeners()
    else:
        with pytest.raises(Invalid):
            config.listeners()
