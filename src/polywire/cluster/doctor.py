"""Check a bucket for damaged and missing objects (``log.doctor`` does the same for a directory).

The check reads every stored batch and changes nothing. Brokers may use the log meanwhile.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from polywire.cluster import fencing
from polywire.cluster.bucket_store import BucketStore
from polywire.cluster.journal_chain import JournalChain, start_of
from polywire.cluster.journal_objects import READERS, SEED_BYTES, JournalObjects, object_name
from polywire.cluster.nodes import DIRECTORY, Node, NodeState
from polywire.errors import BrokerError, Corrupt, ErrorCode
from polywire.log.base import Replay
from polywire.log.doctor import Finding, Remedy, Severity, examine_segment, examine_snapshot, remedy_of
from polywire.log.journal.group import EntryKind, read_directory
from polywire.log.journal.snapshot import Snapshot, get_snapshot
from polywire.log.journal.steps import read_sealed
from polywire.log.opening import JOURNAL
from polywire.log.segments.segment_set import SEGMENTS, SNAPSHOTS, segment_name
from polywire.store.base import BlobMissing
from polywire.store.identity import NAME, find_identity
from polywire.store.objects import Objects, of_shard, shard_root
from polywire.store.system_files import SYSTEM_FILES

FIRST_NUMBER: Final = 1  # number of the first journal object, which is always a start
STARTS_SHOWN_MAX: Final = 10
LITTER: Final = "unneeded: nothing refers to it"


@dataclass(frozen=True, slots=True)
class _Read:
    """A journal that was read to its end.

    Attributes:
        snapshot_name: name of the snapshot that the journal names.
        needed: segments that the snapshot or a later part of the journal names.
    """

    chain: JournalChain
    snapshot_name: str
    snapshot: Snapshot | None
    needed: frozenset[str]


class BucketDoctor:
    """Checks a bucket for damage, shard by shard.

    Args:
        blobs: the same bucket with a longer timeout, for large objects.

    Attributes:
        shards: the examined shards.
    """

    def __init__(self, objects: Objects, blobs: Objects) -> None:
        self._objects = objects
        self._blobs = blobs
        self.shards: list[ShardDoctor] = []

    def examine(self) -> list[Finding]:
        """Return all findings. Raises Unavailable or Busy."""
        return [self.examine_identity(), *(finding for shard in self.shards for finding in shard.examine())]

    def examine_identity(self) -> Finding:
        """Return a finding on the object that identifies the bucket's log, and set ``shards``.

        Raises Unavailable or Invalid.
        """
        identity = find_identity(self._objects)
        if identity is None:
            return Finding(Severity.BROKEN, NAME, "there is no log in this bucket")
        if identity.importing:
            message = (
                f"an import is incomplete (run polywire cluster import again to complete it) source={identity.source}"
            )
            return Finding(Severity.BROKEN, NAME, message)
        self.shards = [ShardDoctor(self._objects, self._blobs, shard) for shard in range(identity.shards)]
        return Finding(Severity.SOUND, NAME, f"id={identity.id} shards={identity.shards}")

    def brokers(self, seen: Sequence[tuple[Node, NodeState]]) -> Iterator[Finding]:
        """Yield a finding with the state of each broker.

        Args:
            seen: brokers, read before ``examine`` was called. So the journals contain every start that a broker
                mentions.
        """
        for node, state in seen:
            found = self.shards[node.shard].start if node.shard < len(self.shards) else None
            severity, message = Severity.SOUND, state.value + (f" start={node.start}" if node.start > 0 else "")
            if found is not None and node.start > found:
                severity = Severity.DAMAGED
                message += f" is not in the journal: objects at its end are missing journal_start={found}"
            yield Finding(severity, DIRECTORY + node.name, message)


class ShardDoctor:
    """Checks the objects of one shard for damage."""

    def __init__(self, objects: Objects, blobs: Objects, shard: int) -> None:
        self._objects = of_shard(objects, shard)
        self._blobs = of_shard(blobs, shard)
        self._root = shard_root(shard)
        self._read: _Read | None = None

    @property
    def start(self) -> int | None:
        return None if self._read is None else self._read.chain.start

    def examine(self) -> list[Finding]:
        """Return all findings. Raises Unavailable or Busy."""
        return [replace(finding, path=self._root + finding.path) for finding in self._examined()]

    def _examined(self) -> list[Finding]:
        """Return all findings, with paths relative to the shard."""
        with tempfile.TemporaryDirectory() as empty:
            store = BucketStore(self._blobs, Path(empty), SYSTEM_FILES, cache_bytes=0)
            try:
                read = self._read = self._journal(store)
            except Corrupt as error:
                return [Finding(Severity.BROKEN, JOURNAL, error.message, remedy=remedy_of(error))]
            if read is None:
                return [Finding(Severity.SOUND, JOURNAL, "no broker has stored anything yet")]
            chain = read.chain
            facts = f"floor={chain.floor.number:016x} next={chain.next_number:016x} groups={len(chain.groups)}"
            found = [Finding(Severity.SOUND, JOURNAL, f"a broker can start last_start={chain.start} {facts}")]
            found += self._below_the_floor(chain)
            found += self._snapshots(store, read)
            found += self._segments(store, read)
        return found

    def replay_into(self, state: Replay) -> None:
        """Apply the journal to a broker's state, as far as it could be read."""
        read = self._read
        if read is None:
            return
        if read.snapshot is not None:
            state.restore(read.snapshot.broker)
        known = 0 if read.snapshot is None else read.snapshot.broker_sequence
        for group in read.chain.groups:
            for entry in read_directory(group.content, group.position) if group.sequence > known else ():
                if entry.kind == EntryKind.CHANGE:
                    state.apply(bytes(group.content[entry.position : entry.position + entry.length]))

    def _journal(self, store: BucketStore) -> _Read | None:
        """Read the journal. Return None if it has no objects yet. Raises Corrupt or Unavailable."""
        try:
            seed = self._objects.read("seed").content
        except BlobMissing:
            if not self._objects.list(f"{JOURNAL}/"):
                return None
            seed = b""
        bucket = JournalObjects(self._objects)
        try:
            chain = bucket.run(fencing.read_journal(int.from_bytes(seed[:SEED_BYTES], "little")))
        finally:
            bucket.close()
        naming = chain.naming()
        if naming is None:
            return _Read(chain, "", None, frozenset(map(segment_name, _named(chain, ()))))
        try:
            snapshot = get_snapshot(store, naming.snapshot)
        except BlobMissing as missing:
            raise Corrupt(
                ErrorCode.CORRUPT, f"a snapshot is missing from the bucket name={naming.snapshot!r}"
            ) from missing
        needed = frozenset(map(segment_name, _named(chain, snapshot.segments)))
        return _Read(chain, naming.snapshot, snapshot, needed)

    def _below_the_floor(self, chain: JournalChain) -> Iterator[Finding]:
        """Yield findings for journal objects below the first one that is needed (the floor).

        Objects with a broker's start are permanent, so a missing one is reported. Other objects should have been
        deleted.
        """
        directory = f"{JOURNAL}/"
        first = object_name(chain.floor.number)
        names = [name for name in self._objects.list(directory) if name < first]
        with ThreadPoolExecutor(READERS) as threads:
            kept = dict(zip(names, threads.map(partial(self._start_in, chain.seed), names), strict=True))
        yield from (Finding(Severity.SOUND, name, LITTER) for name, start in kept.items() if start == 0)
        starts = {start for start in kept.values() if start > 0} | {*chain.starts.values(), chain.start}
        gone = set(range(min(starts), chain.start)) - starts
        if chain.floor.number > FIRST_NUMBER and kept.get(object_name(FIRST_NUMBER), 0) <= 0:
            gone.add(min(starts) - 1)
        if gone:
            shown = ",".join(map(str, sorted(gone)[:STARTS_SHOWN_MAX]))
            message = f"start objects are missing, although brokers never delete them count={len(gone)} starts={shown}"
            yield Finding(Severity.DAMAGED, JOURNAL, message)

    def _start_in(self, seed: int, name: str) -> int:
        """Return the number of the broker start that a journal object begins, 0 if it begins none, or -1 if it was
        deleted.
        """
        try:
            return start_of(self._objects.read(name).content, seed)
        except BlobMissing:
            return -1

    def _snapshots(self, store: BucketStore, read: _Read) -> Iterator[Finding]:
        for name in store.list(f"{SNAPSHOTS}/"):
            if name != read.snapshot_name:
                yield Finding(Severity.SOUND, name, LITTER)
        if read.snapshot_name:
            yield examine_snapshot(store, read.snapshot_name)

    def _segments(self, store: BucketStore, read: _Read) -> Iterator[Finding]:
        there = set(store.list(f"{SEGMENTS}/"))
        for name in sorted(there - read.needed):
            yield Finding(Severity.SOUND, name, LITTER)
        for name in sorted(read.needed):
            try:
                store.size(name)
                findings: Sequence[Finding] = examine_segment(store, name)
            except BlobMissing:
                findings = self._missing_segment(store, name)
            yield from findings

    def _missing_segment(self, store: BucketStore, name: str) -> list[Finding]:
        """Return a finding for a missing segment, unless a leader has merged the segment since the journal was read."""
        try:
            now = self._journal(store)
        except BrokerError:
            now = None
        if now is not None and name not in now.needed:
            return []
        return [Finding(Severity.BROKEN, name, "a segment that the journal lists is missing", remedy=Remedy.BACKUP)]


def _named(chain: JournalChain, listed: Sequence[int]) -> set[int]:
    """Return the segments that the snapshot (``listed``) or the journal after it adds and that are not removed later."""
    new, removed = set(listed), set[int]()
    for group in chain.groups:
        for entry in read_directory(group.content, group.position):
            if entry.kind == EntryKind.SEALED:
                named = read_sealed(group.content[entry.position : entry.position + entry.length])
                new.update(named[0])
                removed.update(named[1])
    return new - removed
