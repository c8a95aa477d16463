"""One Cursus connection: read requests and send responses in order (spec: cursus#frames, cursus#connections).

Batches and PUBLISH are pipelined. Any other command starts when all earlier requests of the connection are answered. No
asyncio task or future is created per request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from polywire.broker.access import Principal
from polywire.broker.api import Pending
from polywire.broker.owners import Caller, caller_of
from polywire.broker.permissions import Action
from polywire.errors import BrokerError, PeerError
from polywire.protocols.cursus.compression import Algorithm, TooLarge, algorithm, sniffed
from polywire.protocols.cursus.context import CursusBroker, CursusState
from polywire.protocols.cursus.errors import refused
from polywire.protocols.cursus.long_frame import LongFrame, PendingBatch
from polywire.protocols.cursus.messages import (
    PREFIX_BYTES,
    TEXT_FRAME_BYTES_MAX,
    BarePublish,
    Dialect,
    Refused,
    Request,
    encoded,
    frame,
    quote,
    read_text,
)
from polywire.protocols.cursus.reply_slots import Answer
from polywire.protocols.cursus.scratch import ScratchArrays
from polywire.protocols.runtime import commands
from polywire.protocols.runtime.framed import FramedSession
from polywire.protocols.runtime.off_loop import LARGE_BYTES, LONG_BYTES, OffLoopQueue
from polywire.protocols.runtime.pipelined import PipelinedSession
from polywire.protocols.runtime.sequential import CLOSED, Wait
from polywire.protocols.runtime.session import LOGIN_FRAME_BYTES_MAX, Output
from polywire.protocols.runtime.shapes import Shapes
from polywire.types import spell_address

UNANSWERED_MAX: Final = 256  # unanswered requests of a connection; then the next one waits
TOPIC_CHECK_S: Final = 0.05  # between two checks for a topic for which a write waits

Reply = bytes | Sequence[bytes]
"""    The bodies of the frames of one response."""


class Handler(Protocol):
    """Executes one request. Returns the bodies of the response, or None if it has called ``session.later``.

    Raises Refused or BrokerError, whose text is sent to the client.
    """

    def __call__(self, session: CursusSession, request: Request, /) -> Reply | None: ...


@dataclass(frozen=True, slots=True)
class Command(commands.Command[str, Handler]):
    """A command of the protocol. The client needs permission for all of its actions (spec: cursus#credentials).

    Attributes:
        alone: whether the command must not have arguments.
    """

    alone: bool = field(default=False, kw_only=True)


class Pushing(Protocol):
    """A stream that pushes records to the client. The connection handles no requests meanwhile."""

    def drained(self) -> None: ...

    def drop(self) -> None: ...


class TakeBatch(Protocol):
    """Parses a batch frame. Returns the batch to store, which is then acknowledged.

    Raises Pending if the request must be repeated later.
    """

    def __call__(self, session: CursusSession, body: memoryview, scratch: ScratchArrays, /) -> PendingBatch | None: ...


class CursusSession(FramedSession[CursusBroker], PipelinedSession[CursusBroker, Answer]):
    """The session of one client.

    Attributes:
        spoken: protocol version of the latest unambiguous request; None before the first.
        principal: the user set by AUTH.
        group: set by SETGROUP.
        structured: whether errors have their class.
        features: enabled by NEGOTIATE.
        shapes: the beginnings of the latest batches, for ``take_repeated``.
    """

    __slots__ = (
        "_acting",
        "_caller",
        "_commands",
        "_compression",
        "_heard_at",
        "_leader",
        "_long",
        "_packed",
        "_pushing",
        "_slot",
        "_take_batch",
        "_timer",
        "_topic_wait",
        "_unused",
        "busy_until",
        "features",
        "group",
        "principal",
        "shapes",
        "spoken",
        "state",
    )

    def __init__(
        self,
        state: CursusState,
        commands: Mapping[str, Command],
        take_batch: TakeBatch,
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(state.broker, output, resume)
        self.state: Final = state
        self.spoken = state.settings.dialect
        self.principal: Principal | None = None
        self._acting: Principal | None = None
        self.group = ""
        self.features: frozenset[str] = frozenset()
        self._commands = commands
        self._short_bytes_max = min(LOGIN_FRAME_BYTES_MAX, state.settings.frame_bytes_max)
        self._take_batch = take_batch
        self._compression = algorithm(state.settings.compression) if state.settings.compression else None
        self._caller: Caller | None = None
        self._packed: Algorithm | None = None
        self.shapes: Final = Shapes()
        self._unanswered_max = UNANSWERED_MAX
        self._slot: Answer | None = None
        self._leader = ""
        self._long: LongFrame | None = None
        self._pushing: Pushing | None = None
        self._topic_wait = "", 0.0
        self.busy_until: float | None = None
        """Time at which to refuse a record that the log still does not accept."""
        self._unused: Any = None
        self._heard_at = state.broker.clock.monotonic()
        self._timer = state.broker.loop.call_later(state.settings.idle_timeout_s, self._check_idle)

    # Driver

    @property
    def spoken_dialect(self) -> str:
        return "" if self.spoken is None else self.spoken.value

    @property
    def frame_bytes_max(self) -> int:
        return self._body_bytes_max() + PREFIX_BYTES

    def _body_bytes_max(self) -> int:
        """Return the size limit for a frame. It is lower before the login."""
        frame_bytes_max = self.state.settings.frame_bytes_max
        return min(frame_bytes_max, LOGIN_FRAME_BYTES_MAX) if self._is_unauthenticated() else frame_bytes_max

    def _is_unauthenticated(self) -> bool:
        return self._acting is None and self.output.certified is None and not self.broker.access.is_open

    def identify(self, principal: Principal | None) -> None:
        """Set the client's user: from AUTH, or from credentials in the latest request.

        Raises Busy if there are too many connections.
        """
        if principal is not self._acting:
            self.output.identified(principal)
            self._acting = principal

    def receive(self, data: memoryview) -> int:
        self._heard_at = self.state.broker.clock.monotonic()
        taken = super().receive(data) if self._pushing is None else 0
        return taken if self._pushing is None else len(data)  # bytes after a STREAM are ignored (spec: cursus#stream)

    def _frame_bytes(self, data: memoryview, at: int) -> int:
        if len(data) - at < PREFIX_BYTES:
            return 0
        size = int.from_bytes(data[at : at + PREFIX_BYTES], "big")
        if size > self._short_bytes_max and size > self._body_bytes_max():
            if self._is_unauthenticated():
                self.output.write(frame(encoded("ERROR: authentication_required")))
            raise PeerError(f"frame is too long bytes={size}", fatal=True)
        return PREFIX_BYTES + size

    def drained(self) -> None:
        if self._pushing is not None:
            self._pushing.drained()
        self._continue()

    def finish(self, data: memoryview) -> None:
        if self._pushing is not None:
            self._pushing.drop()
            self._end_pushing()
        super().finish(data)

    def close(self) -> None:
        self._enter(CLOSED)
        self._slot = None
        self._timer.cancel()
        self.is_used()
        if self._pushing is not None:
            self._pushing.drop()
            self._end_pushing()
        if self._long is not None:
            self._long.close()
        self._drop_slots()

    # One frame

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        self.is_used()
        body = data[at + PREFIX_BYTES : end]
        packed = self._compression or sniffed(body)
        if packed is not None and body and self._is_unauthenticated() and self._compression is None:
            self.later(Dialect.MODERN).refuse(Refused("authentication_required", "command=BATCH"))
            return True
        if packed is not None and body:
            plain = self._expanded(packed, body)
            if plain is None:
                return self._begin_long(body, packed)
            body = plain
        elif len(body) > LONG_BYTES:
            return self._begin_long(body, None)
        return self._take_plain(body, data[at + PREFIX_BYTES : end], packed)

    def _take_plain(self, body: memoryview, received: memoryview, packed: Algorithm | None) -> bool:
        """Execute a frame after its decompression.

        Return False if it must wait for earlier responses. Raises Pending. ``received`` is the frame before
        decompression.
        """
        self._packed = packed
        if not self._is_batch(body):
            return self._take_text(body)
        storing = self._take_batch(self, body, self.state.scratch)
        if storing is not None and not storing.store_at_once():
            return self._begin_long(received, packed)  # it must wait for earlier answers like other long frames
        return True

    def _expanded(self, packed: Algorithm, body: memoryview) -> memoryview | None:
        """Decompress a frame. Return None if it is too large to decompress on the event loop."""
        limit = self._body_bytes_max()
        if len(body) > LARGE_BYTES:
            return None
        try:
            return memoryview(packed.expand(body, min(limit, LARGE_BYTES)))
        except TooLarge:
            if limit <= LARGE_BYTES:
                raise
            return None

    def _begin_long(self, body: memoryview, packed: Algorithm | None) -> bool:
        if not self._earlier_answered():
            return False
        self._long = LongFrame(self, body, packed)
        self._reasons |= Wait.LONG
        return True

    def take_long(self, body: memoryview, packed: Algorithm | None) -> PendingBatch | None:
        """Execute the request in a long frame. The caller must store the returned batch, if there is one.

        Raises Pending if the request must be repeated later.
        """
        self._packed = packed
        pending, self._awaited = self._awaited, None
        with pending or nullcontext():
            if self._is_batch(body):
                return self._take_batch(self, body, self.state.large_scratch)
            self._take_text(body)
        return None

    def hold(self, pending: Pending) -> None:
        """Execute the long frame again when ``pending`` allows it."""
        self._await_pending(pending)

    def _resume_pending(self) -> None:
        if self._long is not None:
            self._long.begin()
        super()._resume_pending()

    def _end_long(self) -> None:
        self._long = None
        self._reasons &= ~Wait.LONG

    def frame_done(self) -> None:
        self._end_long()
        self._heard_at = self.state.broker.clock.monotonic()
        self._continue()

    def failed(self, error: PeerError) -> None:
        self._end_long()
        self._stop_receiving()
        self.output.fail(error)

    def _take_text(self, body: memoryview) -> bool:
        """Execute one text frame. Return False if earlier requests must be answered first, or a stream has begun.

        Raises Pending if the request must be repeated later.
        """
        try:
            read = read_text(bytes(body[: TEXT_FRAME_BYTES_MAX + 1]), self.spoken, self.state.settings.dialect)
        except Refused as error:
            self.later(self.spoken or Dialect.LEGACY).refuse(error)
            return True
        if isinstance(read, BarePublish):
            read = self._bare(read)
        command = self._commands.get(read.name, _UNKNOWN)
        if not command.pipelined and not self._earlier_answered():
            return False
        if read.telling:
            self.spoken = read.dialect
        self._handle(command, read, body)
        return self._pushing is None

    def _is_batch(self, body: memoryview) -> bool:
        return len(body) >= 6 and body[0] == 0xBA and body[1] == 0x7C and 0 < (body[2] << 8 | body[3]) <= len(body) - 4

    def _bare(self, bare: BarePublish) -> Request:
        return Request(BARE, Dialect.LEGACY, "", "", (), {"topic": bare.topic}, bare.payload, telling=True)

    def _handle(self, command: Command, request: Request, body: memoryview) -> None:
        """Execute one command and respond to it. Raises Pending if the request must be repeated later."""
        self._slot = None
        refusal: Refused | None = None
        try:
            if request.dialect is Dialect.MODERN and not (request.arguments or command.alone):
                raise Refused("unknown_command", f"command={quote(request.text)}")
            reply = self._begin(command, request, body)
        except Pending:
            if self._slot is not None:
                self.withdraw(self._slot)
            raise
        except Refused as error:
            refusal = error
        except BrokerError as error:
            refusal = refused(error)
        else:
            if reply is not None:
                bodies = [reply] if isinstance(reply, bytes) else reply
                self.later(request.dialect).ok(*bodies)
        if refusal is not None:
            self._slot_for(request).refuse(refusal)
        del refusal  # breaks the reference cycle between the exception's traceback and this frame

    def _begin(self, command: Command, request: Request, body: memoryview) -> Reply | None:
        """Check permissions and execute one command. Raises Refused, BrokerError or Pending."""
        if self._forwards(command, request, body):
            return None
        self.state.guard.admit(self, request, command.actions)
        return command.handler(self, request)

    def _forwards(self, command: Command, request: Request, body: memoryview) -> bool:
        """Have other processes execute a request. Return False if this process must execute it."""
        forward = self.state.forward
        return forward is not None and forward(self, command, request, body)

    def _slot_for(self, request: Request) -> Answer:
        """Return the response for an error: that of the failed command if it has created one, otherwise a new one."""
        return self._slot or self.later(request.dialect)

    # Methods for commands

    @property
    def off_loop(self) -> OffLoopQueue:
        return self.state.off_loop

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of this broker for clients: as configured, or as used by this client.

        The address remains valid after a failover.
        """
        settings, places, at = self.state.settings, self.state.places, self.output.local
        host, port = at if places is None else places.lasting(at)
        return settings.host or host, settings.port or port

    @property
    def peer_address(self) -> str:
        return self.output.peer

    @property
    def leader(self) -> str:
        if not self._leader:
            self._leader = spell_address(*self.address)
        return self._leader

    @property
    def compresses(self) -> bool:
        """Whether every frame is compressed."""
        return self._compression is not None

    @property
    def structured(self) -> bool:
        return "structured_errors_v1" in self.features

    @property
    def caller(self) -> Caller:
        acting = self.state.guard.acting
        if self._caller is None or self._caller.principal != acting:
            self._caller = caller_of(acting, self.peer_address)
        return self._caller

    def later(self, dialect: Dialect, *, blocking: bool = False) -> Answer:
        """Return a response that is sent later. ``blocking``: whether later requests wait for it.

        If the handler raises an error afterwards, this response contains the error. Responses are compressed only for
        the oldest clients, with the algorithm of the request.
        """
        packing = self._packed if dialect is Dialect.LEGACY else None
        self._slot = self.append(Answer(self, dialect, packing, blocking=blocking))
        return self._slot

    def withdraw(self, answer: Answer) -> None:
        """Remove the newest response, because its request is repeated later."""
        self._remove_newest(answer)
        self._slot = None

    def wait_for_topic(self, name: str) -> None:
        """Raise Pending until the topic exists or the waiting time is over (spec: cursus#publish)."""
        now = self.state.broker.clock.monotonic()
        waited, until = self._topic_wait
        if waited != name:
            until = now + self.state.settings.topic_wait_s
            self._topic_wait = name, until
        if now >= until:
            self._topic_wait = "", 0.0
            return
        raise Pending(name, partial(self.broker.loop.call_later, min(TOPIC_CHECK_S, max(until - now, 0.001))))

    def end(self) -> None:
        """Accept no more requests, and close the connection after the responses to those that have started."""
        self._stop_receiving()
        self._end_when_done()

    def close_unused(self) -> None:
        """Close the connection unless another request has arrived or arrives soon."""
        self.is_used()
        state = self.state
        self._unused = state.broker.loop.call_later(state.settings.unused_s, self.output.close)

    def is_used(self) -> None:
        if self._unused is not None:
            self._unused.cancel()
            self._unused = None

    def push(self, pushing: Pushing) -> None:
        """Let a stream push records to the client. Bytes that are received from now on are ignored."""
        self._pushing = pushing
        self._ignores_backlog = True
        self._awaited = None

    def pull(self) -> None:
        """Accept requests again for a limited time, because the stream has ended (spec: cursus#stream)."""
        self._end_pushing()
        self._heard_at = self.state.broker.clock.monotonic()
        self._timer.cancel()
        self._timer = self.state.broker.loop.call_later(
            self.state.settings.linger_s, self._check_unused, self._heard_at
        )
        self._continue()

    def _end_pushing(self) -> None:
        self._pushing = None
        self._ignores_backlog = False

    def owes(self) -> bool:
        return self._long is not None or super().owes()

    # Idle connections

    def _check_idle(self) -> None:
        limit = self.state.settings.idle_timeout_s
        now = self.state.broker.clock.monotonic()
        idle = self._pushing is None and self._long is None and not self._slots
        if idle and now - self._heard_at >= limit:
            self.output.close()
            return
        left = limit - (now - self._heard_at) if idle else limit
        self._timer = self.state.broker.loop.call_later(left, self._check_idle)

    def _check_unused(self, since: float) -> None:
        if self._heard_at == since and self._pushing is None:
            self.output.close()
            return
        self._check_idle()


def _unknown(session: CursusSession, request: Request, /) -> Reply | None:
    raise Refused("unknown_command", f"command={quote(request.text)}", legacy=f"unknown command: {request.text}")


BARE: Final = ""  # the name of the command in an envelope without a command
_UNKNOWN: Final = Command("", _unknown, (Action.SELF_DESCRIBE,), alone=True)
