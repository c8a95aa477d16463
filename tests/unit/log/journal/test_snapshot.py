"""Snapshot files: current format, version 1 and 2, and damage."""

from __future__ import annotations

import pytest

from polywire.errors import Corrupt
from polywire.log.journal.snapshot import Snapshot, copies_sound, get_snapshot, put_snapshot
from polywire.records.checksum import xxh64
from tests.memory_store import MemoryStore

GIVEN = Snapshot(
    sequence=7,
    broker_sequence=9,
    partitions=b"packed",
    segments=[1, 1 << 32],
    tokens=[(b"t" * 16, -1, 1)],
    broker=b"state",
    clean={3: 100, 5: 1 << 40},
)
VERSION_1 = bytes.fromhex(
    "50575431 01000000 0700000000000000 0900000000000000 0000000000000000 0000000000000000 01000000 00000000"
    "0600000000000000 0500000000000000"
) + b"packed" + (1).to_bytes(8, "little") + b"state"  # fmt: skip


def sealed(content: bytes) -> bytes:
    return content + xxh64(content).to_bytes(8, "little")


def test_a_snapshot_reads_back() -> None:
    store = MemoryStore()
    put_snapshot(store, "a", GIVEN)
    found = get_snapshot(store, "a")
    assert list(found.segments) == GIVEN.segments
    assert (found.sequence, found.broker_sequence, found.partitions) == (7, 9, b"packed")
    assert (found.tokens, found.broker, found.clean) == (GIVEN.tokens, b"state", GIVEN.clean)


def test_version_1_is_read() -> None:
    store = MemoryStore()
    store.put_new("a", (sealed(VERSION_1),))
    found = get_snapshot(store, "a")
    assert (found.sequence, found.partitions, list(found.segments), found.broker) == (7, b"packed", [1], b"state")
    assert not found.clean


def test_a_snapshot_that_fails_verification_is_corrupt() -> None:
    store = MemoryStore()
    put_snapshot(store, "a", GIVEN)
    content = bytes(store.get("a"))
    half = len(content) // 2
    once = content[: content.index(b"state") + 5]
    later = once[:4] + b"\x04" + once[5:]
    more = once[:24] + b"\x03" + once[25:]
    both = bytearray(content)
    both[3] ^= 1
    both[half + 70] ^= 1
    for number, damaged in enumerate(
        (b"", content[:40], sealed(later), sealed(more), bytes(both), content[: len(once)])
    ):
        store.put_new(f"b{number}", (damaged,))
        with pytest.raises(Corrupt):
            get_snapshot(store, f"b{number}")


def test_one_sound_copy_is_enough() -> None:
    store = MemoryStore()
    put_snapshot(store, "a", GIVEN)
    content = bytes(store.get("a"))
    for at in range(0, len(content), 7):
        store.put_new(f"b{at}", (content[:at] + bytes((content[at] ^ 0x10,)) + content[at + 1 :],))
        assert get_snapshot(store, f"b{at}") == get_snapshot(store, "a")
    assert copies_sound(store, "a") == (2, 2)
    assert copies_sound(store, "b7") == (1, 2)


def test_version_2_is_read() -> None:
    store = MemoryStore()
    put_snapshot(store, "a", GIVEN)
    content = bytes(store.get("a"))
    once = content[: content.index(b"state") + 5]
    store.put_new("b", (sealed(once[:4] + b"\x02" + once[5:]),))
    assert get_snapshot(store, "b") == get_snapshot(store, "a")
    assert copies_sound(store, "b") == (1, 1)
