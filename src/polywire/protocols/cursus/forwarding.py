"""Requests that other processes of this broker execute, in sessions of their own (decision 0130).

Most commands are executed in the process of their topic. Commands about groups without a topic and about transactions
are executed in all processes, one after the other, and their responses are combined.

* A process has authenticated the client before it forwards a request. The executing process authorizes it.
* A transactional id has the same epoch in all processes. A transaction is committed in one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from typing import Final, NamedTuple, Protocol

import msgspec

from polywire.broker.access import Principal
from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.log.base import Completion, Handle
from polywire.protocols.cursus.context import WIRE, CursusBroker, CursusState
from polywire.protocols.cursus.groups import TRANSACTION_KEYS
from polywire.protocols.cursus.messages import (
    PREFIX_BYTES,
    Dialect,
    Refused,
    Request,
    bodies_of,
    decoded,
    encoded,
    frame,
    quote,
)
from polywire.protocols.cursus.produce import close_if_lost
from polywire.protocols.cursus.reply_slots import Answer
from polywire.protocols.cursus.session import BARE, Command, CursusSession, TakeBatch
from polywire.protocols.runtime import forwarded as runtime
from polywire.protocols.runtime.forwarded import ForwardedRequests, Sender
from polywire.protocols.runtime.off_loop import LONG_BYTES
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import Parts

ANYWHERE: Final = frozenset(
    {"AUTH", "HELP", "EXIT", "SETGROUP", "PROTOCOL_INFO", "NEGOTIATE", "FIND_COORDINATOR", "STREAM"}
    | {"LIST_CLUSTER", "CLUSTER_STATUS", "ELECT_LEADER"}
)
"""Commands that the process of the client's connection executes."""
EVERYWHERE: Final = frozenset({"LIST_GROUPS", "GROUP_STATUS", "INIT_PRODUCER_ID", "BEGIN_TXN", "TXN_STATUS", "END_TXN"})
"""Commands that all processes execute."""
STAGED_MAX: Final = 1_000  # transactional ids of one connection whose shard is remembered
SPANS: Final = "all topics of a transaction must belong to the same process of this broker"
STAGED_IN_SEVERAL: Final = "the transaction has staged data in several processes of this broker (abort it)"
_ERROR: Final = b"ERROR:"
_BOUNDARIES: Final = frozenset({"INIT_PRODUCER_ID", "BEGIN_TXN", "END_TXN"})
_STAGING: Final = {
    "TXN_PUBLISH": "transaction_publish_failed",
    "SEND_OFFSETS_TO_TXN": "transaction_offsets_failed",
}
"""Commands that stage something, and their errors."""


