"""Read and verify the journal in a bucket: numbered objects that contain atomic writes, called groups (decision 0124).

Each group contains the checksum of the previous one. Raises Corrupt for a group with a wrong checksum, or one that does
not follow the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

from polywire.cluster.journal_floor import Floor
from polywire.errors import Corrupt, ErrorCode
from polywire.log.journal.group import (
    ENTRY_BYTES,
    GROUP_HEADER_BYTES,
    EntryKind,
    GroupHead,
    bad_entry,
    read_directory,
    read_group,
)
from polywire.log.journal.steps import sealed_content
from polywire.types import Buffer

_START: Final = Struct("<II16sB")
START_VERSION: Final = 1
DEPTH: Final = 1  # number of objects that a leader may be uploading at the same time
NONCE_BYTES: Final = 16
NODE_BYTES_MAX: Final = 100
START_BYTES_MAX: Final = GROUP_HEADER_BYTES + ENTRY_BYTES + (_START.size + NODE_BYTES_MAX + 7 & ~7)
_STARTING: Final = 1 << EntryKind.START
_NAMING: Final = 1 << EntryKind.SNAPSHOT


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A journal write, as part of an object in the bucket.

    Attributes:
        number: number of the object.
        content: bytes of the object.
        position: where the journal write begins in ``content``.
    """

    number: int
    content: bytes
    position: int
    length: int
    sequence: int
    start: int
    synced: int
    previous: int
    checksum: int
    kinds: int


@dataclass(frozen=True, slots=True)
class Naming:
    """Content of the newest journal write that names a snapshot.

    Attributes:
        sealed: last journal write whose effect is in the segments that ``snapshot`` lists.
        rests_on: last journal write that ``snapshot`` depends on.
        number: number of the object that contains it.
    """

    sealed: int
    rests_on: int
    snapshot: str
    number: int


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """Start, sequence number and checksum of the last journal write, which the next one must continue."""

    start: int
    sequence: int
    checksum: int


@dataclass(slots=True)
class JournalChain:
    """The journal of a shard from the first needed object on.

    Attributes:
        groups: journal writes, each of which continues the previous one.
        starts: broker starts by the number of the object that begins them.
        next_number: number of the next object.
    """

    seed: int
    floor: Floor
    groups: list[StoredGroup] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    next_number: int = 0

    def __post_init__(self) -> None:
        self.next_number = self.floor.number

    @property
    def start(self) -> int:
        """Number of the newest start of a broker, or 0 if there is none."""
        return self.groups[-1].start if self.groups else 0

    @property
    def sequence(self) -> int:
        return self.groups[-1].sequence if self.groups else 0

    @property
    def checksum(self) -> int:
        return self.groups[-1].checksum if self.groups else 0

    @property
    def end(self) -> ChainEnd:
        return ChainEnd(self.start, self.sequence, self.checksum)

    def add(self, content: bytes) -> None:
        """Add the object with the next number. Raises Corrupt."""
        number, at = self.next_number, 0
        while at < len(content):
            group = self._group_at(number, content, at)
            self._check_order(group)
            if group.kinds & _STARTING:
                self.starts[number] = group.start
            self.groups.append(group)
            at += group.length
        if at == 0:
            raise _corrupt("object is empty", number, at)
        self.next_number = number + DEPTH if number in self.starts else number + 1

    def naming(self) -> Naming | None:
        """Return the content of the newest journal write that names a snapshot, or None.

        Raises Corrupt if there is none although objects before this part of the journal were deleted.
        """
        for group in reversed(self.groups):
            if group.kinds & _NAMING:
                return _read_naming(group)
        if self.floor.base:
            raise _corrupt("the group before the first retained object is missing", self.floor.base, 0)
        return None

    def behind(self, sealed: int) -> Sequence[StoredGroup]:
        """Return the journal writes after number ``sealed``."""
        return [group for group in self.groups if group.sequence > sealed]

    def _group_at(self, number: int, content: bytes, at: int) -> StoredGroup:
        fields = read_group(content, at, self.seed) if at % 8 == 0 else None
        if fields is None or bad_entry(content, at) >= 0:
            raise _corrupt("checksum of a journal write does not match", number, at)
        return StoredGroup(
            number=number,
            content=content,
            position=at,
            length=fields.length,
            sequence=fields.sequence,
            start=fields.start,
            synced=fields.synced,
            previous=fields.previous,
            checksum=fields.checksum,
            kinds=fields.kinds,
        )

    def _check_order(self, group: StoredGroup) -> None:
        """Raise Corrupt unless a journal write continues the previous one.

        The first one must directly follow the journal writes that are in segments, or be one of them.
        """
        number, at = group.number, group.position
        starting = bool(group.kinds & _STARTING)
        if starting and (at != 0 or group.length != len(group.content)):
            raise _corrupt("a start record shares its object with other groups", number, at)
        if starting:
            _check_start(group)
        if not self.groups:
            if group.sequence > self.floor.sealed + 1:
                raise _corrupt("the beginning of the journal is missing", number, at)
            return
        last = self.groups[-1]
        if group.sequence != last.sequence + 1 or group.previous != last.checksum:
            raise _corrupt("group does not follow the previous group", number, at)
        if group.start != last.start + starting:
            raise _corrupt("group belongs to another start", number, at)


