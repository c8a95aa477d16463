"""Transactions over several shards in a stored data directory (decision 0129)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from polywire.broker.changes import TransactionDecided
from polywire.broker.transaction_state import Transaction
from tests.vectors.data.test_data import LOG, Kept
from tests.vectors.data.test_newer import login, position, values
from tests.vectors.data.world import StoredWorld

PARTS: Final = ("sealed", "journal")
SHARDS: Final = (1, 3)


class Others:
    """The other shards: they follow, and know nothing of the transactions they are asked about."""

    def __init__(self) -> None:
        self.reported: set[tuple[int, str, bool]] = set()
        self.asked: set[tuple[str, int]] = set()

    def end_participant(self, shard: int, decided: TransactionDecided, then: Callable[[bool], None]) -> None:
        self.reported.add((shard, decided.id, decided.commits))
        then(True)

    def ask_coordinator(self, participant: Transaction, then: Callable[[bool | None], None]) -> None:
        self.asked.add((participant.id[1:], participant.coordinator))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StoredWorld]:
    kept = Kept("state-5", tmp_path / "data")
    world = StoredWorld(kept.path, kept.written_at_us, LOG)
    world.run()
    yield world
    world.broker.close()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("commits", [True, False], ids=["committed", "aborted"])
def test_a_participant_follows(world: StoredWorld, part: str, commits: bool) -> None:
    peer, participants = login(world), world.broker.participants
    participant = participants.find(f"branch-{part}")
    assert participant is not None
    before = values(peer, 0)
    participants.end(f"branch-{part}", participant.token, commits=commits, done=lambda _: None)
    world.run()
    assert values(peer, 0) == before + [b"branch %s" % part.encode()] * commits
    assert position(peer, f"branch-group-{part}", 1) == ((9, "m") if commits else (-1, ""))


def test_other_shards_get_decisions_and_are_asked_about_open_transactions(world: StoredWorld) -> None:
    others, participants = Others(), world.broker.participants
    participants.begin(others, lambda _: True)
    world.run()
    assert others.reported == {
        (shard, f"{word}-{part}", word == "decided")
        for shard in SHARDS
        for word in ("decided", "dropped")
        for part in PARTS
    }
    assert others.asked == {(f"branch-{part}", 2) for part in PARTS}
    assert not any(participants.is_deciding(f"{word}-{part}") for word in ("decided", "dropped") for part in PARTS)
    participants.stop()


@pytest.mark.parametrize("part", PARTS)
def test_an_open_transaction_commits_in_every_shard(world: StoredWorld, part: str) -> None:
    others, broker, before = Others(), world.broker, values(login(world), 0)
    held = broker.transactions.find(f"shared-{part}")
    assert held is not None
    assert held.is_open
    broker.participants.begin(others, lambda _: True)
    broker.transactions.commit(held, done=lambda _: None)
    world.run()
    assert {(shard, held.id, True) for shard in SHARDS} <= others.reported
    assert values(login(world), 0) == [*before, b"shared %s" % part.encode()]
    broker.participants.stop()
