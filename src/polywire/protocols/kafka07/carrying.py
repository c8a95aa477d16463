"""A Kafka 0.7 connection that forwards requests to the shards that own the topics they name (decision 0127).

Producers get no responses, so a later read is their only acknowledgement. Before a read, an empty FETCH over the same
link confirms the message sets that were forwarded.

* A read sees every message set produced before it on this connection, in any shard.
* Message sets of one topic stay in order.
* If a process ends with unconfirmed message sets, the connection is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from polywire.errors import BrokerError, PeerError
from polywire.protocols.kafka07.context import Kafka07Broker
from polywire.protocols.kafka07.messages import (
    Fetch,
    Offsets,
    Produce,
    Request,
    RequestType,
    answer_head,
    encode_fetch,
    encode_multifetch,
    encode_multiproduce,
    entry_count,
    frame_length,
    parse,
    split_multifetch_answer,
)
from polywire.protocols.kafka07.produce import Producer, topic_name
from polywire.protocols.kafka07.session import ENTRIES_AT_ONCE_MAX, LENGTH_BYTES, Command, KafkaSession
from polywire.protocols.runtime.carrying import CarryingSession
from polywire.protocols.runtime.links import AnsweredLink, Links, LinksOwner
from polywire.protocols.runtime.off_loop import OffLoopQueue
from polywire.protocols.runtime.reply_buffers import ReplyBuffers
from polywire.protocols.runtime.sequential import ENDING
from polywire.protocols.runtime.session import QUANTUM_S, Output
from polywire.protocols.runtime.shards import Shards

TYPE_AT: Final = LENGTH_BYTES
TOPIC_AT: Final = TYPE_AT + 2
PRODUCING: Final = frozenset({RequestType.PRODUCE, RequestType.MULTIPRODUCE})
SINGLE: Final = frozenset({RequestType.PRODUCE, RequestType.FETCH, RequestType.OFFSETS})
_SIZE_BYTES: Final = 4  # size field before each entry of a MULTIFETCH response

Then = Callable[[bytes], None]
"""Called with a complete response."""


class KafkaLink(AnsweredLink[tuple[Then, int]]):
    """A link to one shard.

    Of the ``_sent`` message sets, ``_settled`` are known to be stored. Each pending request is remembered with the
    number of sets that were sent before it, because its response confirms these.
    """

    def __init__(self, shards: Shards, shard: int, owner: LinksOwner) -> None:
        super().__init__(shards, shard, owner)
        self._sent = self._settled = 0
        self._topic = b""

    def produce(self, frame: bytes, topic: bytes) -> None:
        """Send message sets. ``topic`` is one of their topics."""
        self._sent += 1
        self._topic = topic
        self.write(frame)

    def ask(self, frame: bytes, then: Then) -> None:
        """Send a request that has a response."""
        self._asked.append((then, self._sent))
        self.write(frame)

    def settle(self, then: Then) -> None:
        """Call ``then`` when all message sets that were sent so far are stored."""
        self.ask(encode_fetch(self._topic, 0, 0, 0), then)

    @property
    def is_dirty(self) -> bool:
        """Whether there are message sets that may not be stored yet."""
        return self._sent > self._settled

    @property
    def owes(self) -> bool:
        """Whether unconfirmed message sets or responses would be lost if the link ended."""
        return self.is_dirty or bool(self._asked)

    def _take_answer(self, received: bytearray, at: int) -> int:
        begin = at + LENGTH_BYTES
        if len(received) < begin:
            return 0
        end = begin + int.from_bytes(received[at:begin], "big")
        if end > len(received):
            return 0
        then, self._settled = self._asked.popleft()
        then(bytes(memoryview(received)[at:end]))
        return end

    def _not_answered(self, asked: tuple[Then, int]) -> None:
        """Do nothing, because the client's connection is closed when a link is lost."""


