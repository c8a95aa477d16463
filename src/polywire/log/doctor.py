"""Check a data directory for damage, and restore damaged copies of duplicated data from the intact ones.

* A check reads every stored batch and changes nothing.
* A rebuild copies only verified data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from polywire.errors import BrokerError, Corrupt, ErrorCode
from polywire.log.journal.seed import SEED_NAMES, is_sound, keep_seed, seed_copies
from polywire.log.journal.snapshot import copies_sound, is_copy, newer_version
from polywire.log.opening import JOURNAL
from polywire.log.repair import Diagnosis, OfflineLog
from polywire.log.segments.damage import Damage
from polywire.log.segments.format import TRAILER, SegmentRun, read_footer
from polywire.log.segments.segment import Segment
from polywire.log.segments.segment_set import SEGMENTS, SNAPSHOTS
from polywire.records.batch import check_body, check_header
from polywire.records.checksum import xxh64
from polywire.records.columns import BATCH_BYTES_MAX, HEADER_BYTES
from polywire.records.fields import header_fields
from polywire.store.base import BLOCK_BYTES, CHUNK_BYTES, BlobMissing, Store, aligned_buffer, blob_newer
from polywire.store.files import COPY_MODE, read_file, replace_file
from polywire.store.system_files import SYSTEM_FILES
from polywire.types import Buffer

COPY_BYTES: Final = 1024 * 1024  # bytes copied at a time
_length: Final = header_fields("length")


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
    """Result for one examined file. ``path`` is relative to the data directory; ``damage`` names damaged records.
    ``remedy`` is None if no action is needed.
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
    """Return the remedy if the broker does not start with this directory and no intact copy exists."""
    return Remedy.UPGRADE if is_newer(error) else Remedy.BACKUP


def rebuild(offline: OfflineLog, findings: Sequence[Finding]) -> list[str]:
    """Rewrite damaged copies from intact ones and return their paths; raise OSError or BrokerError."""
    paths = []
    for finding in findings:
        if finding.severity is not Severity.WORN:
            continue
        path = offline.directory / finding.path
        if finding.path.startswith(JOURNAL):
            keep_seed(SYSTEM_FILES, offline.directory / JOURNAL, offline.journal.seed)
        elif finding.path.startswith(SNAPSHOTS):
            _replace(path, [_sound_half(read_file(SYSTEM_FILES, path))] * 2)
        else:
            _replace(path, _with_footers(offline.store, finding.path))
        paths.append(finding.path)
    return paths


def _seeds(offline: OfflineLog) -> Finding:
    copies = seed_copies(SYSTEM_FILES, offline.directory / JOURNAL)
    sound = [name for name, content in zip(SEED_NAMES, copies, strict=True) if is_sound(content)]
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
    """Return the finding for a snapshot's copies."""
    sound, copies = copies_sound(store, name)
    if not sound and (version := newer_version(store.get(name))):
        return Finding(Severity.BROKEN, name, blob_newer(name, version).message, remedy=Remedy.UPGRADE)
    if sound == copies:
        return Finding(Severity.SOUND, name, f"copies={copies}")
    severity, remedy = (Severity.WORN, Remedy.REBUILD) if sound else (Severity.DAMAGED, Remedy.BACKUP)
    return Finding(severity, name, f"damaged copies={copies - sound} of {copies}", remedy=remedy)


def examine_segment(store: Store, name: str) -> list[Finding]:
    """Return findings for a segment's footers and for its damaged batches."""
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
        yield from segment.verify_past(block, run.partition, start, stop)


def _damaged_staged(segment: Segment, run: SegmentRun) -> Iterator[Damage]:
    """Yield the damaged staged batches of a run; these have no offsets yet."""
    at = run.position
    while at < run.stop:
        header = segment.stored(at, min(at + HEADER_BYTES, run.stop))
        length = _length(header)[0] if check_header(header, 0) else run.stop - at
        if not check_header(header, 0) or not check_body(segment.stored(at, min(at + length, run.stop)), 0):
            yield Damage(segment.name, run.partition, at, at + length, 0, 0)
        at += length


def _footers(tail: bytes) -> tuple[int, int]:
    """Return (number of valid footers, number of all footers) in the bytes after a segment's batches."""
    if _is_footer(tail):
        return 1, 1
    half = len(tail) // 2
    return sum(_is_footer(copy) for copy in (tail[:half], tail[half:])), 2


def _is_footer(copy: bytes) -> bool:
    """Return whether these bytes are a footer and its trailer."""
    if len(copy) < TRAILER.size:
        return False
    fields = TRAILER.unpack_from(copy, len(copy) - TRAILER.size)
    whole = xxh64(copy[-TRAILER.size : -8]) == fields[9] and fields[3] == len(copy) - TRAILER.size
    return bool(whole and xxh64(copy[: -TRAILER.size]) == fields[7])


def _with_footers(store: Store, name: str) -> Iterator[Buffer]:
    """Yield the segment's content with its valid footer as both copies."""
    info, _ = read_footer(store, name)
    for at in range(0, info.data_bytes, COPY_BYTES):
        yield store.get(name, at, min(at + COPY_BYTES, info.data_bytes))
    tail = store.get(name, info.data_bytes, store.size(name))
    half = len(tail) // 2
    footer = tail[:half] if _is_footer(tail[:half]) else tail[half:]
    yield footer
    yield footer


def _sound_half(content: bytes) -> bytes:
    """Return the valid copy of a snapshot."""
    half = len(content) // 2
    first, second = content[:half], content[half:]
    return first if is_copy(first) else second


def _replace(path: Path, parts: Iterable[Buffer]) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(f".{path.name}.rebuilt")
    replace_file(SYSTEM_FILES, path, parts, temporary=temporary, mode=COPY_MODE)
