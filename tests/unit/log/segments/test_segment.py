"""Segments are written and read back, and compared with their slot."""

from __future__ import annotations

from array import array

import pytest

from polywire.errors import Corrupt, ErrorCode, Missing
from polywire.log.segments.format import TRAILER, read_info
from polywire.log.segments.segment import EntryCache, Segment
from polywire.log.segments.writer import Part, RunSource, write_segment
from polywire.records.batch import record_at_address
from polywire.records.checksum import xxh64
from tests.memory_store import MemoryStore
from tests.unit.log.batches import Partition, Slot, make_batch

NAME = "segments/one.pws"


def source(slot: Slot, number: int) -> RunSource:
    partition = slot.partitions[number]
    return RunSource(number, [Part(slot.base, partition.positions, partition.lengths)])


def large_slot() -> Slot:
    """Return three partitions of several strides; the batches of a partition differ in time, so none are merged."""
    slot = Slot(9, 4, 2**62 + 5)
    for number in range(240):
        for place, partition in enumerate(slot.partitions):
            slot.append(partition, [bytes([number]) * (300 + number)] * (number % 5 + 1), time_us=number * 10 + place)
    return slot


def stored(slot: Slot) -> tuple[MemoryStore, Segment]:
    store = MemoryStore()
    runs = [source(slot, number) for number in slot.partitions]
    info = write_segment(store, NAME, runs, chunk_bytes=8192)  # small, so that batches cross a chunk's end
    assert info == read_info(store, NAME)
    return store, Segment(store, info)


def holding(partition: Partition, offset: int) -> int:
    return next(i for i, batch in enumerate(partition.batches) if batch.next_offset > offset)


def at_address(segment: Segment, partition: int, address: int) -> bytes:
    found = segment.by_address(partition, address)
    return b"" if found is None else bytes(found)


def test_runs_are_sorted_and_have_correct_bounds() -> None:
    slot = large_slot()
    store, segment = stored(slot)
    runs = list(segment.info)
    assert [run.partition for run in runs] == sorted(slot.partitions)
    for run in runs:
        partition = slot.partitions[run.partition]
        batches = partition.batches
        assert store.get(NAME, run.position, run.stop) == partition.content
        assert (run.first_offset, run.next_offset) == (0, partition.next_offset)
        assert (run.first_address, run.next_address) == (0, partition.next_address)
        assert (run.first_time_us, run.last_time_us) == (batches[0].time_us, batches[-1].time_us)
        assert run.record_count == partition.next_offset
        assert run.index_count >= run.size // (65536 + 2000)
        assert run.token == b""
    assert segment.info.find(1) is segment.info.find(2**64 - 1) is segment.info.find(5) is None


def expected_read(partition: Partition, offset: int, bytes_max: int) -> tuple[bytes, int]:
    """Return the batch with the offset, and those after it that fit."""
    first = holding(partition, offset)
    content, last = partition.batches[first].content, first + 1
    while last < len(partition.batches) and len(content) + len(partition.batches[last].content) <= bytes_max:
        content += partition.batches[last].content
        last += 1
    return content, partition.batches[last - 1].next_offset


@pytest.mark.parametrize("bytes_max", [0, 5_000, 200_000])
def test_reads_return_whole_batches_from_the_requested_one(bytes_max: int) -> None:
    slot = large_slot()
    _, segment = stored(slot)
    for number, partition in slot.partitions.items():
        for offset in range(0, partition.next_offset, 7):
            chunk, next_offset = segment.read(number, offset, bytes_max)
            assert (bytes(chunk), next_offset) == expected_read(partition, offset, bytes_max)


def test_reads_end_with_the_batch_that_reaches_the_end_offset() -> None:
    slot = large_slot()
    _, segment = stored(slot)
    partition = slot.partitions[4]
    for offset in range(0, partition.next_offset, 7):
        chunk, next_offset = segment.read(4, offset, 10**9, offset + 9)
        first = holding(partition, offset)
        last = holding(partition, min(offset + 8, partition.next_offset - 1)) + 1
        assert chunk == b"".join(batch.content for batch in partition.batches[first:last])
        assert next_offset == partition.batches[last - 1].next_offset
        assert segment.batch_at(4, offset) == partition.batches[first].content


def test_reads_cover_at_most_one_extra_stride() -> None:
    slot = large_slot()
    _, segment = stored(slot)
    run = segment.run(4)
    for offset in range(0, run.next_offset, 11):
        start, stop = segment.locate(4, offset, 10_000)
        assert run.position <= start < stop <= run.stop
        assert stop - start <= 10_000 + 2 * (65536 + 2000)
        assert segment.locate(4, offset, 10**9, offset + 1) == segment.locate(4, offset)


def test_offsets_out_of_range_are_missing() -> None:
    slot = large_slot()
    _, segment = stored(slot)
    for offset in (-1, slot.partitions[4].next_offset):
        with pytest.raises(Missing) as caught:
            segment.read(4, offset, 1000)
        assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
    with pytest.raises(Missing) as caught:
        segment.read(5, 0, 1000)
    assert caught.value.code is ErrorCode.PARTITION_MISSING


