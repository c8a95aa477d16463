"""The world of the log: a client of it, and what the processes that have it open must have kept.

Promises: as ``World``; after a clean stop copies of the disk are damaged. Must not know: how the log does what it promises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Final

from polywire.errors import BrokerError
from polywire.log.base import Read
from polywire.log.segments import compaction
from polywire.log.settings import LogSettings
from polywire.testing.sim.log.client import ACTS, LEVELS, Client, records_of
from polywire.testing.sim.log.model import Model
from polywire.testing.sim.log.process import LogProcess
from polywire.testing.sim.log.rot import Rot
from polywire.testing.sim.promises import require
from polywire.testing.sim.world import World
from polywire.types import Level

ROTS: Final = 3  # damages tried at the end of a run
SETTINGS: Final = LogSettings(
    slot_bytes=48 * 1024, staged_bytes_max=256 * 1024, disk_reserve_bytes=0, scrub_hours=0.0001, open_blobs_max=4
)
COMPACTION: Final = {"DIRTY_BYTES_MIN": 4000, "KEY_SLOTS": 64}
"""What must be small so that it happens often."""


@contextmanager
def small_compaction() -> Iterator[None]:
    """Passes of compaction are worth it early."""
    before = {name: getattr(compaction, name) for name in COMPACTION}
    try:
        for name, value in COMPACTION.items():
            setattr(compaction, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(compaction, name, value)


class LogWorld(World):
    """Guards: ``client`` is of the process that was started last; the model is what every client together asked for."""

    NAME = "log"
    ACTS = tuple(act.__name__ for act in ACTS)

    client: Client
    _process: LogProcess
    _settings: LogSettings
    _model: Model
    _weights: list[float]

    def _small(self) -> AbstractContextManager[None]:
        return small_compaction()

    def _choose_settings(self) -> None:
        self._model = Model()
        chance = self._chance
        least = 2 + chance.below(2)
        self._settings = replace(
            SETTINGS,
            slot_count_min=least,
            slot_count_max=least + 1 + chance.below(2),
            sync_interval_ms=chance.one_of((1, 20, 100, 60_000)),
            staged_bytes_max=chance.one_of((16 * 1024, SETTINGS.staged_bytes_max)),
            durability=chance.one_of((Level.WRITTEN, Level.WRITTEN, Level.SYNCED)),
        )

    def _description(self) -> str:
        return f"seed={self.seed} durability={self._settings.durability.name}"

    def _make_process(self) -> LogProcess:
        return LogProcess(self._disk, self._settings, self._clock, self._chance, self.story)

    def _meet(self) -> None:
        process = self._process
        self.client = Client(process.log, process.state, self._model, self._chance, self.story)
        self._weights = list(ACTS.values())

    def _act(self) -> None:
        self.client.act(self._weights, self._without)

    @property
    def _failure(self) -> BrokerError | None:
        return self.client.failure

    def _change_minds(self) -> None:
        self._weights = [weight * self._chance.share() ** 2 for weight in ACTS.values()]
        self.client.levels = self._chance.one_of(LEVELS)

    def _expect_failed_reads(self) -> None:
        self.client.may_fail_reads = True

    def _let_go(self) -> None:
        self.client.let_go()

    def _closed(self) -> None:
        for acknowledged, count in self._model.everything():
            acknowledged.note(count, Level.SYNCED)

    def _check_closed(self) -> None:
        """The disk as a clean stop has left it, and what if something of it were damaged."""
        for _ in range(0 if "rot" in self._without else ROTS):
            Rot(deepcopy(self._model), self._settings, self._clock, self._chance, self.story).judge(self._disk)

    # Checks

    def _check_start(self) -> None:
        model, powerless = self._model, self._powerless
        log = self._process.log
        ends = {0: len(self._process.state.changes)}
        found = {incarnation: log.partition(incarnation) for incarnation in log.incarnations()}
        ends.update((incarnation, partition.next_offset) for incarnation, partition in found.items())
        unknown = sorted(set(found) - set(model.partitions))
        require(not unknown, "no partition appears", unknown=unknown)
        model.check_prefix(ends)
        model.check_changes(self._process.state.changes, powerless=powerless)
        model.check_publications(ends)
        shown_stays = not powerless or self._settings.durability is Level.SYNCED
        for kept in list(model.partitions.values()):
            partition = found.get(kept.incarnation)
            if partition is None:
                model.check_loss(kept, powerless=powerless)
                continue
            first, end = partition.first_offset, partition.next_offset
            model.check_survival(kept, first, end, powerless=powerless, shown_stays=shown_stays)
        for token, staged in list(model.tokens.items()):
            if self._process.is_staged(token):
                staged.leaving = staged.spent = False
                staged.known.note(1, Level.SYNCED)
            else:
                lost = not staged.known.floor(powerless=powerless)
                require(lost or staged.leaving, "an acknowledged staged batch is there", token=token.hex())
                del model.tokens[token]
        self._check_records()

    def _check_records(self) -> None:
        """Everything can be read."""
        for kept in list(self._model.partitions.values()):
            if kept.dropped:
                continue
            partition = self._process.log.partition(kept.incarnation)
            offset, end = partition.first_offset, partition.readable_offset
            seen: set[int] = set()
            while offset < end:
                found = self._read(kept.incarnation, offset)
                require(found.next_offset > offset, "a read goes on", partition=kept.incarnation, offset=offset)
                records = [record for record in records_of(found.chunks) if record.offset >= offset]
                kept.check_records(records, offset, found.next_offset)
                seen.update(record.offset for record in records)
                kept.shown = max(kept.shown, found.next_offset)
                offset = found.next_offset
                found.pin.release()
            kept.check_nulls(seen)

    def _read(self, incarnation: int, offset: int) -> Read:
        answer = self._process.read(incarnation, offset)
        if isinstance(answer, BrokerError):
            require(False, "every record can be read", partition=incarnation, offset=offset, error=answer.message)
        assert isinstance(answer, Read), "an answer is a read or an error"
        return answer

    def _come_to_rest(self) -> None:
        told: list[int | BrokerError] = []
        self._process.log.barrier(Level.SYNCED, told.append)
        self._process.until(lambda: told and not self._process.log.sealing)
        self._process.until(lambda: self._process.loop.is_idle)
        self.client.check_rest()
        self._check_records()

    def _check_end(self) -> None:
        self._process.close()
        self._leave()
        self._check_closed()
        self.story.tell("end", f"partitions={len(self._model.partitions)} changes={len(self._model.changes)}")
