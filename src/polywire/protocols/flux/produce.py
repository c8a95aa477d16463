"""Handle a single PRODUCE line (spec: flux#produce, flux#acknowledgements)."""

from __future__ import annotations

from array import array

from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.log.base import Handle
from polywire.protocols.flux.errors import not_leader, refused, replication_timeout
from polywire.protocols.flux.messages import Acks, Request, acks, bad, is_plain, topic_name, usage
from polywire.protocols.flux.reply_slots import Answer, Produced
from polywire.protocols.flux.session import FluxSession
from polywire.records.batch import from_spans
from polywire.records.columns import RecordFlags
from polywire.types import KeyHash, Level


def produce(session: FluxSession, request: Request, /) -> None:
    usage(request, "<topic> <key>:<value> [acks=0|1|all]", 2, 3)
    key, colon, value = request.args[1].partition(b":")
    if not colon:
        raise bad("message must be key:value")
    topic = session.topic_to_write(topic_name(request.args[0]))
    mode = acks(request.args[2]) if len(request.args) == 3 else Acks.LEADER
    partition = session.broker.partition_of_key(topic, key, KeyHash.FNV32)
    if not session.state.is_writable(partition):
        raise not_leader()
    flags = None if is_plain(value) else bytes((RecordFlags.LINE_VALUE,))
    batch = from_spans(key + value, array("q", (0, len(key), len(key), len(value))), None, flags)
    if mode is Acks.ALL:
        answer = session.later(request, blocking=True)
        timeout_s = session.state.settings.ack_all_timeout_ms / 1000
        waiting = AcksAll(session, answer, partition)
        waiting.timer = session.broker.loop.call_later(timeout_s, waiting.expire)
        answer.cancel = waiting.cancel
        session.append_queue.produce(partition, batch, Level.SYNCED, waiting.stored)
        return
    produced = Produced(session, request.id)
    produced.partition = partition
    session.append(produced)
    session.append_queue.produce(partition, batch, Level.WRITTEN, produced.done)


class AcksAll:
    """A record with ``acks=all``.

    The response is sent when it is synced and enough replicas have it, or after a timeout.
    """

    __slots__ = ("_answer", "_offset", "_partition", "_session", "_waits_for", "timer")

    def __init__(self, session: FluxSession, answer: Answer, partition: Partition) -> None:
        self._session = session
        self._answer = answer
        self._partition = partition
        self._offset = -1
        self._waits_for: Handle | None = None
        self.timer: Handle | None = None

    def stored(self, offset: int | BrokerError) -> None:
        """Completion of the append: wait for the replicas if the record is synced, otherwise respond with the error."""
        if self._answer.parts is not None:
            return
        if isinstance(offset, BrokerError):
            self.cancel()
            self._answer.refuse(refused(offset))
            return
        self._offset = offset
        if self._session.state.is_replicated(self._partition, offset):
            self._succeed()
        else:
            self._waits_for = self._session.state.wait_replicated(self._partition, offset, self._succeed)

    def _succeed(self) -> None:
        self.cancel()
        hw = self._session.state.hw(self._partition)
        self._answer.ok(b"partition=%d offset=%d hw=%d" % (self._partition.number, self._offset, hw))

    def expire(self) -> None:
        """Respond with a timeout. The record remains stored (spec: flux#acknowledgements)."""
        if self._answer.parts is None:
            self.cancel()
            self._answer.refuse(replication_timeout())

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self._waits_for is not None:
            self._waits_for.cancel()
            self._waits_for = None
