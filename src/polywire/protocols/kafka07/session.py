"""One Kafka 0.7 connection: execute its requests in order.

Consecutive produce requests are decoded together. Producers get no responses. A response to FETCH or OFFSETS is their
only acknowledgement: it implies that all earlier message sets of the connection are stored. No asyncio task or future
is created per request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from polywire.broker.access import Principal
from polywire.broker.api import Pending
from polywire.broker.owners import Caller, caller_of
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, PeerError
from polywire.log.base import Completion
from polywire.protocols.kafka07 import decoder
from polywire.protocols.kafka07.compression import EXPANDED_BYTES_MAX, ExpandsTooFar, OpenedSet, open_sets
from polywire.protocols.kafka07.context import Kafka07Broker
from polywire.protocols.kafka07.decoder import FRAME_BYTES_MAX
from polywire.protocols.kafka07.fetch import FetchReply, Parts, ReadCursor, Release
from polywire.protocols.kafka07.messages import (
    Fetch,
    Offsets,
    Produce,
    Request,
    RequestType,
    encode_offsets_answer,
    entry_count,
    frame_length,
    parse,
)
from polywire.protocols.kafka07.offsets import OffsetsReply
from polywire.protocols.kafka07.produce import Peer, Producer
from polywire.protocols.runtime import commands
from polywire.protocols.runtime.append_queue import AppendQueue
from polywire.protocols.runtime.off_loop import LARGE_BYTES, LONG_BYTES, OffLoopQueue, OffLoopWork
from polywire.protocols.runtime.reply_buffers import ReplyBuffers
from polywire.protocols.runtime.sequential import CLOSED, SequentialSession
from polywire.protocols.runtime.session import QUANTUM_S, Output
from polywire.types import Level

LENGTH_BYTES: Final = 4
# how long message sets wait for space in the log; then the connection is closed, the only way to reject them
BUSY_WAIT_S: Final = 30.0
ENTRIES_AT_ONCE_MAX: Final = 512  # entries of a request that is parsed on the event loop, in one or two milliseconds
SMALL_ANSWER_BYTES: Final = 16 * 1024  # for a smaller response, a copy costs less than holding the buffer


class Handler(Protocol):
    """Executes one request. Its message sets are in ``data``. Raises PeerError to close the connection."""

    def __call__(self, session: KafkaSession, data: memoryview, request: Any, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Command(commands.Command[RequestType, Handler]):
    """A request type and its handler. Permissions for its actions are checked for each entry of a request."""


class KafkaSession(SequentialSession[Kafka07Broker]):
    """The session of one client. At most one response is built at a time.

    The next request waits while

    * a response is built,
    * message sets wait for space in the log's write buffer,
    * a FETCH or OFFSETS request waits until earlier message sets are stored,
    * a large request is prepared in a thread or stored in several passes of the loop.
    """

    __slots__ = (
        "_append_queue",
        "_commands",
        "_delayed",
        "_is_partly_stored",
        "_large",
        "_off_loop",
        "_pending",
        "_principal",
        "_producer",
        "_read_cursors",
        "_reply_buffers",
        "_storing",
        "_unstored",
    )

    def __init__(
        self,
        broker: Kafka07Broker,
        producer: Producer,
        reply_buffers: ReplyBuffers,
        off_loop: OffLoopQueue,
        commands: Mapping[RequestType, Command],
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(broker, output, resume)
        self._producer = producer
        self._reply_buffers = reply_buffers
        self._off_loop = off_loop
        self._commands = commands
        self._large: OffLoopWork | None = None  # a request that is prepared in the thread or stored in slices
        self._storing: Iterator[bool] = iter(())  # the remaining steps of storing it
        self._is_partly_stored = False  # whether one of its message sets is partly stored
        self._read_cursors: dict[Partition, ReadCursor] = {}
        self._append_queue: Final = AppendQueue(broker, BUSY_WAIT_S, self._queue_emptied, self._refused)
        self._pending: FetchReply | OffsetsReply | None = None  # the response that is built
        self._unstored = 0  # batches that are not known to be stored
        self._delayed: Callable[[], None] | None = None  # executes the request that waits for these batches
        self._principal: Principal | None = None

    @property
    def _peer(self) -> Peer:
        return Peer(self._authorize, self._caller)

    @property
    def frame_bytes_max(self) -> int:
        return LENGTH_BYTES + FRAME_BYTES_MAX

    def _waits(self) -> bool:
        is_busy = self._pending is not None or self._delayed is not None or self._large is not None
        return is_busy or bool(self._append_queue.waiting) or super()._waits()

    def owes(self) -> bool:
        """Return whether a request is unanswered, or a message set is not stored yet."""
        is_busy = self._pending is not None or self._delayed is not None or self._large is not None
        return is_busy or self._unstored > 0

    def _receive(self, data: memoryview) -> int:
        at = self._wanted = 0
        now = self.broker.clock.monotonic
        quantum_end = now() + QUANTUM_S
        while len(data) - at >= LENGTH_BYTES and (taken := self._take_requests(data, at)):
            at += taken
            if self._waits():
                break
            if now() >= quantum_end:
                self._end_quantum()
                break
        return at

    def _take_requests(self, data: memoryview, start: int) -> int:
        """Execute consecutive PRODUCE requests and the request after them. Return the number of bytes consumed.

        Returns 0 if the request at ``start`` is incomplete or must wait. Raises PeerError for an invalid request.
        """
        at = start
        try:
            reason, at, end = self._producer.take_run(data, at, self._append, self._peer)
            if reason == decoder.MORE and len(data) - at >= LENGTH_BYTES:
                self._wanted = LENGTH_BYTES + frame_length(data, at)
            elif reason == decoder.FRAME and not self._waits():
                frame_length(data, at)
                self._handle(data, at + LENGTH_BYTES, end)
                at = end
        except Pending as pending:
            self._await_pending(pending)
        if self.output.meter is not None:
            self.requests += _count_requests(data, start, at)
        return at - start

    def _handle(self, data: memoryview, at: int, end: int) -> None:
        """Parse and execute a single request. Raises PeerError for an invalid request."""
        if entry_count(data, at, end) > ENTRIES_AT_ONCE_MAX:
            self._large = self._off_loop.put(
                partial(_prepare, data, at, end), self._execute_prepared, self.output.pin()
            )
        else:
            self._begin(data, parse(data, at, end))

    def _execute_prepared(self, prepared: Any) -> None:
        if isinstance(prepared, PeerError):
            self._fail(prepared)
            return
        request, sets = prepared
        if sets is not None:
            self._store_prepared(sets)
            return
        self._leave_off_loop()
        try:
            self._begin(memoryview(b""), request)
        except PeerError as error:
            self._fail(error)

    def _begin(self, data: memoryview, request: Request) -> None:
        """Execute a request whose message sets are in ``data``. Raises PeerError to close the connection."""
        command = self._commands[request.kind]
        if self._unstored and not command.pipelined:
            # the response implies that all earlier message sets are stored
            self._delayed = partial(command.handler, self, memoryview(b""), request)
            self.broker.commit()
        else:
            command.handler(self, data, request)

    def _stored(self, result: int | BrokerError) -> None:
        self._unstored -= 1
        if self._phase is CLOSED:
            return
        if isinstance(result, BrokerError):
            self.broker.loop.call_soon(self._fail, _not_stored(result))
        elif not self._unstored and self._delayed is not None:
            self._run_delayed(self._delayed)
        elif not self._unstored:
            self._end_when_done()

    def _run_delayed(self, then: Callable[[], None]) -> None:
        """Execute the request that waited for earlier message sets.

        Errors are handled in a later callback, because the session may be inside ``receive``.
        """
        try:
            then()
        except PeerError as error:
            self.broker.loop.call_soon(self._fail, error)
        else:
            self._delayed = None
            self._continue()

    def fetch(self, _: memoryview, request: Fetch) -> None:
        """Execute FETCH or MULTIFETCH. Raises PeerError for a negative size."""
        if any(entry.bytes_max < 0 for entry in request.entries):
            raise PeerError("fetch size is negative", fatal=True)
        answering = FetchReply(
            self.broker,
            self._reply_buffers,
            self._read_cursors,
            request,
            self._send_response,
            authorize=self._authorize,
        )
        self._pending = answering
        answering.run()

    def list_offsets(self, _: memoryview, request: Offsets) -> None:
        listing = OffsetsReply(self.broker, request, self._listed, authorize=self._authorize)
        self._pending = listing
        listing.run()

    def _listed(self, addresses: list[int] | BrokerError) -> None:
        """Respond to OFFSETS. After an error, close the connection, because OFFSETS has no error response."""
        if isinstance(addresses, BrokerError):
            self._pending = None
            self._fail(PeerError(f"cannot list offsets: {addresses.message}", fatal=True))
        else:
            self._send_response([memoryview(encode_offsets_answer(addresses))], _nothing)

    def _send_response(self, parts: Parts, release: Release) -> None:
        self._pending = None
        if len(parts) == 1 and len(parts[0]) <= SMALL_ANSWER_BYTES:
            answer = bytes(parts[0])
            release()
            self.output.write(answer)
        else:
            self.output.write_many(parts, release)
        self._continue()

    def _authorize(self, action: Action, name: str) -> None:
        """Raise Denied if the client may not perform the action on the topic.

        This protocol has no logins, so the TLS certificate names the user, or else it is ``anonymous`` (decision 0115).
        """
        access = self.broker.access
        if self._principal is None or not access.is_current(self._principal):
            self._principal = access.nameless(self.output.certified)
            self.output.identified(self._principal)
        access.authorize(self._principal, action, self.broker.resource(name))

    def _caller(self) -> Caller:
        return caller_of(self._principal, self.output.peer)

    # Produce

    def produce(self, data: memoryview, request: Produce) -> None:
        """Execute PRODUCE or MULTIPRODUCE: store the message sets.

        Large ones are stored in several passes of the loop. Raises PeerError if a message set is rejected.
        """
        entries = request.entries
        sets: list[OpenedSet] | None = None
        if not entries or entries[-1].stop - entries[0].start <= LONG_BYTES:
            with suppress(ExpandsTooFar):
                sets = open_sets(data, entries, LARGE_BYTES)
        if sets is None:
            prepare = partial(open_sets, data, entries, EXPANDED_BYTES_MAX)
            self._large = self._off_loop.put(prepare, self._store_prepared, self.output.pin())
            return
        self._producer.find_topics(sets, self._peer)
        for _ in self._producer.take_sets(sets, self._append, self._peer):
            pass  # there are few entries, and they are short

    def _store_prepared(self, sets: Any) -> None:
        if isinstance(sets, PeerError):
            self._fail(sets)
            return
        try:
            self._producer.find_topics(sets, self._peer)
        except Pending as pending:
            pending.then(partial(self._store_prepared, sets))
            return
        self._storing = self._producer.take_sets(sets, self._append, self._peer)
        self._store()

    def _store(self) -> None:
        """Store message sets of a large request for a limited time."""
        if self._large is None or self._append_queue.waiting:
            return
        now = self.broker.clock.monotonic
        quantum_end = now() + QUANTUM_S
        try:
            for ended in self._storing:
                self._is_partly_stored = not ended
                if self._append_queue.waiting:
                    return
                if now() >= quantum_end:
                    self.broker.loop.call_soon(self._store)
                    return
        except PeerError as error:
            self._fail(error)
            return
        self._leave_off_loop()
        self._continue()

    def _leave_off_loop(self) -> None:
        large, self._large = self._large, None
        self._storing, self._is_partly_stored = iter(()), False
        if large is not None:
            large.leave()

    def _append(self, partition: Partition, batch: bytearray) -> None:
        """Append a batch. While it waits for space in the log's write buffer, later requests wait, too."""
        self._unstored += 1
        self._append_queue.produce(partition, batch, Level.WRITTEN, self._stored)

    def _refused(self, done: Completion[int] | None, error: BrokerError) -> None:
        """Close the connection, because a message set was not stored. The protocol has no error response for it."""
        del done  # producers get no responses
        self._fail(_not_stored(error))

    def _queue_emptied(self) -> None:
        self._store()
        self._continue()

    # Connection

    def _fail(self, error: PeerError) -> None:
        """Drop waiting requests and close the connection. Used for errors that are found outside ``receive``."""
        self._append_queue.drop()
        self._delayed = None
        self._stop_receiving()
        self._leave_off_loop()
        if self._phase is not CLOSED:
            self.output.fail(error)

    def close(self) -> None:
        self._enter(CLOSED)
        self._delayed = None
        if self._is_partly_stored and not self._append_queue.waiting:
            with suppress(PeerError):  # a message set that is partly stored must be stored completely
                any(self._storing)
        self._leave_off_loop()
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        self._append_queue.drop()
        self._storing = iter(())


def _prepare(data: memoryview, at: int, end: int) -> tuple[Request, list[OpenedSet] | None]:
    """Parse a request with many entries. If it is a produce request, decompress its message sets. Called in the thread.

    Raises PeerError for an invalid request.
    """
    request = parse(data, at, end)
    return request, open_sets(data, request.entries, EXPANDED_BYTES_MAX) if isinstance(request, Produce) else None


def _not_stored(error: BrokerError) -> PeerError:
    return PeerError(f"message set cannot be stored: {error.message}", fatal=True)


def _count_requests(data: memoryview, at: int, end: int) -> int:
    count = 0
    while at < end:
        at += LENGTH_BYTES + frame_length(data, at)
        count += 1
    return count


def _nothing() -> None:
    pass
