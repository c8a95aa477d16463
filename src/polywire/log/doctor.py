"""Check a data directory offline, restore damaged copies of metadata, and discard the damaged end of a journal.

* A check or diagnosis reads every stored batch and changes nothing.
* A rebuild copies only verified data.
* A repair of a journal with a gap or damage retains the longest valid prefix. It moves later journal files aside, and
  reports the lost groups (atomic journal writes) and offsets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, Corrupt, ErrorCode, Unavailable
from polywire.log.base import Loop, Replay
from polywire.log.journal.group import TOKEN_BYTES, Entry, EntryKind, read_directory
from polywire.log.journal.recovery import Chain, FoundGroup, damaged_bodies, find_chain, newest_groups
from polywire.log.journal.replay import Player, image_of_all
from polywire.log.journal.slots import SEED_NAMES, FileJournal, Slot, is_seed, restore_seed, seed_copies
from polywire.log.journal.snapshot import copies_sound, is_copy, newer_version
from polywire.log.journal.staging import Staging
from polywire.log.opening import JOURNAL, lock_directory, open_log
from polywire.log.partition.reader import Reader
from polywire.log.segments.damage import Damage
from polywire.log.segments.format import TRAILER, SegmentRun, read_footer
from polywire.log.segments.sealer import snapshot_name
from polywire.log.segments.sealing import seal_all
from polywire.log.segments.segment import Segment
from polywire.log.segments.segment_set import SEGMENTS, SNAPSHOTS, SegmentSet
from polywire.log.settings import LogSettings
from polywire.log.state import LogState
from polywire.log.worker import ThreadWorker, storage_failed
from polywire.records.batch import check_body, check_header, read_header
from polywire.records.checksum import xxh64
from polywire.records.columns import BATCH_BYTES_MAX, HEADER_BYTES
from polywire.records.fields import header_fields
from polywire.store.base import BLOCK_BYTES, CHUNK_BYTES, BlobMissing, Store, aligned_buffer, blob_newer
from polywire.store.data_directory import BlobRoot
from polywire.store.file import FileStore
from polywire.store.files import COPY_MODE, copy_file, exists, make_directories, read_file, replace_file
from polywire.store.system_files import SYSTEM_FILES
from polywire.types import Buffer

ASIDE: Final = "aside"
ALL_GROUPS: Final = 2**63 - 1

Offsets = tuple[int, int]
"""(first offset, end offset); the end is exclusive."""
COPY_BYTES: Final = 1024 * 1024  # bytes copied at a time
_length: Final = header_fields("length")


@dataclass(slots=True)
class Loss:
    """The data that a repair of a damaged journal loses.

    Attributes:
        groups: number of journal writes that are cut off.
        unknown: number of journal writes whose header is damaged. Their content is known only in part, from later ones.
        records: lost offsets by partition. Later records get these offsets again.
        damaged: offsets by partition of batches that stay in the log but cannot be read.
    """

    groups: int = 0
    unknown: int = 0
    records: dict[int, Offsets] = field(default_factory=dict)
    damaged: dict[int, list[Offsets]] = field(default_factory=dict)
    changes: int = 0
    staged: int = 0

    @property
    def nothing(self) -> bool:
        return not self.groups and not self.damaged


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of examining a data directory.

    Attributes:
        reason: error that prevents a broker from starting, None if it can start.
        through: sequence number of the last journal write that a repair retains.
        loss: data that a repair loses.
        log_state: recovered state.
    """

    reason: Corrupt | None
    through: int
    loss: Loss
    log_state: LogState | None


