"""A ``RoutedBroker`` for handlers that must look up topics without waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from polywire.broker.api import Pending
from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.routing.broker import ANSWER_S, HAS, RoutedBroker


def _never(_: str) -> Caller | None:
    pass


class ResolvedBroker(RoutedBroker):
    """Like ``routed``, but looking up a topic never raises Pending.

    It is for requests that are executed in several passes of the loop and cannot be repeated. Before the first,
    ``resolve`` raises Pending until all topics of the request are known.
    """

    __slots__ = ()

    def __init__(self, routed: RoutedBroker) -> None:
        for name in RoutedBroker.__slots__:
            setattr(self, name, getattr(routed, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)

    def find_topic(self, full_name: str) -> Topic | None:
        """Return the topic with this full name, or None."""
        return self.local.find_topic(full_name) or self.remote_topics.find(full_name)

    def ensure_topic(self, full_name: str, *, by: Caller = NO_CALLER) -> Topic:
        """Return the topic with this name.

        Raises Busy(BUSY) for a topic of another process that ``resolve`` has not created.
        """
        try:
            return super().ensure_topic(full_name, by=by)
        except Pending:
            raise Busy(ErrorCode.BUSY, f"the topic is being created (retry) name={full_name!r}") from None

    def resolve(
        self, names: Iterable[str], ids: Iterable[bytes] = (), *, creates: Callable[[str], Caller | None] = _never
    ) -> None:
        """Raise Pending until the topics with these names and ids are known.

        ``creates`` returns the caller for whom a missing topic is created, or None if it must not be created. Names
        whose process does not respond stay unknown.
        """
        for name in names:
            if self.find_topic(name) is not None:  # nearly always, and requests for records need nothing more
                continue
            with suppress(BrokerError):
                found = RoutedBroker.find_topic(self, name)
                by = None if found is not None else creates(name)
                if by is not None:
                    super().ensure_topic(name, by=by)
        unknown = [topic_id for topic_id in ids if self.topic_of_id(topic_id) is None]
        if unknown:
            with suppress(BrokerError):
                self._results(list(self._links), HAS, HAS.encode((unknown,), {})[0], ANSWER_S)
