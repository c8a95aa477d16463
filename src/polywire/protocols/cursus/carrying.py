"""A Cursus session that forwards requests to the shards that own the topics they name (decision 0127).

* Responses leave in the order of the requests, whichever shard they come from.
* Requests about one topic stay in order.
* While the client does not read responses, nothing is read from the shards for it.
* Nothing is forwarded before login.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from polywire.errors import PeerError
from polywire.protocols.cursus import produce
from polywire.protocols.cursus.context import CursusState
from polywire.protocols.cursus.gathering import GATHERED, Gathered, gathering, transaction_of
from polywire.protocols.cursus.messages import PREFIX_BYTES, Dialect, Refused, Request, decoded, quote, topic_name
from polywire.protocols.cursus.produce import BatchAppend
from polywire.protocols.cursus.reply_slots import Answer
from polywire.protocols.cursus.scratch import ScratchArrays
from polywire.protocols.cursus.session import Command, CursusSession, Reply
from polywire.protocols.cursus.shard_link import STREAM, STREAM_END, UNUSED, Context, CursusLink, LinkRequest
from polywire.protocols.runtime.carrying import CarryingSession
from polywire.protocols.runtime.links import Links
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import Shards

OWN: Final = frozenset(
    {"AUTH", "HELP", "EXIT", "SETGROUP", "PROTOCOL_INFO", "NEGOTIATE", "FIND_COORDINATOR"}
    | {"LIST_CLUSTER", "CLUSTER_STATUS", "ELECT_LEADER"}
)
"""Commands about the connection itself, or about the broker as a whole."""
LOST: Final = "the process of this topic has ended and is being restarted: the outcome of the request is unknown"
_BOUNDARIES: Final = frozenset({"INIT_PRODUCER_ID", "BEGIN_TXN", "END_TXN"})
_TRANSACTION_FAILURES: Final = {
    "TXN_PUBLISH": "transaction_publish_failed",
    "SEND_OFFSETS_TO_TXN": "transaction_offsets_failed",
}
SPANS: Final = "all topics of a transaction must belong to the same process of this broker"


class CarryingCursusSession(CarryingSession, CursusSession):
    """One connection.

    ``_body`` is the current text frame. ``_login`` is the latest AUTH request. ``_staged_in`` has, for each
    transactional id, the shard in which this connection has staged records or offsets. ``stream_asked`` is the link of
    a stream that was requested and has not begun yet.
    """

    __slots__ = ("_body", "_links", "_login", "_staged_in", "shards", "stream_asked")

    def __init__(
        self,
        shards: Shards,
        state: CursusState,
        commands: Mapping[str, Command],
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(state, commands, take_batch, output, resume)
        self.shards: Final = shards
        self._body = memoryview(b"")
        self._links: Final = Links(self._linked)
        self._login: LinkRequest | None = None
        self._staged_in: dict[str, int] = {}
        self.stream_asked: _StreamLink | None = None

    # Routing

    def _take_text(self, body: memoryview) -> bool:
        self._body = body
        try:
            return super()._take_text(body)
        finally:
            self._body = memoryview(b"")

    def _begin(self, command: Command, request: Request) -> Reply | None:
        if request.name == "AUTH":
            self._links.close()  # the links were authenticated with the previous login
            self._login = self.asking(bytes(self._body))
        gathered = None
        if request.name in GATHERED:
            gathered = gathering(self.shards.count, request, bytes(self._body))
        if gathered is not None:
            self.state.guard.prove(self, request)
            if request.name in _BOUNDARIES:
                self._staged_in.pop(transaction_of(request), None)
            _Several(self, self.later(request.dialect, blocking=gathered.is_blocking), gathered).ask_next()
            return None
        place = self._place_of(request)
        if place is None or place == self.shards.own:
            self._check_transaction(request, place)
            return super()._begin(command, request)
        self._check_transaction(request, place)
        self.state.guard.prove(self, request)
        waits = request.name == "CONSUME" and request.options.get("wait_ms", "0") != "0"
        answer = self.later(request.dialect, blocking=not (command.pipelined or waits))
        if request.name == "STREAM":
            self.stream_asked = _StreamLink(self, place, answer, self.asking(bytes(self._body)))
        else:
            self.carry(place, bytes(self._body), answer, writes=command.pipelined)
        return None

    def _place_of(self, request: Request) -> int | None:
        name = request.options.get("topic", "")
        if not name or request.name in OWN:
            return None
        place = self.place(name)
        return self.shards.least_loaded() if place is None and request.name == "CREATE" else place

    def place(self, name: str) -> int | None:
        """Return the shard of a topic.

        For a topic that no shard has, return None; this process then responds that the topic is missing.
        """
        if self.broker.find_topic(name) is not None:
            return self.shards.own
        return self.shards.shard_of(name)

    def _check_transaction(self, request: Request, place: int | None) -> None:
        """Raise Refused if this connection has staged records or offsets of the same transaction in another shard.

        A commit in several shards would not be atomic. END_TXN checks what other connections have staged.
        """
        failure = _TRANSACTION_FAILURES.get(request.name)
        if failure is None or place is None:
            return
        if self._staged_in.setdefault(transaction_of(request), place) != place:
            raise Refused(failure, f"reason={quote(SPANS)}")

    # Forwarding

    def asking(self, body: bytes) -> LinkRequest:
        return LinkRequest(body, self.spoken, "" if self._packed is None else self._packed.name)

    def carry(self, shard: int, body: bytes, answer: Answer, *, writes: bool) -> None:
        """Forward a frame to a shard; the response is sent in the slot of ``answer``.

        If ``writes``, the frame appends records, and the client may already have sent later ones for the same topic.
        """
        self._links.to(shard).ask(self.asking(body), _One(self, answer, writes=writes))

    def ask(self, shard: int, request: LinkRequest, several: _Several) -> None:
        self._links.to(shard).ask(request, several)

    def _linked(self, shard: int) -> CursusLink:
        return CursusLink(self.shards, shard, self, self.login)

    @property
    def login(self) -> LinkRequest | None:
        return None if self.principal is None else self._login

    @property
    def context(self) -> Context:
        host, port = self.address
        return Context(host, port, self.output.peer, self.group, self.features)

    def answers_came(self) -> None:
        """Send the responses that arrived from shards. Stop reading from the shards while the client does not read."""
        self.answered()
        super().answers_came()

    # End of the connection

    def close(self) -> None:
        super().close()
        self._links.close()
        if self.stream_asked is not None:
            self.stream_asked.close()
            self.stream_asked = None


def take_batch(session: CursusSession, body: memoryview, scratch: ScratchArrays, /) -> BatchAppend | None:
    """Store a batch, or forward it to the shard that owns its topic.

    Raises NotYet if the batch must wait and be handled again.
    """
    assert isinstance(session, CarryingCursusSession), "only these sessions forward requests"
    try:
        session.state.guard.admit_batch(session)
        place = session.place(topic_name(decoded(bytes(body[4 : 4 + int.from_bytes(body[2:4], "big")]))))
    except Refused as error:
        session.later(Dialect.MODERN).refuse(error)
        return None
    if place is None or place == session.shards.own:
        return produce.take_batch(session, body, scratch)
    session.carry(place, bytes(body), session.later(Dialect.MODERN), writes=True)
    return None


class _One:
    """A request to one shard. The shard's frames are sent to the client unchanged. Implements ``Asked``."""

    __slots__ = ("_answer", "_session", "_writes")

    def __init__(self, session: CarryingCursusSession, answer: Answer, *, writes: bool) -> None:
        self._session: Final = session
        self._answer: Final = answer
        self._writes: Final = writes

    def answered(self, flags: int, frames: bytes) -> None:
        self._answer.parts = [frames]
        if flags & UNUSED:
            self._session.close_unused()

    def lost(self) -> None:
        """If the lost request was a write, close the connection.

        A producer then sends its unanswered batches again, in order. After an error response, it would continue with
        the next batch.
        """
        if self._writes:
            self._session.output.fail(PeerError("the process that owns a topic has exited", fatal=True))
        else:
            self._answer.refuse(lost())