class OfflineLog:
    """A data directory that is locked against brokers and examined without changes.

    Args:
        replay: creates an empty broker state.
        store: where the segments are if not in the data directory, for example a bucket.
    """

    def __init__(
        self, directory: Path, replay: Callable[[], Replay], loop: Loop, store: FileStore | None = None
    ) -> None:
        self.directory: Final = directory
        self.store: Final = FileStore(directory) if store is None else store
        self.state: Replay = replay()
        self._replay = replay
        self._loop = loop
        self.journal: Final = FileJournal(directory / JOURNAL, slot_bytes=0, slot_count_max=0)
        self.slots: Final[Sequence[Slot]] = self.journal.open_to_read()

    def diagnose(self) -> Diagnosis:
        """Determine whether a broker would start and, if not, how much of the journal a repair could retain.

        Recovers the journal in memory, like a start, but writes no files.

        Raises:
            Corrupt: a repair is not possible. NEWER_FORMAT: a newer version wrote the data.
            Unavailable: a file cannot be read.
        """
        reason: Corrupt | None = None
        try:
            chain, log_state, _ = self._recover_until(None)
        except Corrupt as error:
            if error.code is ErrorCode.NEWER_FORMAT:
                raise
            reason = error
        else:
            if chain is not None:
                self._rehearse_start(chain, log_state)
            if chain is not None or not self.slots:
                return Diagnosis(None, 0 if chain is None else chain.sequence, Loss(), log_state)
            reason = Corrupt(ErrorCode.CORRUPT, "no group of the journal has a valid checksum")
        through = ALL_GROUPS
        while True:
            chain, log_state, broken = self._recover_until(through)
            if chain is None:
                raise reason
            if broken is None:
                return Diagnosis(reason, chain.sequence, self._loss(chain), log_state)
            through = broken.sequence - 1

    def recover(self) -> tuple[Chain | None, LogState]:
        """Return the journal's valid writes and the log state that a start would recover.

        The first is None if nothing was ever stored. Raises Corrupt.
        """
        chain, log_state, _ = self._recover_until(None)
        if chain is None and self.slots and not self.journal.is_blank():
            raise Corrupt(ErrorCode.CORRUPT, "no group of the journal has a valid checksum")
        return chain, log_state

    def _recover_until(self, through: int | None) -> tuple[Chain | None, LogState, FoundGroup | None]:
        """Recover in memory. With ``through``, an invalid journal write is returned instead of raising Corrupt."""
        chain = find_chain(self.slots, through=through)
        self.state = self._replay()
        log_state = self._log_state(chain)
        if chain is None:
            return None, log_state, None
        self.journal.assign_serials(dict.fromkeys(group.slot for group in chain.groups))
        player = Player(self.store, log_state, self.state, chain)
        try:
            player.play()
        except BrokerError as error:
            if through is None or player.playing is None:
                raise _as_corrupt(error) from error
            return chain, log_state, player.playing
        return chain, log_state, None

    def _rehearse_start(self, chain: Chain, log_state: LogState) -> None:
        """Write the recovered state to segments, as a start does, but discard the output.

        Raises Corrupt or Unavailable.
        """
        try:
            for slot in self.slots:
                slot.lost_pages()
            image = image_of_all(log_state, chain.sequence)
            name = snapshot_name(chain.start + 1, 0)
            with suppress(Busy):  # if the disk cannot read a body yet, a start continues without sealing it
                store, broker = _Discarding(self.directory), self.state.snapshot()
                seal_all(store, log_state, self.journal.views, image, broker, name)
        except OSError as error:
            raise storage_failed(error) from error

    def _log_state(self, chain: Chain | None) -> LogState:
        start = 1 if chain is None else chain.start + 1
        segments = SegmentSet(self.store, start)
        worker = ThreadWorker("repair", self._loop)
        reader = Reader(self.journal, segments, worker, epoch=start, root=BlobRoot(str(self.directory), b""))
        return LogState(reader, segments, Staging(bytes_max=2**62, batches_max=2**62), hides_unsynced=False)

    def _loss(self, chain: Chain) -> Loss:
        found = Loss()
        for group in [group for group in chain.groups if not group.whole]:
            for entry in damaged_bodies(group) or ():
                _note_damaged(found, group.slot, entry)
        cut = newest_groups(self.slots).since(chain.sequence + 1)
        if cut:
            found.groups = cut[-1].sequence - chain.sequence
            found.unknown = found.groups - len(cut)
        for group in cut:
            _note_cut(found, group)
        return found

    def slots_with(self, after: int) -> list[Slot]:
        found_groups = newest_groups(self.slots).since(after + 1)
        return list({group.slot.number: group.slot for group in found_groups}.values())

    def close(self) -> None:
        self.journal.close()


