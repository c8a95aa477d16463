"""Execute the requests of ``fencing`` on a bucket, which stores a shard's journal and floor as objects.

Writes are sent once, and their response is returned unchanged. Reads are retried until they succeed or are cancelled.
Call these functions from threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event, Timer
from typing import Any, Final, TypeVar

from polywire.cluster.fencing import (
    READ_AT_ONCE_MAX,
    Create,
    Delete,
    DeleteBlobs,
    ListBlobs,
    ListJournal,
    MoveFloor,
    Outcome,
    Pause,
    Read,
    ReadFloor,
    ReadHeads,
    Request,
    Steps,
)
from polywire.cluster.journal_floor import Floor
from polywire.errors import Corrupt, ErrorCode, Unavailable
from polywire.log.opening import JOURNAL
from polywire.matching import HEX_DIGITS, consists_of
from polywire.store.base import BlobExists, BlobMissing
from polywire.store.objects import ObjectChanged, Objects

NUMBER_DIGITS: Final = 16
# parallel reads: each takes a network round trip, and a start may read a thousand objects
READERS: Final = READ_AT_ONCE_MAX
RETRY_S: Final = 0.2
SEED_BYTES: Final = 8

_Result = TypeVar("_Result")


def object_name(number: int) -> str:
    return f"{JOURNAL}/{number:0{NUMBER_DIGITS}x}"


def _numbers(names: Sequence[str]) -> list[int]:
    digits = [name.rpartition("/")[2] for name in names]
    return [int(one, 16) for one in digits if len(one) == NUMBER_DIGITS and consists_of(one, HEX_DIGITS)]


class JournalObjects:
    """Executes the requests of ``fencing`` procedures on one shard's bucket.

    Args:
        objects: objects of this shard only.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        # when set, requests are not repeated and pauses end at once
        self._gone = Event()
        self._readers = ThreadPoolExecutor(READERS, "polywire-bucket")

    def run(self, steps: Steps[_Result]) -> _Result:
        """Execute a procedure and return its result. Raises Unavailable if cancelled, and errors of the procedure."""
        answer = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if self._gone.is_set():
                raise Unavailable(ErrorCode.STORAGE_FAILED, "the bucket did not respond in time")
            answer = self._perform(request)

    def seed(self, make: Callable[[], bytes]) -> int:
        """Return the journal's secret, which every checksum covers. If there is none, create it.

        Raises Unavailable, and Corrupt if it is damaged or lost: a journal that exists cannot be read without it.
        """
        name = "seed"
        while True:
            found = self._repeated(lambda: self._found(name))
            if found is None and not self._list(JOURNAL):  # a journal is begun after its seed
                self._outcome(lambda: self._objects.create(name, [make()]))
                continue
            found = found or self._repeated(lambda: self._found(name))  # another broker may have created it meanwhile
            if found is None or len(found) != SEED_BYTES:
                size = 0 if found is None else len(found)
                raise Corrupt(
                    ErrorCode.CORRUPT, f"the seed of the journal is damaged or missing object={name!r} bytes={size}"
                )
            return int.from_bytes(found, "little")

    def finish_within(self, seconds: float) -> None:
        """Stop repeating requests after this number of seconds."""
        timer = Timer(seconds, self._gone.set)
        timer.daemon = True
        timer.start()

    def cancel(self) -> None:
        """Stop repeating requests now."""
        self._gone.set()

    def close(self) -> None:
        """Stop the threads. No method may be called afterwards."""
        self._gone.set()
        self._readers.shutdown(wait=False)

    def _perform(self, request: Request) -> Any:
        match request:
            case Create(number, content):
                return self._outcome(lambda: self._objects.create(object_name(number), [content]))
            case Read(numbers):
                return list(self._readers.map(self._read, numbers))
            case ReadFloor():
                return self._repeated(self._floor)
            case MoveFloor(floor, tag):
                return self._outcome(lambda: self._move(floor, tag))
            case Delete(numbers):
                list(self._readers.map(self._delete, map(object_name, numbers)))
            case DeleteBlobs(names):
                list(self._readers.map(self._delete, names))
            case ReadHeads(numbers, size):
                return list(self._readers.map(partial(self._read_head, size), numbers))
            case ListJournal():
                return _numbers(self._list(JOURNAL))
            case ListBlobs(directory):
                return self._list(directory)
            case Pause(seconds):
                self._gone.wait(seconds)
        return None

    def _read(self, number: int) -> bytes | None:
        return self._repeated(lambda: self._found(object_name(number)))

    def _found(self, name: str) -> bytes | None:
        try:
            return self._objects.read(name).content
        except BlobMissing:
            return None

    def _floor(self) -> tuple[Floor, str]:
        try:
            found = self._objects.read("floor")
        except BlobMissing:
            return Floor(), ""
        return Floor.unpack(found.content), found.tag

    def _move(self, floor: Floor, tag: str) -> None:
        if tag:
            self._objects.replace("floor", floor.pack(), tag)
        else:
            self._objects.create("floor", [floor.pack()])

    def _read_head(self, size: int, number: int) -> bytes | None:
        def head() -> bytes | None:
            try:
                return self._objects.read_range(object_name(number), 0, size)
            except BlobMissing:
                return None

        return self._repeated(head)

    def _list(self, directory: str) -> list[str]:
        return self._repeated(lambda: self._objects.list(f"{directory}/"))

    def _delete(self, name: str) -> None:
        """Delete an object. Errors are ignored, because garbage collection tries again."""
        self._outcome(lambda: self._objects.delete(name))

    def _outcome(self, write: Callable[[], None]) -> Outcome:
        try:
            write()
        except (BlobExists, ObjectChanged):
            return Outcome.EXISTS
        except Unavailable:
            return Outcome.UNKNOWN
        return Outcome.DONE

    def _repeated(self, read: Callable[[], _Result]) -> _Result:
        """Repeat a read until it succeeds. Raises Unavailable when it is cancelled."""
        while True:
            try:
                return read()
            except Unavailable:
                if self._gone.is_set():
                    raise
                time.sleep(RETRY_S)
