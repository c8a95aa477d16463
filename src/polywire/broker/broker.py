"""The broker: a facade with every operation that protocols use.

These operations are called verbs (decision 0107). A verb never blocks. It returns a result at once if the result is
available, and raises errors as exceptions. A result that depends on the log arrives in a callback, which runs on the
event loop and never inside the call.

A verb that changes state writes a description of the change to the journal, and applies it with the function that
recovery uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from polywire.broker.access import Access
from polywire.broker.claims import ALONE
from polywire.broker.events import Events
from polywire.broker.expiry import Expiry
from polywire.broker.group_topics import GroupTopics
from polywire.broker.groups.classic import ClassicGroup
from polywire.broker.groups.classic_groups import ClassicGroups
from polywire.broker.groups.commits import Commits, PositionVerbs
from polywire.broker.groups.consumer_groups import ConsumerGroups
from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.groups.delay_index import FILE as DELAYS_FILE
from polywire.broker.groups.delay_index import DelayIndex
from polywire.broker.groups.memberships import TopicGroups
from polywire.broker.groups.share_groups import ShareBroker, ShareGroups
from polywire.broker.owners import Owners
from polywire.broker.participants import Participants
from polywire.broker.record_verbs import Admission, ProducerVerbs
from polywire.broker.remote_topics import NO_REMOTE_TOPICS
from polywire.broker.retention import Retention
from polywire.broker.settings import BrokerSettings
from polywire.broker.sliced import OrderedWork, SlicedWork
from polywire.broker.staging import StagedPublish, StagingVerbs
from polywire.broker.state import State, WireStateVerbs
from polywire.broker.topic_verbs import RemovalVerbs, TopicVerbs
from polywire.broker.topics import Catalog
from polywire.broker.transactions import Transactions
from polywire.clock import Clock, ElapsedClock
from polywire.errors import BrokerError
from polywire.log.base import Log, Loop
from polywire.log.worker import LoopWorker, MakeWorker, ThreadWorker
from polywire.records.columns import HEADER_BYTES
from polywire.types import Level

if TYPE_CHECKING:
    from polywire.log.settings import LogSettings


class Broker(StagingVerbs, ProducerVerbs, TopicVerbs, GroupTopics, RemovalVerbs, PositionVerbs, WireStateVerbs):
    """One broker over one log. Its base classes implement most methods. Create it with ``open`` or ``over``."""

    __slots__ = (
        "_admission",
        "_append",
        "_catalog",
        "_commits",
        "_delays",
        "_expiry",
        "_log",
        "_plain_bytes_max",
        "_producer_ids",
        "_retention",
        "_state",
        "_topic_work",
        "access",
        "claims",
        "classic",
        "clock",
        "commit",
        "consumers",
        "elapsed",
        "events",
        "groups",
        "hold",
        "loop",
        "owners",
        "participants",
        "pressure",
        "producer_shard",
        "publish_work",
        "remote_topics",
        "settings",
        "shares",
        "sliced",
        "staging",
        "streams",
        "transactions",
        "when_applied",
    )

    when_applied: Callable[[Callable[[], None]], None] | None

    def __init__(
        self,
        log: Log,
        state: State,
        settings: BrokerSettings,
        loop: Loop,
        clock: Clock,
        delays: DelayIndex,
    ) -> None:
        self.settings = settings
        self.loop: Final = loop
        self.clock, self.claims, self.remote_topics, self.when_applied = clock, ALONE, NO_REMOTE_TOPICS, None
        self.sliced = SlicedWork(loop, clock)
        self._topic_work = OrderedWork(self.sliced, loop, clock)
        self.publish_work: Final = OrderedWork(self.sliced, loop, clock)
        self._log = log
        self._append = log.append
        self.hold, self.commit, self.pressure = log.hold, log.commit, log.pressure
        # result of all changes in the journal and in the current write batch
        self._state = state
        self._catalog: Catalog = state.catalog
        self.streams: Final = state.catalog.streams
        self.elapsed = elapsed = state.begin(clock)
        state.show_durable_only(log, settings.durability)
        log.expire_by(elapsed, age_us_max=settings.stage_expiry_us)
        self.access: Final = Access(self, settings, loop, clock)
        self.owners = Owners(self.access)
        self._admission = Admission(log, state, settings, elapsed, self.owners)
        self.appended = self.producer_shard = 0
        self._producer_ids: Iterator[int] = count(1)
        self._plain_bytes_max = min(settings.record_bytes_max, settings.batch_bytes_max - HEADER_BYTES - 8)
        self.staging = StagedPublish(log, state, settings, elapsed, owners=self.owners)
        self.events: Final = Events(log, state, self._admission, settings, clock)
        groups = _open_groups(self, state, settings, loop, clock, elapsed, self.owners, self.sliced, delays)
        self._commits, self._delays = groups.commits, delays
        self.groups, self.classic = groups.coordinator, groups.classic
        self.consumers, self.shares = groups.consumers, groups.shares
        self.transactions: Final = Transactions(
            log,
            state,
            admission=self._admission,
            staging=self.staging,
            commits=self._commits,
            settings=settings,
            clock=elapsed,
            owners=self.owners,
            new_producer_id=self.new_producer_id,
            loop=loop,
            work=self.publish_work,
        )
        self.participants: Final = Participants(log, state, self.transactions, self.staging, clock=elapsed, loop=loop)
        self._expiry = Expiry(
            self, state, self.groups, settings, loop, elapsed, groups.table, abort_late=self.transactions.abort_late
        )
        self._retention = Retention(log, state.catalog, settings, loop, clock)
        for partition in state.catalog.partitions():
            partition.attach(log.partition(partition.incarnation))
        self._drop_orphaned_partitions()
        self._retention.start()
        self._expiry.start()

    @classmethod
    def open(
        cls,
        data_dir: Path,
        settings: BrokerSettings,
        loop: Loop,
        clock: Clock,
        *,
        log_settings: LogSettings | None = None,
        on_failure: Callable[[BrokerError], None] | None = None,
        make_worker: MakeWorker | None = None,
    ) -> Broker:
        """Open the broker of a data directory: recover its state and begin a new epoch. Creates a missing directory.

        Args:
            log_settings: sizes of the journal. ``settings`` overrides its durability and its limit of staged bytes.
                Batches and records are limited to what one disk write of the journal can hold.
            on_failure: called on the loop when storage fails. Afterwards the broker acknowledges nothing.
            make_worker: creates the log's threads. Tests replace it.

        Raises:
            Unavailable: STORAGE_FAILED: the directory cannot be used.
            Busy: BUSY: another broker owns it. DISK_FULL: no space.
            Corrupt: synced data is damaged.
        """
        # imported here, because a broker in memory needs neither files nor a lock
        from polywire.log.opening import open_log
        from polywire.log.settings import LogSettings

        sizes = log_settings or LogSettings()
        own = replace(sizes, durability=settings.durability, staged_bytes_max=settings.staged_bytes_max)
        settings = settings.within(own.batch_bytes_max)

        def recover(state: State) -> Log:
            worker = make_worker or ThreadWorker
            log = open_log(data_dir, settings=own, loop=loop, clock=clock, replay=state, make_worker=worker)
            log.name_partitions(state.catalog.partition_name)
            if on_failure is not None:
                log.on_failure(on_failure)
            return log

        return cls.over(
            recover,
            settings=settings,
            loop=loop,
            clock=clock,
            delays=data_dir / DELAYS_FILE,
            make_worker=make_worker or ThreadWorker,
        )

    @classmethod
    def over(
        cls,
        open_log: Callable[[State], Log],
        *,
        settings: BrokerSettings,
        loop: Loop,
        clock: Clock,
        state: State | None = None,
        delays: Path | None = None,
        make_worker: MakeWorker = LoopWorker,
    ) -> Broker:
        """Return a broker over a log.

        Args:
            open_log: recovers the log and applies its state changes to the given state.
            state: empty state to use instead of a new one.
            delays: file of the index of delayed records. It is in memory by default.
            make_worker: creates the thread that uses the index. By default, the event loop does.
        """
        replayed = State(settings) if state is None else state
        log = open_log(replayed)
        index = DelayIndex(
            delays,
            loop=loop,
            worker=make_worker("delays", loop),
            live=replayed.shares.waiting_incarnations,
            sync=partial(log.barrier, Level.SYNCED),
        )
        return cls(log, replayed, settings, loop, clock, index)

    @property
    def users(self) -> Access:
        """The methods of ``access`` that change users."""
        return self.access

    @property
    def epoch(self) -> int:
        """The log's epoch, which increases by one at each start."""
        return self._log.epoch

    def close(self) -> None:
        """Write and sync all pending appends, call their callbacks, and stop."""
        self._retention.stop()
        self._expiry.stop()
        self.participants.stop()
        self.access.close()
        self._delays.close()
        self._log.close()


