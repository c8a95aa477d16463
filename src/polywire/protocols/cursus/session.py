"""One Cursus connection: frames and responses in order (spec: cursus#frames, cursus#connections).

Batches and PUBLISH are pipelined. Any other command starts only when all earlier requests of the connection are
answered. A request needs no task and no future.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol

from polywire.broker.access import Principal
from polywire.broker.actions import Action
from polywire.broker.owners import Caller, caller_of
from polywire.errors import BrokerError, PeerError
from polywire.protocols.cursus.compression import Algorithm, TooLarge, algorithm, sniffed
from polywire.protocols.cursus.context import CursusBroker, CursusState
from polywire.protocols.cursus.errors import refused
from polywire.protocols.cursus.long_frame import LongFrame, NotYet, Stored
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
from polywire.types import spell_address

ANSWERS_MAX: Final = 256  # unanswered requests of a connection before the next one waits
TOPIC_LOOK_S: Final = 0.05  # between two checks for a topic that a write waits for

Reply = bytes | Sequence[bytes]
"""Bodies of the frames of one answer."""


class Handler(Protocol):
    """Executes one request: returns the bodies of its reply, or None if it took a slot by ``session.later``.

    Raises Refused, BrokerError.
    """

    def __call__(self, session: CursusSession, request: Request, /) -> Reply | None: ...


@dataclass(frozen=True, slots=True)
class Command(commands.Command[str, Handler]):
    """A command of the protocol; all its actions are checked (spec: cursus#credentials).

    alone: it may have no arguments.
    """

    alone: bool = field(default=False, kw_only=True)


class Pushing(Protocol):
    """Owner of the connection while it streams."""

    def drained(self) -> None:
        """The client reads again."""

    def drop(self) -> None:
        """The connection is closed."""


class TakeBatch(Protocol):
    """Handles a batch frame; it answers once the returned batch was stored. Raises NotYet."""

    def __call__(self, session: CursusSession, body: memoryview, scratch: ScratchArrays, /) -> Stored | None: ...


class CursusSession(FramedSession[CursusBroker], PipelinedSession[CursusBroker, Answer]):
    """One client.

    Attributes:
        spoken: dialect of the latest unambiguous request, None before.
        principal: from AUTH, None before.
        group: from SETGROUP.
        structured: errors contain their class.
        features: enabled by NEGOTIATE.
    """

    answer_type: ClassVar[type[Answer]] = Answer
    """Class of its reply slots."""

    __slots__ = (
        "_acting",
        "_anybody_bytes_max",
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
        self._anybody_bytes_max: Final = min(LOGIN_FRAME_BYTES_MAX, state.settings.frame_bytes_max)
        self._take_batch = take_batch
        self._compression = algorithm(state.settings.compression) if state.settings.compression else None
        self._caller: Caller | None = None
        self._packed: Algorithm | None = None
        self._slot: Answer | None = None
        self._leader = ""
        self._long: LongFrame | None = None
        self._pushing: Pushing | None = None
        self._topic_wait = "", 0.0
        self.busy_until: float | None = None
        """When to give up on a record that the log does not accept."""
        self._unused: Any = None
        self._heard_at = state.broker.clock.monotonic()
        self._timer = state.broker.loop.call_later(state.settings.idle_timeout_s, self._look_idle)

    # Driver

    @property
    def spoken_dialect(self) -> str:
        """Dialect of the latest unambiguous request."""
        return "" if self.spoken is None else self.spoken.value

    @property
    def frame_bytes_max(self) -> int:
        """Longest frame, with its length."""
        return self._body_bytes_max() + PREFIX_BYTES

    def _body_bytes_max(self) -> int:
        """Longest body; small before authentication."""
        frame_bytes_max = self.state.settings.frame_bytes_max
        return min(frame_bytes_max, LOGIN_FRAME_BYTES_MAX) if self._is_unauthenticated() else frame_bytes_max

    def _is_unauthenticated(self) -> bool:
        return self._acting is None and self.output.certified is None and not self.broker.access.is_open

    def identify(self, principal: Principal | None) -> None:
        """Set the acting principal: from AUTH, or from credentials in the latest request. Raises Busy."""
        if principal is not self._acting:
            self.output.identified(principal)
            self._acting = principal

    def _waits(self) -> bool:
        return bool(
            self._reasons
            or self._blocking
            or self._long is not None
            or len(self._answers) >= ANSWERS_MAX
            or (self.output.backlog > self.output.backlog_max and self._pushing is None)
        )

    def receive(self, data: memoryview) -> int:
        """Handle complete frames."""
        self._heard_at = self.state.broker.clock.monotonic()
        taken = super().receive(data) if self._pushing is None else 0
        return taken if self._pushing is None else len(data)  # bytes after a STREAM are not read (spec: cursus#stream)

    def _frame_bytes(self, data: memoryview, at: int) -> int:
        if len(data) - at < PREFIX_BYTES:
            return 0
        size = int.from_bytes(data[at : at + PREFIX_BYTES], "big")
        if size > self._anybody_bytes_max and size > self._body_bytes_max():
            if self._is_unauthenticated():
                self.output.write(frame(encoded("ERROR: authentication_required")))
            raise PeerError(f"frame is too long bytes={size}", fatal=True)
        return PREFIX_BYTES + size

    def drained(self) -> None:
        """The client reads again."""
        if self._pushing is not None:
            self._pushing.drained()
        self._go_on()

    def finish(self, data: memoryview) -> None:
        """The client has finished: drop an incomplete frame; waiting whole ones are still answered."""
        if self._pushing is not None:
            self._pushing.drop()
            self._pushing = None
        super().finish(data)

    def close(self) -> None:
        """The connection is closed."""
        self._enter(CLOSED)
        self._slot = None
        self._timer.cancel()
        self._is_used()
        if self._pushing is not None:
            self._pushing.drop()
            self._pushing = None
        if self._long is not None:
            self._long.close()
        self._abandon()

    # One frame

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        body = data[at + PREFIX_BYTES : end]
        self._is_used()
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
        """Execute a frame; False if it must wait and be offered again. received: the frame as it arrived."""
        self._packed = packed
        try:
            if self._is_batch(body):
                storing = self._take_batch(self, body, self.state.scratch)
                if storing is not None and not storing.store_at_once():
                    return self._begin_long(received, packed)  # it waits like those
                return True
            return self._take_text(body)
        except NotYet:
            self._reasons |= Wait.ASLEEP
            return False

    def _expanded(self, packed: Algorithm, body: memoryview) -> memoryview | None:
        """Return a compressed frame's bytes; None if they are too many to expand here."""
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
        """Execute a long frame; False if it must wait for earlier answers and be offered again."""
        if not self._settled():
            return False
        self._long = LongFrame(self, body, packed)
        return True

    def take_long(self, body: memoryview, packed: Algorithm | None) -> Stored | None:
        """Begin a long frame's request; a returned batch is to be stored. Raises NotYet."""
        self._packed = packed
        if self._is_batch(body):
            return self._take_batch(self, body, self.state.large_scratch)
        self._take_text(body)
        return None

    def carried(self) -> None:
        """The long frame is complete."""
        self._long = None
        self._heard_at = self.state.broker.clock.monotonic()
        self._go_on()

    def failed(self, error: PeerError) -> None:
        """The long frame is invalid."""
        self._long = None
        self._stop_taking()
        self.output.fail(error)

    def _take_text(self, body: memoryview) -> bool:
        """Execute one text frame; False if earlier requests must be answered first, or a stream has begun.

        Raises NotYet if the command itself must wait.
        """
        try:
            read = read_text(bytes(body[: TEXT_FRAME_BYTES_MAX + 1]), self.spoken, self.state.settings.dialect)
        except Refused as error:
            self.later(self.spoken or Dialect.LEGACY).refuse(error)
            return True
        if isinstance(read, BarePublish):
            read = self._bare(read)
        command = self._commands.get(read.name, _UNKNOWN)
        if not command.pipelined and not self._settled():
            return False
        if read.telling:
            self.spoken = read.dialect
        self._handle(command, read)
        return self._pushing is None

    def _is_batch(self, body: memoryview) -> bool:
        """Return whether a topic follows the magic (spec: cursus#bodies)."""
        return len(body) >= 6 and body[0] == 0xBA and body[1] == 0x7C and 0 < (body[2] << 8 | body[3]) <= len(body) - 4

    def _bare(self, bare: BarePublish) -> Request:
        """Convert an envelope without a command to the PUBLISH it means."""
        return Request(BARE, Dialect.LEGACY, "", "", (), {"topic": bare.topic}, bare.payload, telling=True)

    def _handle(self, command: Command, request: Request) -> None:
        """Execute one command; raise NotYet."""
        self._slot = None
        refusal: Refused | None = None
        try:
            if request.dialect is Dialect.MODERN and not (request.arguments or command.alone):
                raise Refused("unknown_command", f"command={quote(request.text)}")
            reply = self._begin(command, request)
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
        del refusal  # break the reference cycle: its traceback references this frame

    def _begin(self, command: Command, request: Request) -> Reply | None:
        """Authorize and begin one command; raise Refused, BrokerError or NotYet."""
        self.state.guard.admit(self, request, command.actions)
        return command.handler(self, request)

    def _slot_for(self, request: Request) -> Answer:
        """Return the slot that the command took before it failed, or a new one."""
        return self._slot or self.later(request.dialect)

    # Methods for commands

    @property
    def off_loop(self) -> OffLoopQueue:
        """Queue for long work."""
        return self.state.off_loop

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of this broker for clients, now and after failover: as configured, else those that this client
        used.
        """
        settings, places, at = self.state.settings, self.state.places, self.output.local
        host, port = at if places is None else places.lasting(at)
        return settings.host or host, settings.port or port

    @property
    def peer_address(self) -> str:
        """Address of the client, for quotas."""
        return self.output.peer

    @property
    def leader(self) -> str:
        """Address in acknowledgements and METADATA."""
        if not self._leader:
            self._leader = spell_address(*self.address)
        return self._leader

    @property
    def epoch_min(self) -> int:
        """Minimum of a new epoch of a transactional id."""
        return 0

    @property
    def structured(self) -> bool:
        """Whether errors contain their class."""
        return "structured_errors_v1" in self.features

    @property
    def caller(self) -> Caller:
        """Caller of the current request, as owner of state; valid while it is executed."""
        acting = self.state.guard.acting
        if self._caller is None or self._caller.principal != acting:
            self._caller = caller_of(acting, self.peer_address)
        return self._caller

    def later(self, dialect: Dialect, *, blocking: bool = False) -> Answer:
        """Return the reply slot of a later answer; a blocking one delays later requests. A command that raises
        afterwards is answered there.

        The legacy dialect compresses whole messages both ways; other clients send compressed batches, and read plain
        answers.
        """
        packing = self._packed if dialect is Dialect.LEGACY else None
        answer = self.answer_type(self, dialect, packing, blocking=blocking)
        self._answers.append(answer)
        self._slot = answer
        self._blocking += blocking
        return answer

    def withdraw(self, answer: Answer) -> None:
        """Remove the last slot: its request is offered again."""
        withdrawn = self._answers.pop()
        assert withdrawn is answer, "nothing was asked behind it"
        self._slot = None

    def wake(self) -> None:
        """The request's precondition is met: offer it again."""
        self._reasons &= ~Wait.ASLEEP
        if self._long is not None:
            self._long.begin()
        self._go_on()

    def wait_for_topic(self, name: str) -> None:
        """Offer the request again for a while, because the topic may be about to be created (spec: cursus#publish).

        Raises NotYet until the time is over.
        """
        now = self.state.broker.clock.monotonic()
        waited, until = self._topic_wait
        if waited != name:
            until = now + self.state.settings.topic_wait_s
            self._topic_wait = name, until
        if now >= until:
            self._topic_wait = "", 0.0
            return
        self.state.broker.loop.call_later(min(TOPIC_LOOK_S, max(until - now, 0.001)), self.wake)
        raise NotYet

    def end(self) -> None:
        """Accept no further request; close after all outstanding answers."""
        self._stop_taking()
        self._end_when_done()

    def close_unused(self) -> None:
        """Close the connection unless another request follows soon, or has arrived."""
        self._is_used()
        state = self.state
        self._unused = state.broker.loop.call_later(state.settings.unused_s, self.output.close)

    def _is_used(self) -> None:
        if self._unused is not None:
            self._unused.cancel()
            self._unused = None

    def push(self, pushing: Pushing) -> None:
        """Give the connection to a stream: received bytes are not read any more."""
        self._pushing = pushing

    def pull(self) -> None:
        """The stream has ended: accept requests again, for a while (spec: cursus#stream)."""
        self._pushing = None
        self._heard_at = self.state.broker.clock.monotonic()
        self._timer.cancel()
        self._timer = self.state.broker.loop.call_later(self.state.settings.linger_s, self._look_unused, self._heard_at)
        self._go_on()

    def owes(self) -> bool:
        """Whether a request is unanswered."""
        return self._long is not None or super().owes()

    # Idle connections

    def _look_idle(self) -> None:
        """Close a connection that was idle for too long (spec: cursus#connections)."""
        limit = self.state.settings.idle_timeout_s
        now = self.state.broker.clock.monotonic()
        idle = self._pushing is None and self._long is None and not self._answers
        if idle and now - self._heard_at >= limit:
            self.output.close()
            return
        left = limit - (now - self._heard_at) if idle else limit
        self._timer = self.state.broker.loop.call_later(left, self._look_idle)

    def _look_unused(self, since: float) -> None:
        """Close a connection whose stream ended unless it was used again."""
        if self._heard_at == since and self._pushing is None:
            self.output.close()
            return
        self._look_idle()


def _unknown(session: CursusSession, request: Request, /) -> Reply | None:
    raise Refused("unknown_command", f"command={quote(request.text)}", legacy=f"unknown command: {request.text}")


BARE: Final = ""  # name of the command that an envelope without one means
_UNKNOWN: Final = Command("", _unknown, (Action.SELF_DESCRIBE,), alone=True)
