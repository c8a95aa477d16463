"""A disk, the sequence of processes that use it, and their faults.

* After a kill or a power loss, another process starts with the data that is left.
* A start without faults succeeds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import ClassVar, Final

from polywire.errors import BrokerError, Busy
from polywire.testing.loop import SimulatedClock
from tests.sim.chance import Chance
from tests.sim.disk import SimulatedDisk
from tests.sim.files import ERRORS, Killed
from tests.sim.process import Process
from tests.sim.promises import require
from tests.sim.story import Story

CAPACITY_BYTES: Final = 64 * 1024 * 1024
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
"""The faults that a run can exclude; some have the probability that a mood includes them, unless an earlier one does.
"""
REST_SECONDS: Final = 5.0  # garbage is deleted by then
STARTS_MAX: Final = 8  # starts in a row that are killed or fail
CALLS_TO_START: Final = 250  # system calls: about as many as the longest start makes


class Node(ABC):
    """Guards: ``_process`` is the latest one.

    TROUBLES: its faults.
    """

    TROUBLES: ClassVar[Mapping[str, float]] = TROUBLES

    story: Story
    _chance: Chance
    _clock: SimulatedClock
    _without: Collection[str]
    _disk: SimulatedDisk
    _process: Process
    _kill_after = -1
    _epoch = 0
    _powerless = False

    # What a node implements

    @abstractmethod
    def _make_process(self) -> Process:
        """Return a process that is not started yet."""

    @abstractmethod
    def _meet(self) -> None:
        """Connect clients to a process that has started."""

    @property
    @abstractmethod
    def _failure(self) -> BrokerError | None:
        """Return the error that the process reported for its failed storage."""

    @abstractmethod
    def _change_minds(self) -> None:
        """Change what clients request from here on."""

    @abstractmethod
    def _expect_failed_reads(self) -> None:
        """Expect failures from here on."""

    @abstractmethod
    def _let_go(self) -> None:
        """Release everything that clients hold of the process."""

    @abstractmethod
    def _closed(self) -> None:
        """Note a clean stop: every request is acknowledged."""

    @abstractmethod
    def _check_closed(self) -> None:
        """Check after a clean stop without faults."""

    @abstractmethod
    def _check_start(self) -> None:
        """Check a process that has started: all acknowledged data exists, and nothing exists that was not requested."""

    # Steps

    def _count_down(self) -> None:
        """Count the steps until the process is killed, if it should be."""
        if self._kill_after == 0:
            self._process.files.die()
        self._kill_after -= 1

    def _notice_failure(self) -> None:
        """End a process soon after its storage failed."""
        if self._failure is not None and self._kill_after < 0:
            self._kill_after = self._chance.below(30)

    def _change_mood(self) -> None:
        """Change the probabilities of faults and requests."""
        chance = self._chance
        self._change_minds()
        self._process.loop.change_mood()
        faults, files = self._process.files.faults, self._process.files
        files.cold = chance.one_of((0.0, 0.3, 1.0))
        files.short = chance.one_of((0.0, 0.0, 0.2)) * ("short" not in self._without)
        files.haste = chance.one_of((0.0, 0.02, 0.1)) * ("haste" not in self._without)
        faults.rates = {}
        self._disk.capacity_bytes = CAPACITY_BYTES
        self.story.actor = "world"
        trouble = next((name for name, share in self.TROUBLES.items() if share and chance.happens(share)), "")
        if trouble and trouble not in self._without:
            self._make_trouble(trouble)

    def _make_trouble(self, trouble: str) -> None:
        chance, faults = self._chance, self._process.files.faults
        if trouble == "fault":
            kind = chance.one_of((*ERRORS, "sync", "sync"))
            faults.rates[kind] = chance.one_of((0.05, 0.5))
            self._expect_failed_reads()
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
        """Let another process try to open the directory."""
        self.story.tell("rival")
        with suppress(BrokerError):
            self._make_process().open()
            require(False, "one process at a time has a data directory")

    def _close(self) -> None:
        """Stop cleanly."""
        self.story.tell("close")
        process = self._process
        self._let_go()
        process.close()
        if self._failure is None:
            self._closed()
            self.story.tell("closed")
            self._leave()
            self._check_closed()
        process.files.faults.dead = True
        self._restart()

    # Starts

    def _restart(self) -> None:
        """Start another process after one ended, perhaps after a power loss."""
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
        """Drop everything of the process except what it wrote."""
        self.story.actor = "world"
        self._disk.close_all()

    def _lose_power(self) -> None:
        kept = self._chance.one_of((0.0, 0.2, 0.5, 0.8, 1.0))
        sectors, changes = self._disk.lose_power(self._chance, kept)
        self.story.tell("power loss", f"sectors={sectors} names={changes}")

    def _starts_at_all(self) -> bool:
        """Try a start that may be killed or fail."""
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
            self._judge_start()
        except Killed:
            return False
        except BrokerError as error:
            self.story.tell("no start", error.message)
            full = self._may_be_full(error) and self._disk.capacity_bytes < CAPACITY_BYTES
            require(full or self.story.counts["fault"], "a start is possible", error=error.message)
            self._disk.capacity_bytes = CAPACITY_BYTES
            return False
        return True

    def _may_be_full(self, error: BrokerError) -> bool:
        """Return whether a full disk may cause this error of a start."""
        return isinstance(error, Busy)

    def _start(self) -> None:
        """Start without faults."""
        self._disk.capacity_bytes = CAPACITY_BYTES
        self._boot()
        try:
            self._open()
        except BrokerError as error:
            require(False, "a start is always possible", error=error.message)
        self._judge_start()

    def _boot(self) -> None:
        self._process = self._make_process()
        self._kill_after = -1

    def _open(self) -> None:
        self.story.actor = "start"
        self.story.tell("start")
        process = self._process
        process.open()
        self._meet()
        process.loop.change_mood()
        require(process.log.epoch > self._epoch, "no two starts have one number", epoch=process.log.epoch)
        self._epoch = process.log.epoch
        self.story.tell("started", f"epoch={self._epoch}")

    def _judge_start(self) -> None:
        self._process.files.faults.calls_left = -1
        self._check_start()
        self._powerless = False

    # The end

    def _calm(self) -> None:
        """End all faults."""
        files = self._process.files
        files.haste = 0.0
        files.faults.rates.clear()
        files.faults.calls_left = self._kill_after = -1
        self._disk.capacity_bytes = CAPACITY_BYTES

    def _close_for_good(self) -> None:
        """Stop cleanly; after that even a power loss must not lose anything."""
        self.story.actor = "world"
        self._process.close()
        self._closed()
        self._leave()
        self._powerless = True
        self._lose_power()
        self._start()
        rested = self._clock.monotonic() + REST_SECONDS
        self._process.until(lambda: self._clock.monotonic() > rested and self._process.loop.is_idle)
        rested += REST_SECONDS  # the last writes replaced data, too
        self._process.until(lambda: self._clock.monotonic() > rested or not self._remains())
        require(not self._remains(), "space comes back", remains=self._remains())

    def _remains(self) -> list[str]:
        """Return the garbage that was left behind."""
        names = [name for name, _ in self._disk.files()]
        return [name for name in names if "/." in name] + [name for name in names if name.endswith(".pwt")][1:]
