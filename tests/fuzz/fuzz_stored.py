"""Fuzz what a start reads from disk: journal groups, segment footers, snapshots, the broker's state in them, seeds.

Most inputs have correct checksums.

Run as ``python -m tests.fuzz.fuzz_stored``; FUZZ_SECONDS limits it, FUZZ_SEED repeats a run. The seed is printed first.
"""

from __future__ import annotations

import tarfile
from functools import cache
from pathlib import Path
from struct import Struct
from tempfile import TemporaryDirectory
from typing import Final

from polywire.broker.changes import Snapshot as BrokerSnapshot
from polywire.broker.changes import decode_change, decode_snapshot
from polywire.broker.changes import encode as encode_state
from polywire.broker.users import User, decode_user, encode_user
from polywire.errors import Corrupt
from polywire.log.journal.group import (
    ENTRY_BYTES,
    GROUP_HEADER_BYTES,
    EntryKind,
    bad_entry,
    read_directory,
    read_group,
)
from polywire.log.journal.slots import is_seed, read_seed
from polywire.log.journal.snapshot import Snapshot, get_snapshot
from polywire.log.segments.format import SegmentInfo, read_footer
from polywire.records.checksum import xxh64
from polywire.store.base import BlobMissing
from polywire.store.system_files import SYSTEM_FILES
from tests.fuzz.chance import fuzz
from tests.fuzz.decoders import Decoder, one_of_each
from tests.memory_store import MemoryStore

HERE: Final = Path(__file__).parents[1] / "vectors" / "data"
MARK_AT: Final = 44
CHECKSUM_AT: Final = 56
HEADER_END: Final = 64
RUNS: Final = 50  # checked in a decoded footer
BLOB: Final = "segments/one"
_TRAILER: Final = Struct("<II2Q2I4Q")
_SNAPSHOT: Final = Struct("<II4Q2I2Q")
_U32: Final = Struct("<I")
_U64: Final = Struct("<Q")


@cache
def kept_files() -> dict[str, bytes]:
    """Return the files of data directories of earlier releases."""
    found: dict[str, bytes] = {}
    for archive in sorted(HERE.glob("*/data.tar.xz")):
        with tarfile.open(archive) as files:
            contents = {member.name.removeprefix("./"): files.extractfile(member) for member in files}
            found |= {f"{archive.parent.name}/{name}": file.read() for name, file in contents.items() if file}
    return found


def of_folder(name: str) -> tuple[bytes, ...]:
    """Return the files of a folder of data directories."""
    return tuple(content for path, content in kept_files().items() if f"/{name}/" in path)


def seed_of(directory: str) -> int:
    """Return the seed of the journal of one of them."""
    (path,) = (path for path in kept_files() if path.startswith(directory) and path.endswith("journal/seed"))
    content = kept_files()[path]
    return int.from_bytes(content[8:16] if is_seed(content) else content[:8], "little")


SEED: Final = seed_of("state-2")


def groups() -> tuple[bytes, ...]:
    """Return groups of a journal, each from its header to its end."""
    found = []
    for path, slot in kept_files().items():
        at = slot.find(b"PWG1") if path.startswith("state-2") and path.endswith(".pwj") else -1
        while at >= 0:
            fields = read_group(slot, at, SEED)
            if fields is not None and fields.length < 4096:
                found.append(slot[at : at + fields.length])
            at = slot.find(b"PWG1", at + 8)
    return tuple(found[:60])


