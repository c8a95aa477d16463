"""The link of a process to one other shard. All connections of clients share it.

* Calls are sent in order. A shard appends the batches of a partition in the order in which they arrive.
* Each call ends once: with its result, or with Unavailable(STOPPING) if the link is lost.
* A lost link is opened again, at once for the next call and otherwise after a pause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeVar

import msgspec

from polywire.errors import BrokerError, Busy, ErrorCode, PeerError, Unavailable
from polywire.log.base import Completion, Handle, Loop
from polywire.protocols.polywire.codec import ERROR, MORE, PREFIX_BYTES, Prefix, decode_answer_prefix
from polywire.protocols.polywire.errors import error_of
from polywire.protocols.polywire.messages import Failure
from polywire.protocols.runtime.shards import Link, Shards
from polywire.routing import messages
from polywire.routing.messages import Topics, Verb, decode, encode
from polywire.types import Buffer

CLOGGED_BYTES: Final = 16 * 1024 * 1024  # batches on the way to one shard, above which sessions stop to accept requests
# limit for batches on the way to one shard, which may have to hold all of them
UNANSWERED_BYTES_MAX: Final = 4 * CLOGGED_BYTES
LARGE_BYTES: Final = (
    4096  # payloads that are not joined with other frames, because copying them costs more than a write
)
RETRY_S: Final = 0.2  # pause before a lost link is opened again
LOST: Final = "the process of this topic has ended and is being restarted: the outcome of the request is unknown"
_CORRELATION_MASK: Final = 0xFFFFFFFF

_Head = TypeVar("_Head", bound=msgspec.Struct)
Answered = Callable[[bytes, memoryview], None]
"""Gets the head and the payload of a response."""


class TopicsOwner(Protocol):
    """Receiver of the topics of other shards."""

    def topics_came(self, link: ShardLink, topics: Topics) -> None:
        """Apply the states of topics."""

    def process_came(self, link: ShardLink, process: messages.Process) -> None:
        """Remember a process."""


class Call:
    """An unanswered call."""

    __slots__ = ("_link", "answered", "correlation", "failed", "size")

    def __init__(
        self, link: ShardLink, correlation: int, answered: Answered, failed: Callable[[BrokerError], None], size: int
    ) -> None:
        self._link: Final = link
        self.correlation: Final = correlation
        self.answered = answered
        self.failed = failed
        self.size: Final = size

    def cancel(self) -> None:
        """Ignore the response, and end the call in the other process."""
        self.answered, self.failed = _ignore, _ignore
        self._link.end(self)

    def credit(self, count: int) -> None:
        """See ``Execution``."""
        self._link.credit(self, count)


def _ignore(*_: object) -> None:
    """Do nothing."""


class ShardLink:
    """The link to ``shard``. Implements ``LinkPeer``.

    ``waiting`` are callbacks for the time when fewer than ``CLOGGED_BYTES`` are unanswered. ``_pieces`` are received
    bytes, ``_received`` in total; they have no complete frame as long as they are fewer than ``_wanted``.
    """

    __slots__ = (
        "_calls",
        "_correlation",
        "_link",
        "_loop",
        "_owner",
        "_pieces",
        "_received",
        "_retry",
        "_shards",
        "_wanted",
        "epoch",
        "shard",
        "unanswered_bytes",
        "waiting",
    )

    def __init__(self, shards: Shards, shard: int, owner: TopicsOwner, loop: Loop) -> None:
        """Create the link, and open it."""
        self.shard: Final = shard
        self.epoch = 0  # of the process, as it has reported last
        self.unanswered_bytes = 0
        self.waiting: Final[set[Callable[[], None]]] = set()
        self._shards: Final = shards
        self._owner: Final = owner
        self._loop: Final = loop
        self._link: Link | None = None
        self._calls: dict[int, Call] = {}
        self._correlation = 0
        self._pieces: list[bytes] = []
        self._received = self._wanted = 0
        self._retry: Handle | None = None
        self._open()

    # Calls

    def call(
        self, verb: Verb, head: msgspec.Struct, kind: type[_Head], then: Completion[_Head], payload: Buffer = b""
    ) -> Call:
        """Send a call whose response has a head of this kind and no payload. ``then`` gets the head or an error.

        Raises Busy(BUSY) if too many bytes are unanswered.
        """

        def answered(received: bytes, _: memoryview) -> None:
            then(decode(received, kind))

        return self.send(verb, head, answered, then, payload)

    def send(
        self,
        verb: Verb,
        head: msgspec.Struct,
        answered: Answered,
        failed: Callable[[BrokerError], None],
        payload: Buffer = b"",
    ) -> Call:
        """Send a call. Raises Busy(BUSY) as ``call``."""
        size = len(payload)
        if size and self.unanswered_bytes and self.unanswered_bytes + size > UNANSWERED_BYTES_MAX:
            raise Busy(ErrorCode.BUSY, f"too many bytes are on the way to a shard limit={UNANSWERED_BYTES_MAX}")
        if self._link is None:
            self._open()
        self._correlation = correlation = (self._correlation + 1) & _CORRELATION_MASK
        call = self._calls[correlation] = Call(self, correlation, answered, failed, size)
        self.unanswered_bytes += size
        frame = encode(verb, correlation, head, payload_bytes=size)
        # the payload is copied, because the caller may change its buffer before it is sent
        if size < LARGE_BYTES:
            self._write(b"".join((frame, payload)) if size else frame)
        else:
            self._write(frame)
            self._write(bytes(payload))
        return call

    def end(self, call: Call) -> None:
        """End a call in the other process, unless it has ended."""
        if self._calls.pop(call.correlation, None) is call:
            self._count_answered(call)
            self._write(encode(Verb.CANCEL, 0, messages.Cancel(call.correlation)))

    def credit(self, call: Call, count: int) -> None:
        """Report that a client has taken bytes of the responses."""
        if self._calls.get(call.correlation) is call:
            self._write(encode(Verb.CREDIT, 0, messages.Credit(call.correlation, count)))

    def _write(self, frame: bytes) -> None:
        """Send bytes. The event loop joins the writes of one pass."""
        if self._link is not None:
            self._link.write(frame)

    # Link

    def _open(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._pieces, self._received, self._wanted = [], 0, 0
        self._link = self._shards.connect(self.shard, self)
        self._link.write(messages.MAGIC + self._shards.key)
        self.send(Verb.SUBSCRIBE, messages.Empty(), self._topics_came, _ignore)
        self.ask_process(_ignore)

    def ask_process(self, then: Callable[[object], None]) -> Call:
        """Ask for the state of the process. ``then`` is called when it is known, or with an error."""

        def came(process: messages.Process | BrokerError) -> None:
            if not isinstance(process, BrokerError):
                self.epoch = process.epoch
                self._owner.process_came(self, process)
            then(process)

        return self.call(Verb.PROCESS, messages.Empty(), messages.Process, came)

    def _topics_came(self, head: bytes, _: memoryview) -> None:
        self._owner.topics_came(self, decode(head, Topics))

    def received(self, data: bytes) -> None:
        """See ``LinkPeer``."""
        self._pieces.append(data)
        self._received += len(data)
        if self._received < self._wanted:
            return
        whole, at = data if len(self._pieces) == 1 else b"".join(self._pieces), 0
        view = memoryview(whole)
        try:
            self._wanted = PREFIX_BYTES
            while len(whole) - at >= self._wanted:
                prefix = decode_answer_prefix(view, at)
                head = at + PREFIX_BYTES
                payload, end = head + prefix.head_bytes, head + prefix.length
                if end > len(whole):
                    self._wanted = end - at
                    break
                at = end
                self._answer(prefix, whole[head:payload], view[payload:end])
        except PeerError:
            if self._link is not None:
                self._link.close()
            self.lost()
            return
        rest = whole[at:]
        self._pieces, self._received = [rest] if rest else [], len(rest)

    def _answer(self, prefix: Prefix, head: bytes, payload: memoryview) -> None:
        call = self._calls.get(prefix.correlation) if prefix.flags & MORE else self._calls.pop(prefix.correlation, None)
        if call is None:
            return
        if not prefix.flags & MORE:
            self._count_answered(call)
        if prefix.flags & ERROR:
            call.failed(error_of(decode(head, Failure)))
        else:
            call.answered(head, payload)

    def _count_answered(self, call: Call) -> None:
        self.unanswered_bytes -= call.size
        if self.waiting and self.unanswered_bytes <= CLOGGED_BYTES:
            self._relieve()

    def _relieve(self) -> None:
        waiting = list(self.waiting)
        self.waiting.clear()
        for callback in waiting:
            self._loop.call_soon(callback)

    def lost(self) -> None:
        """See ``LinkPeer``."""
        self._link = None
        calls, self._calls = list(self._calls.values()), {}
        self.unanswered_bytes = 0
        self._relieve()
        self._retry = self._loop.call_later(RETRY_S, self._open)
        for call in calls:
            call.failed(Unavailable(ErrorCode.STOPPING, LOST))