def start_object(end: ChainEnd, seed: int, *, nonce: bytes, node: str, now_us: int) -> bytes:
    """Return an object that claims leadership: a journal write that continues the journal and identifies the claimant."""
    name = node.encode()
    assert len(nonce) == NONCE_BYTES, "a nonce distinguishes attempts"
    assert len(name) <= NODE_BYTES_MAX, "node names were checked when they were read"
    content = _START.pack(START_VERSION, DEPTH, nonce, len(name)) + name
    head = GroupHead(seed)
    head.entry(EntryKind.START, 0, 0, content)
    first = head.finish(end.start + 1, end.sequence + 1, end.sequence, end.checksum, now_us)
    return bytes(first) + content + bytes(-len(content) % 8)


def naming_object(start: ChainEnd, seed: int, *, snapshot: str, new: Sequence[int], now_us: int) -> bytes:
    """Return the object that follows a start. It names the segments with everything before the start.

    Args:
        snapshot: name of the snapshot that lists all segments.
        new: numbers of the segments that no earlier journal write names.
    """
    sealed = start.sequence - 1
    contents = ((EntryKind.SEALED, sealed_content(new, ())), (EntryKind.SNAPSHOT, snapshot.encode("ascii")))
    head = GroupHead(seed)
    for kind, content in contents:
        head.entry(kind, 0, sealed, content)
    first = head.finish(start.start, start.sequence + 1, start.sequence, start.checksum, now_us)
    return bytes(first) + b"".join(content + bytes(-len(content) % 8) for _, content in contents)


def start_of(content: bytes, seed: int) -> int:
    """Return the number of the broker start that an object begins, or 0. Only this object is read."""
    fields = read_group(content, 0, seed)
    return fields.start if fields is not None and fields.kinds & _STARTING else 0


def _check_start(group: StoredGroup) -> None:
    content = _entry_of(group, EntryKind.START)
    fields = _START.unpack_from(content) if len(content) >= _START.size else (0, 0, b"", 0)
    if fields[:2] != (START_VERSION, DEPTH) or len(content) != _START.size + fields[3]:
        raise _corrupt(
            f"unknown version of a leader's start record version={fields[0]} depth={fields[1]}", group.number, 0
        )


def _entry_of(group: StoredGroup, kind: EntryKind) -> Buffer:
    entry = next(entry for entry in read_directory(group.content, group.position) if entry.kind == kind)
    return memoryview(group.content)[entry.position : entry.position + entry.length]


def _read_naming(group: StoredGroup) -> Naming:
    sealed = rests_on = group.sequence - 1
    snapshot = ""
    for entry in read_directory(group.content, group.position):
        if entry.kind == EntryKind.SEALED:
            sealed = entry.argument
        elif entry.kind == EntryKind.SNAPSHOT:
            rests_on = entry.argument
            snapshot = group.content[entry.position : entry.position + entry.length].decode("ascii")
    return Naming(sealed, rests_on, snapshot, group.number)


def _corrupt(reason: str, number: int, position: int) -> Corrupt:
    return Corrupt(
        ErrorCode.CORRUPT, f"the journal in the bucket is damaged: {reason} object={number:016x} position={position}"
    )
