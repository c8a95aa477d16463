"""A store for tests that injects the faults of real stores.

The faults are an error before any effect, a slow response, a torn blob, a stale list, and a lost response. Each
injected fault affects one call: the next call of its operation. Several faults affect consecutive calls. All other
calls go to the underlying store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum

from polywire.errors import ErrorCode, Unavailable
from polywire.store.base import Blob, Store
from polywire.types import Buffer


class Fault(Enum):
    """How a call of ``FaultyStore`` fails.

    Attributes:
        ERROR: the call fails without an effect.
        SLOW: the call first calls the function ``wait`` of the store, and then succeeds.
        TORN: ``put_new`` fails and leaves a truncated blob, like a store without atomic writes; ``get`` returns half of
            a blob.
        STALE: ``list`` omits the last blob.
        LOST_REPLY: the call has its effect, but fails.
    """

    ERROR = "error"
    SLOW = "slow"
    TORN = "torn"
    STALE = "stale"
    LOST_REPLY = "lost_reply"


class Verb(Enum):
    """The operations of a Store."""

    PUT_NEW = "put_new"
    PUT = "put"
    GET = "get"
    OPEN = "open"
    LIST = "list"
    DELETE = "delete"
    SIZE = "size"


_ALLOWED = {
    Fault.ERROR: frozenset(Verb),
    Fault.SLOW: frozenset(Verb),
    Fault.TORN: frozenset({Verb.PUT_NEW, Verb.GET}),
    Fault.STALE: frozenset({Verb.LIST}),
    Fault.LOST_REPLY: frozenset({Verb.PUT_NEW, Verb.PUT, Verb.DELETE}),
}


class FaultyStore:
    """A store for tests that passes calls to another one, and fails on demand."""

    def __init__(self, store: Store, *, wait: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._wait = wait
        self._faults: dict[Verb, deque[Fault | None]] = {verb: deque() for verb in Verb}
        self._newest = ""
        self.calls: list[tuple[Verb, str]] = []

    @property
    def pending(self) -> int:
        """Number of injected faults that have not occurred yet."""
        return sum(fault is not None for faults in self._faults.values() for fault in faults)

    def fail(self, verb: Verb, fault: Fault, *, after: int = 0) -> None:
        """Make a later call of an operation fail. ``after`` is the number of calls of that operation before it.

        Raises ValueError if the operation does not have this fault.
        """
        if verb not in _ALLOWED[fault]:
            raise ValueError(f"the operation does not have this fault verb={verb.value} fault={fault.value}")
        self._faults[verb].extend([None] * after)
        self._faults[verb].append(fault)

    def put_new(self, name: str, parts: Iterable[Buffer]) -> None:
        fault = self._begin(Verb.PUT_NEW, name)
        if fault is Fault.TORN:
            content = b"".join(bytes(part) for part in parts)
            self._store.put_new(name, [content[: len(content) // 2]])
            raise _failure(Verb.PUT_NEW, name)
        self._store.put_new(name, parts)
        self._newest = name
        self._end(Verb.PUT_NEW, name, fault)

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        fault = self._begin(Verb.PUT, name)
        self._store.put(name, parts)
        self._newest = name
        self._end(Verb.PUT, name, fault)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        fault = self._begin(Verb.GET, name)
        content = self._store.get(name, start, stop)
        return content[: len(content) // 2] if fault is Fault.TORN else content

    def open(self, name: str) -> Blob:
        self._begin(Verb.OPEN, name)
        return self._store.open(name)

    def list(self, prefix: str) -> list[str]:
        fault = self._begin(Verb.LIST, prefix)
        names = self._store.list(prefix)
        return [name for name in names if name != self._newest] if fault is Fault.STALE else names

    def delete(self, name: str) -> None:
        fault = self._begin(Verb.DELETE, name)
        self._store.delete(name)
        self._end(Verb.DELETE, name, fault)

    def delete_in_steps(self, name: str) -> Iterator[int]:
        fault = self._begin(Verb.DELETE, name)
        yield from self._store.delete_in_steps(name)
        self._end(Verb.DELETE, name, fault)

    def size(self, name: str) -> int:
        self._begin(Verb.SIZE, name)
        return self._store.size(name)

    def drop_copy(self, name: str) -> bool:
        return self._store.drop_copy(name)

    def _begin(self, verb: Verb, name: str) -> Fault | None:
        self.calls.append((verb, name))
        faults = self._faults[verb]
        fault = faults.popleft() if faults else None
        if fault is Fault.ERROR:
            raise _failure(verb, name)
        if fault is Fault.SLOW:
            self._wait()
        return fault

    def _end(self, verb: Verb, name: str, fault: Fault | None) -> None:
        if fault is Fault.LOST_REPLY:
            raise _failure(verb, name)


def _failure(verb: Verb, name: str) -> Unavailable:
    return Unavailable(ErrorCode.STORAGE_FAILED, f"store failed on request verb={verb.value} name={name!r}")
