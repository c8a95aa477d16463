"""Open the log of a shard in a bucket: become its leader, replay its journal, and continue it (decision 0124).

When opening returns, this broker leads the shard and all recovered data is being sealed. The local directory contains
nothing that recovery needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from polywire.clock import Clock
from polywire.cluster import fencing
from polywire.cluster.bucket_store import CHUNKS, BucketStore
from polywire.cluster.garbage_collection import GarbageCollector
from polywire.cluster.journal_chain import NONCE_BYTES, JournalChain, Naming, start_object
from polywire.cluster.journal_objects import SEED_BYTES, JournalObjects
from polywire.cluster.uploader import Uploader, uploading
from polywire.errors import Busy, Corrupt, ErrorCode, Invalid, NotOwner, Unavailable
from polywire.log.base import Loop, Replay
from polywire.log.disk import Disk
from polywire.log.journal.recovery import Chain, FoundGroup
from polywire.log.journal.replay import Player, image_of_all
from polywire.log.journal.slots import FileJournal, Slot
from polywire.log.journal.snapshot import get_snapshot
from polywire.log.journal.staging import Staging
from polywire.log.log import FileLog
from polywire.log.opening import JOURNAL, own_directory
from polywire.log.partition.reader import Reader
from polywire.log.segments.segment_set import SEGMENTS, SNAPSHOTS, SegmentSet, segment_name
from polywire.log.settings import LogSettings
from polywire.log.state import Contents, Image, LogState
from polywire.log.worker import MakeWorker, ThreadWorker, Worker, storage_failed
from polywire.store.base import BlobMissing
from polywire.store.data_directory import BlobRoot, DataDirectory
from polywire.store.files import Files, exists, make_directories
from polywire.store.objects import FIRST, Objects, of_shard
from polywire.store.system_files import SYSTEM_FILES
from polywire.types import shard_name

CACHE: Final = "bucket-cache"
# seconds for which deleted segments are retained, so that a query that was already planned can read them
DELETE_GRACE_S: Final = 900.0
_UNSEEN: Final = BlobRoot("", b"")

logger: Final = structlog.get_logger("polywire.cluster")


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """Configuration for leading a shard of a bucket.

    Attributes:
        blobs: the same bucket with a longer timeout, for large objects.
        directory: local directory for the cache.
        node: name of the process.
        delete_grace_s: seconds for which unneeded objects are retained.
        root: location of the shard, for clients that read segments without the broker.
    """

    objects: Objects
    blobs: Objects
    directory: Path
    node: str
    cache_bytes: int
    root: BlobRoot = _UNSEEN
    delete_grace_s: float = DELETE_GRACE_S
    shard: int = FIRST


def open_shard(
    config: ShardConfig,
    *,
    settings: LogSettings,
    loop: Loop,
    clock: Clock,
    replay: Replay,
    files: Files = SYSTEM_FILES,
    make_worker: MakeWorker = ThreadWorker,
) -> FileLog:
    """Become the leader of a shard and open its log.

    Blocks on the bucket, so call it before the broker serves clients.

    Raises:
        Invalid: the directory contains a log of its own.
        NotOwner: another broker claimed the shard first.
        Unavailable: the bucket failed.
        Corrupt: the journal, a snapshot or a segment is damaged.
    """
    opening = ShardOpening(
        config, settings=settings, loop=loop, clock=clock, replay=replay, files=files, make_worker=make_worker
    )
    opening.recover()
    return opening.begin()


@dataclass(frozen=True, slots=True)
class ShardState:
    """State of a shard as its leader sees it.

    Attributes:
        start: number of the start under which the broker leads. It is the leader epoch of new records.
        objects: number of journal objects that the next start has to read.
        unstored_bytes: size of the data that is not in the bucket yet.
        unstored_s: age of the oldest such data, in seconds.
        cached_bytes: size of cached segment files.
    """

    shard: str
    start: int
    objects: int
    unstored_bytes: int
    unstored_s: float
    cached_bytes: int


@dataclass(frozen=True, slots=True)
class _Recovered:
    """The log after recovery.

    Attributes:
        full: local journal files with recovered data, each with the state at its end.
        unlock: unlocks the directory.
    """

    claim: fencing.Claim
    state: LogState
    chain: Chain
    full: Sequence[tuple[Slot, Image]]
    worker: Worker
    disk: Disk
    sequence: int
    checksum: int
    unlock: Callable[[], None]


class ShardOpening:
    """Becomes the leader of a shard and opens its log, in two steps: ``recover``, then ``begin``.

    ``recover`` waits for the bucket and does not use the event loop, so it can run in a thread.
    """

    def __init__(
        self,
        config: ShardConfig,
        *,
        settings: LogSettings,
        loop: Loop,
        clock: Clock,
        replay: Replay,
        files: Files = SYSTEM_FILES,
        make_worker: MakeWorker = ThreadWorker,
    ) -> None:
        self._config = config
        self._settings = settings
        self._loop = loop
        self._clock = clock
        self._replay = replay
        self._files = files
        self._make_worker = make_worker
        cache = config.directory / CACHE
        self._bucket = JournalObjects(of_shard(config.objects, config.shard))
        self._store = BucketStore(
            of_shard(config.blobs, config.shard),
            cache,
            files,
            cache_bytes=config.cache_bytes,
            memory_bytes=max(settings.cache_bytes, 2 * settings.slot_bytes),  # a segment is uploaded from this memory
        )
        self._journal = FileJournal(
            cache / JOURNAL, slot_bytes=settings.slot_bytes, slot_count_max=settings.slot_count_max, files=files
        )
        self._disk: Disk | None = None
        self._sweeper: GarbageCollector | None = None
        self._recovered: _Recovered | None = None
        self._uploader: Uploader | None = None

    def recover(self) -> None:
        """Claim the leadership of the shard and replay its journal, in any thread.

        Raises:
            Invalid: the directory contains a log of its own.
            NotOwner: another broker claimed the shard first.
            Unavailable: the bucket failed.
            Corrupt: the journal, a snapshot or a segment is damaged.
        """
        config = self._config
        try:
            if exists(self._files, config.directory / JOURNAL):
                raise Invalid(
                    ErrorCode.INVALID_REQUEST,
                    "the data directory contains a log of its own (use another --data-dir with --bucket)"
                    f" path={str(config.directory)!r}",
                )
            make_directories(self._files, config.directory)
            data_directory = DataDirectory.owned(config.directory, self._files)
            with ExitStack() as undone:
                undone.callback(self.release)
                unlock = own_directory(self._files, config.directory, data_directory)
                undone.callback(unlock)
                self._empty(config.directory / CACHE)
                try:
                    self._recovered = self._recover(unlock)
                except Busy as error:  # raised for the bucket: the directory was free
                    raise Unavailable(ErrorCode.STORAGE_FAILED, error.message) from error
                undone.pop_all()
        except OSError as error:
            raise storage_failed(error) from error

    def interrupt(self) -> None:
        """Make ``recover``, which runs in another thread, raise Unavailable soon without sending another request."""
        self._bucket.cancel()
        self._store.stop()

    def _empty(self, cache: Path) -> None:
        """Delete files of an earlier start. Their data is in the bucket, or was never acknowledged."""
        for directory in (JOURNAL, SEGMENTS, SNAPSHOTS, CHUNKS):
            path = cache / directory
            make_directories(self._files, path)
            for name in self._files.names(path):
                self._files.unlink(path / name)

    def release(self) -> None:
        """Release all resources if the log is not opened. ``recover`` must have ended."""
        if self._disk is not None:
            self._disk.deleter.stop()
        self._bucket.close()
        self._store.stop()
        self._journal.close()
        if self._recovered is not None:
            self._recovered.unlock()

    def _recover(self, unlock: Callable[[], None]) -> _Recovered:
        seed = self._bucket.seed(partial(self._files.token, SEED_BYTES))
        claim = self._bucket.run(fencing.claim(seed, self._start_object))
        if claim is None:
            raise NotOwner(ErrorCode.NOT_OWNER, "another broker became the leader of the shard first")
        logger.info(
            "leading the shard",
            node=self._config.node,
            start=claim.chain.start + 1,
            object=claim.number,
            groups=len(claim.chain.groups),
        )
        self._journal.seed = seed
        naming = claim.chain.naming()
        sealed = 0 if naming is None else naming.sealed
        chain = self._copied(claim.chain, naming, sealed)
        start = claim.chain.start + 1
        worker = self._make_worker("reader", self._loop)
        segments = SegmentSet(self._store, start, self._clock)
        state = self._make_state(segments, self._make_reader(segments, worker, start))
        player = Player(self._store, state, self._replay, chain)
        self._replay_journal(player, claim, chain)
        full = self._full(player, state, chain)
        sequence, checksum = self._write_start(state, claim)
        self._disk = disk = self._make_disk()
        return _Recovered(claim, state, chain, full, worker, disk, sequence, checksum, unlock)

    def _replay_journal(self, player: Player, claim: fencing.Claim, chain: Chain) -> None:
        """Replay the journal. Raises NotOwner, Corrupt, and errors of the store."""
        self._store.read_ahead(self._listed(chain.snapshot))
        try:
            player.play()
        except Corrupt:
            if self._bucket.run(fencing.is_last(claim)):
                raise
            raise NotOwner(ErrorCode.NOT_OWNER, "another broker has become the leader of the shard") from None
        finally:
            self._store.read_ahead(())

    def begin(self) -> FileLog:
        """Return the recovered log. Call it on the event loop."""
        recovered = self._recovered
        assert recovered is not None, "it was recovered before"
        start = recovered.claim.chain.start + 1
        log = FileLog(
            settings=self._settings,
            loop=self._loop,
            clock=self._clock,
            replay=self._replay,
            journal=self._journal,
            state=recovered.state,
            reader_worker=recovered.worker,
            disk=recovered.disk,
            make_syncer=uploading(
                self._journal,
                self._bucket,
                recovered.claim,
                self._clock,
                self._make_worker,
                sequence=recovered.sequence,
                made=self._uploads,
            ),
            epoch=start,
            sequence=recovered.sequence,
            checksum=recovered.checksum,
            snapshot_name=recovered.chain.snapshot or "",
            unlock=partial(self._let_go, recovered.unlock),
        )
        self._sweeper = self._make_sweeper(recovered.state, start)
        self._sweeper.begin()  # by now the log knows which snapshot it depends on
        if recovered.chain.groups:
            log.adopt(recovered.full, recovered.chain.sealed)
        return log

    def _uploads(self, uploader: Uploader) -> None:
        self._uploader = uploader

    def state(self) -> ShardState:
        """Return the state of the shard that this broker leads. Call it on the event loop."""
        uploader = self._uploader
        assert uploader is not None, "it began before"
        return ShardState(
            shard=shard_name(self._config.shard),
            start=uploader.start,
            objects=uploader.objects,
            unstored_bytes=uploader.unsynced_bytes,
            unstored_s=uploader.unsynced_s,
            cached_bytes=self._store.cached_bytes,
        )

    def _start_object(self, chain: JournalChain) -> bytes:
        nonce = self._files.token(NONCE_BYTES)
        return start_object(chain.end, chain.seed, nonce=nonce, node=self._config.node, now_us=self._clock.now_us())

    def _copied(self, found: JournalChain, naming: Naming | None, sealed: int) -> Chain:
        """Copy the part of the journal that is in no segment into local journal files, where readers expect it.

        Args:
            sealed: last journal write whose effect is in segments.
        """
        groups = []
        for group in found.behind(sealed):
            if self._journal.capacity < group.length:
                self._next_slot()
            part = memoryview(group.content)[group.position : group.position + group.length]
            position = self._journal.write([part], group.length, group.sequence)
            slot = self._journal.current
            assert slot is not None, "it was just written"
            groups.append(
                FoundGroup(
                    slot,
                    position,
                    group.length,
                    group.sequence,
                    group.synced,
                    group.previous,
                    group.checksum,
                    group.kinds,
                    whole=True,
                )
            )
        rests_on, snapshot = (sealed, None) if naming is None else (naming.rests_on, naming.snapshot)
        return Chain(found.start, sealed, rests_on, snapshot, groups, found.checksum, None, ())

    def _listed(self, snapshot: str | None) -> list[str]:
        """Return the segments that a snapshot lists. Errors are ignored, because replay reports them."""
        if snapshot is None:
            return []
        try:
            return [segment_name(number) for number in sorted(get_snapshot(self._store, snapshot).segments)]
        except (BlobMissing, Corrupt):
            return []

    def _next_slot(self) -> None:
        self._journal.add(self._journal.plan_slot()())
        self._journal.roll()

    def _make_reader(self, segments: SegmentSet, worker: Worker, start: int) -> Reader:
        return Reader(self._journal, segments, worker, epoch=start, root=self._config.root)

    def _make_state(self, segments: SegmentSet, reader: Reader) -> LogState:
        settings = self._settings
        staging = Staging(bytes_max=settings.staged_bytes_max, batches_max=settings.staged_batches_max)
        return LogState(reader, segments, staging, hides_unsynced=True)

    def _full(self, player: Player, state: LogState, chain: Chain) -> Sequence[tuple[Slot, Image]]:
        """Return the local journal files with recovered data, each with the state at its end.

        They are written to segments like any full journal file.
        """
        if not chain.groups:
            return ()
        return [*player.full, (chain.groups[-1].slot, image_of_all(state, chain.sequence))]

    def _write_start(self, state: LogState, claim: fencing.Claim) -> tuple[int, int]:
        """Copy the object with which this broker took the shard over from the bucket's journal to a local journal file.

        Return its sequence number and checksum.
        """
        own = JournalChain(self._journal.seed, claim.chain.floor, [*claim.chain.groups[-1:]], next_number=claim.number)
        own.add(claim.content)
        self._next_slot()
        self._journal.write([claim.content], len(claim.content), own.sequence)
        current = self._journal.current
        assert current is not None, "it was just written"
        state.contents.setdefault(current.serial, Contents())
        for _ in range(self._journal.count, self._settings.slot_count_min):
            self._journal.add(self._journal.plan_slot()())
        return own.sequence, own.checksum

    def _make_disk(self) -> Disk:
        return Disk(
            self._config.directory,
            self._store,
            self._settings.disk_reserve_bytes,
            self._loop,
            files=self._files,
            clock=self._clock,
            make_worker=self._make_worker,
            grace_s=self._config.delete_grace_s,
        )

    def _make_sweeper(self, state: LogState, start: int) -> GarbageCollector:
        return GarbageCollector(
            self._bucket,
            self._loop,
            self._make_worker,
            seed=self._journal.seed,
            start=start,
            needed=state.segments.names,
            grace_s=self._config.delete_grace_s,
        )

    def _let_go(self, unlock: Callable[[], None]) -> None:
        self._store.stop()
        self._bucket.cancel()
        if self._sweeper is not None:
            self._sweeper.stop()
        self._bucket.close()  # only now, because a garbage collection may have been between two requests
        unlock()
