"""Send a request to several shards and combine their responses (decision 0126).

These requests name no topic, or several. Combined lists are the same, page by page, as those of a single broker with
all topics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from polywire.errors import Busy, ErrorCode, Invalid
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.arguments import TOPICS_MAX
from polywire.protocols.polywire.codec import decode_answer
from polywire.protocols.polywire.errors import CODES, failure_of
from polywire.protocols.polywire.messages import Failure, Head, Verb
from polywire.protocols.runtime.shards import Shards

EPOCH_REQUESTS_MAX: Final = 10  # per shard; one or two suffice unless other processes begin epochs of the writer, too
_ONE_PROCESS: Final = (
    "; the records and offsets of one publish or transaction must be in topics of one process of the broker (start the"
    " broker with one process, or use transactions of a Kafka client, which may include topics of several)"
)
_NOT_FOUND: Final = (
    CODES[ErrorCode.STAGE_MISSING],
    CODES[ErrorCode.TRANSACTION_MISSING],
    CODES[ErrorCode.WRITER_MISSING],
)

_Entry = TypeVar("_Entry")
_ShardRequest = tuple[int, Head]


class CombinedResponse(ABC):
    """Combines the responses of several shards to one request. The requests are sent one after the other."""

    def __init__(self, requests: Sequence[_ShardRequest]) -> None:
        self._requests: Final = list(reversed(requests))
        self._failure: Failure | None = None

    def next_request(self) -> _ShardRequest | None:
        """Return the next shard and the request for it; None if no further response is needed."""
        return self._requests.pop() if self._requests else None

    @abstractmethod
    def add(self, head: bytes) -> None:
        """Add the response of a shard."""

    @abstractmethod
    def result(self) -> Head:
        """Return the combined response, or a ``Failure``."""

    def add_failure(self, failure: Failure) -> None:
        """Add the error of a shard. By default, the request fails with it."""
        self._failure = failure
        self._requests.clear()


class _CombinedList(CombinedResponse, Generic[_Entry]):
    """Combines the sorted lists of all shards into one page.

    A shard may return only the first page of its list. Entries of other shards that sort after the last entry of that
    page are left for the next page.
    """

    def __init__(
        self,
        requests: Sequence[_ShardRequest],
        read: Callable[[bytes], tuple[list[_Entry], bool]],
        order: Callable[[_Entry], tuple[str, ...]],
        make: Callable[[list[_Entry], bool], Head],
    ) -> None:
        super().__init__(requests)
        self._read: Final = read
        self._order: Final = order
        self._make: Final = make
        self._entries: list[_Entry] = []
        self._more = False
        self._end: tuple[str, ...] | None = None

    def add(self, head: bytes) -> None:
        entries, more = self._read(head)
        self._entries += entries
        if more:
            self._more = True
            last = self._order(entries[-1]) if entries else ()
            self._end = last if self._end is None else min(self._end, last)

    def result(self) -> Head:
        if self._failure is not None:
            return self._failure
        entries = sorted(self._entries, key=self._order)
        if self._end is not None:
            entries = [entry for entry in entries if self._order(entry) <= self._end]
        return self._make(entries, self._more)


class _CombinedBounds(CombinedResponse):
    """Combines the first and end offsets of topics' partitions."""

    def __init__(self, requests: Sequence[_ShardRequest], names: Sequence[str]) -> None:
        super().__init__(requests)
        self._names: Final = names
        self._found: dict[str, messages.TopicBounds] = {}

    def add(self, head: bytes) -> None:
        self._found |= {topic.name: topic for topic in decode_answer(head, messages.BoundsList).topics}

    def result(self) -> Head:
        return self._failure or messages.BoundsList([self._found[name] for name in self._names])


class _FirstFound(CombinedResponse):
    """A request about a group or another object whose shard is unknown.

    The response comes from the shard that has the object. With ``is_all``, several shards may have one, and all shards
    execute the request.
    """

    def __init__(
        self, requests: Sequence[_ShardRequest], kind: type[Head], *, is_all: bool = False, advice: str = ""
    ) -> None:
        super().__init__(requests)
        self._advice: Final = advice
        self._kind: Final = kind
        self._is_all: Final = is_all
        self._answer: Head | None = None

    def add(self, head: bytes) -> None:
        self._answer = decode_answer(head, self._kind)
        if not self._is_all:
            self._requests.clear()

    def add_failure(self, failure: Failure) -> None:
        self._failure = self._failure or msgspec.structs.replace(failure, message=failure.message + self._advice)
        if failure.code not in _NOT_FOUND:
            self._failure, self._answer = failure, None
            self._requests.clear()

    def result(self) -> Head:
        found = self._answer or self._failure
        assert found is not None, "every shard has responded"
        return found


