"""Duplicate payloads in the legacy dialect, which the broker can be configured to drop."""

from __future__ import annotations

import pytest

from polywire.errors import ErrorCode, Invalid, Unavailable
from polywire.protocols.cursus import repeats
from polywire.protocols.cursus.context import REPEATS_S_MAX, CursusSettings
from polywire.protocols.cursus.repeats import Repeats
from polywire.testing.loop import SimulatedClock
from tests.unit.protocols.cursus.dialogue import Dialogue, World
from tests.unit.protocols.cursus.test_produce import stored

SENT = "\U0001f4e4 Published to "


def started(repeats_s: float) -> tuple[World, Dialogue]:
    world = World(cursus=CursusSettings(repeats_s=repeats_s))
    peer = world.connect()
    for topic in ("orders", "other"):
        peer.ask(f"CREATE {topic} 1", "admin")
    return world, peer


def values(world: World, topic: str) -> list[bytes | None]:
    return [record.value for record in stored(world, topic)]


def test_by_default_nothing_is_dropped() -> None:
    world, peer = started(0.0)
    for _ in range(2):
        assert peer.ask("PUBLISH orders x", "admin") == SENT + "'orders'"
    assert values(world, "orders") == [b"x", b"x"]


def test_a_payload_is_dropped_in_its_topic_for_the_elapsed_time() -> None:
    world, peer = started(1800.0)
    clock = world.memory.clock
    assert isinstance(clock, SimulatedClock)
    for text in ("PUBLISH orders x", "PUBLISH orders x", "PUBLISH orders x ", "PUBLISH other x"):
        assert peer.ask(text, "admin").startswith(SENT)
    assert peer.ask("x", "orders") == "OK"
    assert values(world, "orders") == [b"x", b"x "]
    assert values(world, "other") == [b"x"]
    peer.ask("PUBLISH topic=orders producerId=p message=x")  # other dialects have their own means
    clock.step(3600.0)
    peer.ask("PUBLISH orders x", "admin")
    assert len(values(world, "orders")) == 3, "setting the wall clock does not count as elapsed time"
    world.memory.advance(1801.0)
    peer = world.connect()
    peer.ask("PUBLISH orders x", "admin")
    assert len(values(world, "orders")) == 4


def test_a_recreated_topic_has_no_duplicates() -> None:
    world, peer = started(1800.0)
    peer.ask("PUBLISH orders x", "admin")
    peer.ask("DELETE orders", "admin")
    peer.ask("CREATE orders 1", "admin")
    peer.ask("PUBLISH orders x", "admin")
    assert values(world, "orders") == [b"x"]


def test_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "REPEATS_MAX", 3)
    kept = Repeats(60.0, lambda: 0.0)
    digests = [kept.digest(b"t", b"%d" % number) for number in range(5)]
    for digest in digests:
        kept.add(digest)
    assert len(kept) == 3
    assert [kept.has(digest) for digest in digests] == [False, False, True, True, True]


def test_old_digests_are_removed_in_small_steps() -> None:
    now = 0.0
    kept = Repeats(60.0, lambda: now)
    digests = [kept.digest(b"t", b"%d" % number) for number in range(3 * repeats.ENDED_MAX)]
    for digest in digests:
        kept.add(digest)
    now = 61.0
    assert not kept.has(digests[-1])
    assert len(kept) == 2 * repeats.ENDED_MAX
    kept.add(digests[-1])
    assert kept.has(digests[-1])
    now = 122.0
    for digest in digests[:3]:
        assert not kept.has(digest)
    assert len(kept) == 0


def test_a_payload_that_was_not_stored_is_not_a_duplicate() -> None:
    kept = Repeats(60.0, lambda: 0.0)
    digest = kept.digest(b"t", b"x")
    reported: list[object] = []
    kept.add(digest)
    kept.stored(digest, reported.append, 7)
    assert kept.has(digest)
    kept.stored(digest, reported.append, Unavailable(ErrorCode.STORAGE_FAILED, "no"))
    assert not kept.has(digest)
    assert reported[0] == 7
    assert isinstance(reported[1], Unavailable)


@pytest.mark.parametrize("seconds", [-1.0, REPEATS_S_MAX + 1, float("nan")])
def test_a_time_out_of_range_is_refused(seconds: float) -> None:
    with pytest.raises(Invalid, match="deduplication time is out of range"):
        CursusSettings(repeats_s=seconds)
