"""Settings and limits of a log, with units and reasons."""

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
)  # end of a journal file that data cannot use: up to a page of padding, and writes of the sealer
MERGE_SLACK_BYTES: Final = 2048  # a merged batch may need wider alignment than its parts
# reserved in the last file: 128 removals, each synced separately, and as many writes of the sealer
KEPT_BYTES: Final = 2 * 1024 * 1024
# size of a journal write with one batch, without the batch
GROUP_OVERHEAD_BYTES: Final = GROUP_HEADER_BYTES + ENTRY_BYTES + MERGE_SLACK_BYTES


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Limits of one log.

    Attributes:
        slot_bytes: size of a journal file. A journal write is at most 16 MiB and never spans two files. Files of 64 MiB
            are written to segments at 1.1 to 1.3 GB/s.
        slot_count_min: journal files created when the log opens: one to write and a free one.
        slot_count_max: maximum number of journal files. They are mapped and count as the broker's memory, so four of 64
            MiB keep it below 500 MB. When all wait to be written to segments, producers wait.
        sync_interval_ms: longest time until a sync of ``written`` data, or the writing of its journal file to segments,
            begins.
        unsynced_bytes_max: unsynced bytes above which producers wait; above half of this, a sync starts at once.
        staged_bytes_max: limit of the bytes of unpublished batches.
        staged_batches_max: limit of the number of unpublished batches; each costs some 300 bytes of memory.
        group_bytes_max: size limit of a journal write (decision 0102); smaller journal files lower it.
        disk_reserve_bytes: free space reserved for deletion, retention, offsets and segments; below it appends are
            refused.
        scrub_hours: period in which every segment is read and verified once; 0 for never. A week detects bit rot before
            a monthly backup is replaced.
        cache_bytes: bytes of recent segments cached for readers that are slightly behind; 0 for none.
        open_blobs_max: number of open segment files, each with up to two descriptors.
        durability: minimum level of every acknowledgement, ``WRITTEN`` or ``SYNCED``. With ``SYNCED`` only synced
            records can be read.
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
        assert self.durability is not Level.MEMORY, "a commit is at least written"

    @property
    def kept_bytes(self) -> tuple[int, int, int]:
        """Bytes at the end of the last journal file that data, changes and removals, in this order, must leave free.

        Freeing a journal file or a segment needs a journal write. Without this reserve, offset commits could fill the
        last file while the others cannot be written to segments because the disk is full.
        """
        kept = min(KEPT_BYTES, self.slot_bytes // 8) + 4 * PAGE_BYTES
        last = max(
            kept // 2, 4 * PAGE_BYTES
        )  # space to list segments: two pages, and two more because each of two syncs may leave one unused
        return kept, max(kept * 3 // 4, last + PAGE_BYTES // 2), last

    @property
    def group_limit(self) -> int:
        """Maximum size of a journal write in bytes."""
        return min(self.group_bytes_max, GROUP_BYTES_MAX, self.slot_bytes - SLOT_MARGIN_BYTES)

    @property
    def batch_bytes_max(self) -> int:
        """Maximum size in bytes of a batch that fits into a journal write."""
        return self.group_limit - GROUP_OVERHEAD_BYTES

    @staticmethod
    def slot_bytes_for(batch_bytes: int) -> int:
        """Return the minimum size of a journal file that can hold batches of this size."""
        return batch_bytes + GROUP_OVERHEAD_BYTES + SLOT_MARGIN_BYTES
