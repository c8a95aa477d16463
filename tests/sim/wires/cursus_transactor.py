"""A client with Cursus transactions, which outlive connections and processes.

It repeats a commit or abort without an answer. A transaction is visible as a whole or not at all, and only after its
commit was requested. A repeated commit of a committed transaction succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from polywire.client.cursus import fields, number, numbers
from polywire.protocols.cursus.messages import decoded, enveloped, frame
from polywire.types import Level
from tests.sim.chance import Chance
from tests.sim.promises import require
from tests.sim.story import Story
from tests.sim.wires.group_ledger import Membership
from tests.sim.wires.ledger import COPIERS, PLACES, Ledger, Place, Sending, Transaction
from tests.sim.wires.lone_peer import LonePeer
from tests.sim.wires.ordered_speech import framed_end
from tests.sim.wires.transactor import COMMITS, LOOKS, MOVES, SOURCE, VALUE_SIZES

ID: Final = "cursus-copies"
ENDS: Final = 0.4  # of steps with staged records
ENDS_AGAIN: Final = 0.2  # of answered commits and aborts: repeat
GOES_ON: Final = 0.7  # of connections: continue the former transaction
STILL_OPEN: Final = "state=open"

Then = Callable[[bytes], None]
"""Handles a response without an error."""


class CursusTransactor(LonePeer):
    """Implements ``Caller``. Guards: ``_transaction`` is the open one, of ``_epoch``; nothing is added once its end was
    requested.
    """

    wire = "cursus"

    def __init__(self, ledger: Ledger, chance: Chance, story: Story) -> None:
        super().__init__(chance, story)
        self._ledger: Final = ledger
        self._then: Then | None = None
        self._epoch: int | None = None
        self._is_begun = False
        self._result = ""
        """The requested end of the open transaction."""
        self._transaction = Transaction()
        self._sequences: dict[Place, int] = {}
        self._member: Membership | None = None
        self._offset = 0

    def disconnected(self) -> None:
        """Note the loss of the connection; the transaction continues unless the outstanding request may have become
        part of it.
        """
        is_unsure = self._is_waiting and not self._result
        super().disconnected()
        self._then = None
        if is_unsure or not self._chance.happens(GOES_ON):
            self._restart_epoch()

    def started(self) -> None:
        """Note that the process may end open transactions."""
        self._ledger.goes_on(self._transaction)

    def _restart_epoch(self) -> None:
        """Begin a new epoch, which aborts the open transaction."""
        self._epoch, self._member = None, None
        self._over()

    def _over(self) -> None:
        self._is_begun, self._result, self._transaction = False, "", Transaction()

    # Requests

    def _ask(self, command: str, then: Then) -> None:
        self._count += 1
        self._story.tell("ask", f"v {self._count} {command[:60]}")
        self._then = then
        self._send(frame(enveloped("", command.encode())))

    def _as_producer(self, command: str, more: str, then: Then) -> None:
        whose = f"transactional_id={ID} producerId={self._producer} epoch={self._epoch}"
        self._ask(f"{command} {whose} {more}".rstrip(), then)

    _producer = ""

    def _step(self) -> None:
        if self._epoch is None:
            self._ask(f"INIT_PRODUCER_ID transactional_id={ID}", self._has_epoch)
        elif self._result:
            self._end()
        elif not self._is_begun:
            if self._chance.happens(LOOKS):
                self._look()
            else:
                self._as_producer("BEGIN_TXN", "", self._has_begun)
        elif self._transaction.staged and self._transaction.moved is None and self._chance.happens(MOVES):
            self._move()
        elif self._transaction.staged and self._chance.happens(ENDS):
            self._result = "commit" if self._chance.happens(COMMITS) else "abort"
            self._end()
        else:
            self._publish()

    def _has_epoch(self, body: bytes) -> None:
        reported = fields(body)
        self._producer, self._epoch = reported["producerId"], number(reported, "epoch")

    def _has_begun(self, _: bytes) -> None:
        self._is_begun = True

    def _publish(self) -> None:
        place, transaction = self._chance.one_of(PLACES), self._transaction
        value = b"v.%d:" % (self._count + 1) + b"." * self._chance.one_of(VALUE_SIZES)
        sending = Sending(place, [value], "v", self._count + 1, Level.SYNCED, transaction=transaction)
        self._ledger.sent(sending)
        sequence = self._sequences[place] = self._sequences.get(place, 0) + 1
        at = f"topic={place[0]} partition={place[1]} seqNum={sequence}"
        self._as_producer("TXN_PUBLISH", f"{at} message={value.decode()}", lambda _: transaction.staged.append(sending))

    def _move(self) -> None:
        """Commit a position as a member of the group, joining first."""
        place = self._member
        if place is None or SOURCE[1] not in place.partitions:
            self._ask(f"JOIN_GROUP topic={SOURCE[0]} group={COPIERS[1]} member=v", self._is_member)
            return
        self._offset += 1 + self._chance.below(5)
        offset, transaction = self._offset, self._transaction

        def was_moved(_: bytes) -> None:
            transaction.moved = offset

        at = f"topic={SOURCE[0]} group={COPIERS[1]} member={place.name} generation={place.generation}"
        self._as_producer("SEND_OFFSETS_TO_TXN", f"{at} P{SOURCE[1]}:{offset}", was_moved)

    def _is_member(self, body: bytes) -> None:
        reported = fields(body)
        self._member = Membership(reported["member"], number(reported, "generation"), numbers(reported, "assignments"))

    def _look(self) -> None:
        """Fetch the position: uncommitted ones must not be visible."""
        since = self._ledger.last_answered(COPIERS, SOURCE)

        def reported(body: bytes) -> None:
            self._ledger.finds(COPIERS, SOURCE, number(fields(body), "offset") or None, since)

        self._ask(f"FETCH_OFFSET topic={SOURCE[0]} partition={SOURCE[1]} group={COPIERS[1]}", reported)

    def _end(self) -> None:
        """Request the end, perhaps again."""
        transaction, is_commit = self._transaction, self._result == "commit"
        transaction.is_asked = is_commit
        is_moved = is_commit and transaction.moved is not None
        at = self._ledger.asks(COPIERS, SOURCE, transaction.moved or 0) if is_moved else -1

        def ended(_: bytes) -> None:
            self._story.tell("ended", f"v {self._count} {self._result} records={len(transaction.staged)}")
            if is_moved:
                self._story.tell("moved", f"v to {transaction.moved}")
                self._ledger.was_stored(COPIERS, SOURCE, at, Level.SYNCED)
            if is_commit:
                self._ledger.committed(transaction)
            again = self._result
            self._over()
            if self._chance.happens(ENDS_AGAIN):
                self._as_producer("END_TXN", f"result={again}", lambda body: _is_ended(body, again))

        self._as_producer("END_TXN", f"result={self._result}", ended)

    # Responses

    def received(self, data: bytes) -> None:
        self._buffer += data
        while end := framed_end(self._buffer):
            body = bytes(self._buffer[4:end])
            del self._buffer[:end]
            then, self._then, self._is_waiting = self._then, None, False
            require(then is not None, "an answer is to a request", peer="v")
            assert then is not None, "it was looked at"
            self._story.tell("answered", f"v {self._count} {decoded(body)[:60]}")
            if not body.startswith(b"ERROR:"):
                then(body)
            elif not (self._result and STILL_OPEN in decoded(body) and self._chance.happens(0.5)):
                self._restart_epoch()


def _is_ended(body: bytes, result: str) -> None:
    """Check that a repeated end has the same result."""
    found = fields(body).get("state")
    require(found == ("committed" if result == "commit" else "aborted"), "an end stays what it was", found=found)
