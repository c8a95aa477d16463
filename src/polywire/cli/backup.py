"""``polywire backup``: create, list, verify and restore backups of a data directory (decision 0123).

* A backup can be made while the broker runs, and does not change the data directory.
* A backup is one consistent state of the log, and contains everything that was acknowledged before the backup began.
  The logs of several processes are backed up one after the other, so each has a state of its own.
* A backup that has its final name is complete and synced.
* A restore never overwrites data: its target must be empty or missing.

```
shelf/                     a directory of backups:
  20260102T030405Z/          a data directory, as a broker would find it after a power loss
    journal/  snapshots/       journal groups that are not in a segment yet, and the snapshot before them
    segments/                  hard links to the same files as in other backups, where both need a segment
    backup.json                facts about the backup
    shards/0001/               the same for each further process of the broker
  .unfinished/               a backup in progress, or one whose process died; the next backup reuses its segments
```
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.cli.doctor import (
    EXIT_DAMAGED,
    EXITS,
    empty_state,
    examined_offline,
    exit_code,
    logs_on_stderr,
    parts_of,
    placed,
    print_unsound,
    unsound,
)
from polywire.cli.output import Failed, ListFormat, note, print_list
from polywire.cli.progress import reported
from polywire.cli.usage import DATA_DIR, DataDir, examples, settings_file
from polywire.clock import Clock, SystemClock
from polywire.errors import BrokerError, Busy, Corrupt, ErrorCode, Invalid, Unavailable
from polywire.log.base import Loop, Replay
from polywire.log.doctor import Finding, OfflineLog, Severity, examine, examine_segment
from polywire.log.journal.recovery import Chain, find_chain, newest_groups
from polywire.log.journal.slots import Slot, restore_seed
from polywire.log.opening import JOURNAL, lock_directory
from polywire.log.segments.segment_set import SEGMENTS, SNAPSHOTS
from polywire.server.file_permissions import close_to_others, make_private
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
# maximum number of attempts; one attempt takes a fraction of the time in which the broker fills a journal file
COPIES_MAX: Final = 50
_COPIED: Final = "copied"
_PAUSE_SECONDS: Final = 0.02
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})

MakeReplay = Callable[[], Replay]
LIST_COLUMNS: Final = (
    "backup",
    "taken_at",
    "through",
    "segments",
    "bytes",
    "copied_segments",
    "copied_bytes",
    "damaged",
)
DAMAGED: Final = {EXIT_DAMAGED: "something is damaged; the rest can be restored"}
Shelf = Annotated[Path, Parameter(help="Directory of backups, preferably on another disk.")]
BackupPath = Annotated[Path, Parameter(help="A backup, or a directory of backups, of which the newest is used.")]
Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]


class _LogChanged(Exception):
    """The broker changed the log during the copy, so the copy is not consistent. The copy is then repeated."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Contents of a backup's ``backup.json``.

    Attributes:
        through: sequence number of the last journal write in the backup; of the first process, if there are several.
        copied_segments: number of segments that no earlier backup has.
        copied_bytes: size of these segments.
        damaged: names of segments that were already damaged in the data directory.
    """

    taken_at: str
    through: int
    segments: int
    bytes: int
    copied_segments: int
    copied_bytes: int
    damaged: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Taken:
    """The facts about a part of a backup, and what was found in the segments that were copied for it."""

    facts: Facts
    findings: Sequence[Finding]


@dataclass(frozen=True, slots=True)
class NewBackup(_Taken):
    """A new backup."""

    path: Path


def take_backup(directory: Path, shelf: Path, *, replay: MakeReplay, loop: Loop, clock: Clock) -> NewBackup:
    """Back up a data directory, whether a broker is running or not.

    Raises Unavailable if ``directory`` is not a data directory, and Corrupt if a broker could not start from it. Raises
    Busy(BUSY) if another backup is in progress or the journal changes too fast, and OSError.
    """
    if not exists(SYSTEM_FILES, directory / JOURNAL):
        raise Unavailable(
            ErrorCode.STORAGE_FAILED, f"the directory is not a broker's data directory path={str(directory)!r}"
        )
    make_directories(SYSTEM_FILES, shelf)
    with _locked(shelf):
        taken_at = datetime.fromtimestamp(clock.now_us() // 1_000_000, UTC)
        parts = parts_of(directory)
        for part in set(parts_of(shelf / UNFINISHED)) - set(parts):
            shutil.rmtree(shelf / UNFINISHED / part)  # of an interrupted backup of more processes
        taken = {part: _PartInProgress(directory, shelf, part, replay, loop).take(taken_at) for part in parts}
        return _finish(shelf, taken, taken_at)


def _finish(shelf: Path, taken: Mapping[str, _Taken], taken_at: datetime) -> NewBackup:
    """Give the backup its final name, which makes it complete."""
    facts = [each.facts for each in taken.values()]
    total = replace(
        facts[0],
        segments=sum(each.segments for each in facts),
        bytes=sum(each.bytes for each in facts),
        copied_segments=sum(each.copied_segments for each in facts),
        copied_bytes=sum(each.copied_bytes for each in facts),
        damaged=[part + name for part, each in taken.items() for name in each.facts.damaged],
    )
    for part, each in taken.items():
        content = json.dumps(asdict(each.facts if part else total), indent=2).encode() + b"\n"
        path = shelf / UNFINISHED / part / FACTS
        replace_file(SYSTEM_FILES, path, [content], temporary=path.with_name(f".{FACTS}"), mode=NEW_MODE)
    name = stem = taken_at.strftime("%Y%m%dT%H%M%SZ")
    number = 1
    while (shelf / name).exists():
        number += 1
        name = f"{stem}-{number}"
    SYSTEM_FILES.rename(shelf / UNFINISHED, shelf / name)
    SYSTEM_FILES.sync_directory(shelf)
    findings = [finding for part, each in taken.items() for finding in placed(each.findings, part)]
    return NewBackup(total, findings, shelf / name)


def list_backups(shelf: Path) -> list[str]:
    """Return the names of the complete backups, oldest first."""
    if not shelf.is_dir():
        return []
    return sorted(path.name for path in shelf.iterdir() if not path.name.startswith(".") and _is_backup(path))


def find_backup(path: Path) -> Path:
    """Return ``path`` if it is a backup, else the newest backup in the directory ``path``.

    Raises Invalid if there is none.
    """
    if _is_backup(path):
        return path
    names = list_backups(path)
    if not names:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"no backup found path={str(path)!r}")
    return path / names[-1]


def read_facts(backup: Path) -> Facts:
    """Read ``backup.json`` of a backup. Raises OSError, and Corrupt if it is not valid."""
    try:
        return Facts(**json.loads((backup / FACTS).read_bytes()))
    except (ValueError, TypeError) as error:
        raise Corrupt(ErrorCode.CORRUPT, f"{FACTS} of the backup is unreadable path={str(backup)!r}") from error


def restore_backup(backup: Path, directory: Path, *, replay: MakeReplay, loop: Loop) -> list[Finding]:
    """Restore a backup into a data directory, and return what was found in each file.

    Raises Invalid if the directory is not empty, Corrupt if a broker could not start from the backup, and OSError. The
    directory is created only on success.
    """
    directory = directory.absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"data directory is not empty path={str(directory)!r}")
    unfinished = directory.with_name(f".{directory.name}.restoring")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    make_directories(SYSTEM_FILES, unfinished)
    findings: list[Finding] = []
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, unfinished, ignore_errors=True)
        for part in parts_of(backup):
            _copy_folders(backup / part, unfinished / part)
            findings += placed(examine_copy(unfinished / part, replay, loop), part)
        broken = [finding for finding in findings if finding.severity is Severity.BROKEN]
        if broken:
            reason = f"{broken[0].message} path={str(backup / broken[0].path)!r}"
            raise Corrupt(ErrorCode.CORRUPT, f"a broker could not start from this backup: {reason}")
        undo.pop_all()
    # The files are synced before the directory gets its name, its parent afterwards. So a crash leaves the whole
    # directory or none.
    SYSTEM_FILES.sync_directory(unfinished)
    SYSTEM_FILES.rename(unfinished, directory)
    SYSTEM_FILES.sync_directory(directory.parent)
    return findings


def _copy_folders(source: Path, target: Path) -> None:
    """Copy the folders of a log, and sync the copies."""
    for folder in (SEGMENTS, SNAPSHOTS, JOURNAL):
        make_directories(SYSTEM_FILES, target / folder)
        for name in _names(source / folder):
            copy_file(SYSTEM_FILES, source / folder / name, target / folder / name)
        SYSTEM_FILES.sync_directory(target / folder)


def examine_copy(directory: Path, replay: MakeReplay, loop: Loop) -> list[Finding]:
    """Read all data in a directory that no broker uses, and return what was found in each file."""
    offline = OfflineLog(directory, replay, loop)
    try:
        return examine(offline)
    finally:
        offline.close()


class _PartInProgress:
    """The log of one process in a backup in progress, in the directory ``.unfinished``.

    Each segment there is complete and synced before it gets its name.

    Args:
        part: path of the log's directory below the data directory.
    """

    def __init__(self, directory: Path, shelf: Path, part: str, replay: MakeReplay, loop: Loop) -> None:
        self._directory = directory / part
        self._shelf = shelf
        self._part = part
        self._replay = replay
        self._loop = loop
        self._unfinished = shelf / UNFINISHED / part
        self._copied: dict[str, int] = {}
        """Size in bytes of each segment that was copied instead of linked."""

    def take(self, taken_at: datetime) -> _Taken:
        """Copy the log. Raises the errors of ``take_backup``."""
        for _ in range(COPIES_MAX):
            try:
                return self._try(taken_at)
            except _LogChanged as change:
                reason = str(change)
                time.sleep(_PAUSE_SECONDS)
        raise Busy(
            ErrorCode.BUSY,
            f"the journal changes faster than it can be copied attempts={COPIES_MAX} reason={reason!r}",
        )

    def _try(self, taken_at: datetime) -> _Taken:
        """Raises _LogChanged, and the errors of ``take_backup``."""
        if (self._unfinished / _COPIED).exists():
            shutil.rmtree(self._unfinished / _COPIED)
        for folder in (SEGMENTS, SNAPSHOTS, f"{_COPIED}/{JOURNAL}", f"{_COPIED}/{SNAPSHOTS}"):
            make_directories(SYSTEM_FILES, self._unfinished / folder)
        with ExitStack() as locks:
            try:
                locks.callback(lock_directory(self._directory))
                is_in_use = False
            except Busy:  # in use by a broker, or by another offline tool
                is_in_use = True
            segments, through = self._copy_state(is_in_use)
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
        return _Taken(facts, findings)

    # One consistent state

    def _copy_state(self, is_in_use: bool) -> tuple[set[str], int]:
        """Copy the journal and the snapshots.

        Return the segments that they need, and the sequence number of the last journal write. Raises _LogChanged if the
        copy is not consistent, and Corrupt if the log is damaged.
        """
        try:
            # Snapshots are copied before and after the journal. The journal can refer to a snapshot that is written
            # meanwhile, and the broker deletes old ones when it begins its next journal file.
            self._copy_snapshots()
            self._copy_journal()
            self._copy_snapshots()
            copied = self._unfinished / _COPIED
            offline = OfflineLog(copied, self._replay, self._loop, _LiveStore(self._directory, copied))
        except FileNotFoundError as error:
            raise _LogChanged("a journal file was replaced") from error
        try:
            chain, segments = self._recover(offline, is_in_use)
            self._write_journal(chain, offline.slots, offline.journal.seed)
        finally:
            offline.close()
        snapshots = set() if chain.snapshot is None else {chain.snapshot}
        for name in snapshots:
            self._copy(self._unfinished / _COPIED, name)
        shutil.rmtree(self._unfinished / _COPIED)
        try:
            for name in sorted(segments):
                self._add_segment(name)
        except FileNotFoundError as error:
            raise _LogChanged("a segment of the journal was deleted") from error
        self._remove_unneeded(SEGMENTS, segments)
        self._remove_unneeded(SNAPSHOTS, snapshots)
        return segments, chain.sequence

    def _copy_snapshots(self) -> None:
        source, target = self._directory / SNAPSHOTS, self._unfinished / _COPIED / SNAPSHOTS
        for name in _names(source):
            with suppress(FileNotFoundError):
                shutil.copyfile(source / name, target / name)

    def _copy_journal(self) -> None:
        """Copy the journal files while the broker may be writing to one of them.

        The file that was changed last is copied last. If the broker begins another file in the meantime, the copy ends
        before that file, so it has no gap.
        """
        source, target = self._directory / JOURNAL, self._unfinished / _COPIED / JOURNAL
        for name in sorted(_names(source), key=lambda name: (source / name).stat().st_mtime_ns):
            shutil.copyfile(source / name, target / name)

    def _recover(self, offline: OfflineLog, is_in_use: bool) -> tuple[Chain, set[str]]:
        """Replay the copy, and return its journal writes and the segments that it needs.

        A journal write that was overwritten or incomplete when it was copied leaves a gap. The copy is consistent if
        the writes before the first gap reach the newest one. Raises _LogChanged if it is not consistent, and Corrupt if
        the log is damaged.
        """
        try:
            diagnosis = offline.diagnose()
            chain = find_chain(offline.slots) if diagnosis.reason is None else None
            reason = diagnosis.reason
        except BrokerError as error:
            if not is_in_use:
                raise
            raise _LogChanged(error.message) from error
        if chain is None or diagnosis.log_state is None:
            message = "no group of the journal has a valid checksum" if reason is None else reason.message
            if is_in_use:
                raise _LogChanged(message)
            raise Corrupt(ErrorCode.CORRUPT, message)
        if is_in_use and chain.sequence != newest_groups(offline.slots).last:
            raise _LogChanged("groups are missing before the newest group")
        return chain, {item.segment.name for item in diagnosis.log_state.segments.by_location.values()}

    def _write_journal(self, chain: Chain, slots: Sequence[Slot], seed: int) -> None:
        """Write the valid journal writes at their original positions, and zeros everywhere else."""
        folder = self._unfinished / JOURNAL
        make_directories(SYSTEM_FILES, folder)
        for name in _names(folder):
            remove(SYSTEM_FILES, folder / name)
        restore_seed(SYSTEM_FILES, folder, seed)
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

    def _add_segment(self, name: str) -> None:
        """Add a segment: use the file of an interrupted backup, link the file of another backup, or copy it."""
        source, target = self._directory / name, self._unfinished / name
        if target.exists():
            if _is_same(source, target):
                if target.stat().st_nlink == 1:  # copied by an attempt that ended before the file was verified
                    self._copied[name] = target.stat().st_size
                return
            remove(SYSTEM_FILES, target)
        for backup in reversed(list_backups(self._shelf)):
            other = self._shelf / backup / self._part
            earlier = other / name
            if earlier.exists() and _is_same(source, earlier) and name not in read_facts(other).damaged:
                if _link(earlier, target):
                    return
                break
        self._copy(self._directory, name)
        self._copied[name] = target.stat().st_size

    def _copy(self, source: Path, name: str) -> None:
        """Copy a file and sync it before the copy gets its final name."""
        target = self._unfinished / name
        temporary = target.with_name(f".{target.name}")
        copy_file(SYSTEM_FILES, source / name, temporary)
        SYSTEM_FILES.rename(temporary, target)

    def _remove_unneeded(self, folder: str, needed: set[str]) -> None:
        for name in os.listdir(self._unfinished / folder):
            if f"{folder}/{name}" not in needed:
                remove(SYSTEM_FILES, self._unfinished / folder / name)
        SYSTEM_FILES.sync_directory(self._unfinished / folder)

    # Finish

    def _check(self, through: int) -> None:
        """Replay the backup as a broker does when it starts. Raises Corrupt if that fails."""
        offline = OfflineLog(self._unfinished, self._replay, self._loop)
        try:
            diagnosis = offline.diagnose()
        finally:
            offline.close()
        if diagnosis.reason is not None or diagnosis.through != through:
            raise Corrupt(ErrorCode.CORRUPT, f"the backup is damaged through={diagnosis.through} expected={through}")


class _LiveStore(FileStore):
    """Reads segments from the data directory, and snapshots from their copies.

    The broker may delete the original snapshots at any time.
    """

    __slots__ = ("_snapshots",)

    def __init__(self, directory: Path, copied: Path) -> None:
        super().__init__(directory)
        self._snapshots = FileStore(copied)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        is_copied = name.startswith(f"{SNAPSHOTS}/")
        return self._snapshots.get(name, start, stop) if is_copied else super().get(name, start, stop)


@contextmanager
def _locked(shelf: Path) -> Iterator[None]:
    """Lock a directory of backups while the context is active. Raises Busy if another process has locked it."""
    file = SYSTEM_FILES.open(shelf, Access.READ)
    try:
        file.lock()
    except BlockingIOError:
        file.close()
        raise Busy(ErrorCode.BUSY, f"another backup is in progress path={str(shelf)!r}") from None
    try:
        yield
    finally:
        file.close()


def _is_backup(path: Path) -> bool:
    return (path / FACTS).is_file() and path.name != UNFINISHED


def _names(folder: Path) -> list[str]:
    return [name for name in SYSTEM_FILES.names(folder) if not name.startswith(".")] if folder.is_dir() else []


def _is_same(source: Path, other: Path) -> bool:
    """Return whether two files are the same segment, by comparing their footers.

    Footers contain the times of the records. Names are not enough, because a broker that was restored from a backup
    uses the same names again.
    """
    size = other.stat().st_size
    return source.stat().st_size == size and _last_block(source, size) == _last_block(other, size)


def _last_block(path: Path, size: int) -> bytes:
    file = SYSTEM_FILES.open(path, Access.READ)
    try:
        block = bytearray(min(size, BLOCK_BYTES))
        file.read(block, size - len(block))
        return bytes(block)
    finally:
        file.close()


def _link(source: Path, target: Path) -> bool:
    """Create a hard link. Return False if the file system does not support it."""
    try:
        SYSTEM_FILES.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


app = App(
    name="backup",
    help_epilogue=examples(
        "polywire backup create backups --data-dir polywire-data",
        "polywire backup restore backups --data-dir restored",
    ),
)


@app.command(
    help_epilogue=examples("polywire backup create /mnt/backups --data-dir polywire-data", exits=DAMAGED),
    config=settings_file,
)
def create(shelf: Shelf, *, data_dir: DataDir = DATA_DIR) -> int:
    """Back up a data directory, whether a broker is running or not. Segments that an earlier backup contains are not copied again."""
    make_private()
    close_to_others(shelf, marks=(f"*/{FACTS}",))
    with loop(f"backing up data_dir={str(data_dir)!r}") as running:
        taken = take_backup(data_dir, shelf, replay=empty_state, loop=running, clock=SystemClock())
    facts = taken.facts
    note(
        f"backed up backup={str(taken.path)!r} through={facts.through} segments={facts.segments} bytes={facts.bytes}"
        f" copied_segments={facts.copied_segments} copied_bytes={facts.copied_bytes}"
    )
    return damages(taken.findings)


@app.command(
    name="list", help_epilogue=examples("polywire backup list backups", "polywire backup list backups -o json")
)
def list_all(shelf: Shelf, *, output: Output = ListFormat.TABLE) -> None:
    """List backups, oldest first, with the segments and bytes that each one copied."""
    if not shelf.is_dir():
        raise Failed(f"directory of backups does not exist path={str(shelf)!r}")
    rows = []
    for name in list_backups(shelf):
        facts = read_facts(shelf / name)
        copied = (facts.copied_segments, facts.copied_bytes)
        values = (name, facts.taken_at, facts.through, facts.segments, facts.bytes, *copied, len(facts.damaged))
        rows.append(dict(zip(LIST_COLUMNS, values, strict=True)))
    print_list(rows, columns=LIST_COLUMNS, form=output)


@app.command(
    help_epilogue=examples(
        "polywire backup verify backups", "polywire backup verify backups/20260102T030405Z -o jsonl", exits=EXITS
    )
)
def verify(backup: BackupPath, *, output: Output = ListFormat.TABLE) -> int:
    """Read all data of a backup and list damaged files and records."""
    path = find_backup(backup)
    findings = print_unsound(examined_offline(path), output)
    note(
        f"verified backup={str(path)!r} files={len({found.path for found in findings})} findings={len(unsound(findings))}"
    )
    return exit_code(findings)


@app.command(help_epilogue=examples("polywire backup restore backups --data-dir restored", exits=DAMAGED))
def restore(backup: BackupPath, *, data_dir: DataDir) -> int:
    """Restore a backup into a new data directory, and verify it."""
    path = find_backup(backup)
    make_private()
    with loop(f"restoring backup={str(path)!r}") as running:
        findings = restore_backup(path, data_dir, replay=empty_state, loop=running)
    note(f"restored backup={str(path)!r} data_dir={str(data_dir)!r} files={len(findings)}")
    return damages(findings)


@contextmanager
def loop(activity: str) -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop for replaying the log. Log lines and reports of the activity go to standard error."""
    event_loop = asyncio.new_event_loop()
    try:
        with logs_on_stderr(), reported(activity):
            yield event_loop
    finally:
        event_loop.close()


def damages(findings: Sequence[Finding]) -> int:
    """Print the damage that the backup has copied from the data directory, and return the exit code."""
    for finding in unsound(findings):
        note(f"damaged path={finding.path!r} {finding.message}", style="red")
    return exit_code(findings)
