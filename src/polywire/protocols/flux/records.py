"""FLUX commands on records: PRODUCE as single lines, CONSUME, and the replicas' reports (spec: flux#commands).

Promises: CONSUME answers every record up to the hw that it tells; values a line cannot carry are escaped, never torn.
Must not know: sockets, how bulk PRODUCE works, how replies with records are made.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final

from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError
from polywire.protocols.flux.errors import not_leader, refused, replication_timeout
from polywire.protocols.flux.messages import Acks, Request, acks, bad, flag, integer, is_plain, listed, topic_name
from polywire.protocols.flux.metadata import Replication
from polywire.protocols.flux.replies import Reply
from polywire.protocols.flux.reply_slots import Answer, Produced
from polywire.protocols.flux.session import FluxSession
from polywire.records.batch import from_spans
from polywire.records.columns import RecordFlags
from polywire.types import KeyHash, Level

BROKER_FETCH_RECORDS: Final = 100


def usage(request: Request, text: str, *counts: int) -> None:
    """Refuse another number of arguments."""
    if len(request.args) not in counts:
        raise bad(f"{request.command} requires: {text}")


def find_partition(topic: Topic | None, number: int) -> Partition:
    """A partition that exists. Raises Refused ``invalid partition``."""
    if topic is None or not 0 <= number < len(topic.partitions):
        raise bad("invalid partition")
    return topic.partitions[number]


def produce(session: FluxSession, request: Request, /) -> None:
    """PRODUCE of a line that the bulk path left alone."""
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
    """A record that waits to be synced and held by enough replicas.

    Invariant: the answer is filled once: by success, by an error, or by the timer.
    """

    __slots__ = ("_answer", "_forget", "_offset", "_partition", "_session", "timer")

    def __init__(self, session: FluxSession, answer: Answer, partition: Partition) -> None:
        self._session = session
        self._answer = answer
        self._partition = partition
        self._offset = -1
        self._forget: Callable[[], None] | None = None
        self.timer: object = None

    def stored(self, offset: int, error: BrokerError | None) -> None:
        """The record is synced, or failed."""
        if self._answer.parts is not None:
            return
        if error is not None:
            self.cancel()
            self._answer.refuse(refused(error))
            return
        self._offset = offset
        if self._session.state.is_replicated(self._partition, offset):
            self._succeed()
        else:
            self._forget = self._session.state.wait_replicated(self._partition, offset, self._succeed)

    def _succeed(self) -> None:
        self.cancel()
        hw = self._session.state.hw(self._partition)
        self._answer.ok(b"partition=%d offset=%d hw=%d" % (self._partition.number, self._offset, hw))

    def expire(self) -> None:
        """Too late; the record stays (spec: flux#acknowledgements)."""
        if self._answer.parts is None:
            self.cancel()
            self._answer.refuse(replication_timeout())

    def cancel(self) -> None:
        """Stop waiting."""
        if self.timer is not None:
            self.timer.cancel()  # type: ignore[attr-defined]
            self.timer = None
        if self._forget is not None:
            self._forget()
            self._forget = None


def consume(session: FluxSession, request: Request, /) -> bytes | None:
    """CONSUME: every record from an offset up to hw; no more than about so many bytes where ``max=`` says so."""
    usage(request, "<topic> <partition> <offset>", 3, 4)
    number, offset = integer(request.args[1], "partition"), integer(request.args[2], "offset")
    bytes_max = _bytes_max(request) if len(request.args) == 4 else None
    partition = find_partition(session.ensure_topic(topic_name(request.args[0])), number)
    if offset < 0:
        raise bad("invalid offset")  # the reference ends here (spec: flux#our-choices)
    hw = session.state.hw(partition)
    reply = Reply(session, request, b"messages=", partition, hw + 1, bytes_max=bytes_max, hw=hw)
    return reply.begin(max(offset, partition.log.first_offset))  # spec: flux#our-choices


def _bytes_max(request: Request) -> int:
    """The argument ``max=…``, an extension: to whoever does not write it so it is one argument too many (spec: flux#consume). Raises
    Refused."""
    name, _, value = request.args[3].partition(b"=")
    if name != b"max":
        usage(request, "<topic> <partition> <offset>", 3)
    return integer(value, "max")


def broker_fetch(session: FluxSession, request: Request, /) -> bytes | None:
    """BROKER_FETCH: a follower reads up to the log's end."""
    usage(request, "<topic> <partition> <follower_id> <offset> [max_messages]", 4, 5)
    number = integer(request.args[1], "partition")
    follower = integer(request.args[2], "follower_id")
    offset = integer(request.args[3], "offset")
    most = integer(request.args[4], "max_messages") if len(request.args) == 5 else BROKER_FETCH_RECORDS
    if most <= 0:
        raise bad("max_messages must be > 0")
    name = topic_name(request.args[0])
    partition = find_partition(session.broker.find_topic(name), number)
    if not session.state.is_leader(partition):
        raise not_leader()
    if offset < 0:
        raise bad("invalid offset")
    start = max(offset, partition.log.first_offset)
    head = b"topic=%b partition=%d follower=%d hw=%d records="
    hw = session.state.hw(partition)
    end = min(partition.log.readable_offset, start + most)
    bytes_max = session.state.settings.reply_bytes_max
    reply = Reply(session, request, head % (request.args[0], number, follower, hw), partition, end, bytes_max=bytes_max)
    return reply.begin(start)


def _report(session: FluxSession, request: Request, field: str, offset_field: str) -> tuple[int, int, int, Replication]:
    """A follower tells what it holds."""
    number = integer(request.args[1], "partition")
    follower = integer(request.args[2], field)
    offset = integer(request.args[3], offset_field)
    topic = session.broker.find_topic(topic_name(request.args[0]))
    if not 1 <= follower < session.state.factor_of(topic):
        raise bad("invalid replica id")
    partition = find_partition(topic, number)
    if not session.state.is_leader(partition):
        raise bad("partition is not leader")
    return number, follower, offset, session.state.acknowledge(partition, follower, offset)


def _replicated(offset: int, now: Replication) -> str:
    return f"acked_offset={offset} hw={now.hw} isr={listed(now.isr)} under_replicated={flag(now.under_replicated)}"


def replica_fetch(session: FluxSession, request: Request, /) -> bytes:
    """REPLICA_FETCH: reports, fetches nothing."""
    usage(request, "<topic> <partition> <replica_id> <offset>", 4)
    _, follower, offset, now = _report(session, request, "replica_id", "offset")
    return f"replica={follower} {_replicated(offset, now)}".encode()


def broker_replica_ack(session: FluxSession, request: Request, /) -> bytes:
    """BROKER_REPLICA_ACK: the same between brokers."""
    usage(request, "<topic> <partition> <follower_id> <acked_offset>", 4)
    number, follower, offset, now = _report(session, request, "follower_id", "acked_offset")
    head = b"topic=%b partition=%d follower=%d " % (request.args[0], number, follower)
    return head + _replicated(offset, now).encode()