class _CombinedEpoch(CombinedResponse):
    """Begins the same epoch of a writer in all shards.

    Each shard begins every epoch once. So the epoch that all shards return belongs to this request alone, and all of
    them reject earlier epochs.
    """

    def __init__(self, count: int, request: messages.BeginEpoch) -> None:
        super().__init__(())
        self._request: Final = request
        self._epochs: Final = [0] * count
        self._shard = 0
        self._left = EPOCH_REQUESTS_MAX * count

    def next_request(self) -> _ShardRequest | None:
        latest = max(self._epochs)
        behind = [shard for shard, epoch in enumerate(self._epochs) if not epoch or epoch < latest]
        if self._failure is not None or not behind:
            return None
        if not self._left:
            self._failure = failure_of(
                Busy(
                    ErrorCode.BUSY, f"other processes begin epochs of this writer, too writer={self._request.writer!r}"
                )
            )
            return None
        self._left -= 1
        self._shard = behind[0]
        return self._shard, messages.BeginEpoch(self._request.writer, max(latest, self._request.epoch_min))

    def add(self, head: bytes) -> None:
        self._epochs[self._shard] = decode_answer(head, messages.EpochBegun).epoch

    def result(self) -> Head:
        return self._failure or messages.EpochBegun(self._epochs[0])


def combined_response(shards: Shards, verb: int, request: Head) -> CombinedResponse | None:
    """Return the object that combines several shards' responses to a request; None if one shard can execute it."""
    all_shards = [(shard, request) for shard in range(shards.count)]
    match request:
        case messages.ListTopics():
            return _CombinedList(
                all_shards, _topics, lambda entry: (entry.name,), lambda entries, _: messages.TopicList(entries)
            )
        case messages.AskGroups():
            return _CombinedList(all_shards, _groups, lambda entry: (entry.name, entry.group), messages.GroupList)
        case messages.AskQueues():
            return _CombinedList(all_shards, _queues, lambda entry: (entry.name, entry.group), messages.QueueList)
        case messages.ListEntries() if verb == Verb.WRITERS:
            return _CombinedList(all_shards, _writers, lambda entry: (entry.name,), messages.EntryList)
        case messages.ListEntries():
            return _CombinedList(all_shards, _transactions, lambda entry: (entry.name,), messages.EntryList)
        case messages.Publish():
            requests = [(shard, request) for shard in _shards_of_offsets(shards, request)] or all_shards
            return _FirstFound(requests, messages.Published, advice=_ONE_PROCESS)
        case messages.BeginEpoch():
            return _CombinedEpoch(shards.count, request)
        case messages.Abandon() | messages.DeleteEntry():
            return _FirstFound(all_shards, Head, is_all=True)
        case messages.AskBounds() if len(request.names) <= TOPICS_MAX:
            by_shard = _by_shard(shards, request.names)
            if set(by_shard) <= {shards.own}:
                return None
            return _CombinedBounds(
                [(shard, msgspec.structs.replace(request, names=names)) for shard, names in by_shard.items()],
                list(dict.fromkeys(request.names)),
            )
        case _:
            return None


def _shards_of_offsets(shards: Shards, request: messages.Publish) -> Sequence[int]:
    """Return the shard of the topics whose offsets are committed, or none. Raises Invalid if there are several."""
    found = _by_shard(shards, [group.name for group in request.groups])
    if len(found) > 1:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"the offsets to commit belong to several processes{_ONE_PROCESS}")
    return tuple(found)


def _by_shard(shards: Shards, names: Sequence[str]) -> dict[int, list[str]]:
    """Group topic names by shard. Missing topics are assigned to this shard, which reports the error."""
    by_shard: dict[int, list[str]] = {}
    for name in dict.fromkeys(names):
        shard = shards.shard_of(name)
        by_shard.setdefault(shards.own if shard is None else shard, []).append(name)
    return by_shard


def _topics(head: bytes) -> tuple[list[messages.TopicEntry], bool]:
    return decode_answer(head, messages.TopicList).topics, False


def _groups(head: bytes) -> tuple[list[messages.GroupEntry], bool]:
    found = decode_answer(head, messages.GroupList)
    return found.groups, found.more


def _queues(head: bytes) -> tuple[list[messages.QueueEntry], bool]:
    found = decode_answer(head, messages.QueueList)
    return found.queues, found.more


def _writers(head: bytes) -> tuple[list[messages.WriterEntry], bool]:
    found = decode_answer(head, messages.EntryList[messages.WriterEntry])
    return found.entries, found.more


def _transactions(head: bytes) -> tuple[list[messages.TransactionEntry], bool]:
    found = decode_answer(head, messages.EntryList[messages.TransactionEntry])
    return found.entries, found.more
