"""Requests of Iggy 0.12 that wait for messages (held requests), without delaying later ones of their connection.

* A held request gets one reply, at the latest when its waiting time has passed.
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
from polywire.protocols.iggy.messages import Refused
from polywire.protocols.iggy.reader import Reader
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
"""A partition, and the offset that must become readable before the request is tried again."""
Attempt = Callable[[Answer, Reader, bool], Iterable[Offset] | None]
"""Tries to execute a request. It replies, or returns the offsets to wait for.

The last argument is true for the last attempt, which must reply. Raises Refused or BrokerError.
"""


def check_wait(wait_us: int, timeout_us: int) -> None:
    if wait_us > WAIT_US_MAX or not 0 < timeout_us <= TIMEOUT_US_MAX or (wait_us and timeout_us < wait_us + MARGIN_US):
        raise Refused(errors.UNKNOWN_COMMAND)


class HeldRequests:
    """Requests of one connection that wait for messages. Implements ``ReplyOwner`` for their replies.

    Attributes:
        waits: number of partitions for which the requests wait.
    """

    __slots__ = ("_output", "_session", "_slots", "waits")

    def __init__(self, session: ReplyOwner, output: Output) -> None:
        self._session: Final = session
        self._output: Final = output
        self._slots: Final[dict[int, Answer]] = {}
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
        """Whether no read may begin: the client receives too slowly, or too many reads are in progress."""
        reading = sum(answer.cancel is None for answer in self._slots.values())
        return reading > READING_MAX or self._output.backlog > self._output.backlog_max

    def slot_filled(self) -> None:
        for number in [number for number, answer in self._slots.items() if answer.parts is not None]:
            answer = self._slots.pop(number)
            assert answer.parts is not None, "an answered request has parts"
            self._output.write_many(answer.parts, answer.released)

    def end(self) -> None:
        self._session.end()

    def fail(self, error: PeerError) -> None:
        self._session.fail(error)

    def store_reply(self, head: vsr.Head, reply: bytes) -> None:
        pass

    # Holding

    def open(self, dialect: Dialect, head: vsr.Head, number: int) -> Answer | None:
        """Return a reply for a new request; None if too many requests wait, or one has the same number."""
        if len(self._slots) >= HELD_MAX or head.number in self._slots:
            return None
        answer = Answer(self, dialect, head, number=number)
        self._slots[head.number] = answer
        return answer

    def cancel(self, number: int) -> None:
        """Drop a request that the client has cancelled. It gets no reply."""
        answer = self._slots.get(number)
        if answer is not None and answer.cancel is not None:
            _drop(self._slots.pop(number))

    def drop(self) -> None:
        while self._slots:
            _drop(self._slots.popitem()[1])


def _drop(answer: Answer) -> None:
    cancel, answer.cancel = answer.cancel, None
    if cancel is not None:
        cancel()


class Holding:
    """A request that is tried again for every new message, until it has a result or its waiting time has passed.

    After each attempt it pauses for ten times the attempt's duration. Without pauses, a request for many partitions
    would try all of them for every message.
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
        """Try the request.

        ``ticket`` is the number of the wait that has ended. If another wait has begun since, do nothing.
        """
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
        """Repeat an attempt that has raised ``pending``."""
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
        """Wait for messages in all partitions of the request. If a partition was deleted, try again immediately."""
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
