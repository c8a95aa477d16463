"""Reply slots: they keep the responses of one Cursus connection in order.

A slot is filled once: immediately, by a callback of the broker, or by a timer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from polywire.errors import BrokerError, PeerError
from polywire.protocols.cursus.compression import Algorithm
from polywire.protocols.cursus.errors import encode_error, refused
from polywire.protocols.cursus.messages import Dialect, Refused, frame
from polywire.protocols.runtime.off_loop import OffLoopQueue, OffLoopWork
from polywire.protocols.runtime.pipelined import ReplySlot
from polywire.protocols.runtime.slices import Slices

if TYPE_CHECKING:
    from polywire.protocols.cursus.context import CursusBroker

PACKED_HERE_BYTES_MAX: Final = 64 * 1024  # longer answers are compressed off the loop: gzip takes 2 ms for this much


class ReplyOwner(Protocol):
    """Methods of the session that an answer uses."""

    @property
    def broker(self) -> CursusBroker:
        """Broker whose loop and clock long answers use."""

    @property
    def off_loop(self) -> OffLoopQueue:
        """Queue for compressing long answers."""

    @property
    def structured(self) -> bool: ...

    @property
    def closed(self) -> bool:
        """Whether the connection is closed."""

    def answered(self) -> None:
        """An answer became known."""


class Answer(ReplySlot[ReplyOwner]):
    """A slot in the order of answers; ``parts`` are whole frames, and ``body`` is what ``done`` sends.

    packing: compression of its bodies, each by itself.
    """

    __slots__ = ("_work", "body", "dialect", "packing")

    def __init__(
        self, session: ReplyOwner, dialect: Dialect, packing: Algorithm | None = None, *, blocking: bool = False
    ) -> None:
        self.session = session
        self.dialect = dialect
        self.packing = packing
        self._work: OffLoopWork | None = None
        self.blocking = blocking
        self.body = b""
        self.parts = None
        self.released = None
        self.cancel = None

    def ok(self, *bodies: bytes) -> None:
        """Answer with a frame for each body, usually one."""
        packing = self.packing
        if packing is None or self.session.closed:
            self.fill([frame(body) for body in bodies])
        elif sum(map(len, bodies)) <= PACKED_HERE_BYTES_MAX:
            self.fill(_packed(packing, bodies))
        else:
            self._work = self.session.off_loop.put(partial(_packed, packing, bodies), self._ready, _nothing)
            self.cancel = self._work.cancel

    def _ready(self, frames: Any) -> None:
        """The bodies were compressed."""
        assert self._work is not None, "they were put there"
        self._work.leave()
        if isinstance(frames, PeerError):
            self.packing = None
            self.refuse(Refused("command_failed", 'reason="the answer could not be compressed"'))
        else:
            self.fill(frames)

    def make(self, parts: Iterator[bytes]) -> None:
        """Answer with one frame whose long body the iterator yields in pieces."""
        self.cancel = Slices(self.session.broker, parts, self._made).cancel

    def _made(self, parts: list[bytes] | BrokerError) -> None:
        if isinstance(parts, BrokerError):
            self.fail(parts)
        else:
            self.ok(b"".join(parts))

    def refuse(self, error: Refused) -> None:
        """Answer with an error in the request's dialect."""
        self.ok(encode_error(error, self.dialect, structured=self.session.structured))

    def fail(self, error: BrokerError) -> None:
        """Answer with an error of the broker."""
        self.refuse(refused(error))

    def done(self, result: int | BrokerError) -> None:
        """Callback of the broker: answer with ``body``, or with the error."""
        if isinstance(result, BrokerError):
            self.fail(result)
        else:
            self.ok(self.body)


def _packed(packing: Algorithm, bodies: Sequence[bytes]) -> list[bytes]:
    return [frame(packing.compress(body)) for body in bodies]


def _nothing() -> None:
    """Do nothing: no received bytes are viewed."""
