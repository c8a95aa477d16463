"""Journal groups: encoding, verification, and detection of every flipped bit."""

from __future__ import annotations

from itertools import accumulate

import pytest

from polywire.errors import Invalid
from polywire.log.journal.group import (
    GROUP_MAGIC,
    Entry,
    EntryKind,
    GroupHead,
    GroupRun,
    bad_entry,
    find_groups,
    read_directory,
    read_group,
)
from polywire.records.batch import check_header, read_header
from polywire.records.checksum import xxh64
from polywire.records.columns import HEADER_BYTES
from polywire.types import Buffer
from tests.unit.log.rig import batch_of

TOKEN = b"0123456789abcdef"
SEED = 2**64 - 12_345


def build(*, start: int = 3, sequence: int = 9) -> bytes:
    """Return a group with a batch, a staged batch and a change."""
    head = GroupHead(SEED)
    batch, staged = batch_of([b"one", b"two"]), batch_of([b"three"])
    assert head.batch(batch, 7, start, 100, 5_000, 1_234) is None
    assert (head.offset_span, head.address_span) == (2, 26)
    head.staged(TOKEN + staged[:HEADER_BYTES], len(staged), 8, 99)
    head.entry(EntryKind.CHANGE, 0, 0, b"change")
    first = head.finish(start, sequence, 4, 77, 555)
    group = bytes(first) + batch + TOKEN + staged + b"change\0\0"
    assert len(group) == head.size
    return group


def test_a_group_reads_back() -> None:
    group = build()
    slot = bytes(64) + group + bytes(100)
    fields = read_group(slot, 64, SEED)
    assert fields is not None
    assert fields[:7] == (len(group), 3, 9, 4, 77, 3, 555)
    assert fields.kinds == 1 << EntryKind.BATCH | 1 << EntryKind.STAGED | 1 << EntryKind.CHANGE
    assert bad_entry(slot, 64) == -1
    batch, staged, change = read_directory(slot, 64)
    header = read_header(slot, batch.position)
    assert (header.partition, header.epoch, header.base_offset, header.base_address) == (7, 3, 100, 5_000)
    assert header.append_time_us == 1_234
    assert check_header(slot, batch.position)
    assert (staged.kind, staged.partition, staged.argument) == (EntryKind.STAGED, 8, 99)
    assert slot[staged.position : staged.position + 16] == TOKEN
    assert change == Entry(EntryKind.CHANGE, 0, 0, change.position, 6, xxh64(b"change"))
    assert slot[change.position : change.position + 6] == b"change"


def test_a_group_cannot_be_forged_without_the_seed() -> None:
    group = build()
    assert read_group(group, 0, SEED) is not None
    assert all(read_group(group, 0, SEED ^ 1 << bit) is None for bit in range(64))
    assert SEED.to_bytes(8, "little") not in group, "the seed itself is not stored"


def test_every_flipped_bit_is_detected() -> None:
    group = bytearray(build())
    covered = len(group) - 2  # the change's padding is not covered
    for at in range(covered):
        for bit in range(8):
            group[at] ^= 1 << bit
            broken = read_group(group, 0, SEED) is None or bad_entry(group, 0) >= 0
            assert broken or at in padding(bytes(group)), (at, bit)
            group[at] ^= 1 << bit
    assert bad_entry(group, 0) == -1


def padding(group: bytes) -> set[int]:
    """Return the positions of the padding that aligns batch bodies to 8 bytes."""
    batch, staged, _ = read_directory(build(), 0)
    places: set[int] = set()
    for at, length in ((batch.position, batch.length), (staged.position + 16, staged.length - 16)):
        places.update(range(at + HEADER_BYTES + read_header(build(), at).body_bytes, at + length))
    return places


def test_a_truncated_group_is_not_read() -> None:
    group = build()
    for cut in range(len(group)):
        assert read_group(group[:cut], 0, SEED) is None
    assert read_group(group, 8, SEED) is None
    assert read_group(group, -1, SEED) is None


def find_in(slot: bytes) -> list[GroupRun]:
    return find_groups(slot, SEED, lambda at: slot.find(GROUP_MAGIC, at))


def test_groups_are_found_at_every_position() -> None:
    damaged = bytearray(build(sequence=11))
    damaged[-6] ^= 1
    head = GroupHead(SEED)
    head.entry(EntryKind.START, 0, 0, b"")
    for number in range(100):  # more entries than the scratch memory of the search has space for
        head.entry(EntryKind.TRIM, number, 0, b"")
    long = bytes(head.finish(2, 14, 0, 0, 0))
    whole = [
        build(sequence=9),
        build(sequence=10),
        bytes(damaged),
        build(sequence=12),
        build(start=2, sequence=13),
        long,
    ]
    others = [GROUP_MAGIC + bytes(60), b"odd!" + build(sequence=99) + bytes(4), build(sequence=12)[:-8]]
    runs = find_in(b"".join(whole + others))
    ends = list(accumulate(map(len, whole)))
    assert [(run.start, run.first, list(run.positions)) for run in runs] == [(3, 9, [0, *ends[:3]]), (2, 13, ends[3:5])]
    assert [(list(run.naming), list(run.damaged)) for run in runs] == [([], [11]), ([14], [])]


def test_a_group_inside_another_is_found_only_if_the_other_is_damaged() -> None:
    inside = build(sequence=40) + b"the rest"
    head = GroupHead(SEED)
    head.entry(EntryKind.CHANGE, 0, 0, inside)
    around = bytearray(bytes(head.finish(3, 9, 0, 0, 0)) + inside)
    assert [run.first for run in find_in(bytes(around))] == [9]
    around[-1] ^= 1
    assert [(run.first, list(run.damaged)) for run in find_in(bytes(around))] == [(9, [9]), (40, [])]


def test_a_read_only_batch_gets_its_own_header() -> None:
    head = GroupHead(SEED)
    batch = bytes(batch_of([b"value"]))
    header = head.batch(batch, 7, 1, 0, 0, 0)
    assert header is not None
    assert check_header(bytes(header) + batch[HEADER_BYTES:], 0)
    assert read_header(header).partition == 7


@pytest.mark.parametrize(
    "broken", [b"", bytes(200), bytes(batch_of([b"value"]))[:-8], bytes(batch_of([b"v"])) + bytes(8)]
)
def test_an_incomplete_batch_is_refused(broken: Buffer) -> None:
    head = GroupHead(SEED)
    with pytest.raises(Invalid):
        head.batch(broken, 7, 1, 0, 0, 0)
    assert head.count == 0


def test_directory_grows_with_its_entries() -> None:
    head = GroupHead(SEED)
    for number in range(5_000):
        head.entry(EntryKind.TRIM, number, number * 2, b"")
    first = bytes(head.finish(1, 1, 0, 0, 0))
    entries = read_directory(first, 0)
    assert [(entry.partition, entry.argument) for entry in entries] == [(n, n * 2) for n in range(5_000)]
    assert bad_entry(first, 0) == -1
    head.clear()
    head.entry(EntryKind.OPEN, 1, 0, b"")
    again = bytes(head.finish(1, 2, 0, 0, 0))
    assert len(again) == 96
    assert bad_entry(again, 0) == -1
