"""Finding the journal's unbroken chain after a stop of any kind (decision 0002).

Promises: looks only, changes nothing. Proof that synced groups are damaged is Corrupt; anything else at the end is a
torn tail, told and cut.
Must not know: what the entries do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

from polywire.errors import Corrupt, ErrorCode
from polywire.log.group import GROUP_HEADER_BYTES, GROUP_MAGIC, EntryKind, bad_entry, read_directory, read_group
from polywire.log.journal_file import Slot
from polywire.log.settings import PAGE_BYTES

_HEADER: Final = Struct("<IIQQQQ")
_NAMING: Final = 1 << EntryKind.SNAPSHOT | 1 << EntryKind.START


@dataclass(frozen=True, slots=True)
class Place:
    """A group whose header verified, and where it lies."""

    slot: Slot
    position: int
    length: int
    sequence: int
    synced: int
    previous: int
    checksum: int
    kinds: int


@dataclass(frozen=True, slots=True)
class Torn:
    """A torn tail: where it begins, and how much there was."""

    path: str
    position: int
    size: int
    groups: int


@dataclass(frozen=True, slots=True)
class Chain:
    """What recovery has to go by. ``groups`` follow ``sealed``, the sequence everything up to which is in segments.

    snapshot: name of the newest snapshot's blob, None when there is none.
    broker_sequence: the broker's state in the snapshot is that after this group.
    checksum: of the last group of all.
    """

    start: int
    sealed: int
    broker_sequence: int
    snapshot: str | None
    groups: Sequence[Place]
    checksum: int
    torn: Torn | None

    @property
    def sequence(self) -> int:
        """Sequence of the last group."""
        return self.groups[-1].sequence if self.groups else self.sealed


@dataclass(frozen=True, slots=True)
class _Naming:
    sealed: int
    broker_sequence: int
    snapshot: str | None
    sequence: int


def find_chain(slots: Sequence[Slot]) -> Chain | None:
    """The newest start's chain; None when no slot holds any group. Raises Corrupt."""
    scanned = {slot: list(_scan(slot)) for slot in slots}
    starts = {slot: read_start(places[0]) for slot, places in scanned.items() if places}
    if not starts:
        return None
    start = max(starts.values())
    places = {place.sequence: place for slot, found in scanned.items() if starts.get(slot) == start for place in found}
    for naming in _namings(places):
        groups = list(_follow(places, naming.sealed))
        if groups and groups[-1].sequence >= naming.sequence:
            break
    else:
        raise Corrupt(ErrorCode.CORRUPT, f"journal names no state that can be reached start={start}")
    last = groups[-1]
    torn = _examine_end(slots, scanned, places, start=start, last=last)
    return Chain(start, naming.sealed, naming.broker_sequence, naming.snapshot, groups, last.checksum, torn)


def read_start(place: Place) -> int:
    """The start a group belongs to."""
    return int.from_bytes(place.slot.view[place.position + 8 : place.position + 16], "little")


def _scan(slot: Slot) -> Iterator[Place]:
    """Groups from the slot's first byte on that follow each other; a page boundary is tried once at each end."""
    at, last = 0, None
    while True:
        place = _place(slot, at)
        if place is None or (last is not None and not _follows(place, last)):
            boundary = -(-at // PAGE_BYTES) * PAGE_BYTES
            if boundary == at:
                return
            at = boundary
            continue
        yield place
        last = place
        at = place.position + place.length


def _place(slot: Slot, at: int) -> Place | None:
    fields = read_group(slot.view, at, slot.seed)
    if fields is None:
        return None
    return Place(
        slot, at, fields.length, fields.sequence, fields.synced, fields.previous, fields.checksum, fields.kinds
    )


def _follows(place: Place, last: Place) -> bool:
    return (
        place.sequence == last.sequence + 1
        and place.previous == last.checksum
        and read_start(place) == read_start(last)
    )


def _namings(places: dict[int, Place]) -> Iterator[_Naming]:
    """States that groups name, newest first."""
    for sequence in sorted(places, reverse=True):
        if places[sequence].kinds & _NAMING and bad_entry(places[sequence].slot.view, places[sequence].position) < 0:
            yield _read_naming(places[sequence])


def _read_naming(place: Place) -> _Naming:
    sealed = broker_sequence = place.sequence - 1
    name = None
    for entry in read_directory(place.slot.view, place.position):
        if entry.kind == EntryKind.SEALED:
            sealed = entry.argument
        elif entry.kind == EntryKind.SNAPSHOT:
            broker_sequence = entry.argument
            name = bytes(place.slot.view[entry.position : entry.position + entry.length]).decode("ascii")
    return _Naming(sealed, broker_sequence, name, place.sequence)


def _follow(places: dict[int, Place], sealed: int) -> Iterator[Place]:
    """Whole groups from ``sealed + 1`` on, as far as the chain is unbroken."""
    last = None
    while (place := places.get(sealed + 1 if last is None else last.sequence + 1)) is not None:
        if last is not None and place.previous != last.checksum:
            return
        if bad_entry(place.slot.view, place.position) >= 0:
            return
        yield place
        last = place


def _examine_end(
    slots: Sequence[Slot], scanned: dict[Slot, list[Place]], places: dict[int, Place], *, start: int, last: Place
) -> Torn | None:
    """What lies behind the last whole group. Raises Corrupt when it proves that a synced group is damaged."""
    expected = last.sequence + 1
    later = {place.sequence: place for sequence, place in places.items() if sequence >= expected}
    for slot in slots:
        known = scanned[slot][-1] if scanned[slot] else None
        for place in _search(slot, known.position + known.length if known is not None else 0):
            found = read_start(place)
            if found > start or (found == start and place.sequence > expected and place.synced >= expected):
                raise _damaged(place, expected)
            if found == start and place.sequence >= expected:
                later[place.sequence] = place
    for place in later.values():
        if place.sequence > expected and place.synced >= expected:
            raise _damaged(place, expected)
    if later:
        size = sum(place.length for place in later.values())
        return Torn(str(last.slot.path), last.position + last.length, size, len(later))
    return _find_remains(slots, start=start, last=last)


def _damaged(place: Place, expected: int) -> Corrupt:
    return Corrupt(
        ErrorCode.CORRUPT,
        f"a synced group of the journal is damaged sequence={expected} proof={place.slot.path.name}:{place.position}",
    )


def _search(slot: Slot, start: int) -> Iterator[Place]:
    """Every group whose header verifies, wherever it begins."""
    at = slot.find(GROUP_MAGIC, start)
    while at >= 0:
        place = _place(slot, at) if at % 8 == 0 else None
        if place is not None:
            yield place
        at = slot.find(GROUP_MAGIC, at + (place.length if place is not None else 1))


def _find_remains(slots: Sequence[Slot], *, start: int, last: Place) -> Torn | None:
    """A group that would be next, had it been written whole: two of its header's four facts, its number or its
    predecessor among them, tell it from what lay there before."""
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