class _Groups(NamedTuple):
    commits: Commits
    coordinator: Coordinator
    classic: ClassicGroups
    consumers: ConsumerGroups
    shares: ShareGroups
    table: Mapping[str, ClassicGroup]


def _open_groups(
    broker: ShareBroker,
    state: State,
    settings: BrokerSettings,
    loop: Loop,
    clock: Clock,
    elapsed: ElapsedClock,
    owners: Owners,
    sliced: SlicedWork,
    delays: DelayIndex,
) -> _Groups:
    table: dict[str, ClassicGroup] = {}
    commits = Commits(state, settings, elapsed, owners, table)
    coordinated = Coordinator(broker, state, settings, clock, elapsed)
    topic_groups = TopicGroups(broker, coordinated)
    classic = ClassicGroups(
        broker,
        state,
        settings=settings,
        loop=loop,
        clock=clock,
        commits=commits,
        coordinator=coordinated,
        topic_groups=topic_groups,
        table=table,
        sliced=sliced,
    )
    consumers = ConsumerGroups(
        broker,
        state,
        settings=settings,
        loop=loop,
        clock=clock,
        commits=commits,
        coordinator=coordinated,
        topic_groups=topic_groups,
        sliced=sliced,
    )
    shares = ShareGroups(broker, state, settings=settings, loop=loop, clock=clock, delays=delays)
    return _Groups(commits, coordinated, classic, consumers, shares, table)
