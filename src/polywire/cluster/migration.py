"""Import a stopped broker's data directory into an empty bucket (decision 0124).

* The data directory is not changed.
* No broker leads the bucket before the import is complete and verified against the directory.
* An interrupted import can be resumed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Final

from polywire.clock import Clock
from polywire.cluster import fencing
from polywire.cluster.bucket_store import CHUNKS, BucketStore, repeated
from polywire.cluster.journal_chain import ChainEnd, JournalChain, naming_object, start_object
from polywire.cluster.journal_floor import Floor
from polywire.cluster.journal_objects import SEED_BYTES, JournalObjects
from polywire.errors import Corrupt, ErrorCode, Invalid
from polywire.log.doctor import OfflineLog, Severity, examine_segment
from polywire.log.journal.recovery import Chain
from polywire.log.journal.replay import image_of_all
from polywire.log.journal.snapshot import get_snapshot
from polywire.log.opening import JOURNAL
from polywire.log.segments.sealer import snapshot_name
from polywire.log.segments.sealing import collect_slots, seal
from polywire.log.segments.segment_set import SEGMENTS, SNAPSHOTS, segment_name
from polywire.log.state import LogState
from polywire.store.base import BlobExists, BlobMissing, Store
from polywire.store.files import make_directories
from polywire.store.identity import Identity, begin_import, end_import, find_identity, forget_import
from polywire.store.objects import FIRST, Objects, of_shard, shard_root
from polywire.store.system_files import SYSTEM_FILES

NODE: Final = "import"
COPIED_AT_ONCE: Final = 4  # segments copied in parallel, each fully in memory
READ_BACK_BYTES: Final = 8 * 1024 * 1024  # size of one read, per segment
CACHE_BYTES: Final = 1 << 30  # size limit of the cache, for the segment being written
MEMORY_BYTES: Final = 1 << 27  # memory limit of the cache, for uploading
START_NUMBER: Final = 1
NAMING_NUMBER: Final = 2
JOURNAL_S: Final = 120.0  # seconds for all requests on the journal's few small objects


class Step(Enum):
    """Steps of an import of a data directory, for its progress."""

    VERIFIED = "verified"
    COPIED = "copied"
    SEALED = "sealed"
    """Writing data that was only in the journal into new segments."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one step of an import."""

    step: Step
    segments: int
    segments_all: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Imported:
    """Result of an import.

    Attributes:
        segments: number of segments.
        bytes: their total size.
        again: whether an earlier import was continued, or was already complete.
    """

    identity: Identity
    segments: int
    bytes: int
    again: bool


def import_directory(
    offline: OfflineLog, objects: Objects, blobs: Objects, clock: Clock, notify: Callable[[Progress], None]
) -> Imported:
    """Import a directory into an empty bucket, or continue an interrupted import.

    Args:
        blobs: the same bucket with a longer timeout, for large objects.
        notify: called with the progress.

    Raises:
        Invalid: the bucket has a log or the beginning of another import, or the directory is empty.
        Corrupt: the directory, or a copy in the bucket, is damaged.
        Unavailable: the bucket failed.
        Busy: the bucket is busy.
    """
    chain, state = offline.recover()
    if chain is None:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"the data directory is empty path={str(offline.directory)!r}")
    source = f"{chain.sequence:x}-{chain.checksum:016x}"
    known = find_identity(objects)
    if known is not None and known.shards != 1:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"cannot import a data directory into a bucket with several shards (use a bucket with one) shards={known.shards}",
        )
    # check before writing anything, because brokers would see it
    if (known is None or not known.source) and _has_log(objects):
        raise _no_bucket_for_it()
    _check_segments(offline, state, notify)
    identity, again = begin_import(objects, secrets.token_bytes, clock.now_us(), source)
    if not again and _has_log(objects):
        forget_import(objects, identity)
        raise _no_bucket_for_it()
    if not identity.importing:
        return Imported(identity, 0, 0, again=True)
    migration = _Migration(offline, chain, state, objects, blobs, identity)
    count, size = migration.copy_segments(notify)
    migration.seal_rest(notify)
    migration.write_journal()
    return Imported(end_import(objects, identity), count, size, again)


