"""Distribution of runs to segments, and the writes to memory and stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polywire.errors import Unavailable
from polywire.log.segments.segment import Segment
from polywire.log.segments.writer import OWN_BLOB_BYTES_MIN, Part, RunSource, plan_blobs, write_segment
from polywire.store.base import BlobExists, CopiedParts
from polywire.testing.faulty_store import Fault, FaultyStore, Verb
from polywire.types import Buffer
from tests.memory_store import MemoryStore
from tests.unit.log.batches import Slot


@given(st.dictionaries(st.integers(0, 99), st.integers(1, 3 * OWN_BLOB_BYTES_MIN)))
def test_large_partitions_get_their_own_segments(sizes: dict[int, int]) -> None:
    blobs = plan_blobs(sizes)
    assert sorted(key for blob in blobs for key in blob) == sorted(sizes)
    assert all(blobs)
    large = [key for key, size in sizes.items() if size >= OWN_BLOB_BYTES_MIN]
    assert blobs[: len(large)] == [[key] for key in large]
    assert len(blobs) - len(large) == (len(large) < len(sizes))


def written(slot: Slot, store: MemoryStore | FaultyStore) -> None:
    partition = slot.partitions[1]
    run = RunSource(1, [Part(slot.base, partition.positions, partition.lengths)])
    write_segment(store, "segments/a", [run], chunk_bytes=4096)


def some_slot() -> Slot:
    slot = Slot(1)
    for time_us in range(40):
        slot.append(1, [bytes(500)], time_us=time_us)
    return slot


def test_a_segment_is_written_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    put_new = MemoryStore.put_new

    def noting(store: MemoryStore, name: str, parts: Iterable[Buffer]) -> None:
        def noted() -> Iterator[Buffer]:
            for part in parts:
                sizes.append(len(part))
                yield part

        put_new(store, name, noted())

    monkeypatch.setattr(MemoryStore, "put_new", noting)
    store = MemoryStore()
    written(some_slot(), store)
    assert sum(sizes) == store.size("segments/a")
    assert set(sizes[:-1]) == {4096}


def test_a_segment_is_the_same_in_memory_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = []
    for size in (1, 104, 4096, 1 << 20):

        def filled(store: MemoryStore, name: str, parts: Iterable[Buffer], size: int = size) -> None:
            assert isinstance(parts, CopiedParts)
            content, out = b"", memoryview(bytearray(size))
            while (count := parts.fill(out)) == size:
                content += out
            contents.append(content + out[:count])
            assert parts.fill(out) == 0, "it has ended"

        monkeypatch.setattr(MemoryStore, "put_new", filled)
        written(some_slot(), MemoryStore())
    monkeypatch.undo()
    store = MemoryStore()
    written(some_slot(), store)
    assert set(contents) == {store.get("segments/a")}


def test_a_name_is_written_once() -> None:
    store = MemoryStore()
    written(some_slot(), store)
    with pytest.raises(BlobExists):
        written(some_slot(), store)


def test_a_lost_reply_is_settled_by_reading() -> None:
    store = FaultyStore(MemoryStore())
    store.fail(Verb.PUT_NEW, Fault.LOST_REPLY)
    slot = some_slot()
    with pytest.raises(Unavailable):
        written(slot, store)
    assert Segment.open(store, "segments/a").run(1).next_offset == 40


def test_the_slot_may_be_changed_once_written() -> None:
    store, slot = MemoryStore(), some_slot()
    written(slot, store)
    slot.base[:] = bytes(len(slot.base))
    chunk, _ = Segment.open(store, "segments/a").read(1, 0, 10**6)
    assert chunk == slot.partitions[1].content
