"""The blob of a snapshot: as it is written, as version 1 was, and damaged."""

from __future__ import annotations

import pytest

from polywire.errors import Corrupt
from polywire.log.snapshot import Snapshot, get_snapshot, put_snapshot
from polywire.records.checksum import xxh64
from polywire.store.memory import MemoryStore

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


def test_a_snapshot_comes_back_as_it_was() -> None:
    store = MemoryStore()
    put_snapshot(store, "a", GIVEN)
    found = get_snapshot(store, "a")
    assert list(found.segments) == GIVEN.segments
    assert (found.sequence, found.broker_sequence, found.partitions) == (7, 9, b"packed")
    assert (found.tokens, found.broker, found.clean) == (GIVEN.tokens, b"state", GIVEN.clean)


def test_one_of_version_1_is_read() -> None:
    store = MemoryStore()
    store.put_new("a", (sealed(VERSION_1),))
    found = get_snapshot(store, "a")
    assert (found.sequence, found.partitions, list(found.segments), found.broker) == (7, b"packed", [1], b"state")
    assert not found.clean


def test_what_does_not_verify_is_corrupt() -> None:
    store = MemoryStore()
    put_snapshot(store, "a", GIVEN)
    content = bytes(store.get("a"))
    later = content[:4] + b"\x03" + content[5:-8]
    more = content[:24] + b"\x03" + content[25:-8]
    for number, damaged in enumerate(
        (content[:-1], b"", content[:40], b"?" + content[1:], sealed(later), sealed(more))
    ):
        store.put_new(f"b{number}", (damaged,))
        with pytest.raises(Corrupt):
            get_snapshot(store, f"b{number}")
