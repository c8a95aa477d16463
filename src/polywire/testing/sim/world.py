"""The world of one run: a disk, one process after another that has the log open on it, a client, and everything that can go wrong.

Promises: the same number gives the same events, on any machine, compiled or not; a run ends with everything checked, closed and opened
again. Must not know: how the log does what it promises.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from typing import Final

from polywire.errors import BrokerError, Busy, Missing
from polywire.log.base import Read
from polywire.log.segments import compaction
from polywire.log.settings import LogSettings
from polywire.testing.clock import SimulatedClock
from polywire.testing.sim.chance import Chance
from polywire.testing.sim.client import ACTS, LEVELS, Client, records_of
from polywire.testing.sim.disk import SimulatedDisk
from polywire.testing.sim.files import ERRORS, Killed
from polywire.testing.sim.model import Model, require
from polywire.testing.sim.process import Process
from polywire.testing.sim.rot import Rot
from polywire.testing.sim.story import Story
from polywire.types import Level

CAPACITY_BYTES: Final = 64 * 1024 * 1024
STEPS: Final = 1500
MOOD_STEPS: Final = 60  # on average, until other things happen often
TROUBLES: Final = {
    "fault": 0.1,
    "full": 0.1,
    "kill": 0.35,
    "close": 0.05,
    "rival": 0.1,
    "rot": 0,
    "haste": 0,
    "short": 0,
}
"""What a run can be without; of some how likely a mood is to bring it, unless one before them comes."""
ROTS: Final = 3  # damages tried at the end of a run
REST_SECONDS: Final = 5.0  # what nobody needs is deleted by then
STARTS_MAX: Final = 8  # in a row that are killed or fail
CALLS_TO_START: Final = 250  # of the system: about what the longest start takes
SETTINGS: Final = LogSettings(
    slot_bytes=48 * 1024, staged_bytes_max=256 * 1024, disk_reserve_bytes=0, scrub_hours=0.0001, open_blobs_max=4
)
COMPACTION: Final = {"DIRTY_BYTES_MIN": 4000, "KEY_SLOTS": 64}
"""What must be small so that it happens often."""


@contextmanager
def small_world() -> Iterator[None]:
    """Passes of compaction are worth it early; memory is given back by counts alone, so that two runs do it at the same moments."""
    before = {name: getattr(compaction, name) for name in COMPACTION}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for name, value in COMPACTION.items():
            setattr(compaction, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(compaction, name, value)
        if collecting:
            gc.enable()


class World:
    """One run. Guards: a process that was killed is followed by another that finds what it left, or what the power loss did."""

    client: Client

    def __init__(
        self,
        seed: int,
        *,
        steps: int = STEPS,
        without: Collection[str] = (),
        show: Callable[[str], None] | None = None,
    ) -> None:
        """without: what does not happen, of ``TROUBLES`` and of what a client asks for by its method's name."""
        self.seed: Final = seed
        self._without = without
        self.steps_done = 0
        self._steps = steps
        self.story: Final = Story(show)
        self._chance: Final = Chance(seed)
        self._clock = SimulatedClock()
        self.story.follow(self._clock.monotonic)
        self._disk: Final = SimulatedDisk(CAPACITY_BYTES, reads_past=self._chance.happens(0.7))
        self._model: Final = Model()
        self._settings = self._some_settings()
        self._process = self._make_process()
        self._weights: list[float] = []
        self._kill_after = -1
        self._epoch = 0
        self._powerless = False

    def _some_settings(self) -> LogSettings:
        chance = self._chance
        least = 2 + chance.below(2)
        return replace(
            SETTINGS,
            slot_count_min=least,
            slot_count_max=least + 1 + chance.below(2),
            sync_interval_ms=chance.one_of((1, 20, 100, 60_000)),
            staged_bytes_max=chance.one_of((16 * 1024, SETTINGS.staged_bytes_max)),
            durability=chance.one_of((Level.WRITTEN, Level.WRITTEN, Level.SYNCED)),
        )

    def run(self) -> None:
        """Everything that this number says. Raises Violation."""
        with small_world():
            self.story.tell("world", f"seed={self.seed} durability={self._settings.durability.name}")
            self._start()
            while self.steps_done < self._steps:
                try:
                    self._step()
                except Killed:
                    self._restart()
                self.steps_done += 1
            self._end()

    # What happens

    def _step(self) -> None:
        chance = self._chance
        if chance.happens(1 / MOOD_STEPS):
            self._change_mood()
        if self._kill_after == 0:
            self._process.files.die()
        self._kill_after -= 1
        if chance.happens(0.35):
            self.client.act(self._weights, self._without)
        elif not self._process.loop.step() or chance.happens(0.1):
            self._pass_time()
        if self.client.failure is not None and self._kill_after < 0:
            self._kill_after = chance.below(30)

    def _pass_time(self) -> None:
        before, self.story.actor = self.story.actor, "time"
        if self._chance.happens(0.5):
            self._process.loop.pass_time(self._chance.below(100_000) / 1_000_000)
        elif self._process.loop.is_idle:
            self._process.loop.pass_to_timer()
        self.story.actor = before

    def _change_mood(self) -> None:
        """From here on some things happen often, and others hardly ever."""
        chance = self._chance
        self._weights = [weight * chance.share() ** 2 for weight in ACTS.values()]
        self.client.levels = chance.one_of(LEVELS)
        self._process.loop.change_mood()
        faults, files = self._process.files.faults, self._process.files
        files.cold = chance.one_of((0.0, 0.3, 1.0))
        files.short = chance.one_of((0.0, 0.0, 0.2)) * ("short" not in self._without)
        files.haste = chance.one_of((0.0, 0.02, 0.1)) * ("haste" not in self._without)
        faults.rates = {}
        self._disk.capacity_bytes = CAPACITY_BYTES
        self.story.actor = "world"
        trouble = next((name for name, share in TROUBLES.items() if share and chance.happens(share)), "")
        if trouble and trouble not in self._without:
            self._make_trouble(trouble)

    def _make_trouble(self, trouble: str) -> None:
        chance, faults = self._chance, self._process.files.faults
        if trouble == "fault":
            kind = chance.one_of((*ERRORS, "sync", "sync"))
            faults.rates[kind] = chance.one_of((0.05, 0.5))
            self.client.may_fail_reads = True
            self.story.tell("mood", f"{kind} fails, {faults.rates[kind]}")
        elif trouble == "full":
            self._disk.capacity_bytes = self._disk.used_bytes + chance.below(100_000)
            self.story.tell("mood", f"little space, {self._disk.capacity_bytes - self._disk.used_bytes}")
        elif trouble == "kill" and chance.happens(0.5):
            faults.calls_left = 1 + chance.below(60)
        elif trouble == "kill":
            self._kill_after = chance.below(60)
        elif trouble == "close":
            self._close()
        else:
            self._rival()

    def _rival(self) -> None:
        """Another process wants the directory, too."""
        self.story.tell("rival")
        with suppress(BrokerError):
            self._make_process().open()
            require(False, "one process at a time has a data directory")

    def _close(self) -> None:
        """Stop as asked to."""
        self.story.tell("close")
        log = self._process.log
        self.client.let_go()
        log.close()
        if self.client.failure is None:
            for acknowledged, count in self._model.everything():
                acknowledged.note(count, Level.SYNCED)
            self.story.tell("closed")
            self._try_rot()
        self._process.files.faults.dead = True
        self._restart()

    def _try_rot(self) -> None:
        """The disk as a clean stop has left it, and what if something of it were damaged."""
        self._leave()
        for _ in range(0 if "rot" in self._without else ROTS):
            Rot(deepcopy(self._model), self._settings, self._clock, self._chance, self.story).judge(self._disk)

    # Starts

    def _restart(self) -> None:
        """The process is gone, and perhaps the power; another one starts."""
        chance = self._chance
        self._powerless = chance.happens(0.5)
        self._leave()
        if self._powerless:
            self._lose_power()
        for _ in range(chance.below(3) and STARTS_MAX):
            if not self._starts_at_all():
                self._leave()
                if chance.happens(0.5):
                    self._powerless = True
                    self._lose_power()
                continue
            return
        self._start()

    def _leave(self) -> None:
        """Nothing of the process is left but what it wrote."""
        self.story.actor = "world"
        self._disk.close_all()

    def _lose_power(self) -> None:
        kept = self._chance.one_of((0.0, 0.2, 0.5, 0.8, 1.0))
        sectors, changes = self._disk.lose_power(self._chance, kept)
        self.story.tell("power loss", f"sectors={sectors} names={changes}")

    def _starts_at_all(self) -> bool:
        """A start that may be killed, or fail for a reason."""
        chance = self._chance
        self._boot()
        faults, reason = self._process.files.faults, chance.below(4)
        if reason == 0:
            faults.calls_left = 1 + chance.below(CALLS_TO_START)
        elif reason == 1:
            faults.rates[chance.one_of(tuple(ERRORS))] = 0.02
        elif reason == 2:
            self._disk.capacity_bytes = self._disk.used_bytes + chance.below(60_000)
        try:
            self._open()
            faults.rates.clear()
            self._check_start()
        except Killed:
            return False
        except BrokerError as error:
            self.story.tell("no start", error.message)
            full = isinstance(error, Busy) and self._disk.capacity_bytes < CAPACITY_BYTES
            require(full or self.story.counts["fault"], "a start is possible", error=error.message)
            self._disk.capacity_bytes = CAPACITY_BYTES
            return False
        return True

    def _start(self) -> None:
        """A start that nothing disturbs."""
        self._disk.capacity_bytes = CAPACITY_BYTES
        self._boot()
        try:
            self._open()
        except BrokerError as error:
            require(False, "a start is always possible", error=error.message)
        self._check_start()

    def _make_process(self) -> Process:
        return Process(self._disk, self._settings, self._clock, self._chance, self.story)

    def _boot(self) -> None:
        self._process = self._make_process()
        self._kill_after = -1

    def _open(self) -> None:
        self.story.actor = "start"
        self.story.tell("start")
        process = self._process
        process.open()
        self.client = Client(process.log, process.state, self._model, self._chance, self.story)
        process.loop.change_mood()
        self._weights = list(ACTS.values())
        require(process.log.epoch > self._epoch, "no two starts have one number", epoch=process.log.epoch)
        self._epoch = process.log.epoch
        self.story.tell("started", f"epoch={self._epoch}")

    # Checks

    def _check_start(self) -> None:
        """What was acknowledged is there; nothing is there that was not asked for."""
        model, powerless = self._model, self._powerless
        self._process.files.faults.calls_left = -1
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
            if self._is_staged(token):
                staged.leaving = staged.spent = False
                staged.known.note(1, Level.SYNCED)
            else:
                lost = not staged.known.floor(powerless=powerless)
                require(lost or staged.leaving, "an acknowledged staged batch is there", token=token.hex())
                del model.tokens[token]
        self._powerless = False
        self._check_records()

    def _is_staged(self, token: bytes) -> bool:
        try:
            return bool(self._process.log.staged_partitions([token]))
        except Missing:
            return False

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

    def _end(self) -> None:
        """Everybody is answered; then everything is there, after a stop as well, and after a power loss."""
        files = self._process.files
        files.haste = 0.0
        files.faults.rates.clear()
        files.faults.calls_left = self._kill_after = -1
        self._disk.capacity_bytes = CAPACITY_BYTES
        self._process.until(lambda: self._process.loop.is_idle)  # whatever has failed by now is told
        if self.client.failure is not None:
            self._powerless = False
            self._leave()
            self._start()
        self.client.let_go()
        told: list[int | BrokerError] = []
        self._process.log.barrier(Level.SYNCED, told.append)
        self._process.until(lambda: told and not self._process.log.sealing)
        self._process.until(lambda: self._process.loop.is_idle)
        self.client.check_rest()
        self._check_records()
        self._close_for_good()

    def _close_for_good(self) -> None:
        """After a clean stop not even a power loss takes anything."""
        self.story.actor = "world"
        self._process.log.close()
        for acknowledged, count in self._model.everything():
            acknowledged.note(count, Level.SYNCED)
        self._leave()
        self._powerless = True
        self._lose_power()
        self._start()
        rested = self._clock.monotonic() + REST_SECONDS
        self._process.until(lambda: self._clock.monotonic() > rested)
        self._check_remains()
        self._process.log.close()
        self._try_rot()
        self.story.tell("end", f"partitions={len(self._model.partitions)} changes={len(self._model.changes)}")

    def _check_remains(self) -> None:
        """Nothing lies about that nobody needs."""
        names = [name for name, _ in self._disk.files()]
        remains = [name for name in names if "/." in name] + [name for name in names if name.endswith(".pwt")][1:]
        require(not remains, "space comes back", remains=remains)