class Router(Parts, runtime.Forwarding, Protocol):
    """The processes of this broker. See ``RoutedBroker``."""


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The connection of a client, as far as a forwarded request depends on it.

    Attributes:
        dialect: of the client's latest unambiguous request.
        host: address that the client has used, which responses contain.
        group: set by SETGROUP.
        features: enabled by NEGOTIATE.
        epoch_min: smallest value for a new epoch of a transactional id.
    """

    dialect: Dialect | None
    host: str
    port: int
    group: str
    features: frozenset[str]
    epoch_min: int = 0


class Client(NamedTuple):
    """The client of a forwarded request. It is determined at once, because the guard then admits other requests."""

    user: str | None
    peer: str
    origin: Origin


class ForwardedSession(CursusSession):
    """Executes requests that another process forwards."""

    __slots__ = ("_origin",)

    def __init__(
        self,
        state: CursusState,
        commands: Mapping[str, Command],
        take_batch: TakeBatch,
        sender: Sender,
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(state, commands, take_batch, output, resume)
        origin = self._origin = msgspec.msgpack.decode(sender.context, type=Origin)
        self.spoken, self.group, self.features = origin.dialect, origin.group, origin.features

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        """Execute a frame, which the other process has decompressed."""
        body = data[at + PREFIX_BYTES : end]
        return self._begin_long(body, None) if len(body) > LONG_BYTES else self._take_plain(body, body, None)

    def _forwards(self, command: Command, request: Request, body: memoryview) -> bool:
        return False

    @property
    def address(self) -> tuple[str, int]:
        return self._origin.host, self._origin.port

    @property
    def epoch_min(self) -> int:
        return self._origin.epoch_min


def execute(
    state: CursusState,
    commands: Mapping[str, Command],
    take_batch: TakeBatch,
    sender: Sender,
    requests: memoryview,
    then: Completion[bytes],
) -> ForwardedRequests:
    """Execute forwarded requests. See ``Executor``. They have no response if this process does not know the user."""
    user = None if sender.user is None else state.broker.access.certified(sender.user)
    if user is not None:
        user = Principal(user.user_id, user.name, user.login, peer=sender.peer)
    run = ForwardedRequests(state.broker.loop, requests, sender.peer, user, then)
    return run.run(partial(ForwardedSession, state, commands, take_batch, sender))


class Forwarding:
    """Decides where requests are executed. The sessions of clients call it; see ``CursusState.forward``."""

    __slots__ = ("_local", "_router")

    def __init__(self, local: CursusBroker, router: Router) -> None:
        self._local: Final = local
        self._router: Final = router

    def __call__(self, session: CursusSession, command: Command, request: Request, body: memoryview) -> bool:
        """Forward a request, or return False if this process executes it. Raises Refused or Pending."""
        steps = self._steps(request, body)
        if steps is not None:
            session.state.guard.prove(session, request)
            if request.name in _BOUNDARIES:
                session.staged_in.pop(transaction_of(request), None)
            answer = session.later(request.dialect, blocking=True)
            _Several(partial(self.send, self.client(session), answer), answer, steps)
            return True
        shard = self._shard_of(session, request)
        _check_transaction(session, request, self._router.shards.own if shard is None else shard)
        if shard is None:
            return False
        session.state.guard.prove(session, request)
        waits = request.name == "CONSUME" and request.options.get("wait_ms", "0") != "0"
        answer = session.later(request.dialect, blocking=not (command.pipelined or waits))
        self.send(self.client(session), answer, Question(shard, bytes(body)), partial(answer_with, answer))
        return True

    def _shard_of(self, session: CursusSession, request: Request) -> int | None:
        """Return the shard that executes a request about one topic; None if it is this one."""
        name, shards = request.options.get("topic", ""), self._router.shards
        if not name or request.name in ANYWHERE or self._local.find_topic(name) is not None:
            return None
        if request.name == "CONSUME" and (request.pattern or request.dialect is Dialect.LEGACY):
            return None
        if request.name in ("PUBLISH", BARE) and (request.dialect is Dialect.MODERN or session.state.repeats is None):
            return None
        shard = shards.shard_of(name)
        if shard is None and request.name == "CREATE":
            shard = self._router.next_shard()
        return None if shard == shards.own else shard

    def _steps(self, request: Request, body: memoryview) -> Steps | None:
        """Return how a request is executed that concerns all processes; None for any other request."""
        if request.name not in EVERYWHERE:
            return None
        name, text = transaction_of(request), bytes(body)
        everywhere = [Question(shard, text) for shard in range(self._router.shards.count)]
        match request.name:
            case "LIST_GROUPS":
                return _joined_groups(everywhere)
            case "GROUP_STATUS":
                return _one_status(everywhere)
            case "INIT_PRODUCER_ID" if name:
                return _same_epochs(everywhere)
            case "BEGIN_TXN" | "TXN_STATUS" if name:
                return _most_staged(everywhere)
            case "END_TXN" if name:
                commits = request.options.get("result", "commit").lower() == "commit"
                return _ended(everywhere, _status(request, name), commits=commits)
        return None

    def client(self, session: CursusSession) -> Client:
        """Return the client of the request that the guard has admitted last."""
        acting, (host, port) = session.state.guard.acting, session.address
        origin = Origin(session.spoken, host, port, session.group, session.features)
        return Client(None if acting is None else acting.name, session.peer_address, origin)

    def store(self, session: CursusSession, client: Client, answer: Answer, partition: Partition, body: bytes) -> None:
        """Have another process store a batch. Raises Busy(BUSY) if too many bytes are on the way to it."""

        def then(frames: bytes | BrokerError) -> None:
            if isinstance(frames, BrokerError):
                close_if_lost(session, partition, frames)
            answer_with(answer, frames)

        shard = self._router.shard_of_topic(partition.topic)
        self.send(client, answer, Question(shard, body), then)

    def send(self, client: Client, answer: Answer, question: Question, then: Completion[bytes]) -> None:
        """Execute a request in the process of a shard."""
        origin = client.origin
        if question.epoch_min:
            origin = msgspec.structs.replace(origin, epoch_min=question.epoch_min)
        sender = Sender(client.user, client.peer, msgspec.msgpack.encode(origin))
        call = self._router.execute(question.shard, WIRE, sender, frame(question.body), then)
        answer.cancel = partial(_cancel, call)


def _cancel(call: Handle) -> None:
    call.cancel()


def answer_with(answer: Answer, frames: bytes | BrokerError) -> None:
    """Send the response of another process."""
    if isinstance(frames, BrokerError):
        answer.fail(frames)
    elif answer.packing is None:
        answer.fill([frames])
    else:
        answer.ok(*bodies_of(frames))


def transaction_of(request: Request) -> str:
    """Return the transactional id of a request, or an empty string."""
    return next((request.options[key] for key in TRANSACTION_KEYS if request.options.get(key)), "")


def _check_transaction(session: CursusSession, request: Request, shard: int) -> None:
    """Raise Refused if this connection has staged something of the same transaction in another shard.

    A commit in several shards would not be atomic. END_TXN checks what other connections have staged.
    """
    failure = _STAGING.get(request.name)
    if failure is None:
        return
    if len(session.staged_in) >= STAGED_MAX:
        session.staged_in.clear()
    if session.staged_in.setdefault(transaction_of(request), shard) != shard:
        raise Refused(failure, f"reason={quote(SPANS)}")


# Requests that concern all processes


class Question(msgspec.Struct, frozen=True):
    """A request to the process of a shard. For ``epoch_min`` see ``Origin``."""

    shard: int
    body: bytes
    epoch_min: int = 0


Steps = Generator[Question, bytes, bytes | Refused]
"""Yields requests, gets the body of the response to each, and returns the body of the combined response."""


class _Failed(Exception):
    """A process has answered with an error, whose body is ``args[0]``."""


class _Several:
    """Executes steps, one after the other, and sends their result. An error that they do not handle is sent instead."""

    __slots__ = ("_answer", "_send", "_steps")

    def __init__(self, send: Callable[[Question, Completion[bytes]], None], answer: Answer, steps: Steps) -> None:
        self._send: Final = send
        self._answer: Final = answer
        self._steps: Final = steps
        self._step(partial(next, steps))

    def _step(self, advance: Callable[[], Question]) -> None:
        try:
            self._send(advance(), self._came)
        except StopIteration as stop:
            self._end(stop.value)
        except _Failed as failed:
            self._end(failed.args[0])
        except BrokerError as error:
            self._answer.fail(error)

    def _end(self, whole: bytes | Refused) -> None:
        if isinstance(whole, Refused):
            self._answer.refuse(whole)
        else:
            self._answer.ok(whole)

    def _came(self, frames: bytes | BrokerError) -> None:
        if isinstance(frames, BrokerError):
            self._answer.fail(frames)
            return
        body = frames[PREFIX_BYTES:]
        if body.startswith(_ERROR):
            self._step(partial(self._steps.throw, _Failed(body)))
        else:
            self._step(partial(self._steps.send, body))


def _joined_groups(everywhere: Iterable[Question]) -> Steps:
    names: set[str] = set()
    for question in everywhere:
        names |= set(decoded((yield question)).partition(" groups=")[2].split(",")) - {""}
    return encoded(f"OK count={len(names)} groups={','.join(sorted(names, key=encoded))}")


def _one_status(everywhere: Iterable[Question]) -> Steps:
    """Prefer a group with members, then the topic whose name sorts first."""
    found: list[tuple[bool, str, bytes]] = []
    refusal = b""
    for question in everywhere:
        try:
            body = yield question
        except _Failed as failed:
            refusal = refusal or failed.args[0]
        else:
            shown = json.loads(decoded(body))
            found.append((not shown["members"], shown["topic_name"], body))
    return min(found)[2] if found else refusal


def _same_epochs(everywhere: Iterable[Question]) -> Steps:
    """Begin the same epoch in all shards. It is later than any epoch that a shard has known."""
    body, last = b"", 0
    epochs: dict[int, int] = {}
    for _ in range(2):
        for question in everywhere:
            if epochs.get(question.shard, -1) < last:
                body = yield msgspec.structs.replace(question, epoch_min=last)
                last = epochs[question.shard] = int(_word(body, "epoch"))
    return body


def _most_staged(everywhere: Iterable[Question]) -> Steps:
    """Execute a request in all shards, and return the response with the most staged records and offsets."""
    answers: list[bytes] = []
    for question in everywhere:
        answers.append((yield question))
    return max(answers, key=_staged)


def _ended(everywhere: Iterable[Question], status: bytes, *, commits: bool) -> Steps:
    """End a transaction, first in the shard in which something is staged, whose response is returned.

    If several shards have staged something, a commit is refused.
    """
    staged: dict[int, int] = {}
    for question in everywhere:
        body = yield Question(question.shard, status)
        staged[question.shard] = 0 if _word(body, "state") == "aborted" else _staged(body)
    if commits and sum(count > 0 for count in staged.values()) > 1:
        return Refused("transaction_commit_failed", f"state=open reason={quote(STAGED_IN_SEVERAL)}")
    ordered = sorted(everywhere, key=lambda question: -staged[question.shard])
    answer = yield ordered[0]
    for question in ordered[1:]:
        try:
            yield question
        except _Failed:  # nothing is staged there
            continue
    return answer


def _status(request: Request, name: str) -> bytes:
    words = [f"{key}={request.options[key]}" for key in ("principal", "auth_token") if key in request.options]
    return encoded(" ".join((f"TXN_STATUS transactional_id={name}", *words)))


def _word(body: bytes, key: str) -> str:
    return next((word.partition("=")[2] for word in decoded(body).split() if word.startswith(f"{key}=")), "")


def _staged(body: bytes) -> int:
    return int(_word(body, "messages") or 0) + int(_word(body, "offsets") or 0)
