"""Held requests of protocol 0.12: polls that wait for messages and are answered out of order.

* A held request does not delay later requests of its connection.
* It is answered once, at the latest when its waiting time has passed. Its waiters and its timer end with it.
* The number of held requests per connection is limited, and so is the waiting time.

(spec: iggy#d4-held-polls)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from polywire.broker.api import Pending
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, PeerError
from polywire.log.base import Handle
from polywire.protocols.iggy import errors, vsr
from polywire.protocols.iggy.context import IggyBroker
from polywire.protocols.iggy.dialect import Dialect
from polywire.protocols.iggy.messages import Reader, Refused
from polywire.protocols.iggy.reply_slots import Answer, ReplyOwner
from polywire.protocols.runtime.session import Output

HELD_MAX: Final = 64  # held requests per connection; a client needs one for each partition, or one for all
WAITS_MAX: Final = 4096  # limit for the partitions for which all requests of one connection wait; they take some 1 MiB
# limit for the requests of one connection that read at the same time; each may need a buffer for a whole reply
READING_MAX: Final = 4
CLOGGED_S: Final = 0.02  # delay of the next attempt if the client reads too slowly or too many reads are in progress
PAUSE_RATIO: Final = 10  # see ``Holding``
WAIT_US_MAX: Final = 600_000_000  # the longest wait that the protocol allows
TIMEOUT_US_MAX: Final = 630_000_000  # the longest client timeout that the protocol allows
MARGIN_US: Final = 1_000_000  # time between the end of a wait and the client's timeout

Offset = tuple[Partition, int]
"""A partition, and the offset that must become readable before the request is attempted again."""
Attempt = Callable[[Answer, Reader, bool], Iterable[Offset] | None]
"""Function that answers a request, or returns the offsets to wait for.

