"""Answers that become known piece by piece: many topics, or many partitions, of one request.

Promises: an answer is filled once, when everything that it waits for is known. Must not know: what is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from polywire.errors import BrokerError
from polywire.protocols.kafka.codec import encode_response_entries, encode_response_entry
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.messages import WireError
from polywire.protocols.kafka.peer import Reply
from polywire.protocols.runtime.slices import Slices

if TYPE_CHECKING:
    from polywire.protocols.kafka.context import KafkaBroker

AT_ONCE_MAX: Final = 64  # entries that are made without a pause
PARTITIONS_PER_STEP: Final = 16  # partitions of one entry that are made without a pause


class Gathering:
    """Invariant: the answer is filled when ``settled`` was called once more than ``expect``."""

    __slots__ = ("_answer", "_body", "_broker", "_cancels", "_is_over", "_left")

    def __init__(self, answer: Reply, body: Any) -> None:
        self._answer: Final = answer
        self._body: Final = body
        self._broker: KafkaBroker | None = None  # set when the answer is wide
        self._cancels: list[Callable[[], None]] = []
        self._left = 1
        self._is_over = False  # nobody waits for the answer any more
        answer.cancel = self._cancel

    def on_cancel(self, cancel: Callable[[], None]) -> None:
        """Have this called when the connection ends before everything is known."""
        self._cancels.append(cancel)

    def _cancel(self) -> None:
        self._is_over = True
        for cancel in self._cancels:
            cancel()

    def ask(self, broker: KafkaBroker, entries: Iterator[None], *, at_once: int = AT_ONCE_MAX) -> None:
        """Ask for all that the answer tells of, an entry in each step: at once where they are few, else with others' requests in between
        until the connection ends."""
        for _ in zip(range(at_once), entries, strict=False):
            pass
        if next(entries, _END) is _END:
            self.settled()
            return
        self._broker = broker

        def done(asked: list[None] | BrokerError) -> None:
            assert not isinstance(asked, BrokerError), "entries have errors of their own"
            self.settled()

        self.on_cancel(Slices(broker, entries, done).cancel)

    def expect(self) -> None:
        """One more thing has to become known."""
        self._left += 1

    def settled(self) -> None:
        """One of them is known, or all were asked for."""
        self._left -= 1
        if self._left:
            return
        if self._broker is None:
            self._answer.ok(self._body)
        elif not self._is_over:
            encode_in_slices(self._broker, self._answer, self._body)

    def changed(self, entry: Any, result: int | BrokerError) -> None:
        """A completion of the broker's: what an entry of the answer asked for was done, or not."""
        if isinstance(result, BrokerError):
            refuse(entry, result)
        self.settled()


def refuse(entry: Any, error: BrokerError, code: WireError | None = None) -> None:
    """An entry of an answer says that it failed, and why where its version has words for that."""
    entry.error = wire_error(error) if code is None else code
    if hasattr(entry, "message"):
        entry.message = error.message


def answer_in_slices(
    broker: KafkaBroker,
    answer: Reply,
    entries: Iterator[Any],
    made: Callable[[list[Any]], Any],
    *,
    at_once: int = AT_ONCE_MAX,
) -> Any:
    """The body that ``made`` makes of entries, None are left out: at once where they are few, else with others' requests in between, and then
    None now. What is long gives None now and then while it is made."""
    first = [entry for _, entry in zip(range(at_once), entries, strict=False)]
    following = next(entries, _END)
    if following is _END:
        return made([entry for entry in first if entry is not None])

    def done(found: list[Any] | BrokerError) -> None:
        assert not isinstance(found, BrokerError), "entries have errors of their own"
        answer.ok(made(found))

    whole = _encoded(answer, chain(first, [following], entries))
    answer.cancel = Slices(broker, whole, done).cancel
    return None


def _encoded(answer: Reply, entries: Iterator[Any]) -> Iterator[bytes | None]:
    """Entries as they are written: bytes are all that is kept of each, where records and lists by the hundred thousand would be garbage to
    look through."""
    for entry in entries:
        if entry is None:
            yield None
        else:
            yield from encode_response_entry(answer.request, entry)


def encode_in_slices(broker: KafkaBroker, answer: Reply, body: Any) -> None:
    """The body of a wide answer is known: fill the answer when its entries are encoded, unless the connection ends before."""

    def done(encoded: list[None] | BrokerError) -> None:
        del encoded
        answer.ok(body)

    answer.cancel = Slices(broker, encode_response_entries(answer.request, body), done).cancel


_END: Final = object()  # behind the last entry
