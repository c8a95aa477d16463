"""A request of a worker for records of a share group, as the protocols make it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from polywire.broker.owners import NO_CALLER
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, ErrorCode, Missing
from polywire.log.base import Completion, Read
from polywire.protocols.runtime.acquiring import Acquiring
from polywire.records.columns import Record
from tests.sim.log.client import records_of

if TYPE_CHECKING:
    from tests.sim.broker.queue_part import QueuePart

BYTES_MAX: Final = 1 << 16


class Taking(Acquiring):
    """Guards: ``taken`` has the acquired offsets of each partition that was not refused, and the moment of the history
    from which they are delivered. is_open: whether the response is still to come.
    """

    def __init__(
        self, part: QueuePart, topic: Topic, *, group: str, member: str, records_max: int, wait_s: float
    ) -> None:
        super().__init__(
            part.broker,
            group=group,
            member=member,
            by=NO_CALLER,
            records_max=records_max,
            bytes_max=BYTES_MAX,
            wait_s=wait_s,
        )
        self._part = part
        self._topic: Final = topic
        self.taken: Final[dict[int, tuple[Partition, list[int], int]]] = {}
        self.is_open = True

    def may_acknowledge(self, key: tuple[str, int], member: str) -> bool:
        """Return whether records of a group in a partition can be acknowledged with this request."""
        incarnations = [partition.incarnation for partition in self._topic.partitions]
        return (key[0], member) == (self.group, self.member) and key[1] in incarnations

    def acknowledge(self, verb: Callable[..., bool], done: Completion[int]) -> None:
        """Acknowledge records before the request reads, as the protocols do. Raises BrokerError."""

        def counted(result: int | BrokerError) -> None:
            done(result)
            self.count()

        self.must_respond = True
        self.expect()
        try:
            self.acquires = not verb(done=counted)
        except BrokerError:
            self.count()
            raise

    def find(self, place: int) -> Partition:
        if self._broker.find_topic(self._topic.name.full) is not self._topic:  # type: ignore[attr-defined]
            raise Missing(ErrorCode.TOPIC_MISSING, "the topic was deleted")
        partition: Partition = self._topic.partitions[place]
        return partition

    def encode(
        self, read: Read, partition: Partition, offset: int, offset_end: int, *, bytes_max: int
    ) -> tuple[object, int]:
        found = [record for record in records_of(read.chunks) if record.offset >= offset]
        return found, min(read.next_offset, offset_end)

    def add(self, place: int, records: Any, runs: Sequence[tuple[int, int, int]]) -> int:
        found: list[Record] = records
        by_offset = {record.offset: record for record in found}
        partition = self._topic.partitions[place]
        counts = {at: count for first, last, count in runs for at in range(first, last + 1)}
        moment = self._part.delivered(self.group, self.member, partition, counts, by_offset)
        self.taken[place] = partition, list(counts), moment
        return sum(len(by_offset[at].value or b"") for at in counts if at in by_offset)

    def refuse(self, place: int, error: BrokerError) -> None:
        self.taken.pop(place, None)
        self._part.refused(error)

    def respond(self) -> None:
        self.is_open = False
        self._part.received(self)

    def cancel(self) -> None:
        self.is_open = False
        super().cancel()
