"""The broker's own clients: what the process that runs links may do, and the positions that it stores."""

from __future__ import annotations

import pytest

from polywire.broker.access import ConfiguredUser, Principal
from polywire.broker.owners import LINKS_CALLER, Caller, caller_of
from polywire.broker.permissions import Action, parse_grants
from polywire.broker.settings import BrokerSettings
from polywire.broker.users import LINKS, TABLES
from polywire.errors import Denied
from polywire.testing.memory_broker import MemoryBroker

DAYS = 24 * 3600
SELDOM = BrokerSettings(expiry_interval_s=3600.0, retention_interval_s=3600.0)  # a month has fewer passes
WRITER = "link/old/source/topic/0"


def publish(memory: MemoryBroker, by: Caller, writer: str, number: int) -> None:
    memory.broker.publish(writer, number, [], by=by, done=None)
    memory.run()


def user(memory: MemoryBroker, name: str, words: list[str]) -> Principal:
    memory.broker.access.configure([ConfiguredUser(name, "hash", parse_grants(words))])
    return memory.broker.access.vouched(name)


def test_the_position_of_a_link_does_not_expire() -> None:
    memory = MemoryBroker(SELDOM)
    publish(memory, LINKS_CALLER, WRITER, 7)
    publish(memory, Caller(None, -5), "other", 9)
    for _ in range(3):
        memory.advance(31 * DAYS)
        publish(memory, Caller(None, -5), "later", 1)
        memory.restart()
    found = {known.writer: known.number for known in memory.broker.staging.writers(by=LINKS_CALLER)}
    assert found[WRITER] == 7
    assert "other" not in found


def test_only_links_and_administrators_may_use_the_writers_of_links() -> None:
    memory = MemoryBroker()
    publish(memory, LINKS_CALLER, WRITER, 7)
    loader = caller_of(user(memory, "loader", ["produce"]), "10.0.0.1:1")
    for caller in (loader, Caller(None, -5)):
        with pytest.raises(Denied):
            publish(memory, caller, WRITER, 8)
        assert memory.broker.staging.writers(by=caller) == []
    administrator = caller_of(user(memory, "admin", ["admin"]), "10.0.0.1:1")
    assert memory.broker.staging.writers(by=administrator)
    assert caller_of(LINKS, "10.0.0.1:1") is LINKS_CALLER
    publish(memory, LINKS_CALLER, WRITER, 8)


def test_internal_clients_may_do_their_job_only() -> None:
    memory = MemoryBroker()
    permits = memory.broker.access.permits
    assert permits(LINKS, Action.PRODUCE)
    assert permits(LINKS, Action.TOPIC_CREATE)
    assert permits(LINKS, Action.FETCH)  # after a reversed cut-over
    assert not permits(LINKS, Action.TOPIC_DELETE)
    assert not permits(LINKS, Action.TOPIC_PURGE)
    assert not permits(LINKS, Action.USER_CREATE)
    assert not permits(LINKS, Action.CLUSTER_ALTER)
    assert permits(TABLES, Action.FETCH)
    assert not permits(TABLES, Action.PRODUCE)
    impostor = Principal(LINKS.user_id, LINKS.name)  # equal, but not the same
    assert caller_of(impostor, "10.0.0.1:1") is not LINKS_CALLER
