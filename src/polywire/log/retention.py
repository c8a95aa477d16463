"""What may go: which offsets to keep under a topic's limits, which blobs nobody needs, which are worth writing anew.

Promises: pure functions of sizes, times and offsets; nothing is decided twice. Must not know: stores, journals, clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from polywire.log.segment import NO_TOKEN, Run, SegmentInfo

SHARED_BLOB_BYTES_MAX: Final = 64 * 1024 * 1024  # merging stops at the size of a slot
SMALL_BLOB_BYTES_MAX: Final = (
    16 * 1024 * 1024
)  # blobs above this are never merged: that bounds how often a byte is copied
MERGE_COUNT_MIN: Final = 4  # so that each merge frees at least three names


@dataclass(frozen=True, slots=True)
class Extent:
    """A stretch of one partition that retention keeps or drops whole: a sealed run, an index stride or an unsealed batch."""

    first_offset: int
    next_offset: int
    size: int
    last_time_us: int


@dataclass(frozen=True, slots=True)
class Living:
    """What is still wanted.

    first_offsets: first readable offset of every partition that exists.
    tokens: tokens whose staged batches may still be published, or were published and are read through their token's run.
    """

    first_offsets: Mapping[int, int]
    tokens: Collection[bytes]

    def wants(self, run: Run) -> bool:
        """Whether some record of a run can still be read."""
        if run.token != NO_TOKEN:
            return run.token in self.tokens
        first_offset = self.first_offsets.get(run.partition)
        return first_offset is not None and run.next_offset > first_offset

    def wanted_bytes(self, info: SegmentInfo) -> int:
        """Bytes of a blob's runs that are wanted, each run counted whole."""
        return sum(run.size for run in info if self.wants(run))


def first_offset_to_keep(
    extents: Sequence[Extent], *, age_us_max: int | None, bytes_max: int | None, now_us: int
) -> int | None:
    """Offset where a partition begins under these limits: the first extent that is neither too old (its last record older than
    ``age_us_max``) nor too much (it and all after it hold more than ``bytes_max``).

    The newest extent stays for its size, but goes for its age. None when there are no extents.
    """
    if not extents:
        return None
    total = sum(extent.size for extent in extents)
    for number, extent in enumerate(extents):
        too_old = age_us_max is not None and extent.last_time_us < now_us - age_us_max
        too_much = bytes_max is not None and total > bytes_max and number < len(extents) - 1
        if not (too_old or too_much):
            return extent.first_offset
        total -= extent.size
    return extents[-1].next_offset


def dead_blobs(segments: Iterable[SegmentInfo], living: Living) -> list[str]:
    """Names of the blobs of which nothing is wanted any more."""
    return [info.name for info in segments if not any(living.wants(run) for run in info)]


def half_dead_blobs(segments: Iterable[SegmentInfo], living: Living) -> list[str]:
    """Names of the blobs worth writing anew without what nobody wants: at least half of their bytes, but not all (design §4, rule 5)."""
    found = []
    for info in segments:
        wanted = living.wanted_bytes(info)
        if wanted > 0 and 2 * wanted <= info.data_bytes:
            found.append(info.name)
    return found


def blobs_with_dropped(segments: Iterable[SegmentInfo], living: Living) -> list[str]:
    """Names of the blobs that still hold bytes of partitions that were deleted, and something wanted too. They are to be written anew
    within hours after a DELETE, however little it is (design §4, rule 5)."""
    return [
        info.name
        for info in segments
        if any(run.partition not in living.first_offsets for run in info) and living.wanted_bytes(info) > 0
    ]


def blobs_to_merge(segments: Sequence[SegmentInfo], living: Living) -> list[list[str]]:
    """Groups of small neighbouring blobs worth joining into one each, given in sealing order.

    Neighbours only, so that every run of a joined blob stays one range of offsets; at least four of them, at most 64 MiB together.
    """
    groups: list[list[str]] = []
    group: list[str] = []
    total = 0
    for info in segments:
        wanted = living.wanted_bytes(info)
        if wanted > SMALL_BLOB_BYTES_MAX or total + wanted > SHARED_BLOB_BYTES_MAX:
            groups.append(group)
            group, total = [], 0
        if 0 < wanted <= SMALL_BLOB_BYTES_MAX:
            group.append(info.name)
            total += wanted
    groups.append(group)
    return [names for names in groups if len(names) >= MERGE_COUNT_MIN]
