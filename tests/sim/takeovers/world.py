"""The simulation of takeovers: machines that lead one broker over a bucket in turn, and clients that follow the leader.

* Whatever is acknowledged is in the bucket, so the next leader has it, on any machine.
* A takeover ends all locks, because they are not stored. It changes no delivery count, delay or outcome.
* A former leader that still runs acknowledges nothing that the next leader has not recovered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final

import pytest

from polywire.broker.groups import delay_index
from polywire.errors import BrokerError, ErrorCode, NotOwner
from polywire.types import Level, Outcome
from tests.sim.broker.client import ACTS, QUEUE_ACTS
from tests.sim.broker.queue_index import IndexDisk
from tests.sim.broker.queue_model import SeenKey
from tests.sim.broker.world import BROKER, BrokerWorld
from tests.sim.disk import SimulatedDisk
from tests.sim.log.world import SETTINGS
from tests.sim.node import CAPACITY_BYTES
from tests.sim.promises import require
from tests.sim.takeovers.bucket import SimulatedBucket, without_threads
from tests.sim.takeovers.former import Former
from tests.sim.takeovers.process import TakeoversProcess, index_path

MACHINES: Final = 3
CLAIMS_MAX: Final = 20  # attempts to lead, which late writes of other leaders can make fail
CUTS_S: Final = (0.3, 3.0, 12.0, 40.0)  # from the bucket; a leader resigns after 30 s
TAKEN: Final = 0.6  # share of cuts in which another machine takes over
TAKEN_STEPS: Final = 150
PAUSES_S: Final = (0.0, 0.0, 1.0, 10.0)  # of a leader that is taken over
FAILING: Final = (0.05, 0.3)  # rates of requests to the bucket
ARRIVES: Final = 0.03  # share of steps in which a late write arrives
EARLIER: Final = 0.2  # share of requests about records that an earlier leader has locked
FORMER: Final = 0.25  # share of steps for former leaders


class TakeoversWorld(BrokerWorld):
    """Guards: ``_process`` leads; a machine has one process at a time."""

    NAME = "takeovers"
    TROUBLES: ClassVar = {"takeover": 0.25, "cut": 0.12, "bucket": 0.2, **BrokerWorld.TROUBLES}

    _process: TakeoversProcess
    _takeover_after = -1

    @property
    def _has_queues(self) -> bool:
        return True

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        with super()._surroundings(), without_threads(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(delay_index, "delete", self._delete_index)
            yield

    def _delete_index(self, path: Path) -> None:
        self._indexes[[index_path(machine) for machine in range(MACHINES)].index(path)].write(b"")

    def _choose_settings(self) -> None:
        chance = self._chance
        super()._choose_settings()
        self._durability = Level.STORED
        self._log_settings = replace(self._log_settings, durability=Level.STORED)
        own = replace(BROKER, durability=Level.STORED, staged_bytes_max=SETTINGS.staged_bytes_max)
        self._broker_settings = own.within(self._log_settings.batch_bytes_max)
        self._acts = {**ACTS, **{act: 2 * weight for act, weight in QUEUE_ACTS.items()}}
        self._bucket = SimulatedBucket(chance, self.story)
        self._disks = [SimulatedDisk(CAPACITY_BYTES, reads_past=chance.happens(0.7)) for _ in range(MACHINES)]
        self._indexes = [IndexDisk(chance, self.story) for _ in range(MACHINES)]
        for index in self._indexes:
            index.has_faults = self._has_disk_faults
        self._formers: list[Former] = []
        self._earlier: list[tuple[SeenKey, int, str]] = []
        self._choose_machine()

    def _choose_machine(self) -> None:
        """Choose a machine without a process."""
        used = [former.process.machine for former in self._formers]
        self._machine = self._chance.one_of([one for one in range(MACHINES) if one not in used])
        self._disk = self._disks[self._machine]
        self._index = self._indexes[self._machine]

    def _make_process(self) -> TakeoversProcess:
        return TakeoversProcess(
            self._machine,
            self._disk,
            self._bucket,
            self._log_settings,
            self._broker_settings,
            self._clock,
            self._chance,
            self.story,
            self._indexes[self._machine],
        )

    # Faults

    def _change_mood(self) -> None:
        self._process.end.rate = 0.0
        super()._change_mood()

    def _make_trouble(self, trouble: str) -> None:
        chance, process = self._chance, self._process
        if trouble == "takeover":
            self._take_over()
        elif trouble == "cut":
            process.cut_until = self._clock.monotonic() + chance.one_of(CUTS_S)
            self.story.tell("cut", f"m{process.machine} until {process.cut_until}")
            self.client.may_fail_reads = True
            if chance.happens(TAKEN) and "takeover" not in self._without:
                self._takeover_after = chance.below(TAKEN_STEPS)
        elif trouble == "bucket":
            process.end.rate = chance.one_of(FAILING)
            self.story.tell("mood", f"the bucket fails, {process.end.rate}")
            self.client.may_fail_reads = True
        else:
            super()._make_trouble(trouble)

    def _take_over(self) -> None:
        """Let another machine lead while this one still runs."""
        former = Former(self._process, self.client, self._chance, self.story)
        former.wakes_at = self._clock.monotonic() + self._chance.one_of(PAUSES_S)
        self._end_formers(MACHINES - 2)
        self._formers.append(former)
        self._kill_after = self._takeover_after = -1
        self.story.tell("takeover", f"m{former.process.machine}")
        self._restart()

    def _end_formers(self, left: int) -> None:
        while len(self._formers) > left:
            self._formers.pop(0).end()

    def _restart(self) -> None:
        for former in self._formers:
            if former.process is self._process:
                break
        else:
            self._leave()
        self._takeover_after = -1
        self.client.asking.notice_last()
        self._choose_machine()
        super(BrokerWorld, self)._restart()

    def _open(self) -> None:
        for _ in range(CLAIMS_MAX):
            try:
                super()._open()
            except NotOwner:
                self.story.tell("overtaken")
                self._leave()
                self._boot()
            else:
                return
        require(False, "a machine becomes the leader")

    def _may_be_full(self, error: BrokerError) -> bool:
        return error.code is ErrorCode.STORAGE_FAILED  # its journal cannot be copied

    def _check_start(self) -> None:
        super()._check_start()
        for former in self._formers:
            if former.client.asking.recovered is None:
                former.client.asking.recovered = self._recovered

    # Clients

    def _meet(self) -> None:
        """Connect clients to the new leader. Workers remember what they had acquired from the one before."""
        if self._epoch > 1:
            held = self.client._holds.items()
            self._earlier = [
                (key, at, hold.member) for key, holds in held for at, hold in holds.items() if hold.is_received
            ]
        super()._meet()

    def _act(self) -> None:
        if self._earlier and self._chance.happens(EARLIER):
            self._acknowledge_earlier()
        else:
            super()._act()

    def _acknowledge_earlier(self) -> None:
        """Acknowledge a record that an earlier leader has locked: only a lock of this leader counts."""
        key, at, member = self._earlier.pop(self._chance.below(len(self._earlier)))
        if key[1] in self.client._living():
            self.story.tell("earlier", f"{key[0]} p{key[1]} {at} {member}")
            self.client._acknowledge(key, member, {at: Outcome.ACCEPT}, 0.0)

    # Steps

    def _step(self) -> None:
        if self._chance.happens(ARRIVES):
            self._bucket.arrive()
        if self._formers and self._chance.happens(FORMER):
            self._chance.one_of(self._formers).step()
            self._formers = [former for former in self._formers if not former.is_over]
        if self._takeover_after == 0:
            self._take_over()
        self._takeover_after -= 1
        super()._step()

    def _calm(self) -> None:
        super()._calm()
        self._end_formers(0)
        self._process.end.rate = self._process.cut_until = 0.0