class CarryingKafkaSession(CarryingSession, KafkaSession):
    """The session of one client.

    While responses of other shards are missing (``_owed`` of them), no request is handled.
    """

    __slots__ = ("_links", "_owed", "_shards")

    def __init__(
        self,
        shards: Shards,
        broker: Kafka07Broker,
        producer: Producer,
        reply_buffers: ReplyBuffers,
        off_loop: OffLoopQueue,
        commands: Mapping[RequestType, Command],
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(broker, producer, reply_buffers, off_loop, commands, output, resume)
        self._shards: Final = shards
        self._owed = 0
        self._links: Final = Links(partial(_link, shards, self))

    def owes(self) -> bool:
        """Whether a request is unanswered."""
        return self._owed > 0 or super().owes()

    # Distribution of frames

    def _receive(self, data: memoryview) -> int:
        at = self._wanted = 0
        now = self.broker.clock.monotonic
        quantum_end = now() + QUANTUM_S
        while not self._waits() and (end := self._frame_end(data, at)):
            taken = self._take_own(data, at)
            if taken is None:
                taken = self._take_carried(data, at, end)
            if taken == 0:
                break
            at += taken
            if at < len(data) and now() >= quantum_end:
                self._end_quantum()
                break
        return at

    def _frame_end(self, data: memoryview, at: int) -> int:
        """Return the end of the frame at ``at``, or 0 if it is incomplete. Raises PeerError."""
        if len(data) - at < LENGTH_BYTES:
            return 0
        end = at + LENGTH_BYTES + frame_length(data, at)
        if end <= len(data):
            return end
        self._wanted = end - at
        return 0

    def _take_own(self, data: memoryview, start: int) -> int | None:
        """Handle consecutive frames for this shard, and return how many bytes were consumed.

        The result is None if the frame at ``start`` is not for this shard. Raises PeerError.
        """
        end, own = start, self._shards.own
        while (after := self._frame_end(data, end)) and _kind(data, end) is RequestType.PRODUCE:
            if self._place(_topic(data, end), creates=True) != own:
                break
            end = after
        return super()._receive(data[start:end]) if end > start else None

    def _take_carried(self, data: memoryview, at: int, end: int) -> int:
        """Handle a frame for another shard, or a read.

        Return 0 if it must wait and be offered again. Raises PeerError.
        """
        kind = _kind(data, at)
        if kind not in PRODUCING and not self._is_settled():
            return 0
        if kind in SINGLE:
            shard = self._place(_topic(data, at), creates=kind is RequestType.PRODUCE)
            if shard != self._shards.own:
                self._send(shard, bytes(data[at:end]), _topic(data, at), kind)
                return end - at
        elif kind is not None:
            if entry_count(data, at + LENGTH_BYTES, end) > ENTRIES_AT_ONCE_MAX:
                read = partial(parse, data, at + LENGTH_BYTES, end)
                self._large = self._off_loop.put(read, partial(self._read, data, at, end), self.output.pin())
                return end - at
            if self._spread(data, parse(data, at + LENGTH_BYTES, end)):
                return end - at
        self._handle(data, at + LENGTH_BYTES, end)
        return end - at

    def _read(self, data: memoryview, at: int, end: int, request: Any) -> None:
        """Handle a request with very many entries, after it was parsed."""
        large, self._large = self._large, None
        try:
            if isinstance(request, PeerError):
                raise request
            if not self._spread(data, request):
                self._handle(data, at + LENGTH_BYTES, end)
        except PeerError as error:
            self._fail(error)
        if large is not None:
            large.leave()
        self._go_on()

    def _place(self, topic: bytes, *, creates: bool) -> int:
        """Return the shard of a topic, or this shard, which then reports an error if the topic does not exist.

        With ``creates``, a topic that does not exist gets a shard now.
        """
        own = self._shards.own
        try:
            name = topic_name(topic)
        except BrokerError:
            return own
        if self.broker.find_topic(name) is not None:
            return own
        shard = self._shards.shard_of(name)
        if shard is None:
            return self._shards.home(name) if creates else own
        return shard

    def _is_settled(self) -> bool:
        """Return whether all message sets produced so far are stored, in any shard.

        If not, start to wait for them. Raises PeerError.
        """
        self._settle_links()
        if self._dirty:
            self._settle(_nothing)
        return not self.owes()

    def _settle_links(self) -> None:
        for link in self._links:
            if link.is_dirty:
                self._owed += 1
                link.settle(self._settled_there)

    # Forwarding

    def _send(self, shard: int, frame: bytes, topic: bytes, kind: RequestType) -> None:
        """Forward a request to another shard.

        If it creates a topic, later requests wait until the topic exists.
        """
        link = self._links.to(shard)
        if kind not in PRODUCING:
            self._owed += 1
            link.ask(frame, self._said)
            return
        link.produce(frame, topic)
        if self._shards.shard_of(topic_name(topic)) is None:
            self._owed += 1
            link.settle(self._settled_there)

    def _said(self, answer: bytes) -> None:
        self.output.write(answer)
        self._settled_there(b"")

    def _settled_there(self, _: bytes) -> None:
        self._owed -= 1
        self._go_on()

    def _spread(self, data: memoryview, request: Request) -> bool:
        """Forward the entries of a request to the shards of their topics.

        Return False if all are for this shard. Raises PeerError.
        """
        assert not isinstance(request, Offsets), "it has one topic"
        creates = isinstance(request, Produce)
        places = [self._place(entry.topic, creates=creates) for entry in request.entries]
        if set(places) <= {self._shards.own}:
            return False
        if isinstance(request, Fetch):
            self._spread_fetch(request, places)
        else:
            self._spread_sets(data, request, places)
        return True

    def _spread_sets(self, data: memoryview, request: Produce, places: Sequence[int]) -> None:
        for shard in dict.fromkeys(places):
            own = [entry for entry, place in zip(request.entries, places, strict=True) if place == shard]
            sets = [(entry.topic, entry.partition, bytes(data[entry.start : entry.stop])) for entry in own]
            frame = encode_multiproduce(sets)
            if shard == self._shards.own:
                self._handle(memoryview(frame), LENGTH_BYTES, len(frame))
            else:
                self._send(shard, frame, own[0].topic, RequestType.MULTIPRODUCE)

    def _spread_fetch(self, request: Fetch, places: Sequence[int]) -> None:
        gathered: dict[int, deque[tuple[int, memoryview]]] = {}
        shards = list(dict.fromkeys(places))

        def came(shard: int, answer: bytes) -> None:
            gathered[shard] = deque(split_multifetch_answer(memoryview(answer)[LENGTH_BYTES:]))
            if len(gathered) == len(shards):
                self.output.write(_merged([gathered[place].popleft() for place in places]))
            self._settled_there(b"")

        for shard in shards:
            entries = [entry for entry, place in zip(request.entries, places, strict=True) if place == shard]
            self._owed += 1
            self._links.to(shard).ask(encode_multifetch(entries), partial(came, shard))

    # Called by links

    def link_lost(self, shard: int) -> None:
        """Close the connection.

        The process has ended, so it is unknown which message sets are stored, and the protocol has no error response
        for that.
        """
        link = self._links.forget(shard)
        if link is not None and link.owes:
            self._fail(PeerError("the process that owns a topic has exited, or rejected a message set", fatal=True))

    # End of the connection

    def _end_when_done(self) -> None:
        # the connection stays open until everything that was produced over it is stored
        if self._owed == 0 and self._phase is ENDING:
            self._settle_links()
        super()._end_when_done()

    def close(self) -> None:
        """Close the links after sending everything that was produced."""
        super().close()
        for link in self._links:
            if link.is_dirty:
                link.finish()
            else:
                link.close()


def _link(shards: Shards, owner: LinksOwner, shard: int) -> KafkaLink:
    return KafkaLink(shards, shard, owner)


def _kind(data: memoryview, at: int) -> RequestType | None:
    """Return the type of a frame, or None if it is unknown."""
    number = int.from_bytes(data[at + TYPE_AT : at + TOPIC_AT], "big")
    return RequestType(number) if number <= max(RequestType) else None


def _topic(data: memoryview, at: int) -> bytes:
    """Return the topic of a frame. If the frame names none, the result is arbitrary."""
    begin = at + TOPIC_AT + 2
    return bytes(data[begin : begin + int.from_bytes(data[at + TOPIC_AT : begin], "big")])


def _merged(entries: Sequence[tuple[int, memoryview]]) -> bytes:
    """Return the response to a MULTIFETCH with these errors and message sets."""
    parts: list[bytes | memoryview] = []
    for error, message_set in entries:
        parts += [answer_head_of(len(message_set), error), message_set]
    size = sum(map(len, parts))
    return b"".join([answer_head(size), *parts])


def answer_head_of(size: int, error: int) -> bytes:
    """Return the head of one entry of a MULTIFETCH response."""
    return (size + 2).to_bytes(_SIZE_BYTES, "big") + error.to_bytes(2, "big", signed=True)


def _nothing() -> None:
    """Do nothing, because the request is checked again later."""