def test_times_and_addresses_are_found() -> None:
    slot = large_slot()
    _, segment = stored(slot)
    for number, partition in slot.partitions.items():
        for time_us in range(-5, 2_500, 3):
            wanted = next((b.offset for b in partition.batches if b.time_us >= time_us), partition.next_offset)
            assert segment.by_time(number, time_us) == wanted
        for address in range(0, partition.next_address, 997):
            model = next(b for b in partition.batches if b.next_address > address)
            assert at_address(segment, number, address) == model.content
        for batch in partition.batches[::20]:
            found = segment.by_address(number, batch.address)
            assert found is not None
            assert record_at_address(found, batch.address) == 0
        assert segment.by_address(number, partition.next_address) is None


def test_a_gap_has_no_address() -> None:
    slot = Slot(1)
    for time_us in range(3):
        slot.append(1, [b"value"], time_us=time_us)
    partition = slot.partitions[1]
    del partition.positions[1], partition.lengths[1]
    _, segment = stored(slot)
    assert segment.by_address(1, partition.batches[1].address) is None
    assert at_address(segment, 1, partition.batches[2].address) == partition.batches[2].content
    chunk, next_offset = segment.read(1, 1, 0)
    assert (bytes(chunk), next_offset) == (partition.batches[2].content, 3)


def test_epochs_start_at_their_first_batch() -> None:
    slot = Slot(1, 2)
    for time_us, epoch in enumerate((3, 3, 5, 5, 5, 9)):
        slot.append(1, [b"a", b"b"], time_us=time_us, epoch=epoch)
    slot.append(2, [b"c"], time_us=9, epoch=9)
    _, segment = stored(slot)
    assert segment.epochs(1) == [(3, 0), (5, 4), (9, 10)]
    assert segment.epochs(2) == [(9, 0)]


