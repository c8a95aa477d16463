"""Build a response about many topics or partitions in steps. It is sent when all of its entries are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from polywire.errors import BrokerError, ErrorCode
from polywire.protocols.kafka.codec import encode_response_entries, encode_response_entry
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.messages import WireError
from polywire.protocols.kafka.peer import Reply
from polywire.protocols.kafka.structures import Record
from polywire.protocols.runtime.slices import AT_ONCE_MAX, Slices, rest_in_slices

if TYPE_CHECKING:
    from polywire.protocols.kafka.context import KafkaBroker

PARTITIONS_PER_STEP: Final = 16  # partitions of one entry that are processed without a pause

_Entry = TypeVar("_Entry", bound=Record)
_Body = TypeVar("_Body", bound=Record)


class HasError(Protocol):
    """A response, or one entry of it, with an error code."""

    error: int


class PendingResponse:
    """A response whose entries are set by several callbacks.

    It is sent when all steps passed to ``run`` have run, and ``count_result`` was called as often as ``expect``.
    """

    __slots__ = ("_answer", "_body", "_broker", "_cancels", "_is_over", "_left")

    def __init__(self, answer: Reply, body: Record) -> None:
        self._answer: Final = answer
        self._body: Final = body
        self._broker: KafkaBroker | None = None  # set if the response has many entries
        self._cancels: list[Callable[[], None]] = []
        self._left = 1
        self._is_over = False  # the connection was closed
        answer.cancel = self._cancel

    def on_cancel(self, cancel: Callable[[], None]) -> None:
        """Call ``cancel`` if the connection closes before the response is sent."""
        self._cancels.append(cancel)

    def _cancel(self) -> None:
        self._is_over = True
        for cancel in self._cancels:
            cancel()

    def run(self, broker: KafkaBroker, entries: Iterator[None], *, at_once: int = AT_ONCE_MAX) -> None:
        """Run the steps that fill the response; each one handles one entry.

        At most ``at_once`` steps run immediately. The others run in slices, between other requests, and stop if the
        connection closes.
        """
        slices = rest_in_slices(broker, entries, self.count_result, at_once=at_once)
        if slices is None:
            self.count_result()
        else:
            self._broker = broker
            self.on_cancel(slices.cancel)

    def expect(self) -> None:
        """Delay the response until ``count_result`` is called once more."""
        self._left += 1

    def count_result(self) -> None:
        self._left -= 1
        if self._left:
            return
        if self._broker is None:
            self._answer.ok(self._body)
        elif not self._is_over:
            encode_in_slices(self._broker, self._answer, self._body)

    def set_result(self, entry: HasError, result: int | BrokerError) -> None:
        """Count the result of a broker's operation. If it is an error, set it in the entry."""
        if isinstance(result, BrokerError):
            # the broker is stopping, or another process has ended: the outcome is unknown
            refuse(entry, result, WireError.REQUEST_TIMED_OUT if result.code is ErrorCode.STOPPING else None)
        self.count_result()


def refuse(entry: HasError, error: BrokerError, code: WireError | None = None) -> None:
    """Set the error of an entry, and its message if the entry has one."""
    entry.error = wire_error(error) if code is None else code
    if hasattr(entry, "message"):
        entry.message = error.message


def answer_in_slices(
    broker: KafkaBroker,
    answer: Reply,
    entries: Iterator[_Entry | None],
    made: Callable[[list[_Entry]], _Body],
    *,
    at_once: int = AT_ONCE_MAX,
) -> _Body | None:
    """Return the response that ``made`` builds from the entries, or None if it is sent later.

    At most ``at_once`` entries are built immediately; if there are more, the rest is built in slices. A None between
    the entries lets other requests run.
    """
    first = [entry for _, entry in zip(range(at_once), entries, strict=False)]
    following: Any = next(entries, _END)
    if following is _END:
        return made([entry for entry in first if entry is not None])

    def done(found: list[Any] | BrokerError) -> None:  # the entries are encoded
        assert not isinstance(found, BrokerError), "errors are set in the entries"
        answer.ok(made(found))

    whole = _encoded(answer, chain(first, [following], entries))
    answer.cancel = Slices(broker, whole, done).cancel
    return None


def _encoded(answer: Reply, entries: Iterator[Record | None]) -> Iterator[bytes | None]:
    """Encode each entry as soon as it is built.

    Until the response is sent, only bytes are in memory: hundreds of thousands of objects would slow down garbage
    collection.
    """
    for entry in entries:
        if entry is None:
            yield None
        else:
            yield from encode_response_entry(answer.request, entry)


def encode_in_slices(broker: KafkaBroker, answer: Reply, body: Record) -> None:
    """Encode the entries of a large response in slices, then send it. If the connection closes, encoding stops."""

    def done(encoded: list[None] | BrokerError) -> None:
        del encoded
        answer.ok(body)

    answer.cancel = Slices(broker, encode_response_entries(answer.request, body), done).cancel


_END: Final = object()  # marks the end of the entries
