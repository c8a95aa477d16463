"""What a log may use and what it promises: one value, every limit named, with its unit and its reason.

Promises: plain numbers. Must not know: who reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polywire.log.journal.group import ENTRY_BYTES, GROUP_BYTES_MAX, GROUP_HEADER_BYTES
from polywire.store.base import OPEN_BLOBS_MAX
from polywire.types import Level

PAGE_BYTES: Final = 4096
SLOT_BYTES_MIN: Final = 8 * PAGE_BYTES
SLOT_MARGIN_BYTES: Final = (
    4 * PAGE_BYTES
)  # of a slot that no group takes: for the page it begins on, and the sealer's own groups
MERGE_SLACK_BYTES: Final = 2048  # a merged batch may be aligned more widely than its parts
KEPT_BYTES: Final = (
    2 * 1024 * 1024
)  # of the last slot: 128 removals that are synced one by one, as many groups of the sealer
GROUP_OVERHEAD_BYTES: Final = GROUP_HEADER_BYTES + ENTRY_BYTES + MERGE_SLACK_BYTES  # of a group beside its only batch


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Limits of one log.

    slot_bytes: one journal file; 64 MiB seal at 1.1–1.3 GB/s (concepts: storage#what-it-costs).
        A group is at most 16 MiB and never spans two.
    slot_count_min: made when the log opens: one to write, one ready.
    slot_count_max: mapped slots count as the broker's memory (below 500 MB whatever is produced), so four of 64 MiB;
    when all wait for the sealer,
        produce waits.
    sync_interval_ms: how long ``written`` data may wait for a sync, or the sealing of its slot, to begin.
    unsynced_bytes_max: above it the log is congested; half of it starts a sync at once.
    staged_bytes_max, staged_batches_max: what may lie staged; a staged batch costs some 300 bytes of memory.
    group_bytes_max: see decision 0002; smaller slots lower it.
    disk_reserve_bytes: free space that is kept for deletion, retention, positions and the sealer; below it appends are refused.
    scrub_hours: every segment is read and verified once in so many hours; 0 for never. A week finds rot before a monthly backup goes.
    cache_bytes: of what was sealed last, kept in memory for readers who are somewhat behind; 0 for nothing.
    open_blobs_max: segments kept open, with up to two descriptors each.
    durability: floor of every acknowledgement, ``WRITTEN`` or ``SYNCED``; under the latter readers see synced records only.
    """

    slot_bytes: int = 64 * 1024 * 1024
    slot_count_min: int = 2
    slot_count_max: int = 4
    sync_interval_ms: int = 100
    unsynced_bytes_max: int = 192 * 1024 * 1024
    staged_bytes_max: int = 1024 * 1024 * 1024
    staged_batches_max: int = 65_536
    group_bytes_max: int = GROUP_BYTES_MAX
    disk_reserve_bytes: int = 256 * 1024 * 1024
    scrub_hours: float = 168.0
    durability: Level = Level.WRITTEN
    open_blobs_max: int = OPEN_BLOBS_MAX
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        assert self.slot_bytes >= SLOT_BYTES_MIN, "a slot has at least eight pages"
        assert self.slot_bytes % PAGE_BYTES == 0, "a slot is whole pages"
        assert 2 <= self.slot_count_min <= self.slot_count_max, "one slot is written while another is sealed"
        assert self.durability is not Level.MEMORY, "what is committed is written"

    @property
    def kept_bytes(self) -> tuple[int, int, int]:
        """Capacity of the last slot that is kept: not for data; not for changes either; and not even for removals.

        Where all slots wait for a disk without space, positions would use it up; freeing a slot, or a segment, takes a group.
        """
        kept = min(KEPT_BYTES, self.slot_bytes // 8) + 4 * PAGE_BYTES
        last = max(
            kept // 2, 4 * PAGE_BYTES
        )  # to name segments: two pages, and one that each of two syncs may leave unused
        return kept, max(kept * 3 // 4, last + PAGE_BYTES // 2), last

    @property
    def group_limit(self) -> int:
        """Most bytes of one group."""
        return min(self.group_bytes_max, GROUP_BYTES_MAX, self.slot_bytes - SLOT_MARGIN_BYTES)

    @property
    def batch_bytes_max(self) -> int:
        """Longest batch that always fits a group."""
        return self.group_limit - GROUP_OVERHEAD_BYTES

    @staticmethod
    def slot_bytes_for(batch_bytes: int) -> int:
        """Least size of slots whose groups hold a batch of this length."""
        return batch_bytes + GROUP_OVERHEAD_BYTES + SLOT_MARGIN_BYTES
