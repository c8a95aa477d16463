"""PRODUCE, STAGE, PUBLISH and ABANDON of the `polywire` wire (docs/protocols/polywire.md §4.2, §4.3).

Promises: nothing is stored before every batch of the request was validated; a request is answered once, when all its batches have reached
their level or one has failed; when the log has no room the request waits, and with it all behind it, so that order is kept.
Must not know: frames, sockets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from polywire.errors import BrokerError, Busy, ErrorCode, Invalid
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import BY_KEY, Head, Verb
from polywire.protocols.polywire.splitting import Part, accepted_batches, split_by_key, whole_part
from polywire.protocols.polywire.words import Answering, level_of, partition_of
from polywire.types import Level

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.broker.topics import Topic
    from polywire.broker.transactions import PublishAnswer

TOKENS_MAX: Final = 10_000  # page §3: what one publish may name
HALT_S_MAX: Final = (
    30.0  # how long a request may wait for room in the log; a sealer that is slower than this has stopped
)
HALT_MS: Final = 50  # until it is tried again, when the log does not say


class _Request:
    """A PRODUCE or STAGE under way. Guards: each of its batches is given to the broker once, and it is answered once, after the last."""

    __slots__ = (
        "_chosen",
        "_correlation",
        "_error",
        "_left",
        "_offsets",
        "_session",
        "_verb",
        "began_at",
        "given",
        "level",
        "parts",
        "token",
    )

    def __init__(
        self,
        session: Answering,
        correlation: int,
        parts: Sequence[Part],
        *,
        level: Level,
        chosen: bytes = b"",
        token: bytes | None = None,
        began_at: float,
    ) -> None:
        """chosen: payload of the answer. token: of a STAGE."""
        self.parts: Final = parts
        self.level: Final = level
        self.token: Final = token
        self.began_at: Final = began_at
        self.given = 0
        self._session: Final = session
        self._verb: Final = Verb.PRODUCE if token is None else Verb.STAGE
        self._correlation: Final = correlation
        self._chosen: Final = chosen
        self._offsets: Final = [-1] * len(parts)
        self._left = len(parts)
        self._error: BrokerError | None = None
        session.owe()

    def done(self, index: int, offset: int, error: BrokerError | None) -> None:
        """The broker has answered for one batch."""
        self._offsets[index] = offset
        self._error = self._error or error
        self._count_down(1)

    def refuse(self, error: BrokerError) -> None:
        """The broker takes none of the batches that were not given yet."""
        self._error = self._error or error
        rest, self.given = len(self.parts) - self.given, len(self.parts)
        self._count_down(rest)

    def _count_down(self, count: int) -> None:
        self._left -= count
        if self._left:
            return
        if self._error is not None:
            self._session.settle_error(self._verb, self._correlation, self._error)
        elif self.token is not None:
            staged = messages.Staged(sum([part.record_count for part in self.parts]))
            self._session.settle(self._verb, self._correlation, staged)
        else:
            appended = [
                messages.Appended(part.partition.number, offset, part.record_count)
                for part, offset in zip(self.parts, self._offsets, strict=True)
            ]
            self._session.settle(self._verb, self._correlation, messages.Produced(appended), self._chosen)


class Appending:
    """What one connection appends. Guards: while a request waits for room in the log, none behind it is begun."""

    __slots__ = ("_broker", "_halted", "_session", "_turns")

    def __init__(self, broker: Broker, session: Answering, turns: Iterator[int]) -> None:
        self._broker: Final = broker
        self._session: Final = session
        self._turns: Final = turns
        self._halted: _Request | None = None

    def produce(self, correlation: int, request: messages.Produce, payload: memoryview) -> bool:
        """Append, and answer when all batches have the level. Raises BrokerError when nothing was taken.

        False: the log has no room now; the session was told to halt and offers the same request again.
        """
        if self._halted is None:
            level = level_of(request.level)
            places = accepted_batches(payload)
            topic = self._broker.ensure_topic(request.name) if request.create else self._broker.topic(request.name)
            parts, chosen = self._parts(topic, request.partition, payload, places)
            began_at = self._broker.clock.monotonic()
            self._halted = _Request(self._session, correlation, parts, level=level, chosen=chosen, began_at=began_at)
        return self._give(payload)

    def stage(self, correlation: int, request: messages.Stage, payload: memoryview) -> bool:
        """Store invisibly; raises and returns as ``produce``."""
        if self._halted is None:
            level = level_of(request.level)
            places = accepted_batches(payload)
            parts, _ = self._parts(self._broker.topic(request.name), request.partition, payload, places)
            began_at = self._broker.clock.monotonic()
            self._halted = _Request(
                self._session, correlation, parts, level=level, token=request.token, began_at=began_at
            )
        return self._give(payload)

    def give_up(self) -> None:
        """The request that waits for room will not be offered again: answer it."""
        halted, self._halted = self._halted, None
        if halted is not None:
            halted.refuse(Busy(ErrorCode.BUSY, "the log had no room before the connection ended"))

    def _give(self, payload: memoryview) -> bool:
        """Give the broker what it has not been given of the request in ``_halted``."""
        request = self._halted
        assert request is not None, "a request was begun"
        try:
            while request.given < len(request.parts):
                self._give_next(request, payload)
        except BrokerError as error:
            waited_s = self._broker.clock.monotonic() - request.began_at
            if isinstance(error, Busy) and error.code is ErrorCode.BUSY and waited_s < HALT_S_MAX:
                self._session.halt(error.retry_after_ms or HALT_MS)
                return False
            request.refuse(error)
        self._halted = None
        return True

    def _give_next(self, request: _Request, payload: memoryview) -> None:
        index = request.given
        part = request.parts[index]
        batch, done = part.batch(payload), partial(request.done, index)
        if request.token is None:
            self._broker.produce(part.partition, batch, level=request.level, done=done)
        else:
            self._broker.stage(request.token, part.partition, batch, level=request.level, done=done)
        request.given = index + 1

    def publish(self, correlation: int, request: messages.Publish) -> None:
        """Make staged batches visible, once per (writer, number). Raises BrokerError when refused at once."""
        done = partial(self._published, correlation)
        self._broker.publish(request.writer, request.number, request.tokens, done=done)
        self._session.owe()

    def abandon(self, correlation: int, request: messages.Abandon) -> None:
        """Drop staged batches."""
        if len(request.tokens) > TOKENS_MAX:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"too many tokens count={len(request.tokens)} limit={TOKENS_MAX}")
        self._broker.abandon(request.tokens)
        self._session.answer(Verb.ABANDON, correlation, Head())

    def _published(self, correlation: int, answer: PublishAnswer | BrokerError) -> None:
        if isinstance(answer, BrokerError):
            self._session.settle_error(Verb.PUBLISH, correlation, answer)
            return
        ranges = [
            messages.PublishedRange(r.partition.topic.name.full, r.partition.number, r.first_offset, r.next_offset)
            for r in answer.ranges
        ]
        self._session.settle(Verb.PUBLISH, correlation, messages.Published(answer.duplicate, ranges))

    def _parts(
        self, topic: Topic, number: int, payload: memoryview, places: Sequence[slice]
    ) -> tuple[list[Part], bytes]:
        if number != BY_KEY:
            partition = partition_of(topic, number)
            return [whole_part(partition, payload, place) for place in places], b""
        parts: list[Part] = []
        chosen: list[bytes] = []
        for place in places:
            split, numbers = split_by_key(topic, payload, place, self._turns)
            parts += split
            chosen.append(numbers)
        return parts, b"".join(chosen)
