"""Merging of small neighbouring batches, and the offset that each producer gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polywire.log.journal.merging import answer, merged
from polywire.log.partition.partition import Append
from polywire.log.settings import MERGE_SLACK_BYTES
from polywire.records.columns import Record
from polywire.records.rows import from_records, to_records
from polywire.types import Buffer, Level
from tests.unit.log.rig import batch_of

MERGED_BYTES_MAX = 256 * 1024


def entries(*batches: Buffer, slack: int = MERGE_SLACK_BYTES) -> list[tuple[Buffer, Sequence[Append], Sequence[int]]]:
    """Return the entries that are written for these batches."""
    return merged([(batch, Level.WRITTEN, None) for batch in batches], slack)


def values(batch: Buffer) -> list[bytes | None]:
    return [record.value for record in to_records(bytes(batch))]


def test_small_plain_neighbours_are_merged() -> None:
    small = [batch_of([b"a", b"b"]), batch_of([b"c"]), batch_of([b"d"])]
    [(batch, owners, counts)] = entries(*small)
    assert values(batch) == [b"a", b"b", b"c", b"d"]
    assert [item[0] for item in owners] == small
    assert counts == [2, 1, 1]


def test_large_batches_and_batches_of_producers_are_not_merged() -> None:
    apart: list[Buffer] = [
        batch_of([b"x" * 5000]),
        from_records([Record(b"a")], producer_id=b"p" * 16, producer_epoch=0),
        b"",
    ]
    for alone in apart:
        found = entries(batch_of([b"a"]), alone, batch_of([b"b"]), batch_of([b"c"]))
        assert [len(owners) for _, owners, _ in found] == [1, 1, 2]
        assert found[1][0] is alone
        assert not found[1][2]


def test_batches_with_other_columns_are_not_merged() -> None:
    keyed = from_records([Record(b"a", key=b"k")])
    found = entries(batch_of([b"a"]), batch_of([b"b"]), keyed, keyed)
    assert [counts for _, _, counts in found] == [[1, 1], [1, 1]]


def test_merged_batches_have_a_limit() -> None:
    found = entries(*[batch_of([b"x" * 3000])] * 200)
    assert sum(len(owners) for _, owners, _ in found) == 200
    assert all(len(batch) <= MERGED_BYTES_MAX for batch, _, _ in found)
    assert len(found) < 5


def test_batches_that_would_grow_too_much_are_not_merged() -> None:
    small = [batch_of([b"a"]), batch_of([b"b"])]
    found = entries(*small, slack=-(1 << 20))
    assert [batch for batch, _, _ in found] == small


def test_each_producer_gets_the_offset_of_its_own_batch() -> None:
    written: list[tuple[Any, tuple[Any, ...]]] = []
    synced: list[tuple[Any, tuple[Any, ...]]] = []
    a, b, c = (lambda _: None for _ in range(3))
    owners: list[Append] = [
        (b"", Level.WRITTEN, a),
        (b"", Level.MEMORY, None),
        (b"", Level.SYNCED, b),
        (b"", Level.WRITTEN, c),
    ]
    answer(owners, [2, 3, 1, 4], 100, written, synced)
    assert written == [(a, (100,)), (c, (106,))]
    assert synced == [(b, (105,))]
    answer(owners[:1], (), 7, written, synced)
    assert written[-1] == (a, (7,))