def lost() -> Refused:
    return Refused("request_cancelled", f"reason={quote(LOST)}", legacy=LOST)


class _Several:
    """Requests to several shards, sent one after the other.

    The client gets one combined response. Implements ``Asked``.
    """

    __slots__ = ("_answer", "_gathered", "_session")

    def __init__(self, session: CarryingCursusSession, answer: Answer, gathered: Gathered) -> None:
        self._session: Final = session
        self._answer: Final = answer
        self._gathered: Final = gathered

    def ask_next(self) -> None:
        question = self._gathered.next_question()
        if question is not None:
            request = LinkRequest(question.text, self._answer.dialect, epoch_min=question.epoch_min)
            self._session.ask(question.shard, request, self)
            return
        whole = self._gathered.whole()
        if isinstance(whole, Refused):
            self._answer.refuse(whole)
        else:
            self._answer.ok(whole)

    def answered(self, flags: int, frames: bytes) -> None:
        self._gathered.answered(frames[PREFIX_BYTES:])
        self.ask_next()

    def lost(self) -> None:
        self._answer.refuse(lost())


class _StreamLink(CursusLink):
    """A stream that arrives over its own link. Implements ``Pushing``.

    ``_left`` is the number of bytes of the current frame that have not arrived. ``_held`` has the bytes of the next
    frame's length field that have arrived.
    """

    def __init__(self, session: CarryingCursusSession, shard: int, answer: Answer, request: LinkRequest) -> None:
        super().__init__(session.shards, shard, session, session.login)
        self._session: Final = session
        self._slot: Final = answer
        self._left = 0
        self._held = b""
        self._is_pushing = False
        self.ask(request, self)

    def answered(self, flags: int, frames: bytes) -> None:
        self._session.stream_asked = None
        if flags & STREAM:
            self._is_pushing = True
            self._session.push(self)
            self._slot.parts = []
        else:
            self._slot.parts = [frames]
            self.close()

    def received(self, data: bytes) -> None:
        if not self._is_pushing:
            super().received(data)
            data = bytes(self._received)
            if not self._is_pushing or not data:
                return
            self._received.clear()
        self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        """Write frames to the client until the stream ends. The last frame may be incomplete."""
        data, at = self._held + data, 0
        self._held = b""
        while at < len(data):
            if self._left:
                taken = min(self._left, len(data) - at)
                self._left -= taken
                at += taken
            elif len(data) - at < PREFIX_BYTES:
                self._held = data[at:]
                break
            elif data[at : at + PREFIX_BYTES] == STREAM_END:
                self._session.output.write(data[:at])
                self.close()
                self._session.pull()
                return
            else:
                self._left = PREFIX_BYTES + int.from_bytes(data[at : at + PREFIX_BYTES], "big")
        self._session.output.write(data[: len(data) - len(self._held)])
        if self._session.output.backlog > self._session.output.backlog_max:
            self.pause()

    def lost(self) -> None:
        """End the stream in the same way as if this process had exited."""
        if self._is_pushing:
            self._session.output.fail(PeerError("the process that owns a topic has exited", fatal=True))
        else:
            self._session.stream_asked = None
            self._slot.refuse(lost())

    def drained(self) -> None:
        self.resume()

    def drop(self) -> None:
        self.close()
