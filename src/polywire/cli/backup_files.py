"""Backups of a data directory, taken while a broker writes it, and put back (decision 0061).

Promises: a backup holds everything that was acknowledged before it began, and is one moment of the log; under its name it is whole and on
the disk, or it is not there; nothing in the data directory is changed. Must not know: topics, how anything is printed.

```
shelf/                     a directory of backups, one each:
  20260102T030405Z/          a data directory, as a start would find it after a power loss
    journal/  snapshots/       the groups that are in no segment yet, and what they go on from
    segments/                  files that several backups need are the same file under several names
    backup.json                facts for people
  .unfinished/               one that is being taken, or was when its process died; the next one goes on from its segments
```
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, Corrupt, ErrorCode, Invalid, Unavailable
from polywire.log.base import Loop, Replay
from polywire.log.doctor import Finding, Severity, examine, examine_segment
from polywire.log.journal.recovery import Chain, find_chain, newest_groups
from polywire.log.journal.seed import keep_seed
from polywire.log.journal.slots import Slot
from polywire.log.opening import JOURNAL, lock_directory
from polywire.log.repair import OfflineLog
from polywire.log.segments.segment_set import SEGMENTS, SNAPSHOTS
from polywire.store.base import BLOCK_BYTES
from polywire.store.file import FileStore
from polywire.store.files import (
    NEW_MODE,
    Access,
    copy_file,
    exists,
    make_directories,
    remove,
    replace_file,
    write_parts,
)
from polywire.store.system_files import SYSTEM_FILES

FACTS: Final = "backup.json"
UNFINISHED: Final = ".unfinished"
COPIES_MAX: Final = 50  # of the journal, until one of them is whole; each takes a fraction of what a slot takes to fill
_COPIED: Final = "copied"
_PAUSE_SECONDS: Final = 0.02
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})

MakeReplay = Callable[[], Replay]


class _Moved(Exception):
    """The broker went on meanwhile, so that what was copied is no single moment."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is told of a backup. ``through`` is the journal's last group in it, ``copied_bytes`` what no earlier backup had; ``damaged`` are
    the segments that did not verify, which the data directory had so."""

    taken_at: str
    through: int
    segments: int
    bytes: int
    copied_segments: int
    copied_bytes: int
    damaged: Sequence[str]


@dataclass(frozen=True, slots=True)
class Taken:
    """A backup that was taken, and what is to be said of the bytes that were copied for it."""

    path: Path
    facts: Facts
    findings: Sequence[Finding]


def take_backup(directory: Path, shelf: Path, *, replay: MakeReplay, loop: Loop, clock: Clock) -> Taken:
    """Take a backup of a data directory, whether a broker runs there or not.

    Raises Unavailable where no data directory is, Corrupt where no broker would start from it, Busy(BUSY) where another backup is being
    taken or the journal changes too fast, OSError.
    """
    if not exists(SYSTEM_FILES, directory / JOURNAL):
        raise Unavailable(ErrorCode.STORAGE_FAILED, f"no data directory of a broker path={str(directory)!r}")
    make_directories(SYSTEM_FILES, shelf)
    with _locked(shelf):
        taking = _Taking(directory, shelf, replay, loop)
        for _ in range(COPIES_MAX):
            try:
                return taking.take(datetime.fromtimestamp(clock.now_us() // 1_000_000, UTC))
            except _Moved as moved:
                reason = str(moved)
                time.sleep(_PAUSE_SECONDS)
        raise Busy(
            ErrorCode.BUSY,
            f"the log is written faster than its journal can be copied tries={COPIES_MAX} reason={reason!r}",
        )


def list_backups(shelf: Path) -> list[str]:
    """Names of the finished backups, oldest first."""
    if not shelf.is_dir():
        return []
    return sorted(path.name for path in shelf.iterdir() if not path.name.startswith(".") and _is_backup(path))


def find_backup(path: Path) -> Path:
    """A backup by its own path, or the newest on a shelf. Raises Invalid."""
    if _is_backup(path):
        return path
    names = list_backups(path)
    if not names:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"no backup here path={str(path)!r}")
    return path / names[-1]


def read_facts(backup: Path) -> Facts:
    """What is told of a backup. Raises OSError, Corrupt."""
    try:
        return Facts(**json.loads((backup / FACTS).read_bytes()))
    except (ValueError, TypeError) as error:
        raise Corrupt(ErrorCode.CORRUPT, f"facts of the backup are unreadable path={str(backup)!r}") from error


def restore_backup(backup: Path, directory: Path, *, replay: MakeReplay, loop: Loop) -> list[Finding]:
    """Make a data directory of a backup, from which a broker starts; returns what is to be said of each file.

    Raises Invalid where the directory holds anything, Corrupt where no broker would start from the backup, OSError; then nothing is there.
    """
    directory = directory.absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"data directory is not empty path={str(directory)!r}")
    unfinished = directory.with_name(f".{directory.name}.restoring")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    make_directories(SYSTEM_FILES, unfinished)
    with ExitStack() as undone:
        undone.callback(shutil.rmtree, unfinished, ignore_errors=True)
        for folder in (SEGMENTS, SNAPSHOTS, JOURNAL):
            make_directories(SYSTEM_FILES, unfinished / folder)
            for name in _names(backup / folder):
                copy_file(SYSTEM_FILES, backup / folder / name, unfinished / folder / name)
            SYSTEM_FILES.sync_directory(unfinished / folder)
        findings = examine_copy(unfinished, replay, loop)
        broken = [finding for finding in findings if finding.severity is Severity.BROKEN]
        if broken:
            reason = f"{broken[0].message} path={str(backup / broken[0].path)!r}"
            raise Corrupt(ErrorCode.CORRUPT, f"no broker would start from this backup: {reason}")
        undone.pop_all()
    SYSTEM_FILES.sync_directory(unfinished)
    SYSTEM_FILES.rename(unfinished, directory)
    SYSTEM_FILES.sync_directory(directory.parent)
    return findings


def examine_copy(directory: Path, replay: MakeReplay, loop: Loop) -> list[Finding]:
    """Read everything of a directory that no broker knows, and say what is to be said of each file."""
    offline = OfflineLog(directory, replay, loop)
    try:
        return examine(offline)
    finally:
        offline.close()


class _Taking:
    """One backup that is being taken. Guards: what lies under a segment's name in ``unfinished`` is whole and on the disk."""

    def __init__(self, directory: Path, shelf: Path, replay: MakeReplay, loop: Loop) -> None:
        self._directory = directory
        self._shelf = shelf
        self._replay = replay
        self._loop = loop
        self._unfinished = shelf / UNFINISHED
        self._copied: dict[str, int] = {}
        """Bytes of the segments that were copied, not linked."""

    def take(self, taken_at: datetime) -> Taken:
        """Raises _Moved, and what ``take_backup`` does."""
        if (self._unfinished / _COPIED).exists():
            shutil.rmtree(self._unfinished / _COPIED)
        for folder in (SEGMENTS, SNAPSHOTS, f"{_COPIED}/{JOURNAL}", f"{_COPIED}/{SNAPSHOTS}"):
            make_directories(SYSTEM_FILES, self._unfinished / folder)
        with ExitStack() as held:
            try:
                held.callback(lock_directory(self._directory))
                runs = False
            except Busy:  # a broker runs, or another tool looks
                runs = True
            segments, through = self._copy_moment(runs)
        self._check(through)
        store = FileStore(self._unfinished)
        copied = sorted(segments & set(self._copied))
        findings = [finding for name in copied for finding in examine_segment(store, name)]
        sizes = {name: store.size(name) for name in segments}
        facts = Facts(
            taken_at=taken_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            through=through,
            segments=len(segments),
            bytes=sum(sizes.values()),
            copied_segments=len(copied),
            copied_bytes=sum(self._copied[name] for name in copied),
            damaged=sorted({finding.path for finding in findings if finding.severity is not Severity.SOUND}),
        )
        return Taken(self._finish(facts, taken_at), facts, findings)

    # One moment

    def _copy_moment(self, runs: bool) -> tuple[set[str], int]:
        """Copy the journal, then what it names; returns the segments and the last group. Raises _Moved, Corrupt."""
        try:
            # A slot may name a snapshot that is new since, and one that was there may be gone as soon as the next slot is full.
            self._copy_snapshots()
            self._copy_journal()
            self._copy_snapshots()
            copied = self._unfinished / _COPIED
            offline = OfflineLog(copied, self._replay, self._loop, _LiveStore(self._directory, copied))
        except FileNotFoundError as error:
            raise _Moved("a file of the journal was replaced") from error
        try:
            chain, segments = self._played(offline, runs)
            self._keep_journal(chain, offline.slots, offline.journal.seed)
        finally:
            offline.close()
        snapshots = set() if chain.snapshot is None else {chain.snapshot}
        for name in snapshots:
            self._copy(self._unfinished / _COPIED, name)
        shutil.rmtree(self._unfinished / _COPIED)
        try:
            for name in sorted(segments):
                self._keep_segment(name)
        except FileNotFoundError as error:
            raise _Moved("a segment that the journal names was deleted") from error
        self._tidy(SEGMENTS, segments)
        self._tidy(SNAPSHOTS, snapshots)
        return segments, chain.sequence

    def _copy_snapshots(self) -> None:
        """Those that are there now; few, and small."""
        source, target = self._directory / SNAPSHOTS, self._unfinished / _COPIED / SNAPSHOTS
        for name in _names(source):
            with suppress(FileNotFoundError):
                shutil.copyfile(source / name, target / name)

    def _copy_journal(self) -> None:
        """The journal's files as they are while the broker writes them, page by page. The one that it writes comes last: where it goes on in
        another one meanwhile, no group of that is seen, and none is missing before it."""
        source, target = self._directory / JOURNAL, self._unfinished / _COPIED / JOURNAL
        for name in sorted(_names(source), key=lambda name: (source / name).stat().st_mtime_ns):
            shutil.copyfile(source / name, target / name)

    def _played(self, offline: OfflineLog, runs: bool) -> tuple[Chain, set[str]]:
        """Recover what was copied; it is one moment if every group in it follows from what it names.

        A group that was overwritten or not yet there when its page was copied leaves a gap before the newest one, and no chain crosses it.
        """
        try:
            diagnosis = offline.diagnose()
            chain = find_chain(offline.slots) if diagnosis.reason is None else None
            reason = diagnosis.reason
        except BrokerError as error:
            if not runs:
                raise
            raise _Moved(error.message) from error
        if chain is None or diagnosis.log_state is None:
            message = "no group of the journal verifies" if reason is None else reason.message
            if runs:
                raise _Moved(message)
            raise Corrupt(ErrorCode.CORRUPT, message)
        if runs and chain.sequence != max(newest_groups(offline.slots)):
            raise _Moved("groups are missing before the newest")
        return chain, {item.segment.name for item in diagnosis.log_state.segments.by_location.values()}

    def _keep_journal(self, chain: Chain, slots: Sequence[Slot], seed: int) -> None:
        """The groups of the chain where they lay, and nothing around them."""
        folder = self._unfinished / JOURNAL
        make_directories(SYSTEM_FILES, folder)
        for name in _names(folder):
            remove(SYSTEM_FILES, folder / name)
        keep_seed(SYSTEM_FILES, folder, seed)
        for slot in slots:
            groups = [group for group in chain.groups if group.slot is slot]
            if not groups:
                continue
            file = SYSTEM_FILES.open(folder / slot.path.name, Access.NEW)
            try:
                file.truncate(slot.size)
                for group in groups:
                    write_parts(file, [slot.view[group.position : group.position + group.length]], group.position)
                file.sync()
            finally:
                file.close()
        SYSTEM_FILES.sync_directory(folder)

    # Blobs

    def _keep_segment(self, name: str) -> None:
        """Have a segment among the others: it is there, another backup has it, or it is copied."""
        source, target = self._directory / name, self._unfinished / name
        if target.exists():
            if _is_same(source, target):
                if target.stat().st_nlink == 1:  # copied by a try that ended before it was read again
                    self._copied[name] = target.stat().st_size
                return
            remove(SYSTEM_FILES, target)
        for backup in reversed(list_backups(self._shelf)):
            kept = self._shelf / backup / name
            if kept.exists() and _is_same(source, kept) and name not in read_facts(self._shelf / backup).damaged:
                if _link(kept, target):
                    return
                break
        self._copy(self._directory, name)
        self._copied[name] = target.stat().st_size

    def _copy(self, source: Path, name: str) -> None:
        """Copy a file, whole and on the disk before it has its name."""
        target = self._unfinished / name
        temporary = target.with_name(f".{target.name}")
        copy_file(SYSTEM_FILES, source / name, temporary)
        SYSTEM_FILES.rename(temporary, target)

    def _tidy(self, folder: str, needed: set[str]) -> None:
        """Remove what this backup does not need: an earlier try has left it."""
        for name in os.listdir(self._unfinished / folder):
            if f"{folder}/{name}" not in needed:
                remove(SYSTEM_FILES, self._unfinished / folder / name)
        SYSTEM_FILES.sync_directory(self._unfinished / folder)

    # The end

    def _check(self, through: int) -> None:
        """Recover what was kept, as a start would. Raises Corrupt."""
        offline = OfflineLog(self._unfinished, self._replay, self._loop)
        try:
            found = offline.diagnose()
        finally:
            offline.close()
        if found.reason is not None or found.through != through:
            raise Corrupt(ErrorCode.CORRUPT, f"backup does not verify through={found.through} expected={through}")

    def _finish(self, facts: Facts, taken_at: datetime) -> Path:
        """Give the backup its name."""
        content = json.dumps(asdict(facts), indent=2).encode() + b"\n"
        path = self._unfinished / FACTS
        replace_file(SYSTEM_FILES, path, [content], temporary=path.with_name(f".{FACTS}"), mode=NEW_MODE)
        name = stem = taken_at.strftime("%Y%m%dT%H%M%SZ")
        number = 1
        while (self._shelf / name).exists():
            number += 1
            name = f"{stem}-{number}"
        SYSTEM_FILES.rename(self._unfinished, self._shelf / name)
        SYSTEM_FILES.sync_directory(self._shelf)
        return self._shelf / name


