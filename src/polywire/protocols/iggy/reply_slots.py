"""Reply slots: the order of answers of one Iggy connection, and what is written in front of what fills them.

Promises: an answer is filled once, at once or by a callback of the broker; an error has no payload. Must not know: how requests are read,
sockets.

spec: iggy#classic-framing, iggy#d3-frames
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from polywire.errors import BrokerError
from polywire.protocols.iggy import errors, vsr
from polywire.protocols.iggy.dialect import Dialect
from polywire.protocols.iggy.messages import HEAD, Refused
from polywire.protocols.runtime.pipelined import ReplySlot
from polywire.protocols.runtime.slices import Slices
from polywire.types import Buffer

if TYPE_CHECKING:
    from polywire.protocols.iggy.context import IggyBroker

REPLAY_BYTES_MAX: Final = 64 * 1024  # a longer answer is not kept: no state-changing command has one


class ReplyOwner(Protocol):
    """What an answer needs of its session."""

    @property
    def broker(self) -> IggyBroker:
        """Whose loop and clock long answers are made with."""

    @property
    def closed(self) -> bool:
        """Whether the connection is gone."""

    def answered(self) -> None:
        """An answer became known."""

    def end(self) -> None:
        """The answer in hand is the last."""

    def keep(self, head: vsr.Head, reply: bytes) -> None:
        """Answer a repeat of this request with the same bytes."""


class Answer(ReplySlot[ReplyOwner]):
    """A slot in the order of answers; ``payload`` is what ``done`` tells, or what ``later`` gives, where that takes long to make.

    head: of the request, None in the classic framing. number: of the answer, rising by connection.
    """

    __slots__ = ("dialect", "head", "later", "number", "payload")

    def __init__(
        self,
        session: ReplyOwner,
        dialect: Dialect,
        head: vsr.Head | None = None,
        *,
        number: int = 0,
        blocking: bool = True,
    ) -> None:
        self.session = session
        self.dialect = dialect
        self.head = head
        self.number = number
        self.blocking = blocking
        self.payload = b""
        self.later: Iterator[bytes] | None = None
        self.parts = None
        self.released = None
        self.cancel = None

    def ok(self, payload: bytes = b"") -> None:
        """Success."""
        self.fill([payload] if payload else [])

    def make(self, parts: Iterator[bytes]) -> None:
        """Success, with a payload that takes long to make; the iterator gives it, a little at a time."""
        self.cancel = Slices(self.session.broker, parts, self._made).cancel

    def _made(self, parts: Sequence[Buffer] | BrokerError) -> None:
        if isinstance(parts, BrokerError):
            self.refuse(parts)
        else:
            self.fill(parts)

    def fill(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        """Success, in parts that may be reused once ``released`` was called."""
        super().fill(self._framed(0, parts), released)

    def refuse(self, error: BrokerError | Refused) -> None:
        """Failure."""
        self.status(errors.number_of(error, self.dialect))

    def status(self, number: int) -> None:
        """Failure, by a number that is the dialect's."""
        super().fill(self._framed(number, ()))

    def evict(self, reason: int, protocols: tuple[int, int] = (0, 0)) -> None:
        """The end of the login, and of the connection; see ``vsr.eviction``."""
        assert self.head is not None, "only the headered framing knows evictions"
        self.session.end()
        super().fill([vsr.eviction(self.head.client, reason, protocols)])

    def done(self, result: object | BrokerError) -> None:
        """A callback of the broker: answers with what was given to be told, or with the error."""
        if isinstance(result, BrokerError):
            self.refuse(result)
        elif self.later is not None:
            self.make(self.later)
        else:
            self.ok(self.payload)

    def _framed(self, status: int, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """The parts behind the head of the answer; ``status`` is 0 or an error number."""
        head = self.head
        if head is None:
            return [HEAD.pack(status, sum(map(len, parts))), *parts]
        if head.has_result:
            parts = [_RESULT_REFUSED + status.to_bytes(4, "little")] if status else [_RESULT_OK, *parts]
            status = 0
        elif head.operation == vsr.REGISTER:
            parts = [_RESULT_OK, *parts]
        size = sum(map(len, parts))
        framed = [self._reply_head(head, size, status), *parts]
        if head.has_result and head.operation < vsr.SEND and size <= REPLAY_BYTES_MAX:
            self.session.keep(head, b"".join(framed))
        return framed

    def _reply_head(self, head: vsr.Head, size: int, status: int) -> bytes:
        if not self.dialect.contexts:
            return vsr.reply_head(head, self.number, size, status)
        # Clients use no route that is older than their last change, so both count in microseconds.
        position = self.session.broker.clock.now_us() if head.changes_metadata else self.number
        committed = vsr.COMMITTED if head.operation != vsr.PLAIN and status == 0 else 0
        return vsr.reply_head(head, position, size, status, committed=committed, incarnation=head.incarnation)


_RESULT_OK: Final = bytes(4)
_RESULT_REFUSED: Final = b"\x01\0\0\0\0\0\0\0"
