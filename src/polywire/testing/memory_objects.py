"""A bucket in memory for tests, which can fail single calls or be a store that breaks the rules of buckets.

Each injected fault affects one call: the next call of its operation. Several faults affect consecutive calls. A defect
affects all calls. Any thread may use the bucket.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from enum import Enum
from threading import Barrier, BrokenBarrierError, Lock
from typing import Final

from polywire.errors import ErrorCode, Unavailable
from polywire.records.checksum import xxh64
from polywire.store.base import BlobExists, BlobMissing
from polywire.store.objects import ObjectChanged, Stored, check_object_name
from polywire.types import Buffer

RACE_SECONDS: Final = 0.05  # time for which a defective store waits, so that another request can overtake


class ObjectFault(Enum):
    """How a request to ``MemoryObjects`` fails.

    Attributes:
        DELAY: the call first calls the function ``wait`` of the store, and then succeeds.
        LOST_REPLY: the call has its effect, but fails.
        BUSY: 409, because another request for the name is in progress. The call has no effect, and its response is the
            same as for an existing name.
        REFUSED: 503, without an effect.
        LATE: the call fails, and has its effect when ``deliver`` is called.
        STALE: ``list`` omits the last object.
    """

    DELAY = "delay"
    LOST_REPLY = "lost_reply"
    BUSY = "busy"
    REFUSED = "refused"
    LATE = "late"
    STALE = "stale"


class Defect(Enum):
    """Permanent faults of a simulated bucket, which ``cluster.bucket_probe`` must find."""

    CHECKS_FIRST = "checks_first"
    """It checks the condition of a request and writes later, so that another request can write in between."""
    IGNORES_CONDITIONS = "ignores_conditions"


class MemoryObjects:
    """A bucket in memory. Implements ``Objects``."""

    def __init__(self, *, defect: Defect | None = None, wait: Callable[[], None] = lambda: None) -> None:
        self._objects: dict[str, bytes] = {}
        self._faults: dict[str, deque[ObjectFault | None]] = defaultdict(deque)
        self._late: list[Callable[[], None]] = []
        self._lock = Lock()
        self._wait = wait
        self._defect = defect
        self._race = Barrier(2)
        self._newest = ""

    def fail(self, verb: str, fault: ObjectFault, *, after: int = 0) -> None:
        """Make a later call of an operation fail. ``after`` is the number of calls of that operation before it."""
        self._faults[verb].extend([None] * after)
        self._faults[verb].append(fault)

    def heal(self) -> None:
        """Forget all faults to come."""
        self._faults.clear()

    def deliver(self) -> None:
        """Execute the delayed requests (``ObjectFault.LATE``), in order."""
        late, self._late = self._late, []
        for request in late:
            try:
                request()
            except (BlobExists, ObjectChanged):
                continue

    def create(self, name: str, parts: Sequence[Buffer]) -> None:
        # copied now, because the caller may reuse the memory before a late request is applied
        content = b"".join(parts)
        self._request("create", name, BlobExists, lambda: self._create(name, content))

    def replace(self, name: str, content: Buffer, tag: str) -> None:
        copied = bytes(content)
        self._request("replace", name, ObjectChanged, lambda: self._replace(name, copied, tag))

    def put(self, name: str, content: Buffer) -> None:
        copied = bytes(content)
        self._request("put", name, BlobExists, lambda: self._write(name, copied))

    def read(self, name: str) -> Stored:
        self._begin("read", name)
        content = self._content(name)
        return Stored(content, _tag(content))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        self._begin("read_range", name)
        return self._content(name)[start:stop]

    def size(self, name: str) -> int:
        self._begin("size", name)
        return len(self._content(name))

    def list(self, prefix: str) -> list[str]:
        stale = self._begin("list", prefix) is ObjectFault.STALE
        with self._lock:
            found = sorted(name for name in self._objects if name.startswith(prefix))
        return [name for name in found if not (stale and name == self._newest)]

    def delete(self, name: str) -> None:
        self._request("delete", name, BlobExists, lambda: self._delete(name))

    def _request(self, verb: str, name: str, refused: type[Exception], request: Callable[[], None]) -> None:
        fault = self._begin(verb, name)
        if fault is ObjectFault.BUSY:
            raise refused(name)
        if fault is ObjectFault.LATE:
            self._late.append(request)
            raise _failure(verb, name)
        request()
        if fault is ObjectFault.LOST_REPLY:
            raise _failure(verb, name)

    def _begin(self, verb: str, name: str) -> ObjectFault | None:
        if verb != "list":
            check_object_name(name)
        with self._lock:
            faults = self._faults[verb]
            fault = faults.popleft() if faults else None
        if fault is ObjectFault.REFUSED:
            raise _failure(verb, name)
        if fault is ObjectFault.DELAY:
            self._wait()
        return fault

    def _create(self, name: str, content: bytes) -> None:
        if self._defect is None:
            with self._lock:
                if name in self._objects:
                    raise BlobExists(name)
                self._store(name, content)
            return
        if self._defect is Defect.CHECKS_FIRST and name in self._objects:
            raise BlobExists(name)
        self._be_overtaken()
        self._write(name, content)

    def _replace(self, name: str, content: bytes, tag: str) -> None:
        if self._defect is None:
            with self._lock:
                if name not in self._objects or _tag(self._objects[name]) != tag:
                    raise ObjectChanged(name)
                self._store(name, content)
            return
        if self._defect is Defect.CHECKS_FIRST and (name not in self._objects or _tag(self._objects[name]) != tag):
            raise ObjectChanged(name)
        self._be_overtaken()
        self._write(name, content)

    def _be_overtaken(self) -> None:
        """Wait until another request has also checked the condition, but not longer than ``RACE_SECONDS``."""
        try:
            self._race.wait(RACE_SECONDS)
        except BrokenBarrierError:
            self._race.reset()

    def _write(self, name: str, content: bytes) -> None:
        with self._lock:
            self._store(name, content)

    def _store(self, name: str, content: bytes) -> None:
        self._objects[name] = content
        self._newest = name

    def _delete(self, name: str) -> None:
        with self._lock:
            self._objects.pop(name, None)

    def _content(self, name: str) -> bytes:
        with self._lock:
            content = self._objects.get(name)
        if content is None:
            raise BlobMissing(name)
        return content


def _tag(content: bytes) -> str:
    return f"{xxh64(content):016x}"


def _failure(verb: str, name: str) -> Unavailable:
    return Unavailable(ErrorCode.STORAGE_FAILED, f"bucket failed on request verb={verb} name={name!r}")
