"""Opening the log of a shard in a bucket: take over, play what is there, go on behind it (decision 0058).

Promises: when it returns, the start is claimed and everything recovered is being sealed; the local directory holds nothing that is needed.
Must not know: what the broker's state is.
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
from polywire.cluster import protocol
from polywire.cluster.bucket_store import CHUNKS, BucketStore
from polywire.cluster.chain import NONCE_BYTES, Naming, ObjectChain, start_object
from polywire.cluster.journal_objects import SEED_BYTES, JournalObjects
from polywire.cluster.uploader import uploading
from polywire.errors import BrokerError, Busy, Corrupt, ErrorCode, Invalid, NotOwner, Unavailable
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
from polywire.store.files import Files, exists, make_directories
from polywire.store.mark import BlobRoot, DataDirectory
from polywire.store.objects import Objects
from polywire.store.system_files import SYSTEM_FILES

CACHE: Final = "bucket-cache"
_START_DIGITS: Final = 8
_UNSEEN: Final = BlobRoot("", b"")

logger: Final = structlog.get_logger("polywire.cluster")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a shard lies, and who wants to lead it. ``blobs`` reach the same bucket with more patience, for what is large; ``root`` is the
    bucket for those who read it themselves."""

    objects: Objects
    blobs: Objects
    directory: Path
    node: str
    cache_bytes: int
    root: BlobRoot = _UNSEEN


def open_shard(
    place: Place,
    *,
    settings: LogSettings,
    loop: Loop,
    clock: Clock,
    replay: Replay,
    files: Files = SYSTEM_FILES,
    make_worker: MakeWorker = ThreadWorker,
) -> FileLog:
    """Lead the shard of a bucket. Waits for the bucket: call it before anything is served.

    Raises Invalid where the directory holds a log of its own, NotOwner where another broker was quicker, Unavailable, Corrupt.
    """
    try:
        if exists(files, place.directory / JOURNAL):
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                "this data directory holds a log of its own, a broker on a bucket needs another one"
                f" path={str(place.directory)!r}",
            )
        make_directories(files, place.directory)
        data_directory = DataDirectory.owned(place.directory, files)
        with ExitStack() as undone:
            unlock = own_directory(files, place.directory, data_directory)
            undone.callback(unlock)
            opening = _Opening(place, settings, loop, clock, replay, files, make_worker)
            undone.callback(opening.give_up)
            try:
                log = opening.run(unlock)
            except Busy as error:  # the bucket's: nobody holds the directory
                raise Unavailable(ErrorCode.STORAGE_FAILED, error.message) from error
            undone.pop_all()
            return log
    except OSError as error:
        raise storage_failed(error) from error


