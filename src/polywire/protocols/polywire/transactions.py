"""Requests that list and delete transactional ids and writers (spec: polywire#transactions-and-writers).

Users can list and delete only those that they own; administrators can list and delete all.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import dropwhile, islice
from typing import Final, TypeVar

from polywire.errors import BrokerError
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.polywire.replies import ReplyOwner

ENTRIES_MAX: Final = 1_000  # entries in one response (spec: polywire#limits)
US_PER_MS: Final = 1_000

_T = TypeVar("_T")


def list_transactions(session: ReplyOwner, correlation: int, request: messages.ListEntries, _: memoryview) -> None:
    session.answer(Verb.TRANSACTIONS, correlation, _transactions(session, request.after))


def delete_transaction(session: ReplyOwner, correlation: int, request: messages.DeleteEntry, _: memoryview) -> None:
    done = partial(_done, session, Verb.DELETE_TRANSACTION, correlation)
    session.broker.transactions.delete(request.name, by=session.admission.caller, done=done)
    session.owe()


def list_writers(session: ReplyOwner, correlation: int, request: messages.ListEntries, _: memoryview) -> None:
    session.answer(Verb.WRITERS, correlation, _writers(session, request.after))


def delete_writer(session: ReplyOwner, correlation: int, request: messages.DeleteEntry, _: memoryview) -> None:
    done = partial(_done, session, Verb.DELETE_WRITER, correlation)
    session.broker.staging.delete_writer(request.name, by=session.admission.caller, done=done)
    session.owe()


def _transactions(session: ReplyOwner, after: str) -> messages.EntryList[messages.TransactionEntry]:
    found = session.broker.transactions.visible(by=session.admission.caller)
    entries, more = _page(dropwhile(lambda known: known.id <= after, found))
    return messages.EntryList(
        [
            messages.TransactionEntry(
                known.id,
                known.epoch,
                known.phase.value,
                known.messages,
                known.position_count,
                _idle_ms(session, known.at_us),
                session.broker.access.name_of(known.owner),
            )
            for known in entries
        ],
        more,
    )


def _writers(session: ReplyOwner, after: str) -> messages.EntryList[messages.WriterEntry]:
    found = session.broker.staging.writers(by=session.admission.caller)
    entries, more = _page(dropwhile(lambda known: known.writer <= after, found))
    return messages.EntryList(
        [
            messages.WriterEntry(
                known.writer,
                known.number,
                _idle_ms(session, known.at_us),
                session.broker.access.name_of(known.owner),
                known.epoch,
            )
            for known in entries
        ],
        more,
    )


def _idle_ms(session: ReplyOwner, at_us: int) -> int:
    return max(session.broker.elapsed.now_us() - at_us, 0) // US_PER_MS


def _done(session: ReplyOwner, verb: Verb, correlation: int, result: int | BrokerError) -> None:
    if isinstance(result, BrokerError):
        session.respond_error(verb, correlation, result)
    else:
        session.respond(verb, correlation, Head())


def _page(found: Iterable[_T]) -> tuple[list[_T], bool]:
    entries = list(islice(found, ENTRIES_MAX + 1))
    return entries[:ENTRIES_MAX], len(entries) > ENTRIES_MAX
