"""FLUX in a broker with several processes: forward lines to the process that owns their topic (decision 0130).

* A client's lines for one topic are executed in order.
* A line that may create a topic in another process delays the next lines until it is answered.
* If a process ends before it has responded, the client's connection is closed, because the outcome is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from polywire.broker.api import Pending
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, Denied, PeerError
from polywire.protocols.flux import decoder
from polywire.protocols.flux.context import WIRE, FluxBroker, FluxRouter
from polywire.protocols.flux.messages import Refused, Request, named
from polywire.protocols.flux.metadata import REGISTRY_SHARD, FluxState
from polywire.protocols.flux.reply_slots import Answer, ScratchArrays
from polywire.protocols.flux.session import BUSY_WAIT_S, Command, FluxSession
from polywire.protocols.runtime.append_queue import AppendQueue
from polywire.protocols.runtime.forwarded import Execution, Sender
from polywire.protocols.runtime.sequential import Wait
from polywire.protocols.runtime.session import Output

METADATA: Final = "ADMIN_GET_METADATA"
CREATE: Final = "ADMIN_CREATE_TOPIC"
CREATING: Final = frozenset({"PRODUCE", "CONSUME", "SET_PARTITION_ROLE"})
TOPIC_FIRST: Final = frozenset(
    {
        "SET_PARTITION_ROLE",
        "ADMIN_SET_PARTITION_LEADER",
        "ADMIN_ELECT_TOPIC_LEADERS",
        "REPLICA_FETCH",
        "BROKER_REPLICA_ACK",
    }
)
ABOUT_BROKERS: Final = frozenset(
    {
        "ADMIN_REGISTER_BROKER",
        "ADMIN_BROKER_HEARTBEAT",
        "ADMIN_FENCE_BROKER",
        "ADMIN_UNFENCE_BROKER",
        "ADMIN_RECONCILE_BROKER_HEALTH",
    }
)
ACKS_ALL: Final = b"acks=all"
_TOPIC_NUMBERS_AT: Final = 6 * decoder.RUN_RECORDS_MAX


class RoutedFluxSession(FluxSession):
    """The session of one client that forwards requests to the processes that own the topics."""

    __slots__ = ("_call", "_has_failed", "_known_sender", "_uncredited", "router")

    def __init__(
        self,
        router: FluxRouter,
        broker: FluxBroker,
        state: FluxState,
        scratch: ScratchArrays,
        commands: Mapping[str, Command],
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(broker, state, scratch, commands, output, resume)
        self.router: Final = router
        self._call: Execution | None = None  # the command whose long response arrives in pieces
        self._has_failed = False
        self._known_sender: Sender | None = None
        self._uncredited = 0  # bytes of that response that were not credited to the other process

    def topics(self) -> list[Topic]:
        return self.router.topics()

    # Which process executes a line

    def _shard_of(self, name: str, new_shard: Callable[[], int] | None) -> tuple[int, bool]:
        """Return the shard of a topic, and whether the request creates the topic there.

        ``new_shard`` returns the shard for a new topic. It is None if the request does not create topics.
        """
        shards = self.router.shards
        if self.broker.find_topic(name) is not None:
            return shards.own, False
        shard = shards.shard_of(name)
        if shard is None and new_shard is not None and not name.startswith("__"):
            return new_shard(), True
        return shards.own if shard is None else shard, False

    def _shard_of_command(self, command: Command, request: Request) -> tuple[int, bool]:
        """Return the shard that executes a command, and whether it creates the topic there."""
        shards = self.router.shards
        local = shards.own, False
        if command.name in ABOUT_BROKERS:
            return REGISTRY_SHARD, False
        topic_at = 0 if command.name in TOPIC_FIRST else command.topic_at
        if topic_at is None or topic_at >= len(request.args):
            return local
        try:
            name = named(request.args[topic_at])
        except Refused:  # this shard reports the error
            return local
        if command.name == CREATE:
            return self._shard_of(name, shards.least_loaded)
        return self._shard_of(name, partial(shards.shard_by_hash, name) if command.name in CREATING else None)

    # Lines

    def _produce_one(self, data: memoryview, start: int, end: int) -> None:
        if not self._forward_run(data, start, end, 1, 1):
            super()._produce_one(data, start, end)

    def _produce_run(self, data: memoryview, start: int, end: int, count: int, topics: int) -> None:
        if not self._forward_run(data, start, end, count, topics):
            super()._produce_run(data, start, end, count, topics)

    def _forward_run(self, data: memoryview, start: int, end: int, count: int, topics: int) -> bool:
        """Forward consecutive PRODUCE lines. Return False if this process owns all of their topics."""
        found: list[tuple[int, bool]] = []
        for number in range(topics):
            name = self._topic_text(data, number)
            found.append(self._shard_of(name, partial(self.router.shards.shard_by_hash, name)))
        shards = {shard for shard, _ in found}
        if shards == {self.router.shards.own}:
            return False
        lines = bytes(data[start:end])
        if len(shards) == 1:
            self._forward(shards.pop(), lines, blocking=any(creates for _, creates in found))
        else:
            numbers = self.scratch.work[_TOPIC_NUMBERS_AT : _TOPIC_NUMBERS_AT + count]
            self._split(lines, [found[number][0] for number in numbers])
        return True

    def _handle(self, line: bytes) -> bool:
        pending, self._awaited = self._awaited, None
        try:
            if pending is None:
                return super()._handle(line)
            with pending:
                return super()._handle(line)
        except Pending as again:
            self._await_pending(again)
            return False

    def _execute(self, command: Command, request: Request, line: bytes) -> bytes | None:
        if command.name == METADATA:
            self.router.require_latest()
        shard, creates = self._shard_of_command(command, request)
        if shard == self.router.shards.own:
            return super()._execute(command, request, line)
        blocking = creates or command.name == CREATE or command.name in ABOUT_BROKERS or ACKS_ALL in request.args
        self._forward(shard, line + b"\n", blocking=blocking or not command.pipelined, in_pieces=not command.pipelined)
        return None

    # Forwarding

    @property
    def _sender(self) -> Sender:
        if self._known_sender is None:
            with suppress(Denied):  # which the other process reports
                self.principal  # noqa: B018  # identifies the connection
            certified = self.output.certified
            self._known_sender = Sender(None if certified is None else certified.name, self.output.peer)
        return self._known_sender

    def _send(
        self, shard: int, lines: bytes, then: Callable[[bytes], None], more: Callable[[bytes], None] | None = None
    ) -> Execution | None:
        def receive(responses: bytes | BrokerError) -> None:
            if not isinstance(responses, BrokerError):
                then(responses)
            elif not self.closed and not self._has_failed:
                self._has_failed = True
                self.output.fail(PeerError(f"a forwarded request failed reason={responses}", fatal=True))

        try:
            call = self.router.execute(shard, WIRE, self._sender, lines, receive, more)
        except BrokerError as error:
            self.broker.loop.call_soon(receive, error)
            return None
        if self.router.is_clogged:
            self._reasons |= Wait.CLOGGED
            self.router.on_relief(self._shard_relieved)
        return call

    def _shard_relieved(self) -> None:
        self._reasons &= ~Wait.CLOGGED
        self._continue()

    def _forward(self, shard: int, lines: bytes, *, blocking: bool, in_pieces: bool = False) -> None:
        """Execute requests in another process: consecutive PRODUCE lines, or one line with any other command.

        ``in_pieces``: whether the response may be long and is sent as it arrives.
        """
        answer = self.append(Answer(self, b"", blocking=blocking))
        if not in_pieces:
            self._send(shard, lines, partial(_fill, answer))
            return

        def respond(rest: bytes) -> None:
            self.drain = None
            self._call = None
            answer.fill([rest])

        call = self._send(shard, lines, respond, self._take_piece)
        if call is not None:
            self._call, self._uncredited = call, 0
            self.drain = self._credit
            answer.cancel = call.cancel

    def _take_piece(self, piece: bytes) -> None:
        """Send the next piece of a long response. No other response is outstanding."""
        self.output.write(piece)
        self._uncredited += len(piece)
        self._credit()

    def _credit(self) -> None:
        if self._call is not None and self._uncredited and self.output.backlog < self.output.backlog_max:
            count, self._uncredited = self._uncredited, 0
            self._call.credit(count)

    def _split(self, lines: bytes, shards: Sequence[int]) -> None:
        """Execute each PRODUCE line in the shard of its topic.

        Later lines wait, so that lines for one topic remain in order.
        """
        answer = self.append(Answer(self, b"", blocking=True))
        by_shard: dict[int, list[bytes]] = {shard: [] for shard in shards}
        for shard, line in zip(shards, lines.split(b"\n"), strict=False):
            by_shard[shard].append(line + b"\n")
        found: dict[int, Iterator[bytes]] = {}

        def collect(shard: int, responses: bytes) -> None:
            found[shard] = iter(responses.split(b"\n"))
            if len(found) == len(by_shard):
                answer.fill([b"".join([next(found[shard]) + b"\n" for shard in shards])])

        for shard, lines_of_shard in by_shard.items():
            self._send(shard, b"".join(lines_of_shard), partial(collect, shard))


def _fill(answer: Answer, responses: bytes) -> None:
    answer.fill([responses])


class ForwardedFluxSession(FluxSession):
    """Executes requests forwarded by another process: consecutive PRODUCE lines, or one line with any other command.

    If the log's write buffer is full, the batches of all such sessions wait in one queue. They are stored even if the
    client closes its connection.
    """

    __slots__ = ("_sessions",)

    def __init__(
        self,
        waiting: ForwardedBatches,
        broker: FluxBroker,
        state: FluxState,
        scratch: ScratchArrays,
        commands: Mapping[str, Command],
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(broker, state, scratch, commands, output, resume)
        self.append_queue = waiting
        self._queued = waiting.waiting
        self._sessions: Final = waiting.sessions
        self._sessions[self] = None

    def close(self) -> None:
        self._sessions.pop(self, None)
        super().close()


class ForwardedBatches(AppendQueue):
    """The batches of all forwarded PRODUCE lines that wait for space in the log's write buffer.

    Attributes:
        sessions: the open sessions, in the order in which their lines arrived.
    """

    __slots__ = ("sessions",)

    def __init__(self, broker: FluxBroker) -> None:
        super().__init__(broker, BUSY_WAIT_S, self._continue)
        self.sessions: Final[dict[ForwardedFluxSession, None]] = {}

    def _continue(self) -> None:
        for session in list(self.sessions):
            session._continue()

    def drop(self) -> None:
        """Do nothing, because the queue has batches of other sessions, too."""