class _Discarding(FileStore):
    def put_new(self, name: str, parts: Iterable[Buffer]) -> None:
        deque(parts, maxlen=0)

    def delete(self, name: str) -> None:
        pass


@contextmanager
def open_offline(directory: Path, replay: Callable[[], Replay], loop: Loop) -> Iterator[OfflineLog]:
    """Open a data directory and lock it against brokers.

    Raises Busy(BUSY), Unavailable if it is not a data directory, Corrupt or OSError.
    """
    if not exists(SYSTEM_FILES, directory / JOURNAL):
        raise Unavailable(ErrorCode.STORAGE_FAILED, f"not a data directory path={str(directory)!r}")
    unlock = lock_directory(directory)
    try:
        offline = OfflineLog(directory, replay, loop)
        try:
            yield offline
        finally:
            offline.close()
    finally:
        unlock()


def repair(offline: OfflineLog, diagnosis: Diagnosis) -> Path:
    """Copy the journal files that a repair will cut, sync the copies, and return their directory.

    The journal files themselves are not changed. To complete the repair, unlock the directory and call ``finish``.
    """
    aside = offline.directory / ASIDE / f"{diagnosis.through:016x}"
    make_directories(SYSTEM_FILES, aside)
    damaged = {slot.number: slot for slot in offline.slots_with(diagnosis.through)} or {
        slot.number: slot for slot in offline.slots
    }
    for path in [slot.path for slot in damaged.values()]:
        copy_file(SYSTEM_FILES, path, aside / path.name)
    SYSTEM_FILES.sync_directory(aside)
    return aside


def finish(directory: Path, through: int, slot_bytes: int, replay: Replay, loop: Loop, clock: Clock) -> None:
    """Open the log with the journal writes up to ``through``, as a broker would, and close it. Raises BrokerError."""
    settings = LogSettings(slot_bytes=slot_bytes, disk_reserve_bytes=0)
    open_log(directory, settings=settings, loop=loop, clock=clock, replay=replay, through=through).close()


def _note_damaged(found: Loss, slot: Slot, entry: Entry) -> None:
    if entry.kind == EntryKind.STAGED:
        found.staged += 1
        return
    header = read_header(slot.view, entry.position)
    found.damaged.setdefault(header.partition, []).append((header.base_offset, header.next_offset))


def _note_cut(found: Loss, group: FoundGroup) -> None:
    """Add the content of a journal write that is cut off to ``found``."""
    view = group.slot.view
    for entry in read_directory(view, group.position):
        found.changes += entry.kind == EntryKind.CHANGE
        found.staged += entry.kind == EntryKind.STAGED
        for at in _headers(entry.kind, entry.position, entry.length):
            if at + HEADER_BYTES <= group.position + group.length and check_header(view, at):
                header = read_header(view, at)
                first, end = found.records.get(header.partition, (header.base_offset, 0))
                found.records[header.partition] = (min(first, header.base_offset), max(end, header.next_offset))


def _headers(kind: int, position: int, length: int) -> Iterable[int]:
    """Return the positions of batch headers in a journal entry, without those of batches that have no offsets."""
    if kind == EntryKind.BATCH:
        return (position,)
    return range(position + TOKEN_BYTES, position + length, HEADER_BYTES) if kind == EntryKind.PUBLISH else ()


def _as_corrupt(error: BrokerError) -> Corrupt:
    return error if isinstance(error, Corrupt) else Corrupt(ErrorCode.CORRUPT, error.message)


class Severity(Enum):
    """Severity of a finding, from harmless to "the broker does not start"."""

    SOUND = "sound"
    WORN = "worn"
    DAMAGED = "damaged"
    BROKEN = "broken"


