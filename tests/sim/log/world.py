"""The simulation of a log: a client, and checks of the data that its processes stored.

After a clean stop, the damage tests run on copies of the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import ClassVar, Final

from polywire.errors import BrokerError
from polywire.log.segments import compaction
from polywire.log.settings import LogSettings
from polywire.types import Level
from tests.sim.log.client import ACTS, LEVELS, Client
from tests.sim.log.decay import Decay
from tests.sim.log.model import Model
from tests.sim.log.process import LogProcess
from tests.sim.log.reading import check_start, read_back
from tests.sim.log.rot import Rot
from tests.sim.lone_world import LoneWorld
from tests.sim.node import TROUBLES

ROTS: Final = 3  # damages tried at the end of a run
SETTINGS: Final = LogSettings(
    slot_bytes=48 * 1024, staged_bytes_max=256 * 1024, disk_reserve_bytes=0, scrub_hours=0.0001, open_blobs_max=4
)
COMPACTION: Final = {"DIRTY_BYTES_MIN": 4000, "KEY_SLOTS": 64}
"""Settings that are small so that compaction happens often."""
CACHE_BYTES: Final = 64 * 1024  # of the last sealed data, for some seeds: a segment or two
CACHED: Final = (1, 4, 9, 12)  # remainders of those seeds
REMOVING: Final = (6,)
REMOVALS: Final = {"trim": 5.0, "drop": 4.0, "compact": 3.0, "barrier": 0.0, "publish": 0.3}
"""Factors of the weights in runs about deleted segments."""


@contextmanager
def small_compaction() -> Iterator[None]:
    """Make compaction worthwhile early."""
    before = {name: getattr(compaction, name) for name in COMPACTION}
    try:
        for name, value in COMPACTION.items():
            setattr(compaction, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(compaction, name, value)


class LogWorld(LoneWorld):
    """Guards: ``client`` is that of the latest process; the model has the requests of all clients."""

    NAME = "log"
    ACTS = tuple(act.__name__ for act in ACTS)
    TROUBLES: ClassVar = {**TROUBLES, "decay": 0.2}

    client: Client
    _process: LogProcess
    _settings: LogSettings
    _model: Model
    _decay: Decay
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
        if self.rest in CACHED:
            self._settings = replace(self._settings, cache_bytes=CACHE_BYTES)
        elif self.rest in REMOVING:  # runs in which hardly anything is synced except what must be
            self._settings = replace(self._settings, sync_interval_ms=60_000, durability=Level.WRITTEN)

    def _description(self) -> str:
        return f"seed={self.seed} durability={self._settings.durability.name}"

    def _make_process(self) -> LogProcess:
        return LogProcess(self._disk, self._settings, self._clock, self._chance, self.story)

    def _meet(self) -> None:
        process = self._process
        self.client = Client(process.log, process.state, self._model, self._chance, self.story)
        self._decay = Decay(self._disk, self._model, process, self._chance, self.story)
        self._weights = self._usual()

    def _usual(self) -> list[float]:
        """Return the weights of requests in this run."""
        factors = REMOVALS if self.rest in REMOVING else {}
        return [weight * factors.get(act.__name__, 1.0) for act, weight in ACTS.items()]

    def _act(self) -> None:
        self.client.act(self._weights, self._without)

    @property
    def _failure(self) -> BrokerError | None:
        return self.client.failure

    def _change_minds(self) -> None:
        self._mend()
        self._weights = [weight * self._chance.share() ** 2 for weight in self._usual()]
        self.client.levels = self._chance.one_of(LEVELS)

    def _change_mood(self) -> None:
        super()._change_mood()
        if self.rest in REMOVING and "haste" not in self._without:
            self._process.files.haste = self._chance.one_of((0.0, 0.2))

    def _make_trouble(self, trouble: str) -> None:
        if trouble != "decay":
            super()._make_trouble(trouble)
        elif self._chance.happens(0.5):
            self._decay.begin()
        else:
            self._rot().judge_killed(self._disk)

    def _mend(self) -> None:
        """Restore the damaged disk."""
        if self._failure is None and not self._process.log.uncommitted:
            self._decay.judge()
        self._decay.end()

    def _restart(self) -> None:
        self._decay.end()
        super()._restart()

    def _rot(self) -> Rot:
        return Rot(self._model.copied(), self._settings, self._clock, self._chance, self.story)

    def _expect_failed_reads(self) -> None:
        self.client.may_fail_reads = True

    def _let_go(self) -> None:
        self._decay.end()
        self.client.let_go()

    def _closed(self) -> None:
        for acknowledged, count in self._model.everything():
            acknowledged.note(count, Level.SYNCED)

    def _check_closed(self) -> None:
        """Check the disk after a clean stop, and damaged copies of it."""
        for _ in range(0 if "rot" in self._without else ROTS):
            self._rot().judge(self._disk)

    # Checks

    def _check_start(self) -> None:
        shown_stays = not self._powerless or self._settings.durability is Level.SYNCED
        check_start(self._process, self._model, powerless=self._powerless, shown_stays=shown_stays)

    def _check_records(self) -> None:
        """Check that everything can be read."""
        for kept in [kept for kept in self._model.partitions.values() if not kept.dropped]:
            read_back(self._process, kept)

    def _come_to_rest(self) -> None:
        answers: list[int | BrokerError] = []
        self._process.log.barrier(Level.SYNCED, answers.append)
        self._process.until(lambda: answers and not self._process.log.sealing)
        self._process.until(lambda: self._process.loop.is_idle)
        self.client.check_rest()
        self._check_records()
        self._check_snapshots()

    def _check_snapshots(self) -> None:
        """Check that only the last snapshot of this process is left, unless something failed."""
        if self._process.had_faults:
            return
        self._process.until(lambda: sum(name.endswith(".pwt") for name, _ in self._disk.files()) <= 1)

    def _check_end(self) -> None:
        self._process.close()
        self._leave()
        self._check_closed()
        self.story.tell("end", f"partitions={len(self._model.partitions)} changes={len(self._model.changes)}")
