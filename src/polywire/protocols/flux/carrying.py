"""A FLUX connection that forwards lines to the shards that own the named topics (decision 0126).

* Responses are sent in the order of the lines, and lines about one topic stay in order.
* If the client stops reading responses, the connection stops reading from the shards.
* If a process exits before it has sent a response, the client's connection is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from polywire.errors import PeerError
from polywire.protocols.flux import decoder
from polywire.protocols.flux.messages import KAFKA_BYTES, Refused, Request, bad, err, named, parse, refuse_kafka
from polywire.protocols.flux.part_replies import Lines, Merged, OwnReplies, Part, Said, ShardReplies
from polywire.protocols.flux.session import Command, FluxSession
from polywire.protocols.runtime.links import Links
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import Shards

PARTS_MAX: Final = 64  # runs of lines without a complete response; then the connection stops reading lines
METADATA: Final = "ADMIN_GET_METADATA"
CREATE: Final = "ADMIN_CREATE_TOPIC"
MADE_BY_USE: Final = frozenset({"PRODUCE", "CONSUME", "SET_PARTITION_ROLE"})
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
NO_BROKERS: Final = "brokers cannot be registered if several processes share the topics"
_TOPICS_AT: Final = 7 * decoder.RUN_RECORDS_MAX


class CarryingFluxSession:
    """Implements ``Session`` in front of a session of this shard.

    ``_order`` has the runs of lines whose responses are outstanding, in order. If ``_settles``, the next line waits
    until all earlier ones are answered, because it may depend on them. ``_rest`` has the unread bytes of a client that
    will send no more.
    """

    __slots__ = (
        "_commands",
        "_held",
        "_inner",
        "_is_closed",
        "_is_ending",
        "_is_finished",
        "_links",
        "_order",
        "_output",
        "_own",
        "_receiving",
        "_rest",
        "_resume",
        "_settles",
        "_shards",
    )

    def __init__(
        self,
        shards: Shards,
        commands: Mapping[str, Command],
        output: Output,
        resume: Callable[[], None],
        inner: Callable[[Output, Callable[[], None]], FluxSession],
    ) -> None:
        """``inner`` opens a session of this shard."""
        self._shards: Final = shards
        self._commands: Final = commands
        self._output: Final = output
        self._resume: Final = resume
        self._own: Final = OwnReplies(output, self._replied)
        self._inner: Final = inner(self._own, self._go_on)
        self._own.on_room(partial(self._inner.broker.loop.call_soon, self._inner.drained))
        self._links: Final = Links(self._linked)
        self._order: deque[Part] = deque()
        self._settles = False
        self._held = False
        self._receiving = False
        self._is_ending = False
        self._is_finished = False
        self._is_closed = False
        self._rest = b""

    @property
    def spoken_dialect(self) -> str:
        return ""

    @property
    def frame_bytes_max(self) -> int:
        return self._inner.frame_bytes_max

    def wanted(self) -> int:
        return 0

    def owes(self) -> bool:
        return bool(self._order)

    def paused(self) -> bool:
        """Return whether the next line must wait: for earlier responses, or until the client or a shard has read."""
        self._held = self._waits()
        return self._held

    def _waits(self) -> bool:
        return (
            self._settles
            or len(self._order) >= PARTS_MAX
            or self._output.backlog > self._output.backlog_max
            or self._inner.paused()
            or self._links.are_clogged
        )

    def receive(self, data: memoryview) -> int:
        """Forward every complete line; return the number of bytes consumed. Raises PeerError for a malformed line."""
        self._receiving = True
        try:
            at = 0
            while at < len(data) and not self._is_ending and not self._waits():
                taken = self._take(data, at)
                if taken == 0:
                    break
                at += taken
            return len(data) if self._is_ending else at
        finally:
            self._receiving = False
            self._pump()

    def _take(self, data: memoryview, start: int) -> int:
        """Forward a run of lines, or one line; return the number of bytes consumed.

        Raises PeerError for a malformed line.
        """
        work, line_max = self._inner.scratch.work, self._inner.frame_bytes_max
        reason, after, end, count, topics = decoder.scan(data, start, len(data), work, line_max)
        if count:
            names = [self._topic_text(data, number) for number in range(topics)]
            shards = {self._place(name, self._shards.home) for name in names}
            if len(shards) == 1:
                return self._hand(shards.pop(), data[start:after], count)
            end = start + bytes(data[start:after]).index(b"\n") + 1
        elif reason == decoder.LONG:
            self._is_ending = True
            self._order.append(Lines(self._own, 1))
            self._inner.receive(data[start:])
            return len(data) - start
        elif reason != decoder.LINE:
            refuse_kafka(bytes(data[start : start + KAFKA_BYTES]))
            return 0
        return self._take_line(data[start:end])

    def _topic_text(self, data: memoryview, number: int) -> str:
        at = self._inner.scratch.work[_TOPICS_AT + 2 * number]
        return str(data[at : at + self._inner.scratch.work[_TOPICS_AT + 2 * number + 1]], "ascii")

    def _take_line(self, line: memoryview) -> int:
        try:
            request = parse(bytes(line[:-1]), pipes=self._inner.state.settings.pipes_in_arguments)
            shard = self._shard_of(request, bytes(line))
        except Refused:
            shard = self._shards.own  # this shard reports the error
        return len(line) if shard is None else self._hand(shard, line, 1)

    def _shard_of(self, request: Request, line: bytes) -> int | None:
        """Return the shard that handles a line; None if the response is already queued.

        Raises Refused if the line is invalid.
        """
        command = self._commands.get(request.command)
        if command is None:
            return self._shards.own
        if request.command in ABOUT_BROKERS:
            self._order.append(Said(err(request.id, bad(NO_BROKERS))))
            return None
        if request.command == METADATA:
            links = [self._links.to(shard) for shard in range(self._shards.count)]
            for link in links:
                link.write(line)
            self._order.append(Merged(links))
            self._settles = True  # the response must not include the effects of later lines
            return None
        topic_at = 0 if request.command in TOPIC_FIRST else command.topic_at
        if topic_at is None or topic_at >= len(request.args):
            return self._shards.own
        begins = None
        if request.command == CREATE:
            begins = _anywhere(self._shards.least_loaded)
        elif request.command in MADE_BY_USE:
            begins = self._shards.home
        return self._place(named(request.args[topic_at]), begins)

    def _place(self, name: str, begins: Callable[[str], int] | None) -> int:
        """Return the shard of a topic.

        ``begins`` returns the shard for a topic that the line creates. It is None if the line does not create topics.
        """
        if self._inner.broker.find_topic(name) is not None:
            return self._shards.own
        shard = self._shards.shard_of(name)
        if shard is None and begins is not None and not name.startswith("__"):
            shard = begins(name)
            self._settles |= shard != self._shards.own
        return self._shards.own if shard is None else shard

    def _hand(self, shard: int, lines: memoryview, count: int) -> int:
        """Send lines to a shard; return the number of bytes consumed. Raises PeerError for a malformed line."""
        if shard != self._shards.own:
            link = self._links.to(shard)
            link.write(bytes(lines))
            self._order.append(Lines(link, count))
            return len(lines)
        part = Lines(self._own, 0)
        self._order.append(part)
        taken = self._inner.receive(lines)
        part.count = bytes(lines[:taken]).count(b"\n")
        return taken

    def _linked(self, shard: int) -> ShardReplies:
        return ShardReplies(self._shards, shard, self)

    # What comes back

    def _replied(self) -> None:
        if not self._receiving:
            self._pump()

    def came(self) -> None:
        self._pump()

    def relieved(self) -> None:
        self._go_on()

    def link_lost(self, shard: int) -> None:
        """Close the connection if a response of this shard is outstanding.

        The outcome of the requests is unknown.
        """
        link = self._links.forget(shard)
        if link is not None and not self._is_closed and any(part.rests_on(link) for part in self._order):
            self._output.fail(PeerError("the process that owns a topic has exited", fatal=True))

    def _pump(self) -> None:
        if self._is_closed:
            return
        written: list[bytes] = []
        while self._order and self._order[0].advance(written):
            self._order.popleft()
        if data := b"".join(written):
            self._output.write(data)
        if not self._order:
            self._settles = False
        self._regulate()
        self._go_on()

    def _regulate(self) -> None:
        is_full = self._output.backlog > self._output.backlog_max
        for link in self._links:
            link.regulate(is_full=is_full)
        self._own.regulate()

    def _go_on(self) -> None:
        if self._receiving or self._is_closed or self._waits():
            return
        if self._rest:
            self._take_rest()
        if self._held and not self._is_finished:
            self._held = False
            self._resume()
        if not self._order and not self._rest and (self._is_finished or self._own.is_ended):
            self._output.close()

    # The peer's side

    def drained(self) -> None:
        self._inner.drained()
        self._pump()

    def finish(self, data: memoryview) -> None:
        """Bytes without a line ending are the client's last request (spec: flux#framing)."""
        rest = bytes(data)
        self._is_finished = True
        self._rest = rest if rest.endswith(b"\n") or not rest else rest + b"\n"
        self._go_on()

    def _take_rest(self) -> None:
        rest, self._rest = self._rest, b""
        try:
            taken = self.receive(memoryview(rest))
        except PeerError:  # the client has finished, so only outstanding answers are sent
            taken = len(rest)
        self._rest = rest[taken:] if self._waits() else b""

    def close(self) -> None:
        self._is_closed = True
        self._inner.close()
        self._order.clear()
        self._links.close()


def _anywhere(choose: Callable[[], int]) -> Callable[[str], int]:
    return lambda _: choose()
