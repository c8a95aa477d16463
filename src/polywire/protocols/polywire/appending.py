"""PRODUCE, STAGE, PUBLISH and ABANDON of the `polywire` wire (docs/protocols/polywire.md §4.2, §4.3).

Promises: nothing is stored before every batch of the request was validated; a request is answered once, when all its batches have reached
their level or one has failed. Must not know: frames, sockets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import BY_KEY, Head, Verb
from polywire.protocols.polywire.splitting import Part, accepted_batches, split_by_key
from polywire.protocols.polywire.words import Answering, check_name, level_of, partition_of

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.broker.topics import Topic
    from polywire.broker.transactions import PublishAnswer
    from polywire.protocols.polywire.admission import Admission

TOKENS_MAX: Final = 10_000  # page §3: what one publish may name


class _Collected:
    """The answers of one request's batches. Guards: the request is settled exactly once, after its last batch."""

    __slots__ = ("_correlation", "_counts", "_error", "_left", "_offsets", "_payload", "_session", "_verb")

    def __init__(self, session: Answering, verb: Verb, correlation: int, parts: Sequence[Part], payload: bytes) -> None:
        self._session: Final = session
        self._verb: Final = verb
        self._correlation: Final = correlation
        # Taken now: by the time of the answer the receive buffer may hold something else.
        self._counts: Final = [(part.partition.number, part.record_count) for part in parts]
        self._payload: Final = payload
        self._offsets: Final = [-1] * len(parts)
        self._left = len(parts)
        self._error: BrokerError | None = None
        session.owe()

    def done(self, index: int, offset: int, error: BrokerError | None) -> None:
        self._offsets[index] = offset
        self._error = self._error or error
        self._count_down(1)

    def refused(self, index: int, error: BrokerError) -> None:
        """The broker took none of the batches from ``index`` on."""
        self._error = self._error or error
        self._count_down(len(self._counts) - index)

    def _count_down(self, count: int) -> None:
        self._left -= count
        if self._left:
            return
        if self._error is not None:
            self._session.settle_error(self._verb, self._correlation, self._error)
            return
        if self._verb is Verb.STAGE:
            staged = messages.Staged(sum([record_count for _, record_count in self._counts]))
            self._session.settle(self._verb, self._correlation, staged)
            return
        appended = [
            messages.Appended(number, offset, record_count)
            for (number, record_count), offset in zip(self._counts, self._offsets, strict=True)
        ]
        self._session.settle(self._verb, self._correlation, messages.Produced(appended), self._payload)


class Appending:
    """What one connection appends."""

    __slots__ = ("_admission", "_broker", "_session", "_turns")

    def __init__(self, broker: Broker, session: Answering, admission: Admission, turns: Iterator[int]) -> None:
        self._admission: Final = admission
        self._broker: Final = broker
        self._session: Final = session
        self._turns: Final = turns

    def produce(self, correlation: int, request: messages.Produce, payload: memoryview) -> None:
        """Append, and answer when all batches have the level. Raises BrokerError when nothing was taken."""
        level = level_of(request.level)
        batches = accepted_batches(payload)
        topic = self._broker.find_topic(request.name) if request.create else self._broker.topic(request.name)
        if topic is None:
            topic = self._broker.ensure_topic(request.name, by=self._admission.caller)
        parts, chosen = self._parts(topic, request.partition, batches)
        collected = _Collected(self._session, Verb.PRODUCE, correlation, parts, chosen)
        by = self._admission.caller
        for index, part in enumerate(parts):
            try:
                done = partial(collected.done, index)
                self._broker.produce(part.partition, part.batch, by=by, level=level, done=done)
            except BrokerError as error:
                collected.refused(index, error)
                return

    def stage(self, correlation: int, request: messages.Stage, payload: memoryview) -> None:
        """Store invisibly. Raises BrokerError when nothing was taken."""
        level = level_of(request.level)
        if request.writer:
            check_name("writer", request.writer)
        parts, _ = self._parts(self._broker.topic(request.name), request.partition, accepted_batches(payload))
        collected = _Collected(self._session, Verb.STAGE, correlation, parts, b"")
        write, by = (request.writer, request.number), self._admission.caller
        for index, part in enumerate(parts):
            try:
                done = partial(collected.done, index)
                self._broker.stage(
                    request.token, part.partition, part.batch, write=write, by=by, level=level, done=done
                )
            except BrokerError as error:
                collected.refused(index, error)
                return

    def publish(self, correlation: int, request: messages.Publish) -> None:
        """Make staged batches visible, once per (writer, number). Raises BrokerError when refused at once."""
        self._admission.check_tokens(request.tokens[: TOKENS_MAX + 1])
        done = partial(self._published, correlation)
        self._broker.publish(request.writer, request.number, request.tokens, by=self._admission.caller, done=done)
        self._session.owe()

    def abandon(self, correlation: int, request: messages.Abandon) -> None:
        """Drop staged batches."""
        if len(request.tokens) > TOKENS_MAX:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"too many tokens count={len(request.tokens)} limit={TOKENS_MAX}")
        self._admission.check_tokens(request.tokens)
        self._broker.abandon(request.tokens, by=self._admission.caller)
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

    def _parts(self, topic: Topic, number: int, batches: Sequence[memoryview]) -> tuple[list[Part], bytes]:
        if number != BY_KEY:
            partition = partition_of(topic, number)
            return [Part(partition, batch) for batch in batches], b""
        parts: list[Part] = []
        chosen: list[bytes] = []
        for batch in batches:
            split, numbers = split_by_key(topic, batch, self._turns)
            parts += split
            chosen.append(numbers)
        return parts, b"".join(chosen)