def seal_group(data: bytes) -> bytes:
    """Correct the checksums of header, directory and plain entries."""
    group = bytearray(data)
    if len(group) < HEADER_END:
        return data
    count = min(_U32.unpack_from(group, 40)[0], (len(group) - HEADER_END) // ENTRY_BYTES)
    stop = HEADER_END + count * ENTRY_BYTES
    position = stop
    for at in range(HEADER_END, stop, ENTRY_BYTES):
        kind, length = _U32.unpack_from(group, at)[0], _U32.unpack_from(group, at + 4)[0]
        if kind not in (EntryKind.BATCH, EntryKind.STAGED):
            _U64.pack_into(group, at + 24, xxh64(group[position : position + length]))
        position += (length + 7) & ~7
    _U32.pack_into(group, 40, count)
    seed = _U64.pack(SEED)
    _U32.pack_into(group, MARK_AT, xxh64(seed + group[:MARK_AT]) & 0xFFFFFFFF)
    _U64.pack_into(group, CHECKSUM_AT, xxh64(seed + group[:CHECKSUM_AT] + group[HEADER_END:stop]))
    return bytes(group)


def read_stored_group(data: bytes) -> None:
    """Decode a group as recovery does: verified entries lie within the bytes."""
    fields = read_group(data, 0, SEED)
    if fields is None:
        return
    assert GROUP_HEADER_BYTES + fields.entries * ENTRY_BYTES <= fields.length <= len(data)
    bad = bad_entry(data, 0)
    assert -1 <= bad <= fields.entries
    for entry in read_directory(data, 0)[: bad if bad >= 0 else fields.entries]:
        assert entry.position + entry.length <= fields.length
        if entry.kind == EntryKind.CHANGE:
            read_change(data[entry.position : entry.position + entry.length])


def read_change(data: bytes) -> None:
    """Decode a change of the broker's state."""
    decode_change(data)


def read_state(data: bytes) -> None:
    """Decode the broker's state of a snapshot, which round-trips."""
    found = decode_snapshot(data)
    assert isinstance(found, BrokerSnapshot)
    assert decode_snapshot(encode_state(found)) == found


def seal_footer(data: bytes) -> bytes:
    """Return a segment whose trailers match their footers, if they point to them."""
    blob = bytearray(data)
    at = blob.find(_U32.pack(_TRAILER.unpack_from(SEGMENTS[0], len(SEGMENTS[0]) - _TRAILER.size)[0]))
    while 0 <= at <= len(blob) - _TRAILER.size:
        _, _, position, count, *_ = _TRAILER.unpack_from(blob, at)
        if position + count <= len(blob):
            _U64.pack_into(blob, at + _TRAILER.size - 24, xxh64(blob[position : position + count]))
        _U64.pack_into(blob, at + _TRAILER.size - 8, xxh64(blob[at : at + _TRAILER.size - 8]))
        at = blob.find(blob[at : at + 4], at + 4)
    return bytes(blob)


def read_segment(data: bytes) -> SegmentInfo:
    """Decode a segment's footer and runs."""
    store = MemoryStore()
    store.put(BLOB, (data,))
    info, _ = read_footer(store, BLOB)
    for number in range(min(info.run_count, RUNS)):
        run = info.run(number)
        info.find(run.partition)
        info.epochs_of(run)
    return info


def seal_snapshot(data: bytes) -> bytes:
    """Correct the checksum of a snapshot's first copy, as its header locates it."""
    content = bytearray(data)
    if len(content) < _SNAPSHOT.size:
        return data
    *_, clean, _, segments, tokens, partitions, state = _SNAPSHOT.unpack_from(content)
    size = _SNAPSHOT.size + partitions + 8 * segments + 32 * tokens + 16 * clean + state
    if size + 8 <= len(content):
        _U64.pack_into(content, size, xxh64(content[:size]))
    return bytes(content)


def read_snapshot(data: bytes) -> Snapshot:
    """Decode a snapshot, and the broker's state in it."""
    store = MemoryStore()
    store.put(BLOB, (data,))
    found = get_snapshot(store, BLOB)
    decode_snapshot(found.broker)
    return found


def read_seeds(data: bytes) -> None:
    """Decode the seed of a journal, in two copies."""
    with TemporaryDirectory() as folder:
        half = len(data) // 2
        Path(folder, "seed").write_bytes(data[:half])
        Path(folder, "seed.copy").write_bytes(data[half:])
        read_seed(SYSTEM_FILES, Path(folder))


SEGMENTS: Final = tuple(sorted(of_folder("segments"), key=len)[:6])
SNAPSHOTS: Final = of_folder("snapshots")
SEEDS: Final = tuple(content * 2 for path, content in kept_files().items() if path.endswith("journal/seed"))
GROUPS: Final = groups()
CHANGES: Final = tuple(
    {
        group[entry.position : entry.position + entry.length]: None
        for group in GROUPS
        for entry in read_directory(group, 0)
        if entry.kind == EntryKind.CHANGE
    }
)
STATES: Final = tuple(read_snapshot(content).broker for content in SNAPSHOTS)
USERS: Final = (encode_user(User(7, "alice", "hash", 5)),)
DECODERS: Final = (
    Decoder("group", read_stored_group, GROUPS, (Corrupt,), seal_group),
    Decoder("change", read_change, CHANGES, (Corrupt,)),
    Decoder("state", read_state, STATES, (Corrupt,)),
    Decoder("footer", read_segment, SEGMENTS, (Corrupt, BlobMissing), seal_footer),
    Decoder("snapshot", read_snapshot, SNAPSHOTS, (Corrupt,), seal_snapshot),
    Decoder("seed", read_seeds, SEEDS, (Corrupt,)),
    Decoder("user", decode_user, USERS, (Corrupt,)),
)
INPUTS: Final = len(DECODERS)  # of a round
check_all = one_of_each(DECODERS)


if __name__ == "__main__":
    fuzz(check_all)
