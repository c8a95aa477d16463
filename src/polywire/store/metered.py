"""Count requests to a bucket, for metrics.

Requests are counted by method, by outcome and by the kinds that stores charge for, with durations and bytes sent and
received. Each request is counted once, when it ends. Errors are raised unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from threading import Lock
from typing import Final, TypeVar

import msgspec

from polywire.clock import Clock
from polywire.durations import Durations
from polywire.errors import BrokerError
from polywire.store.base import BlobExists, BlobMissing
from polywire.store.objects import ObjectChanged, Objects, Stored
from polywire.types import Buffer

PAGE_NAMES: Final = 1_000  # names in one response of a store's list request

_Result = TypeVar("_Result")


class Outcome(Enum):
    """How a request to a bucket ended."""

    DONE = "done"
    REFUSED = "refused"
    """Its condition failed: the name is taken, or the object has changed."""
    MISSING = "missing"
    FAILED = "failed"
    """No response, or an error: whether it took effect is unknown."""


class Charge(Enum):
    """Kinds of requests for which object stores charge."""

    PUT = "put"
    GET = "get"
    LIST = "list"
    DELETE = "delete"


CHARGED_AS: Final[Mapping[str, Charge]] = {
    "create": Charge.PUT,
    "replace": Charge.PUT,
    "put": Charge.PUT,
    "read": Charge.GET,
    "size": Charge.GET,
    "list": Charge.LIST,
    "delete": Charge.DELETE,
}
"""The kind under which each method of ``Objects`` is charged."""


class RequestCounts(msgspec.Struct, frozen=True):
    """Snapshot of the counters of requests to buckets.

    Attributes:
        taken: durations of requests, by method and outcome.
        charged: charged requests by kind. A listing counts as one request per ``PAGE_NAMES`` names.
        put_bytes: bytes sent.
        got_bytes: bytes received.
    """

    taken: Mapping[tuple[str, Outcome], Durations]
    charged: Mapping[Charge, int]
    put_bytes: int
    got_bytes: int


class Meter:
    """Counters of requests to any number of buckets. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self.clock: Final = clock
        self._lock: Final = Lock()
        self._taken: dict[tuple[str, Outcome], Durations] = {}
        self._charged = dict.fromkeys(Charge, 0)
        self._put_bytes = 0
        self._got_bytes = 0

    def count(
        self, verb: str, outcome: Outcome, seconds: float, *, requests: int = 1, put_bytes: int = 0, got_bytes: int = 0
    ) -> None:
        """Count a finished request.

        Args:
            verb: method of ``Objects``.
            seconds: duration.
            requests: number of charged requests.
        """
        with self._lock:
            durations = self._taken.get((verb, outcome))
            if durations is None:
                durations = self._taken[verb, outcome] = Durations()
            durations.observe(seconds)
            self._charged[CHARGED_AS[verb]] += requests
            self._put_bytes += put_bytes
            self._got_bytes += got_bytes

    def counts(self) -> RequestCounts:
        """Return a snapshot of the counters."""
        with self._lock:
            taken = {key: durations.copy() for key, durations in self._taken.items()}
            return RequestCounts(taken, dict(self._charged), self._put_bytes, self._got_bytes)


class MeteredObjects:
    """Implements ``Objects`` by counting each request and forwarding it to another implementation."""

    def __init__(self, objects: Objects, meter: Meter) -> None:
        self._objects: Final = objects
        self._meter: Final = meter

    def create(self, name: str, parts: Sequence[Buffer]) -> None:
        self._put("create", sum(map(len, parts)), lambda: self._objects.create(name, parts))

    def replace(self, name: str, content: Buffer, tag: str) -> None:
        self._put("replace", len(content), lambda: self._objects.replace(name, content, tag))

    def put(self, name: str, content: Buffer) -> None:
        self._put("put", len(content), lambda: self._objects.put(name, content))

    def read(self, name: str) -> Stored:
        return self._timed("read", lambda: self._objects.read(name), got=lambda found: len(found.content))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        if start >= stop:
            return b""
        return self._timed("read", lambda: self._objects.read_range(name, start, stop), got=len)

    def size(self, name: str) -> int:
        return self._timed("size", lambda: self._objects.size(name))

    def list(self, prefix: str) -> list[str]:
        return self._timed(
            "list", lambda: self._objects.list(prefix), requests=lambda names: max(-(-len(names) // PAGE_NAMES), 1)
        )

    def delete(self, name: str) -> None:
        self._timed("delete", lambda: self._objects.delete(name))

    def _put(self, verb: str, size: int, ask: Callable[[], None]) -> None:
        self._timed(verb, ask, put_bytes=size)

    def _timed(
        self,
        verb: str,
        ask: Callable[[], _Result],
        *,
        requests: Callable[[_Result], int] = lambda _: 1,
        got: Callable[[_Result], int] = lambda _: 0,
        put_bytes: int = 0,
    ) -> _Result:
        begun = self._meter.clock.monotonic()
        try:
            found = ask()
        except (BlobExists, BlobMissing, ObjectChanged, BrokerError) as error:
            self._meter.count(verb, _outcome(error), self._meter.clock.monotonic() - begun)
            raise
        seconds = self._meter.clock.monotonic() - begun
        self._meter.count(
            verb, Outcome.DONE, seconds, requests=requests(found), put_bytes=put_bytes, got_bytes=got(found)
        )
        return found


def _outcome(error: Exception) -> Outcome:
    if isinstance(error, BlobExists | ObjectChanged):
        return Outcome.REFUSED
    return Outcome.MISSING if isinstance(error, BlobMissing) else Outcome.FAILED
