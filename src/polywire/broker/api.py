"""The broker interface that protocols call. A topic may be stored by this process or by another process of the broker.

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
    """A method needs a response from another broker process.

    The client request that called it has had no effect yet. Only a broker with several processes raises it. Call
    ``then(callback)``. In the callback, execute the client request again inside ``with pending:``. This time the method
    returns the response or raises its error. A request that needs several responses raises Pending several times.
    """

    def __init__(self, subject: str, then: Callable[[Callable[[], None]], Handle]) -> None:
        """Create the exception. ``subject`` is the name of a topic or method, for the error message."""
        super().__init__(subject)
        self.then = then
        """Calls a callback when the response has arrived, unless the returned handle is cancelled."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Topics(Protocol):
    """Methods for topics. Each may raise Pending."""

    def find_topic(self, full_name: str) -> Topic | None:
        """Return the topic with this full name, or None."""

    def topic(self, full_name: str) -> Topic:
        """Return the topic with this full name. Raises Missing(TOPIC_MISSING)."""

    def resource(self, full_name: str) -> Topic | TopicName:
        """Return the resource for permission checks on a full name: the topic, or its name if it does not exist."""

    def partition_count(self, full_name: str) -> int:
        """Return a topic's number of partitions, or the default number for new topics if it does not exist."""

    def ensure_topic(self, full_name: str, *, by: Caller = NO_CALLER) -> Topic:
        """Return the topic with this name. Create it with the default settings if it is missing.

        Raises Invalid(INVALID_TOPIC), Busy(BUSY, DISK_FULL), and Missing(TOPIC_MISSING) if topics are not created
        automatically.
        """


class Records(Protocol):
    """Methods that append, read and wait for records."""

    def produce(
        self, partition: Partition, batch: Buffer, *, by: Caller = NO_CALLER, level: Level, done: Completion[int] | None
    ) -> None:
        """Append one validated batch.

        ``done`` is called with the offset of the first record, once the batch has reached the durability ``level``. See
        ``RecordVerbs.produce`` for duplicates and errors.
        """

    def fetch(
        self,
        partition: Partition,
        offset: int,
        *,
        bytes_max: int,
        then: Completion[Read],
        offset_end: int | None = None,
    ) -> Read | Handle:
        """Read stored batches, beginning with the one that contains ``offset``.

        Return them if they are in memory. Otherwise return a handle that cancels the read, and call ``then`` later.
        Raises Missing(PARTITION_MISSING, OFFSET_OUT_OF_RANGE), or passes it to ``then``.
        """

    def wait(self, partition: Partition, offset: int, wake: Callable[[], None]) -> Handle:
        """Call ``wake`` once, when the partition may have a record at ``offset`` or has been deleted.

        The returned handle cancels the call. Raises Missing(PARTITION_MISSING).
        """

    def epoch_end(self, partition: Partition, epoch: int, then: Completion[int]) -> int | Handle:
        """Return the end offset of a leader epoch, or a handle if the offset is passed to ``then`` later.

        For an unknown epoch Missing(OFFSET_OUT_OF_RANGE) is raised or passed to ``then``.
        """

    def owns(self, partition: Partition) -> bool:
        """Return whether this process stores the partition."""

    def when_current(self, partition: Partition, then: Completion[None]) -> Handle | None:
        """Return None if this process knows the current first offset and end offset of the partition.

        Otherwise, request them from the process that stores the partition, and call ``then`` when they have arrived.
        """

    def require_current(self, partitions: Iterable[Partition]) -> None:
        """Make sure that this process knows the current offsets and sizes of these partitions.

        Raises Pending if another process must send them.
        """


class Settling(Protocol):
    """Methods that wait until earlier requests are durable."""

    @property
    def congested(self) -> bool:
        """Whether to pause reading from producers."""

    def settle(self, level: Level, done: Completion[int]) -> None:
        """Call ``done`` once everything added to the log of this process so far has reached the durability ``level``."""

    def commit(self) -> None:
        """Write this process's pending appends and state changes to the journal now."""

    def probe(self, done: Completion[int]) -> None:
        """Check whether the log of this process would accept a record, without storing one. Raises Busy(DISK_FULL).

        ``done`` is called once all earlier appends and changes are synced.
        """
