"""Offsets and groups over the `polywire` protocol."""

from __future__ import annotations

import pytest

from polywire.errors import ErrorCode
from polywire.protocols.polywire import groups, messages
from polywire.protocols.polywire.messages import Head, Verb
from tests.unit.protocols.polywire.peer import Peer


@pytest.fixture
def peer() -> Peer:
    made = Peer()
    made.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 4)).decode(messages.TopicDescription)
    return made


def join(peer: Peer, member: str, assignor: str | None = None) -> messages.Membership:
    return peer.ask(Verb.JOIN, messages.Join("g", "t", member, assignor)).decode(messages.Membership)


def test_offsets_are_stored_by_kind_and_owner(peer: Peer) -> None:
    assert peer.ask(Verb.POSITION, messages.AskPosition("t", 1, 1, "g")).decode(messages.Position).offset is None
    peer.ask(Verb.COMMIT, messages.Commit("t", 1, 1, "g", 42)).decode(Head)
    peer.ask(Verb.COMMIT, messages.Commit("t", 1, 0, "g", 7, level=2)).decode(Head)
    assert peer.ask(Verb.POSITION, messages.AskPosition("t", 1, 1, "g")).decode(messages.Position).offset == 42
    assert peer.ask(Verb.POSITION, messages.AskPosition("t", 1, 0, "g")).decode(messages.Position).offset == 7
    peer.ask(Verb.COMMIT, messages.Commit("t", 1, 1, "g", 3)).decode(Head)
    assert peer.ask(Verb.POSITION, messages.AskPosition("t", 1, 1, "g")).decode(messages.Position).offset == 3


@pytest.mark.parametrize(
    ("commit", "code"),
    [
        (messages.Commit("t", 9, 1, "g", 1), ErrorCode.PARTITION_MISSING),
        (messages.Commit("gone", 0, 1, "g", 1), ErrorCode.TOPIC_MISSING),
        (messages.Commit("t", 0, 2, "g", 1), ErrorCode.INVALID_REQUEST),
        (messages.Commit("t", 0, 1, "", 1), ErrorCode.INVALID_NAME),
        (messages.Commit("t", 0, 1, "x" * 256, 1), ErrorCode.INVALID_NAME),
        (messages.Commit("t", 0, 0, "g", 1, member="m"), ErrorCode.INVALID_REQUEST),
        (messages.Commit("t", 0, 1, "g", 1, member="m", generation=1), ErrorCode.GROUP_MISSING),
    ],
)
def test_invalid_commits_are_refused(peer: Peer, commit: messages.Commit, code: ErrorCode) -> None:
    assert peer.ask(Verb.COMMIT, commit).error.code is code


def test_members_share_partitions_and_learn_of_changes(peer: Peer) -> None:
    alone = join(peer, "a")
    assert alone.partitions == [0, 1, 2, 3]
    other = peer.another()
    second = join(other, "b")
    assert len(second.partitions) == 2
    stale = peer.ask(Verb.HEARTBEAT, messages.Member("g", "t", "a", alone.generation)).error
    assert stale.code is ErrorCode.GENERATION_STALE
    first = join(peer, "a")
    assert sorted(first.partitions + second.partitions) == [0, 1, 2, 3]
    assert first.generation == second.generation
    for verb in (Verb.SYNC, Verb.HEARTBEAT):
        assert peer.ask(verb, messages.Member("g", "t", "a", first.generation)).decode(messages.Membership) == first
    peer.ask(Verb.LEAVE, messages.Member("g", "t", "a", first.generation)).decode(Head)
    assert join(other, "b").partitions == [0, 1, 2, 3]


def test_commits_of_members_are_fenced(peer: Peer) -> None:
    place = join(peer, "a")
    owned = messages.Commit("t", 2, 1, "g", 5, member="a", generation=place.generation)
    peer.ask(Verb.COMMIT, owned).decode(Head)
    join(peer.another(), "b")
    assert peer.ask(Verb.COMMIT, owned).error.code is ErrorCode.GENERATION_STALE
    assert peer.ask(Verb.POSITION, messages.AskPosition("t", 2, 1, "g")).decode(messages.Position).offset == 5


def test_groups_need_a_topic_and_a_known_assignor(peer: Peer) -> None:
    assert peer.ask(Verb.JOIN, messages.Join("g", "gone", "a")).error.code is ErrorCode.TOPIC_MISSING
    assert peer.ask(Verb.JOIN, messages.Join("g", "t", "a", "sticky")).error.code is ErrorCode.INVALID_REQUEST
    assert join(peer, "a", "range").partitions == [0, 1, 2, 3]


def test_groups_are_described_with_members_and_offsets(peer: Peer) -> None:
    membership = join(peer, "a")
    peer.ask(Verb.COMMIT, messages.Commit("t", 2, 1, "g", 42)).decode(Head)
    peer.ask(Verb.COMMIT, messages.Commit("t", 0, 1, "only-positions", 7)).decode(Head)
    peer.ask(Verb.COMMIT, messages.Commit("t", 0, 0, "a-consumer", 7)).decode(Head)
    reported = peer.ask(Verb.GROUPS, messages.AskGroups()).decode(messages.GroupList)
    with_members, without = reported.groups
    assert (with_members.name, with_members.group, with_members.generation) == ("t", "g", membership.generation)
    assert (with_members.assignor, with_members.positions) == ("round_robin", [[2, 42]])
    assert [(m.member, m.wire, m.partitions) for m in with_members.members] == [("a", "polywire", [0, 1, 2, 3])]
    assert (without.group, without.generation, without.assignor, without.positions) == (
        "only-positions",
        -1,
        None,
        [[0, 7]],
    )
    named = peer.ask(Verb.GROUPS, messages.AskGroups("g")).decode(messages.GroupList)
    assert [entry.group for entry in named.groups] == ["g"]
    assert peer.ask(Verb.GROUPS, messages.AskGroups(None, ["t"])).error.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(("groups_max", "entries_max", "expected"), [(2, 100, 2), (100, 3, 1), (100, 100, 5)])
def test_many_groups_are_listed_in_pages(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, groups_max: int, entries_max: int, expected: int
) -> None:
    monkeypatch.setattr(groups, "GROUPS_MAX", groups_max)
    monkeypatch.setattr(groups, "GROUP_ENTRIES_MAX", entries_max)
    for number in range(5):
        for partition in range(2):
            peer.ask(Verb.COMMIT, messages.Commit("t", partition, 1, f"g{number}", 1)).decode(Head)
    pages: list[list[str]] = []
    after: list[str] = []
    more = True
    while more:
        reported = peer.ask(Verb.GROUPS, messages.AskGroups(None, after)).decode(messages.GroupList)
        pages.append([entry.group for entry in reported.groups])
        after, more = [reported.groups[-1].name, reported.groups[-1].group], reported.more
    assert [name for page in pages for name in page] == [f"g{number}" for number in range(5)]
    assert len(pages[0]) == expected
