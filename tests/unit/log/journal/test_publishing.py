"""Preparing a publish in steps, cancelling it, and its effect on partitions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from polywire.errors import BrokerError, ErrorCode, Missing
from polywire.log.journal.group import EntryKind, GroupHead, read_directory
from polywire.log.journal.publishing import LOT_BATCHES
from polywire.log.partition.partition import FilePartition
from polywire.log.partition.tail_index import TailIndex, attach
from polywire.records.batch import check_header, read_header
from polywire.records.columns import HEADER_BYTES
from polywire.types import Level
from tests.unit.log.rig import Rig, batch_of
from tests.unit.log.test_file_log import fill_slot

FAR = 2**62
TOKENS = [b"%016d" % number for number in range(1, 8)]
BATCHES = 3 * LOT_BATCHES


def stage(rig: Rig, partition: FilePartition, token: bytes, value: bytes) -> None:
    rig.log.stage(token, partition, batch_of([value]), expires_at_us=FAR, level=Level.WRITTEN, done=None)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def partitions(rig: Rig) -> list[FilePartition]:
    """Return three partitions; each token has batches staged for two of them, the first token many."""
    made = [rig.log.open_partition(number) for number in (1, 2, 3)]
    for number, token in enumerate(TOKENS):
        for count in range(BATCHES if number == 0 else 2):
            stage(rig, made[(number + count) % 3], token, b"%d.%d" % (number, count))
    rig.log.commit()
    return made


def published(rig: Rig, what: Sequence[bytes]) -> list[Sequence[tuple[int, int, int]]]:
    """Prepare these tokens step by step, and publish them."""
    made, reported = rig.log.prepare(), []

    def done(ranges: Sequence[tuple[int, int, int]] | BrokerError) -> None:
        assert not isinstance(ranges, BrokerError), ranges
        reported.append(ranges)

    steps = sum(1 for _ in made.add(what))
    assert steps > 2 if what[0] == TOKENS[0] else steps
    rig.log.publish(made, b"published", level=Level.WRITTEN, done=done)
    return reported


def expected(place: int) -> list[bytes]:
    """Return the values of a partition after everything was published in order."""
    return [
        b"%d.%d" % (number, count)
        for number in range(len(TOKENS))
        for count in range(BATCHES if number == 0 else 2)
        if (number + count) % 3 == place
    ]


def test_a_publish_is_one_group_even_after_restarts(rig: Rig, partitions: list[FilePartition]) -> None:
    rig.append(partitions[0], [b"before"])
    reported = published(rig, TOKENS)
    rig.append(partitions[0], [b"after"])
    rig.log.commit()
    [ranges] = reported
    assert {(incarnation, first) for incarnation, first, _ in ranges} == {(1, 1), (2, 0), (3, 0)}
    for again in (False, True):
        if again:
            rig.log.close()
            rig.open()
            partitions = [rig.log.partition(number) for number in (1, 2, 3)]
        assert rig.read(partitions[0]) == [b"before", *expected(0), b"after"]
        assert [rig.read(partition) for partition in partitions[1:]] == [expected(1), expected(2)]
        assert len(rig.log._state.staging) == 0
        assert (rig.log._state.staging.size, rig.log._state.staging.count) == (0, 0)
    rig.log.close()


def test_claimed_tokens_are_unavailable_until_the_publish_is_cancelled(
    rig: Rig, partitions: list[FilePartition]
) -> None:
    made = rig.log.prepare()
    list(made.add(TOKENS[:2]))
    other = rig.log.prepare()
    with pytest.raises(Missing) as caught:
        list(other.add([TOKENS[2], TOKENS[1]]))
    assert caught.value.code is ErrorCode.STAGE_MISSING
    other.cancel()
    with pytest.raises(Missing):
        stage(rig, partitions[0], TOKENS[0], b"more")
    rig.log.abandon(TOKENS[:1])
    rig.log.commit()
    made.cancel()
    assert not rig.log._state.reader.published
    published(rig, TOKENS)
    rig.log.commit()
    assert rig.read(partitions[0]) == expected(0)
    rig.log.close()


def test_a_refused_publish_releases_its_tokens(rig: Rig, partitions: list[FilePartition]) -> None:
    made = rig.log.prepare()
    list(made.add(TOKENS))
    rig.log._writer.capacities = (-1, -1, -1)
    rig.log._journal.roll()
    with pytest.raises(BrokerError):
        rig.log.publish(made, bytes(2**26), level=Level.WRITTEN, done=lambda _: None)
    assert not rig.log._state.reader.published
    assert rig.log.staged_partitions(TOKENS) == {1, 2, 3}
    rig.log.close()


def test_partitions_dropped_during_a_publish_are_skipped(rig: Rig, partitions: list[FilePartition]) -> None:
    made = rig.log.prepare()
    list(made.add(TOKENS))
    for number in (1, 2):
        rig.log.drop_partition(number)
    rig.log.publish(made, b"published", level=Level.WRITTEN, done=lambda _: None)
    rig.log.commit()
    assert rig.read(partitions[2]) == expected(2)
    assert len(rig.log._state.reader.published) == len(expected(2))
    assert made.incarnations == {1, 2, 3}, "the caller gets every partition, dropped or not"
    rig.log.close()
    rig.open()
    assert rig.read(rig.log.partition(3)) == expected(2)
    assert len(rig.log._state.staging) == 0
    rig.log.close()


def test_tokens_without_remaining_batches_are_removed_too(rig: Rig, partitions: list[FilePartition]) -> None:
    del partitions
    for number in (1, 2, 3):
        rig.log.drop_partition(number)
    rig.log.publish(TOKENS, b"published", level=Level.WRITTEN, done=lambda _: None)
    rig.log.commit()
    assert len(rig.log._state.staging) == 0
    rig.log.close()
    rig.open()
    assert len(rig.log._state.staging) == 0
    rig.log.close()


def test_trimmed_and_sealed_batches_are_forgotten(rig: Rig, partitions: list[FilePartition]) -> None:
    published(rig, TOKENS)
    rig.log.commit()
    listed = rig.log._state.reader.published
    before = len(listed)
    rig.log.trim(1, 5)
    rig.log.commit()
    assert len(listed) == before - 5
    assert rig.read(partitions[0], 5) == expected(0)[5:]
    rig.log.drop_partition(1)
    rig.log.commit()
    assert len(listed) == before - len(expected(0))
    rig.log.close()


def test_batches_are_forgotten_once_they_are_sealed(rig: Rig, partitions: list[FilePartition]) -> None:
    published(rig, TOKENS)
    rig.log.commit()
    assert rig.log._state.reader.published
    other = rig.log.open_partition(99)
    for _ in range(2):  # the slot in which they were staged, and that of their publish
        fill_slot(rig, other)
        rig.settle()
    assert not rig.log._state.reader.published
    assert rig.read(partitions[0]) == expected(0)
    rig.log.close()


# Compiled functions


def content_of(count: int) -> bytearray:
    """Return an entry with that many batches of two records."""
    return bytearray(TOKENS[0] + b"".join([bytes(batch_of([b"a", b"b"])[:HEADER_BYTES])] * count))


def test_batches_get_consecutive_offsets() -> None:
    head, content = GroupHead(1), content_of(2) + content_of(1) + TOKENS[1]
    ends = [16 + 2 * HEADER_BYTES, 32 + 3 * HEADER_BYTES, len(content)]
    entries = array("q", [ends[0], 1, ends[1], 0, ends[2], -1])
    numbers = array("q", [7, 100, 1000, 5, 8, 200, 2000, 6])
    head.published(content, entries, numbers, 3)
    group = bytes(head.finish(0, 1, 0, 0, 0)) + content
    first, second, gone = read_directory(group, 0)
    assert [(entry.kind, entry.partition) for entry in (first, second, gone)] == [
        (EntryKind.PUBLISH, 8),
        (EntryKind.PUBLISH, 7),
        (EntryKind.ABANDON, 0),
    ]
    headers = [read_header(group, at) for at in (first.position + 16, first.position + 16 + HEADER_BYTES)]
    span = headers[1].base_address - 2000
    assert [(header.partition, header.base_offset, header.base_address) for header in headers] == [
        (8, 200, 2000),
        (8, 202, 2000 + span),
    ]
    assert {(header.epoch, header.append_time_us) for header in headers} == {(3, 6)}
    assert read_header(group, second.position + 16).base_offset == 100
    assert numbers.tolist() == [7, 102, 1000 + span, 5, 8, 204, 2000 + 2 * span, 6]
    tails = [TailIndex(), TailIndex()]
    attach(tails, content, entries, array("q", [10, 20, 30]), 9)
    assert [tails[1].entry(number)[:2] for number in range(2)] == [(200, 10), (202, 20)]
    assert tails[0].entry(0) == (100, 30, headers[0].length, 9, 1000, 5)


@pytest.mark.parametrize(
    ("entries", "numbers"),
    [
        ([16 + HEADER_BYTES + 8, 0], 4),
        ([16 + 2 * HEADER_BYTES, 0], 4),
        ([8, 0], 4),
        ([16 + HEADER_BYTES, 1], 4),
        ([16 + HEADER_BYTES, 0], 3),
    ],
)
def test_numbering_beyond_the_arrays_raises(entries: list[int], numbers: int) -> None:
    with pytest.raises(IndexError):
        GroupHead(1).published(content_of(1), array("q", entries), array("q", range(numbers)), 1)


@pytest.mark.parametrize(
    ("entries", "positions"), [([16 + 2 * HEADER_BYTES, 0], 9), ([8, 0], 9), ([16 + HEADER_BYTES, 1], 9), ([120, 0], 0)]
)
def test_attaching_beyond_the_arrays_raises(entries: list[int], positions: int) -> None:
    with pytest.raises(IndexError):
        attach([TailIndex()], content_of(1), array("q", entries), array("q", range(positions)), 1)


def test_published_headers_are_valid() -> None:
    content = content_of(1)
    GroupHead(1).published(content, array("q", [len(content), 0]), array("q", [1, 2, 3, 4]), 5)
    assert check_header(content, 16)
