"""Write Iceberg metadata for a table whose files and rows the Delta log determines.

* The metadata follows the Delta log. If a crash separates the two, the next writer updates the metadata with one
  snapshot, which may cover several versions of the Delta log.
* A version of the metadata is an object that is created only if it is absent. A writer that finds it created by another
  reads it and continues from there.
* If the table was moved, or another program has changed the metadata, it is replaced by metadata with one snapshot.
* Rows that the Delta log deletes by a deletion vector are in a file of position deletes, one for each data file.
* The name of a manifest begins with the version that adds it, as for data files. A manifest is in the lists of
  consecutive snapshots, so the oldest snapshot determines which older manifests are garbage.

The format follows the Iceberg specification, version 2, with the file names of Hadoop tables.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import log
from typing import Any, Final
from urllib.parse import unquote
from uuid import uuid4

import msgspec

from polywire.errors import Unavailable
from polywire.store.base import BlobMissing
from polywire.store.objects import Objects
from polywire.table_orders import ICEBERG_HINT, ICEBERG_METADATA, iceberg_metadata_name
from polywire.tables import deletion_vectors
from polywire.tables.columns import HEADER_VALUE_ID, iceberg_schema
from polywire.tables.delta_log import (
    NEW,
    TOPIC,
    CommitConflict,
    DataFile,
    TableState,
    create_named,
    create_once,
    now_ms,
)
from polywire.tables.manifests import (
    Entry,
    Manifest,
    Paths,
    decode_list,
    decode_manifest,
    encode_deletes,
    encode_list,
    encode_manifest,
)

DELTA_VERSION: Final = "polywire.delta-version"
NEXT_OFFSETS: Final = "polywire.next-offsets"
SUMMARY_TOPIC_ID: Final = "polywire.topic-id"
SCHEMAS_MAX: Final = 20  # each commit writes all schemas again; snapshots with older schemas are removed
SNAPSHOT_BYTES_MAX: Final = 512 << 10  # size of all snapshots (about 700), which each commit writes again
PREVIOUS_MAX: Final = 10  # older versions of the metadata that are retained
MANIFEST_MERGE: Final = 32  # number of manifests of one size class that are merged
MANIFEST_FILES_MAX: Final = 4096  # a manifest with this many files is not merged any more
TRIES: Final = 5
_MAIN: Final = "main"
_JSON: Final = ".json"
_NAME: Final = re.compile(
    rf"{ICEBERG_METADATA}(?:v(\d+)\.metadata\.json|(\d{{20}})-(?:files|snapshot|deletes)-\w+\.(?:avro|parquet))"
)
_MANIFEST: Final = "-files-"
_LIST: Final = "-snapshot-"
_DELETES: Final = "-deletes-"
_ID_MAX: Final = 2**63 - 1
_PROPERTIES: Final = {
    # the Delta log determines which data files are needed, so other programs must not delete any
    "gc.enabled": "false",
    "write.parquet.compression-codec": "zstd",
}


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A snapshot.

    Attributes:
        snapshot_id: random.
        sequence: number in the order of snapshots.
        timestamp_ms: when the version of the Delta log was committed.
        list_name: its list of manifests, relative to the table.
        encoded: the snapshot as JSON.
        schema_id: id of the schema that the table had.
    """

    snapshot_id: int
    sequence: int
    timestamp_ms: int
    list_name: str
    encoded: bytes
    schema_id: int


@dataclass(frozen=True, slots=True)
class _Metadata:
    """A version of the metadata. All of it is replaced together.

    Attributes:
        version: number in its name; 0 before the first.
        delta_version: the version of the Delta log that the newest snapshot has.
        positions: next offsets of the newest snapshot, as in its summary.
        snapshots: all snapshots, the oldest first.
        manifests: manifests of the newest snapshot.
        holders: the manifest of each file, by the path of the file.
        history: previous versions, as in the metadata's log.
        schemas: schemas of the snapshots, the current one last.
        last_column_id: greatest field id that any schema ever had.
    """

    version: int = 0
    delta_version: int = NEW
    sequence: int = 0
    updated_ms: int = 0
    positions: str = ""
    snapshots: tuple[_Snapshot, ...] = ()
    manifests: tuple[Manifest, ...] = ()
    holders: dict[str, Manifest] = field(default_factory=dict)
    history: tuple[Mapping[str, Any], ...] = ()
    schemas: tuple[Mapping[str, Any], ...] = ()
    last_column_id: int = HEADER_VALUE_ID


