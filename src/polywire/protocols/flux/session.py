"""One FLUX connection: read requests and send responses in order. Consecutive PRODUCE lines are handled together.

A request that reads the log sees every record that the connection has produced before. No asyncio task or future is
created per request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import cython

from polywire.broker.access import Principal
from polywire.broker.owners import Caller, caller_of
from polywire.broker.permissions import Action, Resource
from polywire.broker.topics import Topic
from polywire.broker.users import ROOT
from polywire.errors import BrokerError, ErrorCode, Invalid, PeerError
from polywire.protocols.flux import decoder
from polywire.protocols.flux.context import FluxBroker
from polywire.protocols.flux.errors import not_leader, refused
from polywire.protocols.flux.messages import (
    KAFKA_BYTES,
    Refused,
    Request,
    WireCode,
    bad,
    is_http,
    named,
    parse,
    refuse_kafka,
)
from polywire.protocols.flux.metadata import FluxState
from polywire.protocols.flux.reply_slots import ProducedLines, ScratchArrays
from polywire.protocols.runtime import commands
from polywire.protocols.runtime.sequential import CLOSED
from polywire.protocols.runtime.session import QUANTUM_S, Output
from polywire.protocols.runtime.shapes import PRODUCE
from polywire.records.batch import from_spans
from polywire.records.partitioner import partitions_of
from polywire.types import KeyHash, Level, TopicName

if cython.compiled:
    from cython.cimports.polywire.protocols.flux.reply_slots import Answer, Produced
    from cython.cimports.polywire.protocols.runtime.append_queue import AppendQueue
    from cython.cimports.polywire.protocols.runtime.pipelined import BarePipelined
    from cython.cimports.polywire.protocols.runtime.shapes import is_permitted
else:
    from polywire.protocols.flux.reply_slots import Answer, Produced
    from polywire.protocols.runtime.append_queue import AppendQueue
    from polywire.protocols.runtime.pipelined import BarePipelined
    from polywire.protocols.runtime.shapes import is_permitted

LINE_END_S: Final = 2.0  # how long to wait for the end of a line that is too long
# how long records wait for space in the log before they are refused; clients give up after 5 s
BUSY_WAIT_S: Final = 2.0

_TOPICS_AT: Final = 7 * decoder.RUN_RECORDS_MAX
_HASH: Final = KeyHash.FNV32


class Handler(Protocol):
    """Executes one request. Returns the payload of the response, or None if it has created an ``Answer``.

    Raises Refused or BrokerError, whose text is sent to the client.
    """

    def __call__(self, session: FluxSession, request: Request, /) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class Command(commands.Command[str, Handler]):
    """A command of the protocol.

    The session checks the user's permission for the first of its ``actions``. The handler checks any others.

    Attributes:
        topic_at: index of the argument with the topic; None if the command has no topic.
    """

    topic_at: int | None = field(default=None, kw_only=True)


@cython.cclass
class FluxSession(BarePipelined):
    """The session of one client.

    Attributes:
        drain: continues a response that is written in pieces, if there is one. No other response then waits.
    """

    if not cython.compiled:  # fields and types of the base class
        broker: FluxBroker
        _slots: deque[Answer]
    append_queue = cython.declare(AppendQueue, visibility="public")
    drain = cython.declare(object, visibility="public")
    scratch = cython.declare(object, visibility="public")
    state = cython.declare(object, visibility="public")
    _caller: Caller | None
    _commands: Mapping[str, Command]
    _principal: Principal | None
    _too_long: Any

    def __init__(
        self,
        broker: FluxBroker,
        state: FluxState,
        scratch: ScratchArrays,
        commands: Mapping[str, Command],
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(broker, output, resume)
        self.state = state
        self.scratch = scratch
        self._caller = None
        self._commands = commands
        self._principal = None
        self._too_long = None  # timer that ends the connection if a line that is too long does not end
        self.drain = None  # continues a response that is written in pieces
        self.append_queue = AppendQueue(broker, BUSY_WAIT_S, self._continue)
        self._queued = self.append_queue.waiting

    @property
    def frame_bytes_max(self) -> int:
        return int(self.state.settings.line_bytes_max)

    def _receive(self, data: memoryview) -> int:
        at, stop = 0, len(data)
        if self._too_long is not None:
            return self._skip(data)
        work, line_max = self.scratch.work, self.state.settings.line_bytes_max
        now = self.broker.clock.monotonic
        quantum_end = now() + QUANTUM_S
        while at < stop:
            reason, after, end, count, topics = decoder.scan(data, at, stop, work, line_max)
            self.requests += count
            if count == 1:
                self._produce_one(data, at, after)
            elif count:
                self._produce_run(data, at, after, count, topics)
            at = after
            if reason == decoder.MORE:
                # checked before the line ends, because the client waits for a response and sends no line end
                if at < stop and data[at] == 0:
                    refuse_kafka(bytes(data[at : at + KAFKA_BYTES]))
                break
            if reason == decoder.LONG:
                self._refuse_long(line_max)
                return at + self._skip(data[at:])
            if self._waits():
                break
            if reason == decoder.LINE:
                if not self._handle(bytes(data[at : end - 1])):
                    break
                self.requests += 1
                at = end
                if self._waits():
                    break
            if at < stop and now() >= quantum_end:
                self._end_quantum()
                break
        return at

    def _refuse_long(self, line_max: int) -> None:
        """Respond to a line that is too long, and close the connection after its end or ``LINE_END_S``.

        If it were closed earlier, the client, which is still writing the line, could not read the response.
        """
        self._too_long = self.broker.loop.call_later(LINE_END_S, self._end)
        self.append(Answer(self, b"0")).refuse(bad(f"a line has more than {line_max} bytes"))

    def _skip(self, data: memoryview) -> int:
        if b"\n" in bytes(data):
            self._end()
        return len(data)

    def _end(self) -> None:
        """Accept no more requests. Responses to requests that have started are still sent."""
        self._stop_receiving()
        self._end_when_done()

    def _handle(self, line: bytes) -> bool:
        """Execute one request. Return False if it must wait for earlier responses.

        Raises PeerError for a client of another protocol.
        """
        try:
            request = parse(line, pipes=self.state.settings.pipes_in_arguments)
        except Refused as error:
            if is_http(line):
                raise PeerError("HTTP request on the FLUX port", fatal=True) from None
            refuse_kafka(line)
            self.append(Answer(self, b"0")).refuse(error)
            return True
        command = self._commands.get(request.command, _UNKNOWN)
        if not command.pipelined and not self._earlier_answered():
            return False
        try:
            payload = self._execute(command, request, line)
        except Refused as error:
            self.append(Answer(self, request.id)).refuse(error)
        except BrokerError as error:
            self.append(Answer(self, request.id)).refuse(refused(error))
        else:
            if payload is not None:
                self.append(Answer(self, request.id)).ok(payload)
        return True

    def _execute(self, command: Command, request: Request, line: bytes) -> bytes | None:
        """Execute a command. Return the payload of its response, or None if it has created an ``Answer``.

        Raises Refused or BrokerError.
        """
        del line
        self._admit(command, request)
        return command.handler(self, request)

    def topics(self) -> list[Topic]:
        return list(self.broker.topics())

    def later(self, request: Request, *, blocking: bool = False) -> Answer:
        """Return a response that is sent later. ``blocking``: whether later requests wait for it."""
        return self.append(Answer(self, request.id, blocking=blocking))

    @property
    def caller(self) -> Caller:
        """The client's user or address, against whose quota the topics that the client creates count.

        Raises Denied if the client needs a certificate.
        """
        principal = self.principal
        if self._caller is None or self._caller.principal is not principal:
            self._caller = caller_of(principal, self.output.peer)
        return self._caller

    def drained(self) -> None:
        if self.drain is not None:
            self.drain()
        super().drained()

    def finish(self, data: memoryview) -> None:
        """Handle the end of the client's data. The last line need not have a line ending (spec: flux#framing)."""
        rest = bytes(data)
        super().finish(memoryview(rest if rest.endswith(b"\n") or not rest else rest + b"\n"))

    def close(self) -> None:
        if self._too_long is not None:
            self._too_long.cancel()
        self._enter(CLOSED)
        self.append_queue.drop()
        self._drop_slots()

    def _admit(self, command: Command, request: Request) -> None:
        action, access = command.actions[0], self.broker.access
        if command.topic_at is not None and command.topic_at < len(request.args):
            name = named(request.args[command.topic_at])
            access.authorize(self.principal, action, self.broker.resource(name))
        elif action.resource is Resource.BROKER:
            access.authorize(self.principal, action)
        else:
            access.authorize_somewhere(self.principal, action)

    @property
    def principal(self) -> Principal:
        """The user of the client's TLS certificate, or the anonymous user: this protocol has no login (decision 0115).

        Raises Denied if the client needs a certificate.
        """
        access, known = self.broker.access, self._principal
        # for ROOT the same as ``is_current``, without a call for every record
        if known is not None and (access.is_open if known is ROOT else access.is_current(known)):
            return known
        self._principal = principal = access.nameless(self.output.certified)
        self.output.identified(principal)
        return principal

    def topic_to_write(self, name: str) -> Topic:
        """Return the topic for a record. A missing topic is created (spec: flux#topics).

        Raises BrokerError if the client may not write to it, or it cannot be created.
        """
        topic = self.broker.find_topic(name)
        if topic is None or name.startswith("__"):
            self.broker.access.authorize(self.principal, Action.PRODUCE, self.broker.resource(name))
            return self.ensure_topic(name)
        principal = self.principal
        if not is_permitted(self.broker.access, principal, PRODUCE, topic):
            raise self.broker.access.refusal(principal, Action.PRODUCE, topic)
        return topic

    def ensure_topic(self, name: str) -> Topic:
        """Return the topic. A missing topic is created (spec: flux#topics).

        The caller must have checked the permission for its own action. Raises BrokerError if the topic cannot be
        created.
        """
        if name.startswith("__"):
            raise Invalid(ErrorCode.INVALID_TOPIC, f"topic names that begin with __ are reserved name={name!r}")
        topic = self.broker.find_topic(name)
        if topic is None:
            self.broker.access.authorize(self.principal, Action.TOPIC_CREATE, TopicName.parse(name))
            topic = self.broker.ensure_topic(name, by=self.caller)
            self.state.created(topic, automatic=True)
        return topic

    def _produce_one(self, data: memoryview, start: int, end: int) -> None:
        """Append the record of the single PRODUCE line ``data[start:end]``. This is faster than ``_produce_run``."""
        del start, end
        work = self.scratch.work
        request_id, name, key = decoder.first_of(data, work)
        answer = Produced(self, request_id)
        self._slots.append(answer)
        try:
            topic = self.topic_to_write(name)
            partitions = topic.partitions
            # with one partition, and below without views, the same as the methods return, without a call
            partition = partitions[0] if len(partitions) == 1 else self.broker.partition_of_key(topic, key, _HASH)
        except BrokerError as error:
            answer.refuse(refused(error))
            return
        if self.state.views and not self.state.is_writable(partition):
            answer.refuse(not_leader())
            return
        answer.partition = partition
        self.append_queue.produce(partition, from_spans(data, work[:4]), Level.WRITTEN, answer.done)

    def _produce_run(self, data: memoryview, start: int, end: int, count: int, topics: int) -> None:
        """Append ``count`` records of ``topics`` topics from the consecutive PRODUCE lines ``data[start:end]``."""
        scratch = self.scratch
        scratch.ids = _sized(scratch.ids, end - start)
        answer = ProducedLines(
            self, bytes(memoryview(scratch.ids)[: decoder.pack_ids(data, scratch.work, count, scratch.ids)]), count
        )
        self._slots.append(answer)
        names = [self._topic_text(data, number) for number in range(topics)]
        if topics == 1:
            self._produce_topic(answer, names[0], data, scratch.work[: 4 * count], count, None)
        else:
            for number, name in enumerate(names):
                part = decoder.select(scratch.work, count, number, scratch.spans, scratch.records)
                self._produce_topic(answer, name, data, scratch.spans[: 4 * part], part, scratch.records)
        answer.batch_done()

    def _topic_text(self, data: memoryview, number: int) -> str:
        at = self.scratch.work[_TOPICS_AT + 2 * number]
        return str(data[at : at + self.scratch.work[_TOPICS_AT + 2 * number + 1]], "ascii")

    def _produce_topic(
        self,
        answer: ProducedLines,
        name: str,
        data: memoryview,
        spans: memoryview,
        count: int,
        records: memoryview | None,
    ) -> None:
        """Append the records of one topic, grouped by partition.

        ``records`` are their numbers among all lines; None for all.
        """
        scratch = self.scratch
        base = len(answer.partitions)
        try:
            topic = self.topic_to_write(name)
            partitions = topic.written_to()
        except BrokerError as error:
            answer.fill_groups(base, count, records)
            answer.fail(answer.add_group(None), refused(error))
            return
        kind = topic.settings.key_hash or _HASH
        found = partitions_of(data, spans, len(partitions), kind)
        numbers = memoryview(found).cast("B").cast("i")
        groups, rows, bounds = answer.groups, scratch.rows, scratch.bounds
        total = decoder.divide(numbers, count, records, base, scratch.slots, groups, rows, bounds)
        start = 0
        for group in range(total):
            end, partition = bounds[2 * group], partitions[bounds[2 * group + 1]]
            number = answer.add_group(partition)
            if self.state.is_writable(partition):
                batch = from_spans(data, spans, rows[start:end] if total > 1 else None)
                self.append_queue.produce(partition, batch, Level.WRITTEN, partial(answer.stored, number))
            else:
                answer.fail(number, not_leader())
            start = end


def _sized(buffer: bytearray, size: int) -> bytearray:
    return buffer if len(buffer) >= size else bytearray(size)


def _unknown(session: FluxSession, request: Request, /) -> bytes | None:
    raise Refused(WireCode.UNKNOWN_COMMAND, b"unsupported command")


_UNKNOWN: Final = Command("", _unknown, (Action.CONNECT,), pipelined=True)