class Remedy(Enum):
    """Action by which an operator can fix a finding."""

    REBUILD = "rebuild"
    REPAIR = "repair"
    BACKUP = "backup"
    UPGRADE = "upgrade"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result for one examined file.

    Attributes:
        path: path below the data directory.
        damage: damaged records.
        remedy: how to fix it, None if no action is needed.
    """

    severity: Severity
    path: str
    message: str
    damage: Damage | None = None
    remedy: Remedy | None = None


def examine(offline: OfflineLog) -> list[Finding]:
    """Return all findings of a directory."""
    found = [_seeds(offline)]
    diagnosis: Diagnosis | None = None
    try:
        diagnosis = offline.diagnose()
        found.append(_journal(diagnosis))
    except BrokerError as error:
        found.append(Finding(Severity.BROKEN, JOURNAL, error.message, remedy=remedy_of(error)))
    log_state = None if diagnosis is None else diagnosis.log_state
    for name in offline.store.list(f"{SNAPSHOTS}/"):
        found.append(examine_snapshot(offline.store, name))
    needed = None if log_state is None else {item.segment.name for item in log_state.segments.by_location.values()}
    for name in offline.store.list(f"{SEGMENTS}/"):
        if needed is None or name in needed:
            found += examine_segment(offline.store, name)
    return found


def is_newer(error: Exception) -> bool:
    """Return whether the data is intact but has an unknown version."""
    return isinstance(error, BrokerError) and error.code is ErrorCode.NEWER_FORMAT


def remedy_of(error: Exception) -> Remedy:
    """Return the remedy for an error that prevents a start, if no intact copy of the data exists."""
    return Remedy.UPGRADE if is_newer(error) else Remedy.BACKUP


def rebuild(offline: OfflineLog, findings: Sequence[Finding]) -> list[str]:
    """Rewrite damaged files from intact copies and return their paths. Raises OSError or BrokerError."""
    paths = []
    for finding in findings:
        if finding.severity is not Severity.WORN:
            continue
        path = offline.directory / finding.path
        if finding.path.startswith(JOURNAL):
            restore_seed(SYSTEM_FILES, offline.directory / JOURNAL, offline.journal.seed)
        elif finding.path.startswith(SNAPSHOTS):
            _replace(path, [_sound_half(read_file(SYSTEM_FILES, path))] * 2)
        else:
            _replace(path, _with_footers(offline.store, finding.path))
        paths.append(finding.path)
    return paths


def _seeds(offline: OfflineLog) -> Finding:
    copies = seed_copies(SYSTEM_FILES, offline.directory / JOURNAL)
    sound = [name for name, content in zip(SEED_NAMES, copies, strict=True) if is_seed(content)]
    if len(sound) == len(SEED_NAMES) and copies[0] == copies[1]:
        return Finding(Severity.SOUND, f"{JOURNAL}/{SEED_NAMES[0]}", "two copies")
    reason = "only one copy is intact" if sound else "the seed has the format of an earlier version"
    message = f"{reason}; the next start fixes this"
    return Finding(Severity.WORN, f"{JOURNAL}/{SEED_NAMES[0]}", message, remedy=Remedy.REBUILD)


def _journal(diagnosis: Diagnosis) -> Finding:
    if diagnosis.reason is None:
        return Finding(Severity.SOUND, JOURNAL, f"a broker can start last_group={diagnosis.through}")
    message = f"{diagnosis.reason.message}; polywire log repair can skip it"
    return Finding(Severity.BROKEN, JOURNAL, message, remedy=Remedy.REPAIR)


def examine_snapshot(store: Store, name: str) -> Finding:
    """Return a finding on the two copies in a snapshot file."""
    sound, copies = copies_sound(store, name)
    if not sound and (version := newer_version(store.get(name))):
        return Finding(Severity.BROKEN, name, blob_newer(name, version).message, remedy=Remedy.UPGRADE)
    if sound == copies:
        return Finding(Severity.SOUND, name, f"copies={copies}")
    severity, remedy = (Severity.WORN, Remedy.REBUILD) if sound else (Severity.DAMAGED, Remedy.BACKUP)
    return Finding(severity, name, f"damaged copies={copies - sound} of {copies}", remedy=remedy)


def examine_segment(store: Store, name: str) -> list[Finding]:
    """Return findings on a segment's two footers and on its damaged batches."""
    try:
        info, _ = read_footer(store, name)
    except (Corrupt, BlobMissing) as error:
        reason = str(error) if is_newer(error) else f"both footers are damaged: {error}"
        return [Finding(Severity.BROKEN, name, reason, remedy=remedy_of(error))]
    found = []
    tail = store.get(name, info.data_bytes, store.size(name))
    sound, copies = _footers(tail)
    if sound < copies:
        message = f"damaged footers={copies - sound} of {copies}"
        found.append(Finding(Severity.WORN, name, message, remedy=Remedy.REBUILD))
    segment, block = Segment(store, info), aligned_buffer(BATCH_BYTES_MAX + CHUNK_BYTES + 2 * BLOCK_BYTES)
    for run in info:
        found += [
            Finding(Severity.DAMAGED, name, damage.error().message, damage, Remedy.BACKUP)
            for damage in _damages(segment, run, block)
        ]
    return found or [Finding(Severity.SOUND, name, f"runs={info.run_count} bytes={info.data_bytes}")]


