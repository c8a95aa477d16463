"""A client that stages batches over the `polywire` protocol and publishes them under a number.

It repeats a publish until an answer. A publication is visible as a whole or not at all, once; abandoned batches never
are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from polywire.errors import Busy, Missing
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import (
    ERROR,
    MAGIC,
    PREFIX_BYTES,
    decode_answer,
    decode_answer_prefix,
    encode_head,
)
from polywire.protocols.polywire.errors import KINDS
from polywire.protocols.polywire.messages import Failure, Head, Verb
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level
from tests.sim.chance import Chance
from tests.sim.promises import require
from tests.sim.story import Story
from tests.sim.wires.ledger import PLACES, Ledger, Sending, Transaction
from tests.sim.wires.lone_peer import LonePeer
from tests.sim.wires.network import Link
from tests.sim.wires.transactor import VALUE_SIZES

WRITER: Final = "writer"
ENDS: Final = 0.35  # of steps with staged batches
ABANDONS: Final = 0.2  # of those
PUBLISHES_AGAIN: Final = 0.1  # of answered publications: repeat

Then = Callable[[bytes, bool], None]
"""Handles a response's head, and whether it is an error."""


class Publisher(LonePeer):
    """Implements ``Caller``. Guards: ``_open`` has what is staged under ``_number``."""

    wire = "polywire"

    def __init__(self, ledger: Ledger, chance: Chance, story: Story) -> None:
        super().__init__(chance, story)
        self._ledger: Final = ledger
        self._then: Then | None = None
        self._is_greeted = False
        self._begin(1)

    def _begin(self, number: int) -> None:
        """Begin the next number, with nothing staged."""
        self._number = number
        self._open = Transaction()
        self._tokens: list[bytes] = []

    def connected(self, link: Link) -> None:
        """Note a connection; outstanding requests of the last one may have been executed."""
        super().connected(link)
        self._unsent += MAGIC
        self.push()

    def disconnected(self) -> None:
        super().disconnected()
        self._then = None
        self._is_greeted = False

    def started(self) -> None:
        """Note that the process may publish what is staged."""
        self._ledger.goes_on(self._open)

    def _ask(self, verb: Verb, head: Head, then: Then, payload: bytes = b"") -> None:
        self._count += 1
        self._story.tell("ask", f"u {self._count} {verb.name} {self._number}")
        self._then = then
        self._send(encode_head(verb, self._count, head, payload_bytes=len(payload)) + payload)

    def _step(self) -> None:
        if self._open.is_asked:
            self._publish()
        elif self._tokens and self._chance.happens(ENDS):
            if self._chance.happens(ABANDONS):
                self._abandon()
            else:
                self._publish()
        else:
            self._stage()

    def _stage(self) -> None:
        place, token, transaction = self._chance.one_of(PLACES), self._chance.token(16), self._open
        values = [
            b"u.%d.%d:" % (self._count + 1, index) + b"." * self._chance.one_of(VALUE_SIZES)
            for index in range(1 + self._chance.below(3))
        ]
        sending = Sending(place, values, "u", self._count + 1, Level.SYNCED, transaction=transaction)
        self._ledger.sent(sending)

        def staged(_: bytes, is_refused: bool) -> None:
            if not is_refused:
                transaction.staged.append(sending)
                self._tokens.append(token)

        level = self._chance.one_of((Level.MEMORY, Level.WRITTEN, Level.SYNCED))
        head = messages.Stage(token, *place, level=int(level), writer=WRITER, number=self._number)
        self._ask(Verb.STAGE, head, staged, bytes(from_records([Record(value) for value in values])))

    def _publish(self) -> None:
        """Request the publication, perhaps again."""
        transaction, is_first = self._open, not self._open.is_asked
        transaction.is_asked = True

        def answered(head: bytes, is_refused: bool) -> None:
            if is_refused:
                self._refused(decode_answer(head, Failure), transaction, is_first=is_first)
                return
            reported = decode_answer(head, messages.Published)
            require(not (is_first and reported.duplicate), "a number is published once", number=self._number)
            self._story.tell("published", f"u {self._number} batches={len(transaction.staged)}")
            self._ledger.committed(transaction)
            again = messages.Publish(WRITER, self._number, self._tokens)
            self._begin(self._number + 1)
            if self._chance.happens(PUBLISHES_AGAIN):
                self._ask(Verb.PUBLISH, again, _is_duplicate)

        self._ask(Verb.PUBLISH, messages.Publish(WRITER, self._number, self._tokens), answered)

    def _refused(self, failure: Failure, transaction: Transaction, *, is_first: bool) -> None:
        """Handle a refusal: it may succeed later, unless the batches are not staged any more."""
        if failure.kind == KINDS[Missing]:
            for sending in transaction.staged:
                sending.is_refused = True
            self._begin(self._number + 1)
        elif failure.kind == KINDS[Busy] and is_first and self._chance.happens(0.5):
            transaction.is_asked = False  # nothing was published: more may be staged

    def _abandon(self) -> None:
        """Abandon: nothing of it may become visible, answered or not."""
        tokens, number = self._tokens, self._number
        for sending in self._open.staged:
            sending.is_refused = True
        self._begin(number)
        self._ask(Verb.ABANDON, messages.Abandon(tokens), lambda *_: None)

    def received(self, data: bytes) -> None:
        self._buffer += data
        if not self._is_greeted and len(self._buffer) >= len(MAGIC):
            del self._buffer[: len(MAGIC)]
            self._is_greeted = True
        while self._is_greeted and len(self._buffer) >= PREFIX_BYTES:
            prefix = decode_answer_prefix(self._buffer)
            end = PREFIX_BYTES + prefix.length
            if len(self._buffer) < end:
                return
            head = bytes(self._buffer[PREFIX_BYTES : PREFIX_BYTES + prefix.head_bytes])
            del self._buffer[:end]
            if prefix.verb != Verb.HELLO:
                self._answered(prefix.correlation, head, is_refused=bool(prefix.flags & ERROR))

    def _answered(self, number: int, head: bytes, *, is_refused: bool) -> None:
        then, self._then, self._is_waiting = self._then, None, False
        require(then is not None and number == self._count, "an answer is to a request", peer="u", number=number)
        assert then is not None, "it was looked at"
        self._story.tell("answered", f"u {number} {decode_answer(head, Failure).message if is_refused else 'OK'}")
        then(head, is_refused)


def _is_duplicate(head: bytes, is_refused: bool) -> None:
    require(is_refused or decode_answer(head, messages.Published).duplicate, "a number is published once")
