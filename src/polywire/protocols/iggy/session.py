"""One Iggy connection: frames of either framing in, answers in the order of the requests out (dossier §2, §8, §9).

Promises: a request sees everything that was asked before it on this connection; what can be read is answered, what cannot ends the
connection with the status or eviction the dossier gives; groups are left when the connection ends. No task and no future per request.
Must not know: sockets, other wires, what the commands do.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from polywire.broker.access import Principal
from polywire.broker.permissions import Permission
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, Denied, ErrorCode, PeerError
from polywire.log.base import Done
from polywire.protocols.base import Output
from polywire.protocols.entrance import Entrance
from polywire.protocols.iggy import errors, vsr
from polywire.protocols.iggy.dialect import D0, D3, Dialect
from polywire.protocols.iggy.messages import HEAD, Code, Reader, Refused
from polywire.protocols.iggy.recognition import Recognition
from polywire.types import Buffer

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.protocols.iggy.shared import Shared

FRAME_BYTES_MAX: Final = (
    32 * 1024 * 1024 - 4096
)  # what one receive buffer holds; no batch that can be stored comes in more
GROWTH_BYTES_MIN: Final = (
    1024 * 1024
)  # a frame's announced length is believed so far, and four times what has come of it
REPLAYS_MAX: Final = 8  # answers to state-changing requests of D3 kept for repeats (dossier §8.3)
REPLAY_BYTES_MAX: Final = 64 * 1024  # a longer answer is not kept: no state-changing command has one
ANSWERS_MAX: Final = 64  # answers a connection may wait for before its next request is handled
PASS_S: Final = 0.002  # how long requests of one connection are handled before other connections get a turn
BUSY_WAIT_S: Final = 2.0  # how long messages wait for room in the log before they are refused


class Carry(Protocol):
    """Carries out one request: returns the payload of the answer, or None when it fills the answer later. Raises Refused, BrokerError."""

    def __call__(self, session: IggySession, answer: Answer, reader: Reader, /) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the wire. ``anonymous``: allowed before a login. ``piled``: handled while earlier ones of its kind wait."""

    carry: Carry
    anonymous: bool = False
    piled: bool = False


class Answer:
    """A place in the order of answers.

    Invariant: filled once. ``status`` is 0 or an error number; an error has no payload, and ``evicts`` a reason ends the connection.
    """

    __slots__ = ("cancel", "dialect", "evicts", "head", "known", "parts", "payload", "released", "session", "status")

    def __init__(self, session: IggySession, dialect: Dialect, head: vsr.Head | None) -> None:
        self.session = session
        self.dialect = dialect
        self.head = head
        self.payload = b""
        self.parts: list[Buffer] = []
        self.status = 0
        self.evicts = 0
        self.known = False
        self.released: Callable[[], None] | None = None
        self.cancel: Callable[[], None] | None = None

    def ok(self, payload: bytes = b"") -> None:
        """Success."""
        self.fill([payload] if payload else [])

    def fill(self, parts: list[Buffer], released: Callable[[], None] | None = None) -> None:
        """Success, in parts that may be reused once ``released`` was called."""
        self.parts = parts
        self.released = released
        self.known = True
        self.cancel = None
        self.session.answered()

    def refuse(self, error: BrokerError | Refused) -> None:
        """Failure."""
        self.status = errors.number_of(error, self.dialect)
        self.known = True
        self.cancel = None
        self.session.answered()

    def evict(self, reason: int) -> None:
        """The end of the login, and of the connection."""
        self.evicts = reason
        self.known = True
        self.session.answered()

    def done(self, offset: int, error: BrokerError | None) -> None:
        """A callback of the broker: answers with ``payload``, or with the error."""
        del offset
        if error is None:
            self.ok(self.payload)
        else:
            self.refuse(error)


