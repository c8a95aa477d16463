"""Listing and deleting transactions and writers (spec: polywire#transactions-and-writers)."""

from __future__ import annotations

import pytest

from polywire.broker.access import ConfiguredUser
from polywire.broker.permissions import parse_grants
from polywire.errors import Denied, Missing
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.polywire.transactions import ENTRIES_MAX
from polywire.types import TopicName
from tests.unit.protocols.polywire.peer import Peer
from tests.unit.protocols.polywire.test_auth import HASH, closed, log_in

WORDS = "produce,consume,group,transaction"


def kept() -> Peer:
    """Return a broker with bob, who may do everything with topics, and alice, a server manager; each owns state."""
    peer = closed(WORDS)
    for name in ("alice", "bob"):
        log_in(peer, name)
        peer.ask(Verb.PUBLISH, messages.Publish(f"{name}s", 1, []))
        peer.ask(Verb.JOIN, messages.Join(f"{name}s", "shop.orders", "m"))
        peer.broker.transactions.begin_epoch(f"{name}s", by=peer.session.admission.caller, done=None)
    return peer


def writers(peer: Peer) -> list[tuple[str, str]]:
    answer = peer.ask(Verb.WRITERS, messages.ListEntries()).decode(messages.EntryList[messages.WriterEntry])
    return [(entry.name, entry.owner) for entry in answer.entries]


def transactions(peer: Peer) -> list[tuple[str, str]]:
    answer = peer.ask(Verb.TRANSACTIONS, messages.ListEntries()).decode(messages.EntryList[messages.TransactionEntry])
    return [(entry.name, entry.owner) for entry in answer.entries]


def test_users_see_their_own_entries_and_administrators_all() -> None:
    peer = kept()
    assert writers(peer) == transactions(peer) == [("bobs", "bob")]
    log_in(peer, "alice")
    assert writers(peer) == transactions(peer) == [("alices", "alice"), ("bobs", "bob")]
    groups = peer.ask(Verb.GROUPS, messages.AskGroups()).decode(messages.GroupList).groups
    assert [(entry.group, entry.owner) for entry in groups] == [("alices", "alice"), ("bobs", "bob")]
    peer.broker.access.configure([ConfiguredUser("alice", HASH, parse_grants(["admin"]))])
    log_in(peer, "alice")
    bob = writers(peer)[1][1]
    assert bob.startswith("#")  # the owner was deleted


DELETIONS: list[tuple[Verb, Head]] = [
    (Verb.DELETE_GROUP, messages.DeleteGroup("alices", "shop.orders")),
    (Verb.DELETE_TRANSACTION, messages.DeleteEntry("alices")),
    (Verb.DELETE_WRITER, messages.DeleteEntry("alices")),
]


@pytest.mark.parametrize(("verb", "head"), DELETIONS)
def test_only_the_owner_or_an_administrator_can_delete_and_once_only(verb: Verb, head: Head) -> None:
    peer = kept()
    refused = peer.ask(verb, head).error
    assert isinstance(refused, Denied if verb is Verb.DELETE_GROUP else Missing)
    log_in(peer, "alice")
    peer.ask(verb, head).decode(Head)
    assert isinstance(peer.ask(verb, head).error, Missing)
    assert "alices" not in [name for name, _ in writers(peer)] or verb is not Verb.DELETE_WRITER


@pytest.mark.parametrize("verb", [Verb.TRANSACTIONS, Verb.DELETE_TRANSACTION, Verb.WRITERS, Verb.DELETE_WRITER])
def test_users_without_permission_cannot_list_or_delete(verb: Verb) -> None:
    peer = closed("consume,group")
    log_in(peer, "bob")
    head: Head = messages.DeleteEntry("x") if "DELETE" in verb.name else messages.ListEntries()
    assert isinstance(peer.ask(verb, head).error, Denied)


def test_long_lists_are_paged() -> None:
    peer = Peer()
    for number in range(ENTRIES_MAX + 5):
        peer.broker.publish(f"w{number:05}", 3, [], done=None)
    first = peer.ask(Verb.WRITERS, messages.ListEntries()).decode(messages.EntryList[messages.WriterEntry])
    assert (len(first.entries), first.more) == (ENTRIES_MAX, True)
    rest = peer.ask(Verb.WRITERS, messages.ListEntries(first.entries[-1].name)).decode(
        messages.EntryList[messages.WriterEntry]
    )
    assert [entry.name for entry in rest.entries] == [f"w{ENTRIES_MAX + number:05}" for number in range(5)]
    assert not rest.more


def test_a_group_with_offsets_only_is_deleted_too() -> None:
    peer = Peer()
    peer.broker.create_topic(TopicName("default", "t"), 1)
    peer.ask(Verb.COMMIT, messages.Commit("t", 0, 1, "g", 5))
    peer.ask(Verb.DELETE_GROUP, messages.DeleteGroup("g", "t")).decode(Head)
    assert peer.ask(Verb.GROUPS, messages.AskGroups()).decode(messages.GroupList).groups == []