def _has_log(objects: Objects) -> bool:
    shard = of_shard(objects, FIRST)
    return any(shard.list(f"{directory}/") for directory in (JOURNAL, SEGMENTS, SNAPSHOTS))


def _no_bucket_for_it() -> Invalid:
    return Invalid(ErrorCode.INVALID_REQUEST, "the bucket already has a log (import into an empty bucket)")


def _check_segments(offline: OfflineLog, state: LogState, notify: Callable[[Progress], None]) -> None:
    """Raise Corrupt if a needed segment is damaged, because a copy of it would be damaged, too."""
    numbers, size = list(state.segments.numbers()), 0
    for count, number in enumerate(numbers, 1):
        _check_segment(offline.store, segment_name(number))
        size += offline.store.size(segment_name(number))
        notify(Progress(Step.VERIFIED, count, len(numbers), size))


def _check_segment(store: Store, name: str) -> None:
    for finding in examine_segment(store, name):
        if finding.severity in (Severity.DAMAGED, Severity.BROKEN):
            raise Corrupt(ErrorCode.CORRUPT, f"a segment is damaged: {finding.message} path={name!r}")


class _Migration:
    """One import of a data directory.

    Every attempt writes the same bytes, or rewrites objects that nothing refers to yet.
    """

    def __init__(
        self,
        offline: OfflineLog,
        chain: Chain,
        state: LogState,
        objects: Objects,
        blobs: Objects,
        identity: Identity,
    ) -> None:
        self._offline = offline
        self._chain = chain
        self._state = state
        self._objects = objects
        self._blobs = of_shard(blobs, FIRST)
        self._identity = identity
        self._start = chain.start + 1
        self._snapshot = snapshot_name(self._start, 0)
        self._old = list(state.segments.numbers())
        self._new: list[int] = []
        self._stopped = Event()

    def copy_segments(self, notify: Callable[[Progress], None]) -> tuple[int, int]:
        """Copy all segments under the same names. Return their number and total size."""
        copied = size = 0
        threads = ThreadPoolExecutor(COPIED_AT_ONCE, "polywire-import")
        try:
            for done in as_completed([threads.submit(self._copy, segment_name(number)) for number in self._old]):
                copied, size = copied + 1, size + done.result()
                notify(Progress(Step.COPIED, copied, len(self._old), size))
        finally:
            threads.shutdown(cancel_futures=True)
        return copied, size

    def _copy(self, name: str) -> int:
        """Store a file as an object, unless an earlier attempt did.

        Then compare it with the original. Return its size. Raises Busy or Corrupt.
        """
        content = self._offline.store.get(name)
        with suppress(BlobExists):  # already stored, perhaps by an earlier attempt
            repeated(lambda: self._blobs.create(name, [content]), self._stopped)
        if not self._holds(name, memoryview(content)):
            name = shard_root(FIRST) + name
            raise Corrupt(ErrorCode.CORRUPT, f"an object in the bucket differs from what was written name={name!r}")
        return len(content)

    def _holds(self, name: str, content: memoryview) -> bool:
        """Return whether an object has this content. It is compared in pieces, to limit memory."""
        if repeated(lambda: self._blobs.size(name), self._stopped) != len(content):
            return False
        for start in range(0, len(content), READ_BACK_BYTES):
            piece = content[start : start + READ_BACK_BYTES]
            ask = partial(self._blobs.read_range, name, start, start + len(piece))
            if repeated(ask, self._stopped) != piece:
                return False
        return True

    def seal_rest(self, notify: Callable[[Progress], None]) -> None:
        """Write data that is only in the journal into new segments, and a snapshot that lists all segments.

        Raises Busy or Corrupt.
        """
        with TemporaryDirectory() as folder:
            store = self._store(Path(folder))
            if not self._is_sealed(store):
                for name in self._listed(store, f"{SEGMENTS}/") + self._listed(store, f"{SNAPSHOTS}/"):
                    store.delete(name)  # left by an earlier attempt; nothing refers to it
                chain, state = self._chain, self._state
                image = image_of_all(state, chain.sequence)
                taken = collect_slots(state, state.contents, self._offline.journal.views, image, strict=True)
                broker = ([self._offline.state.snapshot()], chain.sequence)
                seal(store, taken, state.segments.next_number, self._snapshot, broker)
        with TemporaryDirectory() as folder:  # use an empty cache, so that reads go to the bucket
            store = self._store(Path(folder))
            self._new = sorted(set(get_snapshot(store, self._snapshot).segments) - set(self._old))
            for number in self._new:
                _check_segment(store, segment_name(number))
            size = sum(store.size(segment_name(number)) for number in self._new)
        notify(Progress(Step.SEALED, len(self._new), len(self._new), size))

    def _store(self, folder: Path) -> BucketStore:
        for directory in (SEGMENTS, SNAPSHOTS, CHUNKS):
            make_directories(SYSTEM_FILES, folder / directory)
        return BucketStore(self._blobs, folder, SYSTEM_FILES, cache_bytes=CACHE_BYTES, memory_bytes=MEMORY_BYTES)

    def _is_sealed(self, store: BucketStore) -> bool:
        """Return whether an earlier attempt has completed ``seal_rest``, whose last step writes the snapshot."""
        try:
            get_snapshot(store, self._snapshot)
        except (BlobMissing, Corrupt):
            return False
        return True

    def _listed(self, store: BucketStore, directory: str) -> list[str]:
        return [name for name in store.list(directory) if name.startswith(f"{directory}{self._start:08x}-")]

    def write_journal(self) -> None:
        """Write the bucket's journal: an object that begins it, an object that names the segments, and the floor (the first
        object).

        The floor makes the other two valid. If a broker has begun a log meanwhile, that log is left unchanged: only one of two
        creators of the first object succeeds, and brokers ignore a first object that does not match a floor.

        Raises:
            Invalid: a broker has begun a log meanwhile.
            Corrupt: the bucket has other content.
            Unavailable: the bucket failed.
        """
        bucket, now_us = JournalObjects(of_shard(self._objects, FIRST)), self._identity.created_at_us
        bucket.finish_within(JOURNAL_S)
        try:
            seed = bucket.seed(partial(secrets.token_bytes, SEED_BYTES))
            before = ChainEnd(self._chain.start, self._chain.sequence, self._chain.checksum)
            start = start_object(before, seed, nonce=self._identity.mark, node=NODE, now_us=now_us)
            floor = Floor(START_NUMBER, NAMING_NUMBER, self._start, self._chain.sequence)
            chain = JournalChain(seed, floor)
            chain.add(start)
            naming = naming_object(chain.end, seed, snapshot=self._snapshot, new=self._new, now_us=now_us)
            chain.add(naming)
            if not bucket.run(fencing.settle(START_NUMBER, start)):
                forget_import(self._objects, self._identity)
                raise _no_bucket_for_it()
            bucket.run(_written(naming, floor))
            if bucket.run(fencing.read_journal(seed)).end != chain.end:
                raise Corrupt(ErrorCode.CORRUPT, "the journal in the bucket differs from what was written")
        finally:
            bucket.close()


def _written(naming: bytes, floor: Floor) -> fencing.Steps[None]:
    """Store the object that follows the start, and then the floor (the first needed object). Raises Corrupt.

    Objects that exist are left unchanged.
    """
    if not (yield from fencing.settle(NAMING_NUMBER, naming)):
        raise _not_ours(f"object={NAMING_NUMBER}")
    while (yield fencing.MoveFloor(floor, "")) is fencing.Outcome.UNKNOWN:
        yield fencing.Pause(fencing.PAUSE_MAX_S)
    found, _ = yield fencing.ReadFloor()
    if found != floor:
        raise _not_ours("floor")


def _not_ours(what: str) -> Corrupt:
    return Corrupt(ErrorCode.CORRUPT, f"the bucket has a journal that this import did not write: {what}")
