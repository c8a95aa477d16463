"""PRODUCE, STAGE, PUBLISH, BEGIN_EPOCH and ABANDON of the `polywire` protocol (spec: polywire#produce, polywire#staged-produce).

* Nothing is stored before all batches of the request are validated.
* The response is sent when all batches of the request have reached its level, or one has failed.

A request that takes longer than a time slice continues in further slices, between requests of other connections. Its
own connection waits meanwhile. Such a request is not atomic: if the broker stops or rejects a batch, the batches before
it are stored. If only the connection closes, the remaining batches are stored, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol

from polywire.broker.owners import LINKS_CALLER
from polywire.broker.sliced import Steps
from polywire.broker.staging import no_offsets, portions
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.log.base import Completion
from polywire.protocols.polywire import groups, messages
from polywire.protocols.polywire.arguments import check_name, level_of, partition_of
from polywire.protocols.polywire.batches import Part, accepted_batches, split_by_key
from polywire.protocols.polywire.messages import BY_KEY, Head, Verb
from polywire.protocols.polywire.produce_runs import append_run
from polywire.protocols.polywire.replies import ReplyOwner
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.protocols.runtime.slices import Slices
from polywire.types import Level

if TYPE_CHECKING:
    from polywire.broker.staging import PublishAnswer
    from polywire.broker.topics import Topic

TOKENS_MAX: Final = 10_000  # tokens of one publish (spec: polywire#limits)


class _BatchesResponse:
    """The response to a request with several batches.

    It is sent after ``end`` and all completions that ``expect`` has returned were called.
    """

    __slots__ = ("_correlation", "_counts", "_error", "_offsets", "_outstanding", "_session", "_verb", "chosen")

    def __init__(self, session: ReplyOwner, verb: Verb, correlation: int) -> None:
        self._session: Final = session
        self._verb: Final = verb
        self._correlation: Final = correlation
        self._counts: Final[list[tuple[int, int]]] = []
        self._offsets: Final[list[int]] = []
        self._outstanding = 1
        self._error: BrokerError | None = None
        self.chosen: Final[list[bytes]] = []
        """The partition of each record, if the broker chose it."""

    def expect(self, part: Part) -> Completion[int]:
        """Return the completion for a batch."""
        # read the count now, because the receive buffer may have other content when the response is sent
        self._counts.append((part.partition.number, part.record_count))
        self._offsets.append(-1)
        self._outstanding += 1
        return partial(self._done, len(self._offsets) - 1)

    def _done(self, index: int, offset: int | BrokerError) -> None:
        if isinstance(offset, BrokerError):
            self.end(offset)
        else:
            self._offsets[index] = offset
            self.end(None)

    def end(self, result: BrokerError | None) -> None:
        """Record the result of the request, after its last batch was passed to the broker."""
        self._error = self._error or result
        self._outstanding -= 1
        if self._outstanding:
            return
        if self._error is not None:
            self._session.respond_error(self._verb, self._correlation, self._error)
            return
        if self._verb is Verb.STAGE:
            staged = messages.Staged(sum([record_count for _, record_count in self._counts]))
            self._session.respond(self._verb, self._correlation, staged)
            return
        appended = [
            messages.Appended(number, offset, record_count)
            for (number, record_count), offset in zip(self._counts, self._offsets, strict=True)
        ]
        self._session.respond(self._verb, self._correlation, messages.Produced(appended), b"".join(self.chosen))


class _BatchResponse:
    """The response to a request with one batch, the usual case. ``done`` is called when the batch is stored."""

    __slots__ = ("_correlation", "_partition", "_record_count", "_session")

    def __init__(self, session: ReplyOwner, correlation: int, part: Part) -> None:
        self._session: Final = session
        self._correlation: Final = correlation
        self._partition: Final = part.partition.number
        # Read it now, because the receive buffer may have other content when the response is sent.
        self._record_count: Final = part.record_count

    def done(self, offset: int | BrokerError) -> None:
        if isinstance(offset, BrokerError):
            self._session.respond_error(Verb.PRODUCE, self._correlation, offset)
            return
        appended = messages.Appended(self._partition, offset, self._record_count)
        self._session.respond(Verb.PRODUCE, self._correlation, messages.Produced([appended]))


class RunOwner(ReplyOwner, Protocol):
    requests: int

    def owe(self, count: int = 1) -> None: ...

    def respond_run(self, answers: bytes, count: int) -> None: ...


class _PublishResponse:
    """The response to PUBLISH. It is sent when ``done`` and ``end`` were called."""

    __slots__ = ("_answer", "_correlation", "_end", "_session")

    def __init__(self, session: ReplyOwner, correlation: int) -> None:
        self._session: Final = session
        self._correlation: Final = correlation
        self._end = False
        self._answer: PublishAnswer | BrokerError | None = None

    def done(self, answer: PublishAnswer | BrokerError) -> None:
        self._answer = answer
        self._respond()

    def end(self, result: BrokerError | None) -> None:
        """Record that the session can accept requests again, and the error if the publish was rejected."""
        self._end = True
        self._answer = self._answer or result
        self._respond()

    def _respond(self) -> None:
        answer = self._answer
        if answer is None or not self._end:
            return
        if isinstance(answer, BrokerError):
            self._session.respond_error(Verb.PUBLISH, self._correlation, answer)
            return
        ranges = [
            messages.PublishedRange(r.partition.topic.name.full, r.partition.number, r.first_offset, r.next_offset)
            for r in answer.ranges
        ]
        self._session.respond(Verb.PUBLISH, self._correlation, messages.Published(answer.duplicate, ranges))


def produce(session: ReplyOwner, correlation: int, request: messages.Produce, payload: memoryview) -> None:
    """PRODUCE: append batches. If BrokerError is raised, nothing is stored."""
    level, by = level_of(request.level), session.admission.caller
    name, create, broker = request.name, request.create, session.broker
    topic = broker.find_topic(name) if create else broker.topic(name)

    def made() -> Topic:
        return broker.ensure_topic(name, by=by) if topic is None else topic

    def append(part: Part, done: Completion[int]) -> None:
        broker.produce(part.partition, part.batch, by=by, level=level, done=done)

    batches = accepted_batches(payload, by_key=request.partition == BY_KEY)
    first = next(batches)
    if len(first) == len(payload) and request.partition != BY_KEY:
        part = Part(partition_of(made(), request.partition), first)
        append(part, _BatchResponse(session, correlation, part).done)
        session.owe()
        return
    response = _BatchesResponse(session, Verb.PRODUCE, correlation)
    steps = _append_all(session, response, made(), request.partition, chain([first], batches), append)
    _begin(session, steps, response.end)


def produce_run(session: RunOwner, request: messages.Produce, frames: memoryview) -> bool:
    """Execute consecutive PRODUCE requests by appending one batch. Each request gets a response.

    If nothing was appended, returns False or raises BrokerError. Each request must then be executed separately.
    """
    if request.partition == BY_KEY:
        return False
    level, by = level_of(request.level), session.admission.caller
    topic = session.broker.find_topic(request.name)
    if topic is None:
        return False
    return append_run(session, partition_of(topic, request.partition), frames, level=level, by=by)


def stage(session: ReplyOwner, correlation: int, request: messages.Stage, payload: memoryview) -> None:
    """STAGE: store batches that are invisible until PUBLISH. If BrokerError is raised, nothing is stored."""
    level, by = level_of(request.level), session.admission.caller
    if request.writer:
        check_name("writer", request.writer)
    token, write, broker = request.token, (request.writer, request.number), session.broker
    topic = broker.topic(request.name)

    def stage(part: Part, done: Completion[int]) -> None:
        broker.stage(token, part.partition, part.batch, write=write, by=by, level=level, done=done)

    response = _BatchesResponse(session, Verb.STAGE, correlation)
    is_link = by.owner == LINKS_CALLER.owner
    accepted = accepted_batches(payload, by_key=request.partition == BY_KEY, is_link=is_link)
    steps = _append_all(session, response, topic, request.partition, accepted, stage)
    _begin(session, steps, response.end)


def _append_all(
    session: ReplyOwner,
    response: _BatchesResponse,
    topic: Topic,
    number: int,
    accepted: Iterator[memoryview],
    take: Callable[[Part, Completion[int]], None],
) -> Iterator[None]:
    """Validate all batches, then pass them to ``take``. Yields after each step.

    If BrokerError is raised, nothing is stored.
    """
    batches = []
    for batch in accepted:
        batches.append(batch)
        yield
    for part in _parts(session, topic, number, batches, response.chosen):
        if part is not None:
            done = response.expect(part)
            try:
                take(part, done)
            except BrokerError as error:
                done(error)
                return
        yield


def _parts(
    session: ReplyOwner, topic: Topic, number: int, batches: Sequence[memoryview], chosen: list[bytes]
) -> Iterator[Part | None]:
    if number != BY_KEY:
        partition = partition_of(topic, number)
        return map(partial(Part, partition), batches)
    return chain.from_iterable(split_by_key(topic, batch, session.round_robin, chosen) for batch in batches)


def _begin(session: ReplyOwner, steps: Iterator[None], end: Completion[None]) -> None:
    """Run the steps now for a limited time, and the rest in later passes of the loop.

    Then call ``end``, which responds. If BrokerError is raised, nothing is stored.
    """
    if _run_at_once(session, steps):
        session.owe()
        end(None)
    else:
        session.hold()
        Slices(session.broker, steps, partial(_ended, session, end, session.pin()))


def _run_at_once(session: ReplyOwner, steps: Iterator[None]) -> bool:
    """Run steps for a limited time. Return whether it was enough for all steps."""
    now = session.broker.clock.monotonic
    until = now() + QUANTUM_S
    return not any(now() >= until for _ in steps)


def _ended(
    session: ReplyOwner,
    end: Completion[None],
    unpin: Callable[[], None],
    result: list[None] | BrokerError,
) -> None:
    """Call ``end`` with the result of a request, and release its memory.

    The request's bytes stay in memory until its batches are written, because the batches may refer to them.
    """
    ended = result if isinstance(result, BrokerError) else None

    def end_when_written(_: int | BrokerError) -> None:
        session.broker.loop.call_soon(_end, session, end, unpin, ended)

    try:
        session.broker.settle(Level.MEMORY, end_when_written)
    except BrokerError as error:  # the log has stopped and does not access the bytes any more
        end_when_written(error)


def _end(session: ReplyOwner, end: Completion[None], unpin: Callable[[], None], result: BrokerError | None) -> None:
    unpin()
    session.release()
    end(result)


def publish(session: ReplyOwner, correlation: int, request: messages.Publish, _: memoryview) -> None:
    """PUBLISH: make batches that STAGE has stored visible, once for each writer and sequence number.

    Raises BrokerError if it is rejected immediately.
    """
    answer, work = _PublishResponse(session, correlation), session.broker.publish_work
    steps = _publish(session, request, answer)
    if work.is_idle and _run_at_once(session, steps):
        session.owe()
        answer.end(None)
    else:
        session.hold()
        work.put(_publish_in_turn(session, steps, answer))


def _publish(session: ReplyOwner, request: messages.Publish, answer: _PublishResponse) -> Iterator[None]:
    """Check permissions for the tokens, then publish.

    Yields after some tokens. If BrokerError is raised, nothing is published.
    """
    offsets = partial(groups.checked_offsets, session, request.groups) if request.groups else no_offsets
    if request.groups:
        groups.check_offset_count(session.broker, request.groups)
        session.admission.check_offsets({group.name for group in request.groups})
    for portion in portions(request.tokens[: TOKENS_MAX + 1]):
        session.admission.check_tokens(portion)
        yield
    by = session.admission.caller
    yield from session.broker.publishing(
        request.writer, request.number, request.tokens, epoch=request.epoch, offsets=offsets, by=by, done=answer.done
    )


def _publish_in_turn(session: ReplyOwner, steps: Iterator[None], answer: _PublishResponse) -> Steps:
    result: BrokerError | None = None
    try:
        for _ in steps:
            yield False
    except BrokerError as error:
        result = error
    session.broker.loop.call_soon(_end, session, answer.end, _nothing, result)


def begin_epoch(session: ReplyOwner, correlation: int, request: messages.BeginEpoch, _: memoryview) -> None:
    """BEGIN_EPOCH: begin an epoch of a writer, which fences earlier ones. Raises BrokerError if it is rejected."""
    epochs: list[int] = []

    def done(result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            session.respond_error(Verb.BEGIN_EPOCH, correlation, result)
        else:
            session.respond(Verb.BEGIN_EPOCH, correlation, messages.EpochBegun(epochs[0]))

    staging, by = session.broker.staging, session.admission.caller
    epochs.append(staging.begin_epoch(request.writer, epoch_min=request.epoch_min, by=by, done=done))
    session.owe()


def abandon(session: ReplyOwner, correlation: int, request: messages.Abandon, _: memoryview) -> None:
    """ABANDON: delete batches that were not published. Raises BrokerError if it is rejected immediately."""
    if len(request.tokens) > TOKENS_MAX:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"too many tokens count={len(request.tokens)} limit={TOKENS_MAX}")
    _begin(session, _abandon(session, request.tokens), partial(_abandoned, session, correlation))


def _abandon(session: ReplyOwner, tokens: Sequence[bytes]) -> Iterator[None]:
    """Check permissions for all tokens, then delete their batches. Yields after some tokens.

    Raises BrokerError if nothing was deleted, or if another user has stored a batch under one of the remaining tokens
    meanwhile.
    """
    by = session.admission.caller
    for portion in portions(tokens):
        session.admission.check_tokens(portion)
        session.broker.staging.check_tokens(portion, by=by)
        yield
    for portion in portions(tokens):
        session.broker.abandon(portion, by=by)
        yield


def _abandoned(session: ReplyOwner, correlation: int, result: BrokerError | None) -> None:
    if result is None:
        session.respond(Verb.ABANDON, correlation, Head())
    else:
        session.respond_error(Verb.ABANDON, correlation, result)


def _nothing() -> None:
    pass
