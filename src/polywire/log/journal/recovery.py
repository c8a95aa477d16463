"""Find the valid journal writes (groups) after any kind of stop (decision 0102).

A *start* is one run of the broker. Each group contains the number of its start. A group is *whole* if the checksums of
its header and of all entries match.

Recovery only reads. If there is evidence that a synced group is damaged, it raises Corrupt. Any other invalid data at
the end is a torn tail, which the caller reports and discards.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Final

import msgspec

from polywire.errors import Corrupt, ErrorCode
from polywire.log.journal.group import (
    GROUP_HEADER_BYTES,
    GROUP_MAGIC,
    TOKEN_BYTES,
    Entry,
    EntryKind,
    GroupRun,
    find_groups,
    read_directory,
    read_group,
)
from polywire.log.journal.slots import Slot
from polywire.log.settings import PAGE_BYTES
from polywire.records.batch import check_body, check_header
from polywire.records.checksum import xxh64
from polywire.records.columns import HEADER_BYTES
from polywire.records.fields import header_fields

_HEADER: Final = Struct("<IIQQQQ")
_checksum: Final = header_fields("header_checksum")


class FoundGroup(msgspec.Struct, frozen=True):
    """A journal write that recovery found, with a valid header, and its location.

    Attributes:
        whole: whether all entries are valid, too.
    """

    slot: Slot
    position: int
    length: int
    sequence: int
    synced: int
    previous: int
    checksum: int
    kinds: int
    whole: bool


class FoundGroups(Mapping[int, FoundGroup]):
    """Journal writes with valid headers, by sequence number. Each is read when it is needed; there can be millions.

    Args:
        runs: where they are. If several runs have the same sequence number, the last of them counts.
    """

    def __init__(self, runs: Sequence[tuple[Slot, GroupRun]]) -> None:
        self._runs: Final = runs

    def __getitem__(self, sequence: int) -> FoundGroup:
        for slot, run in reversed(self._runs):
            index = sequence - run.first
            if 0 <= index < len(run.positions):
                return _group_at(slot, run.positions[index], whole=sequence not in run.damaged)
        raise KeyError(sequence)

    def __iter__(self) -> Iterator[int]:
        return iter(self._since(0))

    def __len__(self) -> int:
        return len(self._since(0))

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def start(self) -> int:
        """The newest start."""
        return max(run.start for _, run in self._runs)

    @property
    def first(self) -> int:
        """The lowest sequence number."""
        return min(run.first for _, run in self._runs)

    @property
    def last(self) -> int:
        """The highest sequence number."""
        return max(map(_end, (run for _, run in self._runs))) - 1

    def naming(self) -> list[int]:
        """Return the sequence numbers of journal writes that can name segments, newest first."""
        return sorted({sequence for _, run in self._runs for sequence in run.naming}, reverse=True)

    def since(self, sequence: int) -> list[FoundGroup]:
        """Return the journal writes from ``sequence`` on."""
        return [self[later] for later in self._since(sequence)]

    def _since(self, sequence: int) -> list[int]:
        return sorted({later for _, run in self._runs for later in range(max(run.first, sequence), _end(run))})


class Torn(msgspec.Struct, frozen=True):
    """A torn write at the end of the journal.

    Attributes:
        groups: number of incomplete or unconnected journal writes in it.
    """

    path: str
    position: int
    size: int
    groups: int


class Chain(msgspec.Struct, frozen=True):
    """Result of recovery: the journal writes to replay.

    Attributes:
        sealed: sequence number up to which the data of all journal writes is in segments. ``groups`` begin after it.
        snapshot: name of the newest snapshot, None if there is none.
        rests_on: last journal write that the snapshot, or the segments it lists, depend on.
        checksum: checksum of the last journal write.
        slots: journal files that were searched.
    """

    start: int
    sealed: int
    rests_on: int
    snapshot: str | None
    groups: Sequence[FoundGroup]
    checksum: int
    torn: Torn | None
    slots: Sequence[Slot]

    @property
    def sequence(self) -> int:
        return self.groups[-1].sequence if self.groups else self.sealed

    def missing(self, name: str) -> Corrupt:
        """Return the error for a missing snapshot or segment that the journal refers to."""
        if self.torn is not None:
            path, position = self.torn.path, self.torn.position
        elif self.groups:
            path, position = str(self.groups[-1].slot.path), self.groups[-1].position + self.groups[-1].length
        else:
            return Corrupt(ErrorCode.CORRUPT, f"a file that the journal refers to is missing name={name}")
        return Corrupt(
            ErrorCode.CORRUPT,
            "a file that the journal refers to is missing, or the group with the next reference is damaged"
            f" name={name} path={path!r} position={position}{_slots_without_group(self.slots)}",
        )


class _Reference(msgspec.Struct, frozen=True):
    """A list of segments and the name of a snapshot, as found in one journal write.

    Attributes:
        sealed: sequence number up to which the data of all journal writes is in the segments.
        rests_on: last journal write that the snapshot and segments depend on. They are usable only if the journal is
            intact up to it.
    """

    sealed: int
    rests_on: int
    snapshot: str | None
    checksum: int


def find_chain(slots: Sequence[Slot], *, through: int | None = None) -> Chain | None:
    """Return the journal writes to replay, or None if the journal files contain none. Raises Corrupt.

    Args:
        through: last journal write that a repair retains. If given, batches with a damaged body are accepted.
    """
    found_groups = newest_groups(slots)
    if not found_groups:
        return None
    start = found_groups.start
    for naming in _references(found_groups):
        groups = list(_unbroken_groups(found_groups, naming.sealed, through=through))
        sequence = groups[-1].sequence if groups else naming.sealed
        if sequence >= naming.rests_on:
            break
    else:
        raise _no_reference(slots, found_groups, start)
    torn = None
    if through is None:
        torn = _examine_end(slots, found_groups, start=start, sequence=sequence, last=groups[-1] if groups else None)
    checksum = groups[-1].checksum if groups else naming.checksum
    return Chain(start, naming.sealed, naming.rests_on, naming.snapshot, groups, checksum, torn, slots)


def newest_groups(slots: Sequence[Slot]) -> FoundGroups:
    """Return the journal writes with valid headers.

    These are the writes of the broker's newest start, and of the earlier starts that it continues.
    """
    runs = [(slot, run) for slot in slots for run in _search(slot)]
    if not runs:
        return FoundGroups(())
    # a broker start counts only if its first group is complete
    whole = [run.start for _, run in runs if len(run.damaged) < len(run.positions)]
    start = max(whole or [run.start for _, run in runs])
    return _with_continued_starts(runs, [(slot, run) for slot, run in runs if run.start == start])


def damaged_bodies(group: FoundGroup) -> list[Entry] | None:
    """Return the batches with a damaged body in a journal write, or None if anything else in it is damaged."""
    found, view = [], group.slot.view
    for entry in read_directory(view, group.position):
        if entry.position + entry.length > group.position + group.length:
            return None
        content = view[entry.position : entry.position + entry.length]
        batch = entry.kind == EntryKind.BATCH
        at = 0 if batch else TOKEN_BYTES
        if batch or entry.kind == EntryKind.STAGED:
            sealed = _checksum(content)[0] if batch else xxh64(content[: at + HEADER_BYTES])
            if sealed != entry.checksum or not check_header(content, at):
                return None
            if not check_body(content, at):
                found.append(entry)
        elif xxh64(content) != entry.checksum:
            return None
    return found


def _with_continued_starts(
    runs: Sequence[tuple[Slot, GroupRun]], newest: Sequence[tuple[Slot, GroupRun]]
) -> FoundGroups:
    """Return the journal writes of a start, and of the earlier starts that it continues.

    A start continues an earlier one if there was no space to write the earlier journal to segments (decision 0102).

    Args:
        runs: all journal writes.
        newest: journal writes of the start.
    """
    found_groups = FoundGroups(newest)
    first = found_groups[found_groups.first]
    if not first.kinds & 1 << EntryKind.START or not first.whole:
        return found_groups
    sealed = _read_reference(first).sealed
    earlier = [(slot, _clipped(run, sealed + 1, first.sequence)) for slot, run in runs]
    earlier.sort(key=lambda item: item[1].start)  # a later start reuses sequence numbers whose writes were lost
    return FoundGroups([*((slot, run) for slot, run in earlier if run.positions), *newest])


def _clipped(run: GroupRun, first: int, end: int) -> GroupRun:
    """Return the journal writes from ``first`` on and before ``end``."""
    skipped = max(first - run.first, 0)
    naming = array("Q", (sequence for sequence in run.naming if first <= sequence < end))
    return run._replace(
        first=run.first + skipped, positions=run.positions[skipped : max(end - run.first, 0)], naming=naming
    )


def _end(run: GroupRun) -> int:
    """Return the sequence number after the last journal write of a run."""
    return run.first + len(run.positions)


def _group_at(slot: Slot, at: int, *, whole: bool) -> FoundGroup:
    fields = read_group(slot.view, at, slot.seed)
    assert fields is not None, "the search found it"
    return FoundGroup(
        slot, at, fields.length, fields.sequence, fields.synced, fields.previous, fields.checksum, fields.kinds, whole
    )


def _references(found_groups: FoundGroups) -> Iterator[_Reference]:
    """Yield the snapshot and segments that each journal write names, newest first."""
    for group in map(found_groups.__getitem__, found_groups.naming()):
        if group.whole:
            yield _read_reference(group)


def _read_reference(group: FoundGroup) -> _Reference:
    sealed = rests_on = group.sequence - 1
    name = None
    for entry in read_directory(group.slot.view, group.position):
        if entry.kind == EntryKind.SEALED:
            sealed = rests_on = entry.argument
        elif entry.kind == EntryKind.SNAPSHOT:
            rests_on = entry.argument
            name = bytes(group.slot.view[entry.position : entry.position + entry.length]).decode("ascii")
    return _Reference(sealed, rests_on, name, group.checksum)


def _unbroken_groups(found_groups: FoundGroups, sealed: int, *, through: int | None = None) -> Iterator[FoundGroup]:
    """Yield consecutive undamaged journal writes from ``sealed + 1`` on.

    With ``through``, the last journal write that a repair retains, batches with a damaged body are accepted.
    """
    last = None
    while (group := found_groups.get(sealed + 1 if last is None else last.sequence + 1)) is not None:
        if last is not None and group.previous != last.checksum:
            return
        if through is not None and group.sequence > through:
            return
        if not group.whole and (through is None or damaged_bodies(group) is None):
            return
        yield group
        last = group


def _examine_end(
    slots: Sequence[Slot], found_groups: FoundGroups, *, start: int, sequence: int, last: FoundGroup | None
) -> Torn | None:
    """Return the torn write after the last undamaged journal write, if any.

    Raises Corrupt if a synced journal write is damaged.
    """
    expected = sequence + 1
    later = found_groups.since(expected)
    if any(group.sequence > expected and group.synced >= expected for group in later):
        raise _damage_error(slots, found_groups, expected)
    if later:
        path, position, _ = _locate(found_groups, expected)
        return Torn(str(path), position, sum(group.length for group in later), len(later))
    return None if last is None else _find_remains(slots, start=start, last=last)


def _damage_error(slots: Sequence[Slot], found_groups: FoundGroups, expected: int) -> Corrupt:
    damaged = _newest_damage(found_groups, expected)
    sequence = expected if damaged is None else damaged
    path, position, end = _locate(found_groups, sequence)
    proof = _next_found(found_groups, sequence)
    return Corrupt(
        ErrorCode.CORRUPT,
        f"a synced group of the journal is damaged sequence={sequence} path={str(path)!r} position={position} end={end}"
        f" proof={proof.slot.path.name}:{proof.position}{_other_locations(slots, found_groups, sequence)}",
    )


def _no_reference(slots: Sequence[Slot], found_groups: FoundGroups, start: int) -> Corrupt:
    """Return the error for a journal that names no usable snapshot or segments."""
    newest = next(_references(found_groups), None)
    earliest = found_groups[found_groups.first]
    damaged = _newest_damage(found_groups, earliest.sequence - 1 if newest is None else newest.sealed + 1)
    path, position, end = earliest.slot.path, 0, earliest.position
    doubt = ""
    if damaged is not None:
        path, position, end = _locate(found_groups, damaged)
        doubt = _other_locations(slots, found_groups, damaged)
    return Corrupt(
        ErrorCode.CORRUPT,
        f"the state that the journal starts from cannot be recovered start={start} path={str(path)!r} position={position} end={end}{doubt}",
    )


def _newest_damage(found_groups: FoundGroups, first: int) -> int | None:
    """Return the sequence number of the newest synced journal write from ``first`` on that is missing or damaged."""
    synced = max(group.synced for group in found_groups.values())
    for sequence in range(synced, first - 1, -1):
        found = found_groups.get(sequence)
        if found is None or not found.whole:
            return sequence
    return None


def _next_found(found_groups: FoundGroups, sequence: int) -> FoundGroup:
    return found_groups[min(other for other in found_groups if other > sequence)]


def _locate(found_groups: FoundGroups, sequence: int) -> tuple[Path, int, int]:
    """Return (file, position, end) of a damaged journal write.

    If its header is damaged, this is the range between the journal writes before and after it.
    """
    found = found_groups.get(sequence)
    last = found_groups.get(max((other for other in found_groups if other < sequence), default=-1))
    if found is not None:
        return found.slot.path, found.position, found.position + found.length
    nearest = _next_found(found_groups, sequence)
    if nearest.position > 0:
        position = last.position + last.length if last is not None and last.slot is nearest.slot else 0
        return nearest.slot.path, position, nearest.position
    if last is not None:
        return last.slot.path, last.position + last.length, last.slot.size
    return nearest.slot.path.parent, 0, 0


def _other_locations(slots: Sequence[Slot], found_groups: FoundGroups, sequence: int) -> str:
    """Return the part of an error message that names other possible locations of a damaged journal write.

    Returns "" if its location is certain.
    """
    is_certain = sequence in found_groups or _next_found(found_groups, sequence).position > 0
    return "" if is_certain else _slots_without_group(slots)


def _slots_without_group(slots: Sequence[Slot]) -> str:
    """Return the part of an error message that names the journal files that do not begin with a valid write."""
    headless = [slot for slot in slots if read_group(slot.view, 0, slot.seed) is None]
    paths = " or ".join(repr(str(slot.path)) for slot in headless)
    return f", or at the beginning of {paths}" if paths else ""


def _search(slot: Slot) -> list[GroupRun]:
    """Find every journal write with a valid header in a file."""
    runs = find_groups(slot.view, slot.seed, partial(slot.find, GROUP_MAGIC))
    slot.forget()  # otherwise pages of all journal files would stay in memory after the start
    return runs


def _find_remains(slots: Sequence[Slot], *, start: int, last: FoundGroup) -> Torn | None:
    """Return the torn write that follows ``last``, or None.

    Four header fields are checked. Bytes count as a torn write if at least two fields have the expected value, and one of
    them is the sequence number or the previous checksum. Remains of an older write differ in both of these.
    """
    after = last.position + last.length
    boundary = -(-after // PAGE_BYTES) * PAGE_BYTES
    spots = [(last.slot, after), (last.slot, boundary), *((slot, 0) for slot in slots if slot is not last.slot)]
    for slot, at in spots:
        if at + GROUP_HEADER_BYTES > slot.size:
            continue
        magic, length, number, sequence, _, previous = _HEADER.unpack_from(slot.view, at)
        facts = (
            magic == int.from_bytes(GROUP_MAGIC, "little"),
            number == start,
            sequence == last.sequence + 1,
            previous == last.checksum,
        )
        if sum(facts) >= 2 and (facts[2] or facts[3]):
            return Torn(str(slot.path), at, min(length, slot.size - at), 1)
    return None