class _LiveStore(FileStore):
    """Segments as the broker has them, snapshots as they were copied."""

    __slots__ = ("_snapshots",)

    def __init__(self, directory: Path, copied: Path) -> None:
        super().__init__(directory)
        self._snapshots = FileStore(copied)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        is_copied = name.startswith(f"{SNAPSHOTS}/")
        return self._snapshots.get(name, start, stop) if is_copied else super().get(name, start, stop)


@contextmanager
def _locked(shelf: Path) -> Iterator[None]:
    """Keep other backups from this shelf meanwhile. Raises Busy."""
    file = SYSTEM_FILES.open(shelf, Access.READ)
    try:
        file.lock()
    except BlockingIOError:
        file.close()
        raise Busy(ErrorCode.BUSY, f"another backup is being taken here path={str(shelf)!r}") from None
    try:
        yield
    finally:
        file.close()


def _is_backup(path: Path) -> bool:
    return (path / FACTS).is_file() and path.name != UNFINISHED


def _names(folder: Path) -> list[str]:
    """Files of a folder, those left out that are being made."""
    return [name for name in SYSTEM_FILES.names(folder) if not name.startswith(".")] if folder.is_dir() else []


def _is_same(source: Path, kept: Path) -> bool:
    """Whether two files are the same segment. Segments of logs that went apart, one restored from the other's backup, may share a name, but
    not their footers, which hold the times of their records."""
    size = kept.stat().st_size
    return source.stat().st_size == size and _end(source, size) == _end(kept, size)


def _end(path: Path, size: int) -> bytes:
    file = SYSTEM_FILES.open(path, Access.READ)
    try:
        block = bytearray(min(size, BLOCK_BYTES))
        file.read(block, size - len(block))
        return bytes(block)
    finally:
        file.close()


def _link(kept: Path, target: Path) -> bool:
    """One more name for a file; False where the file system has no such thing."""
    try:
        SYSTEM_FILES.link(kept, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True
