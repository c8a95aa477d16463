"""The session of the `polywire` protocol: execute requests and encode responses (docs/specs/polywire.md).

* Requests take effect in order. Complete requests are executed even if the client has closed its side.
* A response that must wait does not delay other responses, so responses may be sent in another order than requests.
* Batches are passed to the broker without a copy.
* Nothing is written after ``close``.

This module is compiled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import cython

from polywire.errors import BrokerError, Busy, Denied, ErrorCode, Invalid, PeerError
from polywire.protocols.polywire import messages, produce, repeated
from polywire.protocols.polywire.arguments import find_partition
from polywire.protocols.polywire.auth import Admission
from polywire.protocols.polywire.codec import (
    ANSWER_BYTES_MAX,
    ERROR,
    FRAME_BYTES_MAX,
    MAGIC,
    NAME,
    NO_PREFIX,
    PREFIX_BYTES,
    decode_prefix,
    decode_request,
    encode_head,
)
from polywire.protocols.polywire.context import PolywireBroker
from polywire.protocols.polywire.errors import failure_of
from polywire.protocols.polywire.fetch import WAIT_MS_MAX
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.polywire.produce_runs import run_bytes
from polywire.protocols.polywire.replies import Reading
from polywire.protocols.runtime import commands
from polywire.protocols.runtime.sequential import CLOSED, OPEN, Wait
from polywire.protocols.runtime.session import LOGIN_FRAME_BYTES_MAX, QUANTUM_S, Output
from polywire.protocols.runtime.shapes import Shapes
from polywire.records.columns import MERGED_BYTES_MAX

if cython.compiled:
    from cython.cimports.polywire.protocols.polywire.fetch import RangeFetch
    from cython.cimports.polywire.protocols.polywire.produce_runs import short_bytes
    from cython.cimports.polywire.protocols.runtime.framed import BareFramed
else:
    from polywire.protocols.polywire.fetch import RangeFetch
    from polywire.protocols.polywire.produce_runs import short_bytes
    from polywire.protocols.runtime.framed import BareFramed

if TYPE_CHECKING:
    from polywire.broker.topics import Partition

REQUESTS_MAX: Final = 1024  # unanswered requests of one connection; the limit bounds pinned callbacks and views
FETCHES_MAX: Final = 64  # open fetches of one connection, each of which may hold a pin
_PRODUCE: Final = int(Verb.PRODUCE)  # a plain integer, because it is compared with every frame
_FETCH: Final = int(Verb.FETCH)
MEMBERS_MAX: Final = 1_000  # members of share groups on one connection
HEAVY_S: Final = 0.0005  # a connection whose frames take longer to write is served in turn with others


class Handler(Protocol):
    """Executes one request and responds, now or later. ``payload`` has the request's batches.

    Raises BrokerError if the request is rejected immediately.
    """

    def __call__(self, session: PolywireSession, correlation: int, request: Any, payload: memoryview, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Command(commands.Command[Verb, Handler]):
    """A request type of the protocol and its handler.

    Later requests may start before earlier ones are answered, because responses may be sent in any order. Handlers that
    call ``hold`` delay later requests.
    """

    pipelined: bool = field(default=True, kw_only=True)


@cython.cclass
class PolywireSession(BareFramed):
    """The session of one client. While it is open, every request gets exactly one response.

    Responses that are ready at the same time are sent with one write.
    """

    if not cython.compiled:  # when compiled, session.pxd declares the fields
        __slots__ = (
            "_commands",
            "_fetches",
            "_frames",
            "_greeted",
            "_is_heavy",
            "_is_scheduled",
            "_is_writing",
            "_members",
            "_owed",
            "_prefix",
            "_readings",
            "_ready",
            "admission",
            "fetch_shapes",
            "round_robin",
            "shapes",
        )

        broker: PolywireBroker

    def __init__(
        self,
        broker: PolywireBroker,
        commands: Mapping[int, Command],
        round_robin: Iterator[int],
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        """``round_robin`` is a counter that chooses partitions for records without a key."""
        super().__init__(broker, output, resume)
        self.admission: Final = Admission(broker, output)
        self.round_robin: Final = round_robin
        self._commands: Final = commands
        self._frames: list[bytes] = []  # responses that were not written yet
        self._fetches: dict[int, RangeFetch] = {}
        self._ready: deque[RangeFetch] = deque()  # fetches that have data or can read some
        self._members: set[tuple[str, str]] = set()  # members of share groups that may hold records
        self._readings: list[Reading] = []  # requests that wait for records of share groups
        self._greeted = False
        self._is_heavy = False  # whether writing took so long that other connections must be served in between
        self._is_scheduled = False  # whether a callback will write frames
        self._is_writing = False  # whether the running code will write responses and continue fetches
        self._owed = 0  # requests without a response
        self._prefix = NO_PREFIX  # of the current frame; ``NO_PREFIX`` if it was not decoded
        self.shapes: Final = Shapes()  # the heads of the latest PRODUCE requests, for ``take_repeated``
        self.fetch_shapes: Final[list[repeated.FetchShape]] = []  # the latest FETCH requests, for ``take_repeated``

    @property
    def frame_bytes_max(self) -> int:
        return self.admission.frame_bytes_max + PREFIX_BYTES

    def _receive(self, data: memoryview) -> int:
        opening = 0 if self._greeted else self._greet(data)
        if not self._greeted:
            return 0
        self._is_writing = True
        try:
            at = opening + super()._receive(data[opening:] if opening else data)
        except PeerError as error:
            self.refuse(0, 0, Invalid(ErrorCode.INVALID_REQUEST, error.message))
            raise
        finally:
            self._is_writing = False
            self._flush()
        if self._ready:
            waited = self._waits()
            self._write_now()
            # the session waited only for a response, so the driver would not offer the remaining bytes again
            if waited and not self._waits():
                self._end_quantum()
        return at

    def _frame_bytes(self, data: memoryview, at: int) -> int:
        if len(data) - at < PREFIX_BYTES:
            return 0
        if self.take_repeated is not None:
            size = short_bytes(data, at)
            if size:
                self._prefix = NO_PREFIX
                return size if size == len(data) - at else self._run_bytes(data, at) or size
        self._prefix = prefix = decode_prefix(data, at)
        if prefix.length > LOGIN_FRAME_BYTES_MAX:
            decode_prefix(data, at, length_max=self.admission.frame_bytes_max)
        size = PREFIX_BYTES + prefix.length
        if prefix.verb == _PRODUCE and len(data) - at > size:
            return self._run_bytes(data, at) or size
        return size

    def _run_bytes(self, data: memoryview, at: int) -> int:
        """Return the total size of the PRODUCE frames from ``at`` on that can be executed together, or 0 if there are
        none.
        """
        bytes_max = min(MERGED_BYTES_MAX, self.broker.settings.batch_bytes_max)
        return run_bytes(data, at, frames_max=REQUESTS_MAX - self._owed, batch_bytes_max=bytes_max)

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        if self._prefix is NO_PREFIX:
            self._prefix = decode_prefix(data, at)
        next_at = at + PREFIX_BYTES + self._prefix.length
        if next_at < end and self._produce_run(data[at:end]):
            return True
        while at < end:
            prefix = self._prefix
            head = at + PREFIX_BYTES
            body = head + prefix.head_bytes
            self._handle(prefix.verb, prefix.correlation, data[head:body], data[body:next_at])
            at = next_at
            if at < end:
                self._prefix = decode_prefix(data, at)
                next_at += PREFIX_BYTES + self._prefix.length
        return True

    def _produce_run(self, frames: memoryview) -> bool:
        """Execute consecutive PRODUCE requests together. Return False if nothing was stored.

        Each request must then be executed separately, to get its own error.
        """
        try:
            head = frames[PREFIX_BYTES : PREFIX_BYTES + self._prefix.head_bytes]
            request = decode_request(_PRODUCE, head)
            assert isinstance(request, messages.Produce), "the head of a PRODUCE"
            self.admission.check(self._commands[_PRODUCE], request)
            if not produce.produce_run(self, request, frames):
                return False
        except (PeerError, BrokerError):
            return False
        if type(self) is PolywireSession:
            repeated.learn(self, head, request)
        return True

    def _waits(self) -> bool:
        output = self.output
        return bool(self._reasons) or self._owed >= REQUESTS_MAX or output.backlog > output.backlog_max

    def owes(self) -> bool:
        return self._owed > 0

    @property
    def fetches(self) -> tuple[RangeFetch, ...]:
        return tuple(self._fetches.values())

    def drained(self) -> None:
        if self._ready:
            self._schedule()
        super().drained()

    def finish(self, data: memoryview) -> None:
        super().finish(data)
        for reading in self._readings:
            reading.stop()

    def close(self) -> None:
        self._enter(CLOSED)
        for fetch in self._fetches.values():
            fetch.drop()
        self._fetches.clear()
        self._ready.clear()
        self._frames.clear()
        readings, self._readings = self._readings, []
        for reading in readings:
            reading.cancel()
        members, self._members = self._members, set()
        for group, member in members:
            self.broker.shares.member_disconnected(group, member)

    # Used by handlers and fetches

    def hold(self) -> None:
        """Reserve a response, and execute no further request until ``release``.

        Used for logins and long responses, which must be complete before the next request.
        """
        self.owe()
        self._reasons |= Wait.HOLDING

    def release(self) -> None:
        """Execute requests again, after ``hold``.

        Call it before the response is sent: a client that has closed its side is disconnected after the last response.
        """
        self._reasons &= ~Wait.HOLDING
        self._continue()

    def share(self, group: str, member: str, reading: Reading) -> None:
        """When the connection closes, cancel ``reading`` and release the records that the member holds.

        Raises Busy if the connection has too many members or requests.
        """
        self._readings = [other for other in self._readings if not other.is_over]
        is_new = (group, member) not in self._members
        if len(self._readings) >= FETCHES_MAX or (is_new and len(self._members) >= MEMBERS_MAX):
            raise Busy(ErrorCode.BUSY, f"too many open requests or members of share groups limit={FETCHES_MAX}")
        self._readings.append(reading)
        if is_new:
            self._members.add((group, member))
            self.broker.shares.member_connected(group, member)

    def pin(self) -> Callable[[], None]:
        """Keep the content of the receive buffer until the returned function is called.

        The session must accept no requests meanwhile.
        """
        return self.output.pin()

    def owe(self, count: int = 1) -> None:
        """Reserve ``count`` more responses."""
        self._owed += count

    def respond(self, verb: int, correlation: int, head: Head, payload: bytes = b"") -> None:
        if self._phase is not CLOSED:
            self.answer(verb, correlation, head, payload)
        self._count_response()

    def respond_error(self, verb: int, correlation: int, error: BrokerError) -> None:
        if self._phase is not CLOSED:
            self.refuse(verb, correlation, error)
        self._count_response()

    @cython.ccall
    def respond_run(self, answers: bytes, count: cython.long) -> None:
        """Send ``count`` reserved responses, which are already encoded."""
        if self._phase is not CLOSED:
            self._frames.append(answers)
        self._count_response(count)

    def answer(self, verb: int, correlation: int, head: Head, payload: bytes = b"") -> None:
        """Send a response that was not reserved."""
        self._frames.append(encode_head(verb, correlation, head, payload_bytes=len(payload)) + payload)

    def refuse(self, verb: int, correlation: int, error: BrokerError) -> None:
        self._frames.append(encode_head(verb, correlation, failure_of(error), flags=ERROR))

    def ready(self, fetch: RangeFetch) -> None:
        """Continue a fetch that has data or can read some.

        If the session is inside ``receive`` or writes frames, it continues the fetch when that ends.
        """
        self._ready.append(fetch)
        if not self._is_writing:
            # its bytes had to be read from disk, so other connections are waiting, too
            self._is_heavy |= fetch.holds_bytes
            self._schedule()

    def woken(self, fetch: RangeFetch) -> None:
        """Continue a fetch that has waited for records. It is written at once, which costs less than another pass of
        the event loop.
        """
        self._ready.append(fetch)
        if not self._is_writing and not self._is_scheduled:
            self._write_now()

    def failed(self, fetch: RangeFetch, error: BrokerError) -> None:
        fetch.drop()
        self._fetches.pop(fetch.correlation, None)
        self.respond_error(Verb.FETCH, fetch.correlation, error)

    def ended(self, fetch: RangeFetch) -> None:
        self._fetches.pop(fetch.correlation, None)
        self._count_response()

    def _greet(self, data: memoryview) -> int:
        given = bytes(data[: len(MAGIC)])
        if given[: len(NAME)] != NAME[: len(given)]:
            raise PeerError(f"the first bytes are not those of the polywire protocol opening={given.hex()}", fatal=True)
        if len(given) < len(MAGIC):
            return 0
        self._frames.append(MAGIC)
        if given != MAGIC:
            message = f"unknown version version={int.from_bytes(given[len(NAME) :], 'big')}"
            self.refuse(0, 0, Invalid(ErrorCode.INVALID_REQUEST, message))
            self._flush()
            raise PeerError(message, fatal=True)
        self._greeted = True
        self.answer(Verb.HELLO, 0, self._limits())
        return len(MAGIC)

    def _limits(self) -> messages.Limits:
        return messages.Limits(
            broker="polywire",
            frame_bytes_max=FRAME_BYTES_MAX,
            batch_bytes_max=self.broker.settings.batch_bytes_max,
            answer_bytes_max=ANSWER_BYTES_MAX,
            requests_max=REQUESTS_MAX,
            wait_ms_max=WAIT_MS_MAX,
            stage_expiry_ms=self.broker.settings.stage_expiry_us // 1000,
        )

    @cython.cfunc
    def _handle(self, verb: cython.int, correlation: Any, head: Any, payload: Any) -> Any:
        try:
            request = decode_request(verb, head)
            command = self._commands[verb]
            self.admission.check(command, request)
            command.handler(self, correlation, request, payload)
            if type(self) is PolywireSession:
                if verb == _PRODUCE:
                    repeated.learn(self, head, request)
                elif verb == _FETCH:
                    repeated.learn_fetch(self, head, request)
        except PeerError as error:
            if error.fatal:
                raise
            self.refuse(verb, correlation, Invalid(ErrorCode.INVALID_REQUEST, error.message))
        except BrokerError as error:
            self.refuse(verb, correlation, error)

    # Commands of the session itself

    def ping(self, correlation: int, _: Head, __: memoryview) -> None:
        self.answer(Verb.PING, correlation, Head())

    def log_in(self, correlation: int, request: messages.LogIn, _: memoryview) -> None:
        """LOGIN. The fetches of the previous user end. Raises Busy if too many logins wait."""
        if self.admission.principal is not None:
            for fetch in list(self._fetches.values()):
                self.failed(fetch, Denied(ErrorCode.LOGIN_REQUIRED, "the connection is logging in again"))
        if self.admission.log_in(request, partial(self._logged_in, correlation)):
            self.answer(Verb.LOGIN, correlation, Head())
        else:
            self.hold()

    def _logged_in(self, correlation: int, error: BrokerError | None) -> None:
        self.release()
        if error is None:
            self.respond(Verb.LOGIN, correlation, Head())
        else:
            self.respond_error(Verb.LOGIN, correlation, error)

    def cancel(self, correlation: int, request: messages.Cancel, _: memoryview) -> None:
        fetch = self._fetches.get(request.correlation)
        if fetch is not None:
            fetch.cancel(self.output)
        self.answer(Verb.CANCEL, correlation, Head())

    def fetch(self, correlation: int, request: messages.Fetch, _: memoryview) -> None:
        self.begin_fetch(correlation, request, find_partition(self.broker, request.name, request.partition))

    def begin_fetch(self, correlation: int, request: messages.Fetch, partition: Partition) -> None:
        """Start a fetch from a partition, which is that of ``request``. Raises BrokerError if it is rejected immediately."""
        if correlation in self._fetches:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"correlation id is in use correlation={correlation}")
        if len(self._fetches) >= FETCHES_MAX:
            raise Busy(ErrorCode.BUSY, f"too many open fetches limit={FETCHES_MAX}")
        # Earlier requests of this connection must be readable. If there are none, a commit costs almost nothing.
        self.broker.commit()
        fetch = RangeFetch(self, correlation, request, partition)
        self.owe()
        self._fetches[correlation] = fetch
        fetch.start(self.broker, request.wait_ms)

    def _schedule(self) -> None:
        """Write the frames of fetches in a later pass of the event loop, in turn with other connections."""
        if self._is_scheduled:
            return
        self._is_scheduled = True
        if self._is_heavy:
            self.broker.sliced.put(self._write_slice)
        else:
            self.broker.loop.call_soon(self._write_scheduled)

    def _write_slice(self, end: float) -> bool:
        self._is_scheduled = self._write_ready(end)
        return self._is_scheduled

    def _write_scheduled(self) -> None:
        self._is_scheduled = False
        self._write_now()

    @cython.cfunc
    def _write_now(self) -> None:
        """Write frames for a limited time, and the rest in turn with other connections."""
        if self._write_ready(self.broker.clock.monotonic() + QUANTUM_S):
            self._schedule()

    @cython.cfunc
    @cython.exceptval(-1, check=False)
    def _write_ready(self, end: cython.double) -> cython.bint:
        """Write the next frames of open fetches until time ``end``, but at least one. Return whether there are more.

        While the client has not received the last frames, only read the data of the next frame.
        """
        now = self.broker.clock.monotonic
        begun: cython.double = now()
        written_at: cython.double
        output = self.output
        self._is_writing = True
        try:
            while self._ready and output.backlog < output.backlog_max:
                self._advance(self._ready.popleft())
                written_at = now()
                self._is_heavy = written_at - begun > HEAVY_S
                if written_at >= end:
                    return bool(self._ready)
            if self._ready:
                self._read_ahead()
            return False
        finally:
            self._is_writing = False
            self._flush()

    def _read_ahead(self) -> None:
        """Read the next frame's data while the client receives the last frames."""
        fetch = self._ready.popleft()
        try:
            if fetch.prepare(self.broker):
                self._ready.appendleft(fetch)
        except BrokerError as error:
            self.failed(fetch, error)

    @cython.cfunc
    def _advance(self, fetch: RangeFetch) -> None:
        try:
            fetch.advance(self.broker, self.output)
        except BrokerError as error:
            self.failed(fetch, error)

    @cython.cfunc
    def _flush_soon(self) -> Any:
        """Write the responses now if all are ready, otherwise at the end of the event loop's pass."""
        if self._owed == len(self._fetches):
            self._flush()
        elif len(self._frames) == 1:
            self.broker.loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._frames and self._phase is not CLOSED:
            self.output.write(b"".join(self._frames))
            self._frames.clear()

    @cython.ccall
    def _count_response(self, count: cython.long = 1) -> Any:
        self._owed -= count
        if self._phase is CLOSED:
            return
        if self._frames and not self._is_writing:
            self._flush_soon()
        if self._held or self._phase is not OPEN:
            self._continue()