def test_small_neighbours_are_merged() -> None:
    slot = Slot(1)
    for number in range(400):
        slot.append(1, [b"value %d" % number], time_us=number // 100)
    _, segment = stored(slot)
    partition = slot.partitions[1]
    run = segment.run(1)
    assert run.size < len(partition.content) / 4
    assert (run.next_offset, run.next_address, run.record_count) == (400, partition.next_address, 400)
    for offset in (0, 99, 100, 399):
        batch = segment.batch_at(1, offset)
        assert int.from_bytes(batch[32:40], "little") == offset // 100 * 100
        assert int.from_bytes(batch[48:56], "little") == offset // 100
        assert b"value %d" % offset in bytes(batch)
    assert [segment.by_time(1, time_us) for time_us in range(5)] == [0, 100, 200, 300, 400]


def test_staged_runs_store_their_batches_unchanged() -> None:
    slot = Slot(1)
    slot.append(1, [b"numbered"], time_us=5)
    staged = [make_batch([b"staged %d" % number]) for number in range(3)]
    token, other = b"t" * 16, b"a" * 16
    store = MemoryStore()
    runs = [
        RunSource.of_batches(1, staged, token),
        source(slot, 1),
        RunSource.of_batches(1, staged[:1], other),
        RunSource.of_batches(0, staged[1:], token),
    ]
    segment = Segment(store, write_segment(store, NAME, runs))
    assert [(run.partition, run.token) for run in segment.info] == [(0, token), (1, b""), (1, other), (1, token)]
    run = segment.info.find(1, token)
    assert run is not None
    assert segment.stored(run.position, run.stop) == b"".join(staged)
    assert (run.first_offset, run.next_offset, run.next_address, run.record_count) == (0, 0, 0, 3)
    assert segment.info.epochs_of(run) == []
    assert segment.info.find(2, token) is segment.info.find(0) is None
    assert segment.batch_at(1, 0) == slot.partitions[1].content


def test_invalid_batches_are_not_written() -> None:
    slot = Slot(1, 2)
    slot.append(1, [b"a"], time_us=1)
    slot.append(2, [b"b"], time_us=1)
    store = MemoryStore()
    stranger = slot.partitions[2]
    with pytest.raises(Corrupt):
        write_segment(store, NAME, [RunSource(1, [Part(slot.base, stranger.positions, stranger.lengths)])])
    with pytest.raises(Corrupt):
        write_segment(store, NAME, [RunSource.of_batches(1, [make_batch([b"not numbered"])])])
    with pytest.raises(Corrupt):
        write_segment(store, NAME, [RunSource(1, [Part(slot.base, array("q", (0,)), array("q", (112,)))])])
    assert store.list("segments/") == []


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty"])
def test_damaged_footers_are_corrupt(damage: str) -> None:
    store, segment = footed()
    content, data_bytes = store.get(NAME), segment.info.data_bytes
    half = (len(content) - data_bytes) // 2
    damaged: list[bytes] = []
    if damage == "flip":  # the same position of both footers, or of both trailers
        for at in range(data_bytes, data_bytes + half):
            damaged.append(flipped(flipped(content, at), at + half))
    elif damage == "cut":
        damaged = [content[:size] for size in range(data_bytes, data_bytes + half)]
    elif damage == "grow":
        damaged = [b"\0" * 8 + content]
    else:
        damaged = [b"", bytes(64), bytes(500)]
    for number, broken in enumerate(damaged):
        store.put_new(f"broken-{number}", [broken])
        with pytest.raises(Corrupt):
            Segment.open(store, f"broken-{number}")


def test_one_intact_footer_is_enough() -> None:
    store, segment = footed()
    content, data_bytes = store.get(NAME), segment.info.data_bytes
    half = (len(content) - data_bytes) // 2
    damaged = [flipped(content, at) for at in range(data_bytes, len(content))]
    damaged += [content[:size] for size in range(data_bytes + half, len(content))]
    for number, broken in enumerate(damaged):
        store.put_new(f"half-{number}", [broken])
        found = Segment.open(store, f"half-{number}")
        assert (found.info.runs, found.info.epochs) == (segment.info.runs, segment.info.epochs)
        assert found.read(2, 1, 1000) == segment.read(2, 1, 1000)


def test_a_footer_of_version_1_is_read() -> None:
    store, segment = footed()
    content, data_bytes = store.get(NAME), segment.info.data_bytes
    single = content[: data_bytes + (len(content) - data_bytes) // 2]
    trailer = bytearray(single[-TRAILER.size :])
    trailer[4] = 1
    trailer[-8:] = xxh64(trailer[:-8]).to_bytes(8, "little")
    store.put_new("old", [single[: -TRAILER.size], trailer])
    found = Segment.open(store, "old")
    assert (found.info.runs, found.info.epochs) == (segment.info.runs, segment.info.epochs)
    assert found.read(2, 1, 1000) == segment.read(2, 1, 1000)


def footed() -> tuple[MemoryStore, Segment]:
    slot = Slot(1, 2)
    for time_us in range(3):
        slot.append(1, [b"a"], time_us=time_us)
        slot.append(2, [b"b"], time_us=time_us, epoch=time_us)
    return stored(slot)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes((content[at] ^ 1 << at % 8,)) + content[at + 1 :]


def test_damaged_batches_are_corrupt_when_read() -> None:
    slot = Slot(1)
    for time_us in range(5):
        slot.append(1, [b"a"], time_us=time_us)
    store, _ = stored(slot)
    content = bytearray(store.get(NAME))
    content[len(slot.partitions[1].batches[0].content)] ^= 1
    store.put_new("broken", [content])
    segment = Segment.open(store, "broken")
    for read in (
        lambda: segment.read(1, 1, 1000),
        lambda: segment.by_address(1, slot.partitions[1].batches[1].address),
        lambda: write_segment(store, "rewritten", [RunSource.of_segments([(segment, segment.run(1))])]),
    ):
        with pytest.raises(Corrupt):
            read()


def test_segments_are_joined_into_one() -> None:
    slots, store, runs = [], MemoryStore(), []
    whole = Slot(1)
    for number in range(3):
        for time_us in range(4):
            whole.append(1, [bytes(2000)], time_us=number * 10 + time_us)
        slots.append(whole.partitions[1].batches[4 * number :])
    for number, batches in enumerate(slots):
        info = write_segment(store, f"s{number}", [RunSource.of_batches(1, [batch.content for batch in batches])])
        runs.append((Segment(store, info), info.run(0)))
    joined = Segment(store, write_segment(store, NAME, [RunSource.of_segments(runs)]))
    run = joined.run(1)
    assert joined.stored(run.position, run.stop) == whole.partitions[1].content
    assert (run.first_offset, run.next_offset) == (0, 12)


def test_the_entry_cache_is_bounded() -> None:
    cache = EntryCache(bytes_max=100)
    cache.put("a", bytes(40))
    cache.put("b", bytes(40))
    assert cache.get("a") is not None
    cache.put("c", bytes(40))
    assert cache.get("b") is None
    assert cache.get("a") is not None
    cache.drop("a")
    cache.drop("a")
    cache.put("d", bytes(60))
    assert cache.get("c") is not None
    cache.put("e", bytes(200))  # larger than the cache: it alone stays
    assert [cache.get(name) is None for name in "cde"] == [True, True, False]


def test_reading_without_the_disk_needs_cached_entries_too() -> None:
    slot = large_slot()
    store, _ = stored(slot)
    cache = EntryCache()
    segment = Segment.open(store, NAME, cache)
    assert segment.locate_now(4, 17, 1000) is None
    place = segment.locate(4, 17, 1000)
    assert segment.locate_now(4, 17, 1000) == place
    block = memoryview(bytearray(place[1] - place[0]))
    assert segment.pieces_now(block, 4, *place) is None, "the page cache does not have it yet"
    while segment.pieces_now(block, 4, *place) is None:
        read = segment.pieces(memoryview(bytearray(block)), 4, *place)
    assert segment.pieces_now(block, 4, *place) == read
    cache.drop(NAME)
    assert segment.locate_now(4, 17, 1000) is None
