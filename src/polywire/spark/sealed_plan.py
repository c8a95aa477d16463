"""Where the ranges of a plan lie in the broker's bucket, asked when the read is planned: the tasks need no broker for them (decision 0065).

Promises: what is not told is read over the wire, or refused, by the task: nothing fails here that would not fail there. Must not know: Spark,
how a bucket is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from polywire.client.bulk import BulkConnection
from polywire.errors import BrokerError, Corrupt
from polywire.protocols.polywire.messages import ANY_EPOCH, SealedRange
from polywire.spark import snapshot
from polywire.spark.options import LocalSegments, SourceOptions
from polywire.spark.planning import PACK_RECORDS, ReadRange, SealedRuns
from polywire.store.data_directory import BlobRoot

Pieces = Sequence[tuple[ReadRange, ...]]

_on_a_machine: Final[set[BulkConnection]] = set()
"""Connections to brokers whose sealed records are files, or nothing: each task finds out about them for itself."""


def located(options: SourceOptions, pieces: Pieces) -> Pieces:
    """The same work of tasks, with the places of what is sealed."""
    if options.local_segments is LocalSegments.OFF or not pieces:
        return pieces
    records_min = 1 if options.local_segments is LocalSegments.REQUIRED else PACK_RECORDS
    if max(wanted.record_count for piece in pieces for wanted in piece) < records_min:
        return pieces
    planner = _Planner(options, records_min)
    return [tuple(planner.located(wanted) for wanted in piece) for piece in pieces]


class _Planner:
    """Guards: a broker that has no bucket is asked once."""

    def __init__(self, options: SourceOptions, records_min: int) -> None:
        self._connection = snapshot.connect(options)
        self._checks_epoch = options.fail_on_data_loss
        self._records_min = records_min

    def located(self, wanted: ReadRange) -> ReadRange:
        """A range, with its places where it is worth asking for them."""
        if wanted.record_count < self._records_min or self._connection in _on_a_machine:
            return wanted
        try:
            return replace(wanted, sealed=self._ask(wanted))
        except Corrupt:
            raise
        except BrokerError:  # the task gets the same error, or it was temporary
            return wanted

    def _ask(self, wanted: ReadRange) -> SealedRuns | None:
        runs: list[SealedRange] = []
        epoch = wanted.epoch if self._checks_epoch else ANY_EPOCH
        for told in snapshot.located(self._connection, wanted, epoch=epoch):
            root = BlobRoot(told.address, told.mark)
            if not root.is_bucket:
                _on_a_machine.add(self._connection)
                return None
            runs += told.runs
        return SealedRuns(root, tuple(runs))
