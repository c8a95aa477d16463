"""The simulation of a broker: clients that outlive its processes, and the checks of each start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import ClassVar, Final

from polywire.broker import changes
from polywire.broker.groups.share_table import ShareTable
from polywire.broker.settings import BrokerSettings
from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.types import Buffer, Level
from tests.sim.broker.asking import Asking, look
from tests.sim.broker.client import ACTS, QUEUE_ACTS, Client
from tests.sim.broker.model import Model
from tests.sim.broker.part import LEVELS
from tests.sim.broker.process import BrokerProcess
from tests.sim.broker.queue_end import Drain
from tests.sim.broker.queue_index import IndexDisk
from tests.sim.broker.queue_model import LETTERS
from tests.sim.broker.queue_part import small_queues
from tests.sim.log.reading import read_back
from tests.sim.log.world import SETTINGS, small_compaction
from tests.sim.lone_world import LoneWorld
from tests.sim.node import CAPACITY_BYTES, TROUBLES
from tests.sim.promises import require
from tests.sim.tokens import tokens_by

CLOCK_JUMPS_S: Final = (-30 * 86_400.0, -3600.0, -1.0, 1.0, 3600.0, 30 * 86_400.0)
BROKER: Final = BrokerSettings(
    auto_create=False,
    producer_window=3,
    member_timeout_s=1.0,
    retention_interval_s=0.5,
    expiry_interval_s=1.0,
)
"""Settings that are small so that their effects happen often."""
WITH_QUEUES: Final = (5, 7, 11, 15)  # remainders of the seeds with share groups


class BrokerWorld(LoneWorld):
    """Guards: ``client`` is that of the latest process; the model is that of every client since the beginning."""

    NAME = "broker"
    ACTS = tuple(act.__name__ for act in (*ACTS, *QUEUE_ACTS))
    TROUBLES: ClassVar = {**TROUBLES, "clock": 0.3}

    client: Client
    _process: BrokerProcess
    _weights: list[float]
    _index: IndexDisk | None = None
    _shares: ShareTable | None = None
    _recovered = 0

    def _small(self) -> AbstractContextManager[None]:
        return self._surroundings()

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        with small_compaction(), tokens_by(self._chance):
            if not self._has_queues:
                yield
                return
            with small_queues(self._share_changed, self._copied):
                yield

    def _has_disk_faults(self) -> bool:
        return bool(self._process.files.faults.rates) or self._disk.capacity_bytes < CAPACITY_BYTES

    @property
    def _has_queues(self) -> bool:
        return self.rest in WITH_QUEUES

    def _share_changed(self, table: ShareTable, change: changes.Change) -> None:
        """Check a change of a share group, unless a start applies it again."""
        if table is self._shares:
            self.client.share_changed(change)

    def _copied(self, partition: Partition, batch: Buffer) -> None:
        """Check a copy in the dead-letter topic, unless a former leader makes it."""
        if self.client.broker.find_topic(LETTERS) is partition.topic:
            self.client.copied(partition, batch)

    def _choose_settings(self) -> None:
        chance = self._chance
        least = 2 + chance.below(2)
        self._durability = chance.one_of((Level.WRITTEN, Level.WRITTEN, Level.SYNCED))
        self._log_settings = replace(
            SETTINGS,
            slot_count_min=least,
            slot_count_max=least + 1 + chance.below(2),
            sync_interval_ms=chance.one_of((1, 20, 100, 60_000)),
            durability=self._durability,
        )
        own = replace(BROKER, durability=self._durability, staged_bytes_max=SETTINGS.staged_bytes_max)
        self._broker_settings = own.within(self._log_settings.batch_bytes_max)
        self._model = Model(BROKER.producer_window)
        self._acts = {**ACTS, **QUEUE_ACTS} if self._has_queues else ACTS
        if self._has_queues:
            self._index = IndexDisk(chance, self.story)
            self._index.has_faults = self._has_disk_faults

    def _description(self) -> str:
        return f"seed={self.seed} durability={self._durability.name}"

    def _make_process(self) -> BrokerProcess:
        return BrokerProcess(
            self._disk,
            self._log_settings,
            self._broker_settings,
            self._clock,
            self._chance,
            self.story,
            self._index,
        )

    def _meet(self) -> None:
        self.client = Client(Asking(self._process, self._model, self.story, self._durability), self._chance)
        self._weights = list(self._acts.values())

    def _act(self) -> None:
        self.client.act(list(self._acts), self._weights, self._without)

    @property
    def _failure(self) -> BrokerError | None:
        return self.client.asking.failure

    def _change_minds(self) -> None:
        self._weights = [weight * self._chance.share() ** 2 for weight in self._acts.values()]
        self.client.levels = self._chance.one_of(LEVELS)

    def _make_trouble(self, trouble: str) -> None:
        if trouble == "clock":
            seconds = self._chance.one_of(CLOCK_JUMPS_S)
            self.story.tell("clock", f"{seconds:+.0f} s")
            self.client.note_time()
            self._clock.step(seconds)
            self.client.note_time()
        else:
            super()._make_trouble(trouble)

    def _restart(self) -> None:
        self.client.asking.notice_last()
        super()._restart()

    def _lose_power(self) -> None:
        super()._lose_power()
        if self._index is not None:
            self._index.lose_power()

    def _expect_failed_reads(self) -> None:
        self.client.may_fail_reads = True

    def _let_go(self) -> None:
        self.client.asking.notice()

    def _closed(self) -> None:
        self._model.history.acknowledge(self._model.history.moment, Level.SYNCED)

    def _check_closed(self) -> None:
        """The disk is looked at by what starts on it next."""

    # Checks

    def _check_start(self) -> None:
        broker, model = self._process.broker, self._model
        living = {partition.incarnation for topic in broker.topics() for partition in topic.partitions}
        known = [token for token, known in model.tokens.items() if known.incarnation in living]
        staged = [token for token in known if self._process.is_staged(token)]
        state = look(broker, lambda partition: (partition.log.first_offset, partition.log.next_offset), staged)
        moment = model.history.settle(state, powerless=self._powerless)
        self._recovered = moment
        ends = {
            partition.incarnation: partition.log.next_offset
            for topic in broker.topics()
            for partition in topic.partitions
        }
        shown_stays = not self._powerless or self._durability is Level.SYNCED
        for kept in model.partitions.values():
            end = ends.get(kept.incarnation)
            stays = end is None or end >= kept.shown or not shown_stays
            require(stays, "what a reader was shown stays", partition=kept.incarnation, end=end, shown=kept.shown)
        model.settle(moment, ends, now=self._clock.monotonic())
        self._shares = broker._state.shares
        self._check_records()

    def _check_records(self) -> None:
        """Everything can be read, and is what was asked for."""
        for topic in self._process.broker.topics():
            for partition in topic.partitions:
                kept = self._model.partitions[partition.incarnation]
                kept.first = partition.log.first_offset
                read_back(self._process, kept)

    def _come_to_rest(self) -> None:
        answers: list[int | BrokerError] = []
        self._process.broker.settle(Level.SYNCED, answers.append)
        self._process.until(lambda: answers and not self._process.log.sealing)
        self._process.until(lambda: self._process.loop.is_idle)
        self.client.asking.notice()
        drain = Drain(self._process, self.client)
        drain.run()
        self.client.check_rest()
        self._check_records()
        drain.check()

    def _check_end(self) -> None:
        self._process.close()
        self.story.tell("end", f"topics={len(self._process.broker.topics())}")