@dataclass(slots=True)
class _Change:
    """Files of one kind that a snapshot adds and removes."""

    added: list[Entry]
    removed: list[Entry]


class IcebergMetadata:
    """The Iceberg metadata of one table. All methods raise Unavailable if the storage fails.

    Args:
        objects: the files of the table.
        url: URL of the table, which the metadata contains.
        now_ms: returns the time in milliseconds since 1970.
        pause: waits for some seconds between attempts.
    """

    def __init__(
        self,
        objects: Objects,
        url: str,
        *,
        now_ms: Callable[[], int] = now_ms,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._objects: Final = objects
        self._paths: Final = Paths(unquote(url))
        self._now_ms: Final = now_ms
        self._pause: Final = pause
        self._newest: _Metadata | None = None

    def project(self, state: TableState) -> None:
        """Add a snapshot of this version of the table, unless there is one of this or of a later version.

        Raises CommitConflict if other writers keep changing the metadata.
        """
        self._update(state, lambda newest: self._advanced(newest, state))

    def expire(self, state: TableState, before_ms: int) -> int:
        """Remove snapshots that are older than ``before_ms``, delete files of the metadata, and return their number.

        Call it before data files are deleted. Raises CommitConflict if other writers keep changing the metadata.
        """
        self.project(state)
        newest = self._update(state, lambda newest: self._expired(newest, before_ms))
        return self._collect(newest)

    def _update(self, state: TableState, change: Callable[[_Metadata], _Metadata | None]) -> _Metadata:
        """Call ``change`` with the newest metadata, and store the version that it returns, if any.

        Return the newest metadata.
        """
        for _ in range(TRIES):
            newest = self._newest or self._load(state)
            self._newest = None  # unknown if the following steps fail
            changed = change(newest)
            if changed is None or self._store(changed, state):
                self._newest = changed or newest
                return self._newest
        raise CommitConflict(state.version)

    # Reading

    def _load(self, state: TableState) -> _Metadata:
        hint = self._hint()
        version, content = self._find(hint)
        if content is None:
            return _Metadata()
        if version != hint:  # a writer was killed before it wrote the hint, or wrote an outdated one
            self._objects.put(ICEBERG_HINT, str(version).encode())
        try:
            return self._parsed(version, json.loads(content), state)
        except (BlobMissing, LookupError, TypeError, ValueError):
            # the table was moved, or another program wrote the files: write all metadata again, with later numbers
            return _Metadata(version=version, sequence=version)

    def _hint(self) -> int:
        try:
            return int(self._objects.read(ICEBERG_HINT).content)
        except (BlobMissing, ValueError):
            return 0

    def _find(self, version: int) -> tuple[int, bytes | None]:
        """Return the newest metadata. The hint may name an older version."""
        content = self._read(version)
        if content is None and version:
            version = max(map(_number, self._objects.list(ICEBERG_METADATA)), default=0)
            content = self._read(version)
        while (following := self._read(version + 1)) is not None:
            version, content = version + 1, following
        return version, content

    def _read(self, version: int) -> bytes | None:
        if version <= 0:
            return None
        try:
            return self._objects.read(iceberg_metadata_name(version)).content
        except BlobMissing:
            return None

    def _parsed(self, version: int, found: Any, state: TableState) -> _Metadata:
        """Return what ``project`` needs of the metadata. Raises ValueError or LookupError if another program wrote it."""
        expected = (self._paths.location, state.table_id, 2)
        if (found["location"], found["table-uuid"], found["format-version"]) != expected:
            raise ValueError("the metadata is of another table")
        snapshots = tuple(
            _Snapshot(
                item["snapshot-id"],
                item["sequence-number"],
                item["timestamp-ms"],
                self._paths.relative(item["manifest-list"]),
                msgspec.json.encode(item),
                item["schema-id"],
            )
            for item in found["snapshots"]
        )
        current = found["snapshots"][-1]
        if current["snapshot-id"] != found["current-snapshot-id"]:
            raise ValueError("the newest snapshot is not the current one")
        if found["schemas"][-1]["schema-id"] != found["current-schema-id"]:
            raise ValueError("the newest schema is not the current one")
        manifests = decode_list(self._objects.read(snapshots[-1].list_name).content, self._paths)
        for manifest in manifests:
            decode_manifest(manifest, self._objects.read(manifest.name).content, self._paths, state.files)
        summary = current["summary"]
        return _Metadata(
            version=version,
            delta_version=int(summary[DELTA_VERSION]),
            sequence=found["last-sequence-number"],
            updated_ms=found["last-updated-ms"],
            positions=_positions(summary),
            snapshots=snapshots,
            manifests=tuple(manifests),
            holders={path: manifest for manifest in manifests for path in manifest.entries},
            history=tuple(found["metadata-log"]),
            schemas=tuple(found["schemas"]),
            last_column_id=found["last-column-id"],
        )

    # Writing

    def _advanced(self, newest: _Metadata, state: TableState) -> _Metadata | None:
        """Write a snapshot of this version, and return the metadata with it; None if there is nothing to add."""
        if newest.delta_version >= state.version:
            return None
        holders, snapshot_id, sequence = newest.holders, _new_id(), newest.sequence + 1
        entries = [manifest.entries[path] for path, manifest in holders.items()]
        vectors = {entry.target: entry for entry in entries if entry.target}
        change = _Change(
            added=[Entry(file, snapshot_id, sequence) for path, file in state.files.items() if path not in holders],
            removed=[entry for entry in entries if not entry.target and entry.file.path not in state.files],
        )
        deletes = _Change(added=[], removed=[])
        for path in {**state.files, **vectors}:
            file = state.files.get(path)
            count = 0 if file is None or file.deleted is None else file.deleted.count
            known = vectors.get(path)
            if known is not None and known.file.row_count != count:
                deletes.removed.append(known)
            if file is not None and count and (known is None or known.file.row_count != count):
                made = self._put_deletes(newest, file)
                deletes.added.append(Entry(made, snapshot_id, sequence, target=path))
        schemas = _schemas(newest, state)
        schema = schemas[-1]
        manifests = self._changed(newest, schema, newest.manifests, change, snapshot_id, sequence, has_deletes=False)
        manifests = self._changed(newest, schema, manifests, deletes, snapshot_id, sequence, has_deletes=True)
        parent = newest.snapshots[-1] if newest.snapshots else None
        list_name = _new_name(newest, _LIST, ".avro")
        content = encode_list(
            manifests,
            self._paths,
            snapshot_id=snapshot_id,
            parent_id=None if parent is None else parent.snapshot_id,
            sequence=sequence,
        )
        create_named(self._objects, list_name, content, self._pause)
        timestamp_ms = max(state.committed_ms or self._now_ms(), newest.updated_ms + 1)
        summary = _summary(newest, state, change, deletes, manifests)
        item: dict[str, object] = {
            "sequence-number": sequence,
            "snapshot-id": snapshot_id,
            "timestamp-ms": timestamp_ms,
            "manifest-list": self._paths.absolute(list_name),
            "summary": summary,
            "schema-id": schema["schema-id"],
        }
        if parent is not None:
            item["parent-snapshot-id"] = parent.snapshot_id
        encoded = msgspec.json.encode(item)
        snapshot = _Snapshot(snapshot_id, sequence, timestamp_ms, list_name, encoded, schema["schema-id"])
        snapshots = _limited((*newest.snapshots, snapshot), schemas)
        return replace(
            self._following(newest, timestamp_ms),
            delta_version=state.version,
            sequence=sequence,
            positions=_positions(summary),
            snapshots=snapshots,
            manifests=manifests,
            schemas=_needed(schemas, snapshots),
            last_column_id=max(newest.last_column_id, *(item["id"] for item in schema["fields"])),
        )

    def _put_deletes(self, newest: _Metadata, file: DataFile) -> DataFile:
        """Store the deleted rows of a data file as position deletes."""
        rows = deletion_vectors.read(self._objects, file.deleted).to_array()
        content = encode_deletes(self._paths.absolute(file.path), rows)
        name = _new_name(newest, _DELETES, ".parquet")
        create_named(self._objects, name, content, self._pause)
        return DataFile(name, len(content), 0, len(rows))

    def _changed(
        self,
        newest: _Metadata,
        schema: Mapping[str, Any],
        manifests: tuple[Manifest, ...],
        change: _Change,
        snapshot_id: int,
        sequence: int,
        *,
        has_deletes: bool,
    ) -> tuple[Manifest, ...]:
        """Write one manifest with all changes of a snapshot, and return the manifests of the snapshot.

        It replaces the manifests that have removed files, and those that are merged.
        """
        if not (change.added or change.removed):
            return manifests
        holders = newest.holders
        same_kind = [manifest for manifest in manifests if manifest.has_deletes == has_deletes]
        replaced = {id(manifest): manifest for manifest in _mergeable(same_kind)}
        for entry in change.removed:
            manifest = holders.pop(entry.file.path)
            replaced[id(manifest)] = manifest
            del manifest.entries[entry.file.path]
        name = _new_name(newest, _MANIFEST, ".avro")
        made = Manifest(name, 0, snapshot_id, sequence, sequence, has_deletes=has_deletes)
        existing = [entry for manifest in replaced.values() for entry in manifest.entries.values()]
        entries = {"added": change.added, "existing": existing, "deleted": change.removed}
        content = encode_manifest(made, self._paths, schema, **entries)
        create_named(self._objects, made.name, content, self._pause)
        holders.update(dict.fromkeys(made.entries, made))
        rest = [manifest for manifest in manifests if manifest.entries and id(manifest) not in replaced]
        return (*rest, made)

    def _expired(self, newest: _Metadata, before_ms: int) -> _Metadata | None:
        """Return the metadata without old snapshots; None if there are none."""
        remaining = tuple(item for item in newest.snapshots[:-1] if item.timestamp_ms >= before_ms)
        snapshots = (*remaining, *newest.snapshots[-1:])
        if len(snapshots) == len(newest.snapshots):
            return None
        following = self._following(newest, max(self._now_ms(), newest.updated_ms))
        return replace(following, snapshots=snapshots, schemas=_needed(newest.schemas, snapshots))

    def _following(self, newest: _Metadata, updated_ms: int) -> _Metadata:
        """Return the next version of the metadata, without changes."""
        history = newest.history
        if newest.version and newest.snapshots:
            location = self._paths.absolute(iceberg_metadata_name(newest.version))
            history = (*history, {"timestamp-ms": newest.updated_ms, "metadata-file": location})[-PREVIOUS_MAX:]
        return replace(newest, version=newest.version + 1, updated_ms=updated_ms, history=history)

    def _store(self, metadata: _Metadata, state: TableState) -> bool:
        """Store a version of the metadata. Return False if another writer stored this version."""
        name = iceberg_metadata_name(metadata.version)
        if not create_once(self._objects, name, self._encoded(metadata, state), self._pause):
            return False
        self._objects.put(ICEBERG_HINT, str(metadata.version).encode())
        if metadata.version > PREVIOUS_MAX + 1:
            with suppress(Unavailable):  # the next garbage collection deletes it
                self._objects.delete(iceberg_metadata_name(metadata.version - PREVIOUS_MAX - 1))
        return True

    def _encoded(self, metadata: _Metadata, state: TableState) -> bytes:
        current = metadata.snapshots[-1]
        return msgspec.json.encode(
            {
                "format-version": 2,
                "table-uuid": state.table_id,
                "location": self._paths.location,
                "last-sequence-number": metadata.sequence,
                "last-updated-ms": metadata.updated_ms,
                "last-column-id": metadata.last_column_id,
                "current-schema-id": current.schema_id,
                "schemas": metadata.schemas,
                "default-spec-id": 0,
                "partition-specs": [{"spec-id": 0, "fields": []}],
                "last-partition-id": 999,
                "default-sort-order-id": 0,
                "sort-orders": [{"order-id": 0, "fields": []}],
                "properties": {**_PROPERTIES, TOPIC: state.configuration.get(TOPIC, "")},
                "current-snapshot-id": current.snapshot_id,
                "refs": {_MAIN: {"snapshot-id": current.snapshot_id, "type": "branch"}},
                "snapshots": [msgspec.Raw(item.encoded) for item in metadata.snapshots],
                "snapshot-log": [
                    {"timestamp-ms": item.timestamp_ms, "snapshot-id": item.snapshot_id} for item in metadata.snapshots
                ],
                "metadata-log": metadata.history,
            }
        )

    # Garbage

    def _collect(self, newest: _Metadata) -> int:
        """Delete files that no retained snapshot and no retained version of the metadata needs."""
        if not newest.snapshots:
            return 0
        oldest = newest.snapshots[0]
        listed = decode_list(self._objects.read(oldest.list_name).content, self._paths)
        needed = {manifest.name for manifest in (*listed, *newest.manifests)}
        for manifest in listed:
            if manifest.has_deletes:
                content = self._objects.read(manifest.name).content
                decode_manifest(manifest, content, self._paths, {})
        for manifest in (*listed, *newest.manifests):
            if manifest.has_deletes:
                needed.update(manifest.entries)
        needed.update(snapshot.list_name for snapshot in newest.snapshots)
        count = 0
        for name in self._objects.list(ICEBERG_METADATA):
            version = _number(name)
            if name in needed or not version:
                continue
            if name.endswith(_JSON):
                is_garbage = version < newest.version - PREVIOUS_MAX
            elif _LIST not in name:  # manifests and delete files; newer ones may be needed
                is_garbage = version <= _number(oldest.list_name)
            else:
                is_garbage = version <= newest.version
            if is_garbage:
                self._objects.delete(name)
                count += 1
        return count


def remove_metadata(objects: Objects) -> int:
    """Delete the Iceberg metadata of a table that is not updated any more, and return the number of files.

    Raises Unavailable if the storage fails.
    """
    names = [name for name in objects.list(ICEBERG_METADATA) if name == ICEBERG_HINT or _number(name)]
    for name in sorted(names, key=lambda name: name != ICEBERG_HINT):  # hint first: readers begin with it
        objects.delete(name)
    return len(names)


def _number(name: str) -> int:
    """Return the version in the name of a file that a version of the metadata adds; 0 for other files."""
    found = _NAME.fullmatch(name)
    return int(found[1] or found[2]) if found else 0


def _new_name(newest: _Metadata, kind: str, ending: str) -> str:
    return f"{ICEBERG_METADATA}{newest.version + 1:020}{kind}{uuid4().hex}{ending}"


def _new_id() -> int:
    return (uuid4().int & _ID_MAX) or 1


def _mergeable(manifests: Iterable[Manifest]) -> list[Manifest]:
    """Return manifests of one size class if there are enough of them, otherwise nothing."""
    classes: dict[int, list[Manifest]] = {}
    for manifest in manifests:
        count = len(manifest.entries)
        if 0 < count < MANIFEST_FILES_MAX:
            classes.setdefault(int(log(count, MANIFEST_MERGE)), []).append(manifest)
    for group in classes.values():
        if len(group) >= MANIFEST_MERGE:
            sizes = accumulate(len(manifest.entries) for manifest in group)
            return [manifest for manifest, size in zip(group, sizes, strict=True) if size <= MANIFEST_FILES_MAX]
    return []


def _schemas(newest: _Metadata, state: TableState) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas, the last of which is the schema of this version of the table."""
    last = newest.schemas[-1] if newest.schemas else None
    made = iceberg_schema(state.columns, 0 if last is None else last["schema-id"] + 1)
    if last is not None and last["fields"] == made["fields"]:
        return newest.schemas
    return (*newest.schemas[1 - SCHEMAS_MAX :], made)


def _needed(schemas: Sequence[Mapping[str, Any]], snapshots: Sequence[_Snapshot]) -> tuple[Mapping[str, Any], ...]:
    used = {snapshot.schema_id for snapshot in snapshots}
    return tuple([schema for schema in schemas if schema["schema-id"] in used])


def _limited(snapshots: tuple[_Snapshot, ...], schemas: Sequence[Mapping[str, Any]]) -> tuple[_Snapshot, ...]:
    """Return the newest snapshots with these schemas that together are not too large, at least one."""
    size, first = len(snapshots[-1].encoded), len(snapshots) - 1
    while first and (size := size + len(snapshots[first - 1].encoded)) <= SNAPSHOT_BYTES_MAX:
        if snapshots[first - 1].schema_id < schemas[0]["schema-id"]:
            break
        first -= 1
    return snapshots[first:]


def _summary(
    newest: _Metadata, state: TableState, change: _Change, deletes: _Change, manifests: Iterable[Manifest]
) -> dict[str, str]:
    topic_id = state.topic_id
    offsets = {
        f"{key.partition}/{key.incarnation}": offset
        for key, offset in state.offsets.items()
        if key.topic_id == topic_id
    }
    added, removed = ([entry.file for entry in entries] for entries in (change.added, change.removed))
    numbers = {
        "added-data-files": len(added),
        "added-records": sum(file.row_count for file in added),
        "added-files-size": sum(entry.file.size for entry in (*change.added, *deletes.added)),
        "deleted-data-files": len(removed),
        "deleted-records": sum(file.row_count for file in removed),
        "removed-files-size": sum(entry.file.size for entry in (*change.removed, *deletes.removed)),
        "added-delete-files": len(deletes.added),
        "added-position-delete-files": len(deletes.added),
        "added-position-deletes": sum(entry.file.row_count for entry in deletes.added),
        "removed-delete-files": len(deletes.removed),
        "removed-position-delete-files": len(deletes.removed),
        "removed-position-deletes": sum(entry.file.row_count for entry in deletes.removed),
    }
    vectors = [entry.file for manifest in manifests if manifest.has_deletes for entry in manifest.entries.values()]
    totals = {
        "total-data-files": len(state.files),
        "total-records": sum(file.row_count for file in state.files.values()),
        "total-files-size": state.byte_count + sum(file.size for file in vectors),
        "total-delete-files": len(vectors),
        "total-position-deletes": sum(file.row_count for file in vectors),
        "total-equality-deletes": 0,
        DELTA_VERSION: state.version,
    }
    summary = {
        **{name: str(number) for name, number in numbers.items() if number},
        **{name: str(number) for name, number in totals.items()},
        SUMMARY_TOPIC_ID: topic_id.hex(),
        NEXT_OFFSETS: json.dumps(offsets, separators=(",", ":")),
    }
    return {"operation": _operation(newest, summary, change, deletes), **summary}


def _operation(newest: _Metadata, summary: Mapping[str, str], change: _Change, deletes: _Change) -> str:
    if not (change.removed or deletes.added):
        return "append"
    if not change.added:
        return "delete"
    # a table has exactly the records below its next offsets: if these have not changed, neither have the rows
    return "replace" if _positions(summary) == newest.positions else "overwrite"


def _positions(summary: Mapping[str, str]) -> str:
    return f"{summary[SUMMARY_TOPIC_ID]} {summary[NEXT_OFFSETS]}"
