"""Send the responses of a Cursus connection in the order of its requests, whenever each is ready."""

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

# a longer answer is compressed in a thread, because gzip takes 2 ms for this much
PACKED_HERE_BYTES_MAX: Final = 64 * 1024


class ReplyOwner(Protocol):
    """The methods of a session that its responses use."""

    @property
    def broker(self) -> CursusBroker:
        """The broker. Its event loop and clock are used for long responses."""

    @property
    def off_loop(self) -> OffLoopQueue:
        """The queue in which long responses are compressed."""

    @property
    def structured(self) -> bool: ...

    @property
    def closed(self) -> bool: ...

    def slot_filled(self) -> None:
        """Send the responses that are next in order."""


class Answer(ReplySlot[ReplyOwner]):
    """One response, which is sent after the responses to all earlier requests.

    Attributes:
        body: the body that ``done`` sends.
        packing: compression of the response, if it is compressed.
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
        """Respond with a frame for each body; usually there is one."""
        packing = self.packing
        if packing is None or self.session.closed:
            self.fill([frame(body) for body in bodies])
        elif sum(map(len, bodies)) <= PACKED_HERE_BYTES_MAX:
            self.fill(_packed(packing, bodies))
        else:
            self._work = self.session.off_loop.put(partial(_packed, packing, bodies), self._ready, _nothing)
            self.cancel = self._work.cancel

    def _ready(self, frames: Any) -> None:
        assert self._work is not None, "compressed answers have frames"
        self._work.leave()
        if isinstance(frames, PeerError):
            self.packing = None
            self.refuse(Refused("command_failed", 'reason="the answer could not be compressed"'))
        else:
            self.fill(frames)

    def make(self, parts: Iterator[bytes]) -> None:
        self.cancel = Slices(self.session.broker, parts, self._made).cancel

    def _made(self, parts: list[bytes] | BrokerError) -> None:
        if isinstance(parts, BrokerError):
            self.fail(parts)
        else:
            self.ok(b"".join(parts))

    def refuse(self, error: Refused) -> None:
        self.ok(encode_error(error, self.dialect, structured=self.session.structured))

    def fail(self, error: BrokerError) -> None:
        self.refuse(refused(error))

    def done(self, result: int | BrokerError) -> None:
        """Completion that responds with ``body``, or with the error."""
        if isinstance(result, BrokerError):
            self.fail(result)
        else:
            self.ok(self.body)


def _packed(packing: Algorithm, bodies: Sequence[bytes]) -> list[bytes]:
    return [frame(packing.compress(body)) for body in bodies]


def _nothing() -> None:
    pass