def _damages(segment: Segment, run: SegmentRun, block: memoryview) -> Iterable[Damage]:
    if run.token:
        yield from _damaged_staged(segment, run)
        return
    for start, stop in segment.windows(run.partition, CHUNK_BYTES):
        yield from segment.verify_uncached(block, run.partition, start, stop)


def _damaged_staged(segment: Segment, run: SegmentRun) -> Iterator[Damage]:
    at = run.position
    while at < run.stop:
        header = segment.stored(at, min(at + HEADER_BYTES, run.stop))
        length = _length(header)[0] if check_header(header, 0) else run.stop - at
        if not check_header(header, 0) or not check_body(segment.stored(at, min(at + length, run.stop)), 0):
            yield Damage(segment.name, run.partition, at, at + length, 0, 0)
        at += length


def _footers(tail: bytes) -> tuple[int, int]:
    """Return (number of valid footers, number of footers). ``tail`` is what follows a segment's batches."""
    if _is_footer(tail):
        return 1, 1
    half = len(tail) // 2
    return sum(_is_footer(copy) for copy in (tail[:half], tail[half:])), 2


def _is_footer(copy: bytes) -> bool:
    if len(copy) < TRAILER.size:
        return False
    fields = TRAILER.unpack_from(copy, len(copy) - TRAILER.size)
    whole = xxh64(copy[-TRAILER.size : -8]) == fields[9] and fields[3] == len(copy) - TRAILER.size
    return bool(whole and xxh64(copy[: -TRAILER.size]) == fields[7])


def _with_footers(store: Store, name: str) -> Iterator[Buffer]:
    """Yield the segment's content with both footers replaced by the valid one."""
    info, _ = read_footer(store, name)
    for at in range(0, info.data_bytes, COPY_BYTES):
        yield store.get(name, at, min(at + COPY_BYTES, info.data_bytes))
    tail = store.get(name, info.data_bytes, store.size(name))
    half = len(tail) // 2
    footer = tail[:half] if _is_footer(tail[:half]) else tail[half:]
    yield footer
    yield footer


def _sound_half(content: bytes) -> bytes:
    half = len(content) // 2
    first, second = content[:half], content[half:]
    return first if is_copy(first) else second


def _replace(path: Path, parts: Iterable[Buffer]) -> None:
    temporary = path.with_name(f".{path.name}.rebuilt")
    replace_file(SYSTEM_FILES, path, parts, temporary=temporary, mode=COPY_MODE)
