"""Read sealed segments from a bucket, in processes that have access to it (decision 0120).

Only the broker's own bucket is read, with the credentials of this process. A run is read with several concurrent
requests.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Final

from polywire.errors import BrokerError, ErrorCode, Invalid, Unavailable
from polywire.protocols.polywire.messages import SealedRange
from polywire.records.allocation import Arena
from polywire.store.data_directory import BlobRoot
from polywire.store.identity import find_identity
from polywire.store.objects import Objects
from polywire.store.url import open_bucket
from polywire.types import Buffer

CHUNK_BYTES: Final = 4 << 20  # size of one request: what a connection transfers during a round trip of 40 ms
READS_AT_ONCE: Final = 4  # concurrent requests of one run: with more, the CPU would be the limit, not the bucket
TIMEOUT_S: Final = 30.0
TRIES: Final = 4
PAUSE_FIRST_S: Final = 0.1


class BucketSource:
    """The bucket of one broker. Its identity was checked."""

    def __init__(self, objects: Objects) -> None:
        self.arena: Final = Arena()
        self._objects = objects
        self._readers = ThreadPoolExecutor(READS_AT_ONCE, "polywire-bucket")

    def open(self, run: SealedRange) -> RunBytes:
        """Open a run and request its first bytes."""
        return RunBytes(self, run)

    def ask(self, name: str, start: int, stop: int) -> Future[bytes]:
        """Request bytes [start, stop) of a blob. The future fails with BlobMissing or Unavailable."""
        return self._readers.submit(self._read, name, start, stop)

    def _read(self, name: str, start: int, stop: int) -> bytes:
        pause = PAUSE_FIRST_S
        for left in range(TRIES - 1, -1, -1):
            try:
                return self._objects.read_range(name, start, stop)
            except Unavailable:
                if not left:
                    raise
                time.sleep(pause)
                pause *= 2
        raise AssertionError("the last attempt returns or raises")


class RunBytes:
    """The bytes of one run, read in order.

    ``_ahead`` has pending requests for consecutive ranges. The first is for the bytes to be read next.
    """

    def __init__(self, source: BucketSource, run: SealedRange) -> None:
        self._source = source
        self._run = run
        self._next = run.start
        self._ahead: deque[tuple[int, Future[bytes]]] = deque()
        self._look_ahead()

    def _look_ahead(self) -> None:
        while len(self._ahead) < READS_AT_ONCE and self._next < self._run.stop:
            stop = min(self._next + CHUNK_BYTES, self._run.stop)
            self._ahead.append((self._next, self._source.ask(self._run.blob, self._next, stop)))
            self._next = stop

    def pread_into(self, out: Buffer, position: int) -> int:
        """Fill ``out`` with bytes from ``position``, which must be where the last read ended. Return their number.

        It is smaller if the blob is too short. Raises BlobMissing or Unavailable.
        """
        into, done = memoryview(out), 0
        while done < len(into) and self._ahead:
            start, asked = self._ahead[0]
            found = memoryview(asked.result())[position + done - start :]
            part = found[: len(into) - done]
            into[done : done + len(part)] = part
            done += len(part)
            if len(part) == len(found):
                self._ahead.popleft()
                self._look_ahead()
            if not len(part):
                break
        return done

    def expect(self, start: int, stop: int) -> None:
        """Do nothing: the following bytes are always requested ahead."""


_Key = tuple[int, str, bytes, tuple[tuple[str, str], ...]]
_sources: dict[_Key, BucketSource | BrokerError] = {}
_lock: Final = Lock()


def bucket_source(root: BlobRoot, options: Mapping[str, str]) -> BucketSource:
    """Return a broker's bucket. It is opened once per process.

    Raises BrokerError. A permanent error is cached, too.
    """
    key = (os.getpid(), root.address, root.mark, tuple(sorted(options.items())))
    with _lock:
        known = _sources.get(key)
        if known is None:
            try:
                known = _opened(root, options)
            except Invalid as error:  # Unavailable is not cached, because it may be temporary
                known = error
            _sources[key] = known
    if isinstance(known, BrokerError):
        raise known
    return known


def _opened(root: BlobRoot, options: Mapping[str, str]) -> BucketSource:
    try:
        objects = open_bucket(root.address, timeout_s=TIMEOUT_S, options=options, make=False)
    except OSError as error:
        raise Unavailable(ErrorCode.STORAGE_FAILED, f"cannot open the bucket: {error}") from error
    identity = find_identity(objects)
    if identity is None or identity.mark != root.mark:
        found = None if identity is None else identity.id
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"the bucket is not the broker's bucket url={root.address!r} id={found}"
        )
    return BucketSource(objects)