class IggySession:
    """One peer.

    Invariant: ``_answers`` holds what was asked and not yet sent, in request order; ``_piling`` says whether all of them are of commands that
    may be piled up.
    """

    __slots__ = (
        "_answers",
        "_closed",
        "_commands",
        "_ending",
        "_finished",
        "_held",
        "_output",
        "_piling",
        "_receiving",
        "_replays",
        "_rest",
        "_resume",
        "_wanted",
        "_yielding",
        "broker",
        "client_id",
        "entrance",
        "epoch",
        "members",
        "number",
        "principal",
        "recognition",
        "shared",
        "turns",
    )

    def __init__(
        self, shared: Shared, commands: Mapping[int, Command], output: Output, resume: Callable[[], None]
    ) -> None:
        self.shared: Final = shared
        self.broker: Final[Broker] = shared.broker
        self.recognition: Final = Recognition(shared.forced)
        self.entrance: Final = Entrance(shared.broker, BUSY_WAIT_S, self._go_on)
        self.principal: Principal | None = None
        self.epoch = 0
        self.number = 0
        self.client_id: Final = shared.enter(self, output.peer)
        self.members: Final[dict[tuple[bytes, str], tuple[Topic, int]]] = {}
        """Groups joined over this connection, by topic id and group name: the topic and the last partition polled."""
        self.turns: Final[dict[tuple[bytes, str], int]] = {}
        self._commands = commands
        self._output = output
        self._resume = resume
        self._answers: deque[Answer] = deque()
        self._piling = True
        self._replays: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        self._wanted = 0
        self._held = False
        self._receiving = False
        self._ending = False
        self._finished = False
        self._rest = b""
        self._closed = False
        self._yielding = False

    # What the driver asks

    @property
    def frame_bytes_max(self) -> int:
        """Longest frame."""
        return FRAME_BYTES_MAX + vsr.HEADER_BYTES

    @property
    def peer(self) -> str:
        """Address of the peer."""
        return self._output.peer

    @property
    def local(self) -> tuple[str, int]:
        """Which of our addresses the peer has connected to."""
        return self._output.local

    def wanted(self) -> int:
        """Bytes worth making room for: never more than four times what has come, whatever length was announced."""
        return self._wanted

    def paused(self) -> bool:
        """Whether an answer must come, or go, before the next request is handled."""
        self._held = self._waits()
        return self._held

    def _waits(self) -> bool:
        return bool(
            self._yielding
            or self.entrance.waiting
            or (self._answers and not self._piling)
            or len(self._answers) >= ANSWERS_MAX
            or self._output.backlog > self._output.backlog_max
        )

    def receive(self, data: memoryview) -> int:
        """Handle complete frames."""
        if self._ending:
            return len(data)
        self._receiving = True
        try:
            return self._receive(data)
        finally:
            self._receiving = False

    def _receive(self, data: memoryview) -> int:
        at, stop = 0, len(data)
        now = self.broker.clock.monotonic
        pass_end = now() + PASS_S
        while at < stop and not self._ending:
            size = self._frame_bytes(data[at:])
            if size == 0 or size > stop - at:
                self._wanted = min(size, max(GROWTH_BYTES_MIN, 4 * (stop - at)))
                break
            self._wanted = 0
            if not self._take(data[at : at + size]):
                break
            at += size
            if self._waits():
                break
            if at < stop and now() >= pass_end:
                self._yielding = True
                self.broker.loop.call_soon(self._turn_again)
                break
        return stop if self._ending else at

    def _turn_again(self) -> None:
        """The others had their turn."""
        self._yielding = False
        self._go_on()

    def _frame_bytes(self, data: memoryview) -> int:
        """Bytes of the frame at the front of ``data``, 0 while it does not tell. Raises PeerError for what cannot be a frame."""
        if len(data) < 4:
            return 0
        length = int.from_bytes(data[:4], "little")
        if self.recognition.framed is None:
            self.recognition.see_framing(length)
        if self.recognition.framed is not True:
            if not 4 <= length <= FRAME_BYTES_MAX:
                self._output.write(HEAD.pack(errors.TOO_BIG if length > FRAME_BYTES_MAX else errors.UNKNOWN_COMMAND, 0))
                raise PeerError(f"no frame of this wire length={length}", fatal=True)
            return 4 + length
        if len(data) < vsr.HEADER_BYTES:
            return 0
        head = vsr.parse_head(data)
        if head.command != vsr.REQUEST or not vsr.HEADER_BYTES <= head.size <= FRAME_BYTES_MAX:
            raise PeerError(f"no request command={head.command} size={head.size}", fatal=True)
        return head.size

    # Requests

    def _take(self, frame: memoryview) -> bool:
        """Carry out one request; False when it must wait until everything before it is answered."""
        if not self.recognition.framed:
            return self._carry(int.from_bytes(frame[4:8], "little"), frame[8:], None)
        head = vsr.parse_head(frame)
        body = frame[vsr.HEADER_BYTES :]
        if head.operation == vsr.REGISTER:
            return self._carry(Code.LOGIN, body, head)
        if head.operation == vsr.PLAIN:
            if head.code in (Code.LOGIN, Code.LOGIN_TOKEN):
                self._place(head, D3).evict(vsr.EVICT_LOGIN)
                return True
            return self._carry(head.code, body, head)
        code = vsr.OPERATIONS.get(head.operation)
        if code is None:
            self._place(head, D3).evict(vsr.EVICT_UNKNOWN)
            return True
        if self.principal is None and head.operation != vsr.LOG_OUT:
            self._place(head, D3).evict(vsr.EVICT_NO_LOGIN)
            return True
        if head.has_result and head.operation < vsr.SEND:
            if not self._settled():
                return False
            if self._replay(head):
                return True
        return self._carry(code, body, head)

    def _settled(self) -> bool:
        """Whether everything asked before is answered; what still is not makes the next request wait."""
        if self._answers:
            self.broker.commit()
        if self._answers:
            self._piling = False
        return not self._answers

    def _carry(self, code: int, payload: memoryview, head: vsr.Head | None) -> bool:
        command = self._commands.get(code)
        piled = command is not None and command.piled
        if not piled and not self._settled():
            return False
        dialect = self.recognition.dialect_for(code, payload, logged_in=self.principal is not None)
        answer = self._place(head, dialect)
        self._piling = piled
        try:
            if command is None:
                raise Refused(errors.UNAVAILABLE if code in _KNOWN and dialect is not D0 else errors.UNKNOWN_COMMAND)
            if self.principal is None and not command.anonymous:
                self._let_in()
            reader = Reader(payload, dialect)
            result = command.carry(self, answer, reader)
        except (Refused, BrokerError) as error:
            answer.refuse(error)
        else:
            if result is not None:
                answer.ok(result)
        return True

    def _let_in(self) -> None:
        """A peer that has not logged in is nobody, or on an open broker everybody (dossier §9.2). Raises Denied."""
        if self.recognition.framed:
            raise Denied(ErrorCode.LOGIN_REQUIRED, "log in first")
        self.principal = self.broker.access.anonymous()

    def _place(self, head: vsr.Head | None, dialect: Dialect) -> Answer:
        answer = Answer(self, dialect, head)
        self._answers.append(answer)
        return answer

    def _replay(self, head: vsr.Head) -> bool:
        """Answer a repeated state-changing request of D3 as before (dossier §8.3)."""
        kept = self._replays.get(head.number)
        if kept is None or kept[0] != head.operation:
            return False
        self._output.write(kept[1])
        return True

    def logged_in(self, principal: Principal) -> None:
        """This is who the peer is from now on."""
        self.principal = principal
        self._replays.clear()

    def logged_out(self) -> None:
        """The peer is nobody any more; its groups are left."""
        self.leave_groups()
        self.principal = None

    def check(self, permission: Permission, topic: Topic | None = None, *, stream: str | None = None) -> None:
        """Refuse what the peer may not do. Raises Denied."""
        assert self.principal is not None, "who is not logged in carries out nothing that is checked"
        self.broker.access.check(self.principal, permission, None if topic is None else topic.name, stream=stream)

    # Answers

    def answered(self) -> None:
        """An answer became known: send what is next in order, and go on with what had to wait."""
        answers = self._answers
        while answers and answers[0].known:
            self._send(answers.popleft())
        if not answers:
            self._piling = True
        if self._held or self._ending or self._finished:
            self._go_on()

    def _send(self, answer: Answer) -> None:
        if self._closed:
            self._drop(answer)
            return
        if answer.head is None:
            body = sum(len(part) for part in answer.parts)
            head = HEAD.pack(answer.status, 0 if answer.status else body)
            self._write(head, [] if answer.status else answer.parts, answer.released)
            return
        if answer.evicts:
            self._output.write(vsr.eviction(answer.head.client, answer.evicts))
            self._ending = True
            self._output.close()
            return
        self._send_framed(answer, answer.head)

    def _send_framed(self, answer: Answer, head: vsr.Head) -> None:
        parts, status = answer.parts, answer.status
        if head.has_result:
            refusal = _RESULT_REFUSED + status.to_bytes(4, "little")
            parts = [refusal] if status else [_RESULT_OK, *parts]
            status = 0
        elif head.operation == vsr.REGISTER:
            parts = [_RESULT_OK, *parts]
        self.number += 1
        size = sum(len(part) for part in parts)
        front = vsr.reply_head(head, self.number, size, status)
        if head.has_result and head.operation < vsr.SEND and size <= REPLAY_BYTES_MAX:
            self._replays[head.number] = (head.operation, front + b"".join(bytes(part) for part in parts))
            while len(self._replays) > REPLAYS_MAX:
                self._replays.popitem(last=False)
        self._write(front, parts, answer.released)

    def _write(self, head: bytes, parts: list[Buffer], released: Callable[[], None] | None) -> None:
        if released is None and len(parts) <= 2:
            self._output.write(b"".join([head, *(bytes(part) for part in parts)]))  # one write: dossier §2.5
        else:
            self._output.write_many([head, *parts], released)

    def _drop(self, answer: Answer) -> None:
        released, answer.released = answer.released, None
        if released is not None:
            released()

    def _go_on(self) -> None:
        """Take up what had to wait, unless it still must; never from inside ``receive``."""
        if self._receiving or self._closed or self._waits():
            return
        if self._finished:
            try:
                self._take_rest()
            except PeerError:
                self._output.close()
        elif self._held:
            self._held = False
            self._resume()
        elif self._ending and not self._answers:
            self._output.close()

    # The end

    def drained(self) -> None:
        """The peer reads again."""
        self._go_on()

    def finish(self, data: memoryview) -> None:
        """The peer is done; a request that is not whole is none, whole ones that had to wait are still answered."""
        self._rest = bytes(data)
        self._finished = True
        self._take_rest()

    def _take_rest(self) -> None:
        """Carry out what was left when the peer finished, as far as it goes now; once all is answered, nothing more comes."""
        if self._rest and not self._ending and not self._waits():
            rest, self._rest = self._rest, b""
            taken = self.receive(memoryview(rest))
            self._rest = rest[taken:] if self._waits() else b""
        if not self._rest:
            self._ending = True
        if self._ending and not self._answers:
            self._output.close()

    def close(self) -> None:
        """The connection is gone: groups are left."""
        self._closed = True
        self.entrance.drop()
        for answer in self._answers:
            if answer.cancel is not None:
                answer.cancel()
            self._drop(answer)
        self.leave_groups()
        self.shared.leave(self)

    def joined(self) -> list[tuple[Topic, str]]:
        """Topic and name of every group this connection is a member of; those that ended with their topic are forgotten."""
        for key, (topic, _) in list(self.members.items()):
            if self.broker.find_topic(topic.name.full) is not topic:
                del self.members[key]
                self.turns.pop(key, None)
        return [(topic, group) for (_, group), (topic, _) in self.members.items()]

    def leave_groups(self) -> None:
        """Stop being a member of every group."""
        for topic_id, group in list(self.members):
            self.leave_group(topic_id, group)

    def leave_group(self, topic_id: bytes, group: str, done: Done | None = None) -> None:
        """Stop being a member of a group, whether or not it still is one."""
        topic, _ = self.members.pop((topic_id, group))
        self.turns.pop((topic_id, group), None)
        try:
            self.broker.groups.leave(group, topic.name.full, self.member_id, None, wire="iggy", done=done)
        except BrokerError as error:
            if done is not None:
                self.broker.loop.call_soon(done, -1, None)
            del error  # the group, its topic or the member is gone: what was wanted

    @property
    def member_id(self) -> str:
        """How groups know this connection."""
        return f"iggy-{self.client_id}"


_RESULT_OK: Final = bytes(4)
_RESULT_REFUSED: Final = b"\x01\0\0\0\0\0\0\0"
_KNOWN: Final = frozenset(Code)
