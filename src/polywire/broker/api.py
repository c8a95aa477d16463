"""The interface through which protocols call the broker, for topics of this process and of its other processes.

``Broker`` implements it for the topics of its log, ``routing.RoutedBroker`` for the topics of all processes. A method
returns its result, or passes it to a callback if it has to wait (rules in ``log.base``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.topics import Partition, Topic
from polywire.log.base import Completion, Handle, Read
from polywire.types import Buffer, Level, TopicName


class Pending(Exception):
    """Another process must answer before a method can return. The request that called the method has had no effect yet.

    Only the broker of several processes raises it. Call ``then``, and after its callback repeat the request with
    ``with pending:``. The repeated calls of the request then return the answers that have arrived, or raise their
    errors. A request that needs several answers raises Pending several times.
    """

    def __init__(self, subject: str, then: Callable[[Callable[[], None]], Handle]) -> None:
        """Create the exception. ``subject`` is the name of a topic or method."""
        super().__init__(subject)
        self.then = then
        """Calls a callback once the answer is there, unless the returned handle is cancelled."""

    def __enter__(self) -> None:
        """Let the calls of the repeated request find the answers."""

    def __exit__(self, *_: object) -> None:
        """End the repetition."""


class Topics(Protocol):
    """Methods for topics. Each may raise Pending."""

    def find_topic(self, full_name: str) -> Topic | None:
        """Return the topic with this full name, or None."""

    def topic(self, full_name: str) -> Topic:
        """Return the topic with this full name. Raises Missing(TOPIC_MISSING)."""

    def resource(self, full_name: str) -> Topic | TopicName:
        """Return what permissions on a full name are checked against: the topic, or its name if it does not exist."""

    def partition_count(self, full_name: str) -> int:
        """Return a topic's number of partitions, or the default number if it does not exist."""

    def ensure_topic(self, full_name: str, *, by: Caller = NO_CALLER) -> Topic:
        """Return the topic with this name. Create it with the default settings if it is missing.

        Raises Invalid(INVALID_TOPIC), Busy(BUSY, DISK_FULL), and Missing(TOPIC_MISSING) if topics are not created
        automatically.
        """


class Records(Protocol):
    """Records of partitions."""

    def produce(
        self, partition: Partition, batch: Buffer, *, by: Caller = NO_CALLER, level: Level, done: Completion[int] | None
    ) -> None:
        """Append one validated batch. See ``RecordVerbs.produce``."""

    def fetch(
        self,
        partition: Partition,
        offset: int,
        *,
        bytes_max: int,
        then: Completion[Read],
        offset_end: int | None = None,
    ) -> Read | Handle:
        """Read stored batches, beginning with the one that contains ``offset``. See ``PartitionLog.read``.

        Raises Missing(PARTITION_MISSING, OFFSET_OUT_OF_RANGE), or passes it to ``then``.
        """

    def wait(self, partition: Partition, offset: int, wake: Callable[[], None]) -> Handle:
        """Call ``wake`` once, when the record at ``offset`` may be readable, or the partition was deleted.

        Cancelling the returned handle prevents the call. Raises Missing(PARTITION_MISSING).
        """

    def epoch_end(self, partition: Partition, epoch: int, then: Completion[int]) -> int | Handle:
        """Return the offset at which an epoch ends. See ``PartitionLog.epoch_end``.

        The offset is returned, or passed to ``then`` later. For an unknown epoch Missing(OFFSET_OUT_OF_RANGE) is
        raised, or passed to ``then``.
        """

    def owns(self, partition: Partition) -> bool:
        """Return whether a partition is in this process."""

    def when_current(self, partition: Partition, then: Completion[None]) -> Handle | None:
        """Return None if the offsets of ``partition.log`` are current, as they always are in the partition's process.

        Otherwise request them, and call ``then`` when they are known.
        """

    def require_current(self, partitions: Iterable[Partition]) -> None:
        """Make sure that the offsets and sizes of ``partition.log`` are current. Raises Pending if they are not."""


class Settling(Protocol):
    """When earlier requests are stored."""

    @property
    def congested(self) -> bool:
        """Whether to pause reading from producers."""

    def settle(self, level: Level, done: Completion[int]) -> None:
        """Call ``done`` once everything added to the log of this process so far has reached ``level``."""

    def commit(self) -> None:
        """Write the write batch of this process now."""

    def probe(self, done: Completion[int]) -> None:
        """Check whether the log of this process would accept a record. See ``WriteBatchVerbs.probe``."""
