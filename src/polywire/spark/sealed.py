"""Locate the records of ranges in the broker's bucket during planning, so that tasks do not need the broker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from polywire.client.bulk import BulkConnection
from polywire.errors import BrokerError, Corrupt
from polywire.protocols.polywire.messages import ANY_EPOCH, SealedRange
from polywire.spark import snapshot
from polywire.spark.options import LocalSegments, SourceOptions
from polywire.spark.planning import PACK_RECORDS
from polywire.store.data_directory import BlobRoot
from polywire.tables.sealed import ReadRange, SealedRuns, located

Pieces = Sequence[tuple[ReadRange, ...]]
_without_bucket: Final[set[BulkConnection]] = set()
"""Connections to brokers without a bucket. Each task checks for itself whether it can access the broker's files."""


def locate_ranges(options: SourceOptions, pieces: Pieces) -> Pieces:
    """Return the ranges with the locations of their records in segments, if these are in a bucket."""
    if options.local_segments is LocalSegments.OFF or not pieces:
        return pieces
    records_min = 1 if options.local_segments is LocalSegments.REQUIRED else PACK_RECORDS
    if max(wanted.record_count for piece in pieces for wanted in piece) < records_min:
        return pieces
    planner = _Planner(options, records_min)
    return [tuple(planner.located(wanted) for wanted in piece) for piece in pieces]


class _Planner:
    """Requests from the broker where the records of ranges are in segments. Stops if the broker has no bucket."""

    def __init__(self, options: SourceOptions, records_min: int) -> None:
        self._connection = snapshot.connect(options)
        self._checks_epoch = options.fail_on_data_loss
        self._records_min = records_min

    def located(self, wanted: ReadRange) -> ReadRange:
        if wanted.record_count < self._records_min or self._connection in _without_bucket:
            return wanted
        try:
            return replace(wanted, sealed=self._ask(wanted))
        except Corrupt:
            raise
        except BrokerError:  # the task will get the same error, unless it was temporary
            return wanted

    def _ask(self, wanted: ReadRange) -> SealedRuns | None:
        runs: list[SealedRange] = []
        epoch = wanted.epoch if self._checks_epoch else ANY_EPOCH
        for location in located(self._connection, wanted, epoch=epoch):
            root = BlobRoot(location.address, location.mark)
            if not root.is_bucket:
                _without_bucket.add(self._connection)
                return None
            runs += location.runs
        return SealedRuns(root, tuple(runs))
