"""Send calls to the process of another shard, over one connection (link) for all clients.

* Calls are sent in order. The other process appends the batches of a partition in the order in which they arrive.
* Each call ends once: with its result, or with Unavailable(STOPPING) if the link is lost.
* A lost link is opened again for the next call, or after ``RETRY_S``.
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
from polywire.routing.values import VALUES_SHARD
from polywire.types import Buffer

# Both limits are for the payloads of calls to one shard that have no response yet.
CLOGGED_BYTES: Final = 16 * 1024 * 1024  # above this, sessions accept no more requests
UNANSWERED_BYTES_MAX: Final = (
    4 * CLOGGED_BYTES
)  # above this, calls fail, because the other process may buffer all of it
LARGE_BYTES: Final = 4096  # from this size on, copying a payload into a frame costs more than a second write
RETRY_S: Final = 0.2  # pause before a lost link is opened again
LOST: Final = "the process of this topic has ended and is being restarted: the outcome of the request is unknown"
_CORRELATION_MASK: Final = 0xFFFFFFFF

_Head = TypeVar("_Head", bound=msgspec.Struct)
OnResponse = Callable[[bytes, memoryview], None]
"""Called with the head and the payload of each response to a call."""


class TopicsOwner(Protocol):
    """Applies what other processes report."""

    def apply_topics(self, link: ShardLink, topics: Topics) -> None:
        """Apply a report about topics of the link's shard."""

    def apply_process(self, link: ShardLink, process: messages.Process) -> None:
        """Apply a report about the process of the link's shard."""


class Call:
    """A call that has no response yet. Implements ``Execution``."""

    __slots__ = ("_link", "correlation", "on_error", "on_response", "size")

    def __init__(
        self,
        link: ShardLink,
        correlation: int,
        on_response: OnResponse,
        on_error: Callable[[BrokerError], None],
        size: int,
    ) -> None:
        self._link: Final = link
        self.correlation: Final = correlation
        self.on_response = on_response
        self.on_error = on_error
        self.size: Final = size

    def cancel(self) -> None:
        """Ignore the response, and cancel the call in the other process."""
        self.on_response, self.on_error = _ignore, _ignore
        self._link.end(self)

    def credit(self, count: int) -> None:
        """Allow the other process to send ``count`` more bytes of responses."""
        self._link.credit(self, count)


def _ignore(*_: object) -> None:
    pass


class ShardLink:
    """The link to one shard. Implements ``LinkPeer``.

    Attributes:
        shard: number of the other shard.
        epoch: number of the other process's start, as it reported last; 0 before.
        unanswered_bytes: payload bytes of calls without a response.
        waiting: callbacks for the time when ``unanswered_bytes`` is at most ``CLOGGED_BYTES`` again.
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
        """Open the link."""
        self.shard: Final = shard
        self.epoch = 0
        self.unanswered_bytes = 0
        self.waiting: Final[set[Callable[[], None]]] = set()
        self._shards: Final = shards
        self._owner: Final = owner
        self._loop: Final = loop
        self._link: Link | None = None
        self._calls: dict[int, Call] = {}
        self._correlation = 0
        self._pieces: list[bytes] = []  # received bytes that are not a complete frame yet
        self._received = self._wanted = 0  # bytes in ``_pieces``, and the number needed for the next frame
        self._retry: Handle | None = None
        self._open()

    # Calls

    def call(
        self, verb: Verb, head: msgspec.Struct, kind: type[_Head], then: Completion[_Head], payload: Buffer = b""
    ) -> Call:
        """Send a call. ``then`` gets the head of the response, decoded as ``kind``, or an error.

        Raises Busy(BUSY) if too many payload bytes wait for responses.
        """

        def on_response(received: bytes, _: memoryview) -> None:
            then(decode(received, kind))

        return self.send(verb, head, on_response, then, payload)

    def send(
        self,
        verb: Verb,
        head: msgspec.Struct,
        on_response: OnResponse,
        on_error: Callable[[BrokerError], None],
        payload: Buffer = b"",
    ) -> Call:
        """Send a call. ``on_response`` gets each response, ``on_error`` an error. Raises Busy(BUSY) like ``call``."""
        size = len(payload)
        if size and self.unanswered_bytes and self.unanswered_bytes + size > UNANSWERED_BYTES_MAX:
            raise Busy(ErrorCode.BUSY, f"too many bytes are on the way to a shard limit={UNANSWERED_BYTES_MAX}")
        if self._link is None:
            self._open()
        self._correlation = correlation = (self._correlation + 1) & _CORRELATION_MASK
        call = self._calls[correlation] = Call(self, correlation, on_response, on_error, size)
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
        """Cancel a call in the other process, unless it has ended."""
        if self._calls.pop(call.correlation, None) is call:
            self._count_response(call)
            self._write(encode(Verb.CANCEL, 0, messages.Cancel(call.correlation)))

    def credit(self, call: Call, count: int) -> None:
        if self._calls.get(call.correlation) is call:
            self._write(encode(Verb.CREDIT, 0, messages.Credit(call.correlation, count)))

    def confirm(self) -> None:
        """Confirm that this process has applied the values of a report."""
        self._write(encode(Verb.APPLIED, 0, messages.Empty()))

    def _write(self, frame: bytes) -> None:
        """Send bytes, unless the link is lost. The event loop joins the writes of one pass."""
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
        reports_values = self.shard == VALUES_SHARD
        self.send(Verb.SUBSCRIBE, messages.Subscribe(reports_values), self._apply_topics, _ignore)
        self.request_process(_ignore)

    def request_process(self, then: Callable[[object], None]) -> Call:
        """Request the ``Process`` of the other end, and pass it to ``then`` after ``TopicsOwner`` has applied it. On failure, ``then`` gets
        the error."""

        def received(process: messages.Process | BrokerError) -> None:
            if not isinstance(process, BrokerError):
                self.epoch = process.epoch
                self._owner.apply_process(self, process)
            then(process)

        return self.call(Verb.PROCESS, messages.Empty(), messages.Process, received)

    def _apply_topics(self, head: bytes, _: memoryview) -> None:
        self._owner.apply_topics(self, decode(head, Topics))

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
                self._dispatch(prefix, whole[head:payload], view[payload:end])
        except PeerError:
            if self._link is not None:
                self._link.close()
            self.lost()
            return
        rest = whole[at:]
        self._pieces, self._received = [rest] if rest else [], len(rest)

    def _dispatch(self, prefix: Prefix, head: bytes, payload: memoryview) -> None:
        call = self._calls.get(prefix.correlation) if prefix.flags & MORE else self._calls.pop(prefix.correlation, None)
        if call is None:
            return
        if not prefix.flags & MORE:
            self._count_response(call)
        if prefix.flags & ERROR:
            call.on_error(error_of(decode(head, Failure)))
        else:
            call.on_response(head, payload)

    def _count_response(self, call: Call) -> None:
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
            call.on_error(Unavailable(ErrorCode.STOPPING, LOST))
