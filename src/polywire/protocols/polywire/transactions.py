"""Transactional ids and writers: what the broker remembers of them, listed and deleted (protocols: polywire#47-what-is-kept).

Promises: nobody is told of, or deletes, what is another user's, but administrators; a list comes in pieces. Must not know: frames,
sockets, how ownership is decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import dropwhile, islice
from typing import TYPE_CHECKING, Final, TypeVar

from polywire.errors import BrokerError
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.polywire.replies import ReplyOwner

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.protocols.polywire.auth import Admission

ENTRIES_MAX: Final = 1_000  # page §3: of one answer
US_PER_MS: Final = 1_000

Kept = messages.AskKept | messages.DeleteKept
_T = TypeVar("_T")


class TransactionRequests:
    """Requests about what the broker remembers of them."""

    __slots__ = ("_admission", "_broker", "_session")

    def __init__(self, broker: Broker, session: ReplyOwner, admission: Admission) -> None:
        self._admission: Final = admission
        self._broker: Final = broker
        self._session: Final = session

    def handle(self, verb: int, correlation: int, request: Kept) -> None:
        """Carry out one request. Raises BrokerError when it is refused at once."""
        by, done = self._admission.caller, partial(self._done, Verb(verb), correlation)
        match request:
            case messages.AskKept() if verb == Verb.TRANSACTIONS:
                self._session.answer(verb, correlation, self._transactions(request.after))
            case messages.AskKept():
                self._session.answer(verb, correlation, self._writers(request.after))
            case messages.DeleteKept() if verb == Verb.DELETE_TRANSACTION:
                self._broker.transactions.delete(request.name, by=by, done=done)
                self._session.owe()
            case messages.DeleteKept():
                self._broker.staging.delete_writer(request.name, by=by, done=done)
                self._session.owe()

    def _transactions(self, after: str) -> messages.KeptList[messages.TransactionEntry]:
        found = self._broker.transactions.visible(by=self._admission.caller)
        entries, more = _piece(dropwhile(lambda known: known.id <= after, found))
        return messages.KeptList(
            [
                messages.TransactionEntry(
                    known.id,
                    known.epoch,
                    known.state.value,
                    known.messages,
                    len(known.offsets),
                    self._idle_ms(known.at_us),
                    self._broker.access.name_of(known.owner),
                )
                for known in entries
            ],
            more,
        )

    def _writers(self, after: str) -> messages.KeptList[messages.WriterEntry]:
        found = self._broker.staging.writers(by=self._admission.caller)
        entries, more = _piece(dropwhile(lambda known: known.writer <= after, found))
        return messages.KeptList(
            [
                messages.WriterEntry(
                    known.writer, known.number, self._idle_ms(known.at_us), self._broker.access.name_of(known.owner)
                )
                for known in entries
            ],
            more,
        )

    def _idle_ms(self, at_us: int) -> int:
        return max(self._broker.elapsed.now_us() - at_us, 0) // US_PER_MS

    def _done(self, verb: Verb, correlation: int, _: int, error: BrokerError | None) -> None:
        if error is None:
            self._session.settle(verb, correlation, Head())
        else:
            self._session.settle_error(verb, correlation, error)


def _piece(found: Iterable[_T]) -> tuple[list[_T], bool]:
    """What one answer holds, and whether there is more."""
    entries = list(islice(found, ENTRIES_MAX + 1))
    return entries[:ENTRIES_MAX], len(entries) > ENTRIES_MAX