The last argument is true for the last attempt, which must answer. Raises Refused, BrokerError.
"""


def check_wait(wait_us: int, timeout_us: int) -> None:
    if wait_us > WAIT_US_MAX or not 0 < timeout_us <= TIMEOUT_US_MAX or (wait_us and timeout_us < wait_us + MARGIN_US):
        raise Refused(errors.UNKNOWN_COMMAND)


class HeldRequests:
    """The held requests of one connection, by request number. It owns their replies.

    ``waits`` is the number of partitions for which the requests wait.
    """

    __slots__ = ("_answers", "_output", "_session", "waits")

    def __init__(self, session: ReplyOwner, output: Output) -> None:
        self._session: Final = session
        self._output: Final = output
        self._answers: Final[dict[int, Answer]] = {}
        self.waits = 0

    # Owner of the answers

    @property
    def broker(self) -> IggyBroker:
        """The broker. Its event loop and clock are used for replies that take long to build."""
        return self._session.broker

    @property
    def closed(self) -> bool:
        return self._session.closed

    @property
    def is_clogged(self) -> bool:
        """Return whether no read may begin, because the client reads too slowly or too many reads are in progress."""
        reading = sum(answer.cancel is None for answer in self._answers.values())
        return reading > READING_MAX or self._output.backlog > self._output.backlog_max

    def slot_filled(self) -> None:
        for number in [number for number, answer in self._answers.items() if answer.parts is not None]:
            answer = self._answers.pop(number)
            assert answer.parts is not None, "an answered request has parts"
            self._output.write_many(answer.parts, answer.released)

    def end(self) -> None:
        self._session.end()

    def fail(self, error: PeerError) -> None:
        self._session.fail(error)

    def keep(self, head: vsr.Head, reply: bytes) -> None:
        """A held request changes no state, so its reply is not stored for repeated requests."""

    # Holding

    def open(self, dialect: Dialect, head: vsr.Head, number: int) -> Answer | None:
        """Return the reply slot for a new request.

        Returns None if too many requests are held, or one has the same number.
        """
        if len(self._answers) >= HELD_MAX or head.number in self._answers:
            return None
        answer = Answer(self, dialect, head, number=number)
        self._answers[head.number] = answer
        return answer

    def cancel(self, number: int) -> None:
        """Drop a waiting request that the client has cancelled. It gets no reply."""
        answer = self._answers.get(number)
        if answer is not None and answer.cancel is not None:
            _drop(self._answers.pop(number))

    def drop(self) -> None:
        while self._answers:
            _drop(self._answers.popitem()[1])


def _drop(answer: Answer) -> None:
    cancel, answer.cancel = answer.cancel, None
    if cancel is not None:
        cancel()


class Holding:
    """One request that is attempted again for every new message, until it is answered or its waiting time is over.

    After an attempt without a result, it pauses for ten times the attempt's duration. Otherwise, a request for many
    partitions would cost a full attempt per message.
    """

    __slots__ = ("_answer", "_attempt", "_broker", "_owner", "_payload", "_stops", "_ticket", "_until", "_waits")

    def __init__(self, answer: Answer, owner: HeldRequests, payload: bytes, wait_us: int, attempt: Attempt) -> None:
        self._answer: Final = answer
        self._owner: Final = owner
        self._payload: Final = payload
        self._attempt: Final = attempt
        self._broker: Final = answer.session.broker
        self._until: Final = self._broker.clock.monotonic() + wait_us / 1_000_000
        self._stops: list[Handle] = []
        self._ticket = 0
        self._waits = 0

    def run(self, ticket: int = 0) -> None:
        """Reply to the request, or wait. ``ticket`` identifies the wait that has ended."""
        if ticket != self._ticket:
            return
        self._stop_waiting()
        if self._owner.is_clogged:
            self._answer.cancel = self._stop_waiting
            self._stops.append(self._broker.loop.call_later(CLOGGED_S, self.run, self._ticket))
            return
        self._run(ticket)

    def _run(self, ticket: int) -> None:
        now = self._broker.clock.monotonic()
        is_last = now >= self._until
        try:
            offsets = self._attempt(self._answer, Reader(memoryview(self._payload), self._answer.dialect), is_last)
        except BrokerError as error:
            self._answer.refuse(error)
            return
        except Pending as pending:
            self._answer.cancel = self._stop_waiting
            self._stops.append(pending.then(partial(self._repeat, ticket, self._ticket, pending)))
            return
        if offsets is not None:
            took = self._broker.clock.monotonic() - now
            self._wait(list(offsets), PAUSE_RATIO * took if ticket else 0.0)

    def _repeat(self, ticket: int, expected: int, pending: Pending) -> None:
        """Repeat an attempt for which another process had to answer."""
        if expected != self._ticket:
            return
        self._stop_waiting()
        with pending:
            self._run(ticket)

    def _wait(self, offsets: list[Offset], pause_s: float) -> None:
        if self._owner.waits + len(offsets) > WAITS_MAX:
            self._answer.status(errors.HELD_TOO_MANY)
            return
        self._waits = len(offsets)
        self._owner.waits += self._waits
        self._answer.cancel = self._stop_waiting
        loop, ticket = self._broker.loop, self._ticket
        left_s = max(self._until - self._broker.clock.monotonic(), 0.0)
        self._stops.append(loop.call_later(left_s, self.run, ticket))
        if pause_s:
            self._stops.append(loop.call_later(min(pause_s, left_s), self._listen, offsets))
        else:
            self._listen(offsets)

    def _listen(self, offsets: list[Offset]) -> None:
        """Wait for all partitions. A deleted partition ends the wait at once."""
        loop, ticket = self._broker.loop, self._ticket

        def wake() -> None:
            loop.call_soon(self.run, ticket)

        for partition, offset in offsets:
            try:
                self._stops.append(self._broker.wait(partition, offset, wake))
            except BrokerError:
                wake()

    def _stop_waiting(self) -> None:
        self._ticket += 1
        self._answer.cancel = None
        self._owner.waits -= self._waits
        self._waits = 0
        stops, self._stops = self._stops, []
        for stop in stops:
            stop.cancel()