class _Opening:
    """The steps of opening, in order."""

    def __init__(
        self,
        place: Place,
        settings: LogSettings,
        loop: Loop,
        clock: Clock,
        replay: Replay,
        files: Files,
        make_worker: MakeWorker,
    ) -> None:
        self._place = place
        self._settings = settings
        self._loop = loop
        self._clock = clock
        self._replay = replay
        self._files = files
        self._make_worker = make_worker
        cache = place.directory / CACHE
        self._empty(cache)
        self._bucket = JournalObjects(place.objects)
        self._store = BucketStore(place.blobs, cache, files, cache_bytes=place.cache_bytes)
        self._journal = FileJournal(
            cache / JOURNAL, slot_bytes=settings.slot_bytes, slot_count_max=settings.slot_count_max, files=files
        )
        self._disk: Disk | None = None

    def _empty(self, cache: Path) -> None:
        """What another start left is in the bucket, or nobody was told of it."""
        for directory in (JOURNAL, SEGMENTS, SNAPSHOTS, CHUNKS):
            path = cache / directory
            make_directories(self._files, path)
            for name in self._files.names(path):
                self._files.unlink(path / name)

    def give_up(self) -> None:
        """Let go of what was opened: the log does not come to be."""
        if self._disk is not None:
            self._disk.deleter.stop()
        self._bucket.close()
        self._store.stop()
        self._journal.close()

    def run(self, unlock: Callable[[], None]) -> FileLog:
        seed = self._bucket.seed(partial(self._files.token, SEED_BYTES))
        claim = self._bucket.run(protocol.claim(seed, self._start_object))
        if claim is None:
            raise NotOwner(ErrorCode.NOT_OWNER, "another broker was quicker to lead the shard")
        logger.info(
            "leading the shard",
            node=self._place.node,
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
        self._store.read_ahead(self._listed(chain.snapshot))
        player.play()
        self._store.read_ahead(())
        full = self._full(player, state, chain)
        sequence, checksum = self._write_start(state, claim)
        self._disk = disk = self._make_disk()
        log = FileLog(
            settings=self._settings,
            loop=self._loop,
            clock=self._clock,
            replay=self._replay,
            journal=self._journal,
            state=state,
            reader_worker=worker,
            disk=disk,
            make_syncer=uploading(
                self._journal, self._bucket, claim, self._clock, self._make_worker, sequence=sequence
            ),
            epoch=start,
            sequence=sequence,
            checksum=checksum,
            snapshot_name=chain.snapshot or "",
            unlock=partial(self._let_go, unlock),
        )
        self._delete_unnamed(state, chain, start)
        if chain.groups:
            log.take_over(full, chain.sealed)
        return log

    def _start_object(self, chain: ObjectChain) -> bytes:
        nonce = self._files.token(NONCE_BYTES)
        return start_object(chain.end, chain.seed, nonce=nonce, node=self._place.node, now_us=self._clock.now_us())

    def _copied(self, found: ObjectChain, naming: Naming | None, sealed: int) -> Chain:
        """The groups that are in no segment, in slots, where tails and readers expect them."""
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
        return Chain(found.start, sealed, rests_on, snapshot, groups, found.checksum, None)

    def _listed(self, snapshot: str | None) -> list[str]:
        """Segments that a snapshot lists, whose ends are read next; what is wrong with it is found by who plays it."""
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
        return Reader(self._journal, segments, worker, epoch=start, root=self._place.root)

    def _make_state(self, segments: SegmentSet, reader: Reader) -> LogState:
        settings = self._settings
        staging = Staging(bytes_max=settings.staged_bytes_max, batches_max=settings.staged_batches_max)
        return LogState(reader, segments, staging, hides_unsynced=True)

    def _full(self, player: Player, state: LogState, chain: Chain) -> Sequence[tuple[Slot, Image]]:
        """Slots that hold what was recovered, each with the state at its end: they are sealed like any other that is full."""
        if not chain.groups:
            return ()
        return [*player.full, (chain.groups[-1].slot, image_of_all(state, chain.sequence))]

    def _write_start(self, state: LogState, claim: protocol.Claim) -> tuple[int, int]:
        """The group of the start, which is stored, at the beginning of a slot: the chain goes on behind it."""
        own = ObjectChain(self._journal.seed, claim.chain.floor, [*claim.chain.groups[-1:]], next_number=claim.number)
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
            self._place.directory,
            self._store,
            self._settings.disk_reserve_bytes,
            self._loop,
            files=self._files,
            clock=self._clock,
            make_worker=self._make_worker,
        )

    def _delete_unnamed(self, state: LogState, chain: Chain, start: int) -> None:
        """Blobs of older starts that no group names: none will, for theirs are over."""
        assert self._disk is not None, "the log has one"
        named = {segment_name(number) for number in state.segments.numbers()} | {chain.snapshot}
        try:
            found = [name for directory in (SEGMENTS, SNAPSHOTS) for name in self._store.list(f"{directory}/")]
        except BrokerError as error:
            logger.warning("litter in the bucket is left for another start", reason=error.message)
            return
        old = f"{start:0{_START_DIGITS}x}"
        self._disk.deleter.delete([name for name in found if name not in named and name.partition("/")[2] < old])

    def _let_go(self, unlock: Callable[[], None]) -> None:
        self._store.stop()
        self._bucket.close()
        unlock()
