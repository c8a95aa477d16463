"""A client of the `polywire` protocol without a socket: a session over a broker in memory, and the frames it wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from polywire.broker.access import Principal
from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.errors import BrokerError, PeerError
from polywire.protocols.polywire.codec import (
    ERROR,
    MAGIC,
    MORE,
    PREFIX_BYTES,
    decode_answer,
    decode_prefix,
    encode_head,
)
from polywire.protocols.polywire.errors import error_of
from polywire.protocols.polywire.factory import PolywireFactory
from polywire.protocols.polywire.messages import Failure, Head, Verb
from polywire.records.batch import from_spans
from polywire.testing.loop import ManualLoop
from polywire.testing.memory_log import MemoryLog
from polywire.types import Buffer
from tests.unit.protocols.unmetered import Unmetered

_H = TypeVar("_H", bound=Head)


class CapturedOutput(Unmetered):
    """The output of a session. ``backlog`` is set by tests only."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.backlog = 0
        self.backlog_max = 1 << 20
        self.peer = "test"
        self.on_loopback = True
        self.certified: Principal | None = None
        self.local = ("127.0.0.1", 1)
        self.closed = False
        self.releases = 0
        self.principal: Principal | None = None
        self.pins = 0

    def write(self, data: Buffer) -> None:
        self.written += data

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        for part in parts:
            self.written += part
        if released is not None:
            released()
            self.releases += 1

    def close(self) -> None:
        self.closed = True

    def fail(self, error: PeerError) -> None:
        raise error

    def identified(self, principal: Principal | None) -> None:
        self.principal = principal

    def pin(self) -> Callable[[], None]:
        self.pins += 1
        return self._unpin

    def _unpin(self) -> None:
        self.pins -= 1


@dataclass(frozen=True)
class Answer:
    """One frame as the client sees it."""

    verb: int
    flags: int
    correlation: int
    head: bytes
    payload: bytes

    def decode(self, kind: type[_H]) -> _H:
        if self.flags & ERROR:
            raise self.error
        return decode_answer(self.head, kind)

    @property
    def error(self) -> BrokerError:
        assert self.flags & ERROR, f"no error: {self}"
        return error_of(decode_answer(self.head, Failure))

    @property
    def more(self) -> bool:
        return bool(self.flags & MORE)


class Peer:
    """A connection after its handshake."""

    def __init__(
        self,
        settings: BrokerSettings | None = None,
        *,
        broker: Broker | None = None,
        loop: ManualLoop | None = None,
        output: CapturedOutput | None = None,
        factory: PolywireFactory | None = None,
    ) -> None:
        self.loop = loop or ManualLoop()
        self.broker = broker or Broker.over(
            lambda replay: MemoryLog(self.loop, self.loop.clock, replay),
            settings=settings or BrokerSettings(),
            loop=self.loop,
            clock=self.loop.clock,
        )
        self.output = output or CapturedOutput()
        self.resumes = 0
        self.session = (factory or PolywireFactory(self.broker)).open(self.output, self._resume)
        self._unread = bytearray()
        self.correlations: Iterator[int] = count(1)
        assert self.session.receive(memoryview(bytearray(MAGIC))) == len(MAGIC)
        self.opening = bytes(self.output.written)
        self.output.written.clear()

    def another(self, output: CapturedOutput | None = None) -> Peer:
        """Open a second connection to the same broker."""
        return Peer(broker=self.broker, loop=self.loop, output=output)

    def send(self, verb: Verb, head: Head, payload: Buffer = b"") -> int:
        """Send one request; return its correlation."""
        correlation = next(self.correlations)
        self._unread += encode_head(verb, correlation, head, payload_bytes=len(payload)) + payload
        self._offer()
        return correlation

    def _offer(self) -> None:
        """Offer bytes to the session, as the driver does."""
        if self._unread and not self.session.paused():
            data = bytearray(self._unread)
            del self._unread[: self.session.receive(memoryview(data))]

    def frames(self) -> list[Answer]:
        """Return the frames written since the last call."""
        data, found, at = bytes(self.output.written), [], 0
        while at < len(data):
            prefix = decode_prefix(data, at)
            body = at + PREFIX_BYTES + prefix.head_bytes
            end = at + PREFIX_BYTES + prefix.length
            found.append(
                Answer(prefix.verb, prefix.flags, prefix.correlation, data[at + PREFIX_BYTES : body], data[body:end])
            )
            at = end
        self.output.written.clear()
        return found

    def ask(self, verb: Verb, head: Head, payload: Buffer = b"") -> Answer:
        """Send one request, let the loop run, and return its only frame."""
        correlation = self.send(verb, head, payload)
        for _ in range(2 if self._unread else 1):  # a request that had to wait is offered again
            self.loop.run_due()
            self._offer()
        self.loop.run_due()
        frames = self.frames()
        assert [frame.correlation for frame in frames] == [correlation], frames
        return frames[0]

    def _resume(self) -> None:
        self.resumes += 1


def batch_of(*records: tuple[bytes | None, bytes | None] | bytes) -> bytearray:
    """Return a batch of values, or of (key, value) pairs."""
    source, spans = bytearray(), []
    for record in records:
        for part in record if isinstance(record, tuple) else (None, record):
            spans += [len(source), -1 if part is None else len(part)]
            source += part or b""
    numbers = b"".join(number.to_bytes(8, "little", signed=True) for number in spans)
    return from_spans(source, memoryview(numbers))
