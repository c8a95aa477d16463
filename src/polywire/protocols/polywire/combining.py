"""Scatter-gather for requests that name no topic, or several (decision 0126).

The combined lists are the same, page by page, as those of a single broker with all topics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from polywire.errors import ErrorCode
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.arguments import TOPICS_MAX
from polywire.protocols.polywire.codec import decode_answer
from polywire.protocols.polywire.errors import CODES
from polywire.protocols.polywire.messages import Failure, Head, Verb
from polywire.protocols.runtime.shards import Shards

_MISSING: Final = CODES[ErrorCode.STAGE_MISSING], CODES[ErrorCode.TRANSACTION_MISSING], CODES[ErrorCode.WRITER_MISSING]

_Entry = TypeVar("_Entry")
_Question = tuple[int, Head]


class Gathered(ABC):
    """The combined response of several shards.

    Requests are sent to one shard at a time, in the order of ``_questions``.
    """

    def __init__(self, questions: Sequence[_Question]) -> None:
        self._questions: Final = list(reversed(questions))
        self._failure: Failure | None = None

    def next_question(self) -> _Question | None:
        """Return the next shard and the request for it; None if no other response is needed."""
        return self._questions.pop() if self._questions else None

    @abstractmethod
    def answered(self, head: bytes) -> None: ...

    @abstractmethod
    def whole(self) -> Head:
        """Return the combined response, or a ``Failure``."""

    def refused(self, failure: Failure) -> None:
        """Handle an error of a shard. No request is then sent to other shards."""
        self._failure = failure
        self._questions.clear()


class _Lists(Gathered, Generic[_Entry]):
    """Sorted entries of all shards.

    If a shard returned only a part of its list, all entries after the last one of this part are dropped.
    """

    def __init__(
        self,
        questions: Sequence[_Question],
        read: Callable[[bytes], tuple[list[_Entry], bool]],
        order: Callable[[_Entry], tuple[str, ...]],
        make: Callable[[list[_Entry], bool], Head],
    ) -> None:
        super().__init__(questions)
        self._read: Final = read
        self._order: Final = order
        self._make: Final = make
        self._entries: list[_Entry] = []
        self._more = False
        self._end: tuple[str, ...] | None = None

    def answered(self, head: bytes) -> None:
        entries, more = self._read(head)
        self._entries += entries
        if more:
            self._more = True
            last = self._order(entries[-1]) if entries else ()
            self._end = last if self._end is None else min(self._end, last)

    def whole(self) -> Head:
        if self._failure is not None:
            return self._failure
        entries = sorted(self._entries, key=self._order)
        if self._end is not None:
            entries = [entry for entry in entries if self._order(entry) <= self._end]
        return self._make(entries, self._more)


class _Bounds(Gathered):
    def __init__(self, questions: Sequence[_Question], names: Sequence[str]) -> None:
        super().__init__(questions)
        self._names: Final = names
        self._found: dict[str, messages.TopicBounds] = {}

    def answered(self, head: bytes) -> None:
        self._found |= {topic.name: topic for topic in decode_answer(head, messages.BoundsList).topics}

    def whole(self) -> Head:
        return self._failure or messages.BoundsList([self._found[name] for name in self._names])


class _Anyone(Gathered):
    """A request about something whose shard is unknown. The first shard that has it responds.

    If ``is_all``, all shards that have it execute the request.
    """

    def __init__(
        self, questions: Sequence[_Question], kind: type[Head], *, is_all: bool = False, advice: str = ""
    ) -> None:
        super().__init__(questions)
        self._advice: Final = advice
        self._kind: Final = kind
        self._is_all: Final = is_all
        self._answer: Head | None = None

    def answered(self, head: bytes) -> None:
        self._answer = decode_answer(head, self._kind)
        if not self._is_all:
            self._questions.clear()

    def refused(self, failure: Failure) -> None:
        self._failure = self._failure or msgspec.structs.replace(failure, message=failure.message + self._advice)
        if failure.code not in _MISSING:
            self._failure, self._answer = failure, None
            self._questions.clear()

    def whole(self) -> Head:
        found = self._answer or self._failure
        assert found is not None, "every shard was asked"
        return found


def gathering(shards: Shards, verb: int, request: Head) -> Gathered | None:
    """Return the object that combines the responses to a request; None if the request names a single topic."""
    everyone = [(shard, request) for shard in range(shards.count)]
    match request:
        case messages.ListTopics():
            return _Lists(
                everyone, _topics, lambda entry: (entry.name,), lambda entries, _: messages.TopicList(entries)
            )
        case messages.AskGroups():
            return _Lists(everyone, _groups, lambda entry: (entry.name, entry.group), messages.GroupList)
        case messages.AskKept() if verb == Verb.WRITERS:
            return _Lists(everyone, _writers, lambda entry: (entry.name,), messages.KeptList)
        case messages.AskKept():
            return _Lists(everyone, _transactions, lambda entry: (entry.name,), messages.KeptList)
        case messages.Publish():
            return _Anyone(
                everyone, messages.Published, advice="; what is staged in several shards cannot be published together"
            )
        case messages.Abandon() | messages.DeleteKept():
            return _Anyone(everyone, Head, is_all=True)
        case messages.AskBounds() if len(request.names) <= TOPICS_MAX:
            places = _places(shards, request.names)
            if set(places) <= {shards.own}:
                return None
            return _Bounds(
                [(shard, msgspec.structs.replace(request, names=names)) for shard, names in places.items()],
                list(dict.fromkeys(request.names)),
            )
        case _:
            return None


def _places(shards: Shards, names: Sequence[str]) -> dict[int, list[str]]:
    """Group topic names by shard. Names of missing topics are for this shard, which then reports the error."""
    places: dict[int, list[str]] = {}
    for name in dict.fromkeys(names):
        shard = shards.shard_of(name)
        places.setdefault(shards.own if shard is None else shard, []).append(name)
    return places


def _topics(head: bytes) -> tuple[list[messages.TopicEntry], bool]:
    return decode_answer(head, messages.TopicList).topics, False


def _groups(head: bytes) -> tuple[list[messages.GroupEntry], bool]:
    found = decode_answer(head, messages.GroupList)
    return found.groups, found.more


def _writers(head: bytes) -> tuple[list[messages.WriterEntry], bool]:
    found = decode_answer(head, messages.KeptList[messages.WriterEntry])
    return found.entries, found.more


def _transactions(head: bytes) -> tuple[list[messages.TransactionEntry], bool]:
    found = decode_answer(head, messages.KeptList[messages.TransactionEntry])
    return found.entries, found.more
