"""Read and write the Delta log of a table: the commits that determine which files and rows the table has.

* A commit is an object that is created only if it is absent, so of two writers exactly one commits a version.
* A commit states the next offset of each partition, as a Delta transaction identifier. Rows and offsets change
  together.
* A commit whose outcome is unknown is read again, and recognized by its content, which has a random identifier.

The format follows the Delta protocol: reader version 1 and writer version 2, or 3 and 7 with deletion vectors.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from polywire.build_info import VERSION
from polywire.errors import Corrupt, ErrorCode, Unavailable
from polywire.store.base import BlobExists, BlobMissing
from polywire.store.objects import ObjectChanged, Objects
from polywire.table_columns import TypedColumn
from polywire.tables.columns import delta_schema, typed_columns
from polywire.tables.deletion_vectors import DeletionVector
from polywire.tables.parquet import Bounds, bounds_of, stated
from polywire.types import Buffer

LOG: Final = "_delta_log/"
LAST_CHECKPOINT: Final = LOG + "_last_checkpoint"
CHECKPOINT: Final = ".checkpoint.parquet"
CHECKPOINT_COMMITS: Final = 50  # commits between two checkpoints; readers read the commits since the last one
COMMIT_TRIES: Final = 5
COMMIT_PAUSE_S: Final = 0.2
READER_VERSION: Final = 1
WRITER_VERSION: Final = 2
FEATURES_READER_VERSION: Final = 3  # from this protocol version on, a table lists the features that it uses
FEATURES_WRITER_VERSION: Final = 7
DELETION_VECTORS: Final = "deletionVectors"
INVARIANTS: Final = "invariants"  # columns that are not nullable
NEW: Final = -1  # version of a table without commits
TOPIC: Final = "polywire.topic"
TOPIC_ID: Final = "polywire.topicId"
LATEST: Final = "polywire.latest"
ENABLE_VECTORS: Final = "delta.enableDeletionVectors"
LAST_COLUMN_ID: Final = "polywire.lastColumnId"
FIELDS: Final = "polywire.fields"
ALL: Final = "all"
_APPLICATION: Final = "polywire"
_MAP: Final = pa.map_(pa.string(), pa.string())


def _struct(**fields: pa.DataType) -> pa.DataType:
    return pa.struct([pa.field(name, kind) for name, kind in fields.items()])


_VECTOR: Final = _struct(
    storageType=pa.string(),
    pathOrInlineDv=pa.string(),
    offset=pa.int32(),
    sizeInBytes=pa.int32(),
    cardinality=pa.int64(),
)
_CHECKPOINT_SCHEMA: Final = pa.schema(
    {
        "txn": _struct(appId=pa.string(), version=pa.int64(), lastUpdated=pa.int64()),
        "add": _struct(
            path=pa.string(),
            partitionValues=_MAP,
            size=pa.int64(),
            modificationTime=pa.int64(),
            dataChange=pa.bool_(),
            stats=pa.string(),
            tags=_MAP,
            deletionVector=_VECTOR,
        ),
        "remove": _struct(
            path=pa.string(),
            deletionTimestamp=pa.int64(),
            dataChange=pa.bool_(),
            size=pa.int64(),
            deletionVector=_VECTOR,
        ),
        "metaData": _struct(
            id=pa.string(),
            name=pa.string(),
            format=_struct(provider=pa.string(), options=_MAP),
            schemaString=pa.string(),
            partitionColumns=pa.list_(pa.string()),
            configuration=_MAP,
            createdTime=pa.int64(),
        ),
        "protocol": _struct(
            minReaderVersion=pa.int32(),
            minWriterVersion=pa.int32(),
            readerFeatures=pa.list_(pa.string()),
            writerFeatures=pa.list_(pa.string()),
        ),
    }
)

Action = dict[str, Any]
"""One action of a commit: a dictionary with one key, its kind."""


class CommitConflict(Exception):
    """Another writer committed this version. The files of the failed commit are garbage, and the state is outdated."""


@dataclass(frozen=True, slots=True)
class PartitionKey:
    """A partition of a topic, for as long as it exists. A new partition with the same number has another incarnation."""

    topic_id: bytes
    partition: int
    incarnation: int

    @property
    def application(self) -> str:
        """The application id of this partition's Delta transaction identifiers.

        The version of such an identifier is the partition's next offset.
        """
        return f"{_APPLICATION}/{self.topic_id.hex()}/{self.partition}/{self.incarnation}"

    @classmethod
    def parse(cls, application: str) -> PartitionKey | None:
        """Return the partition of an application id; None if another application wrote it."""
        name, *parts = application.split("/")
        if name != _APPLICATION or len(parts) != 3:
            return None
        return cls(bytes.fromhex(parts[0]), int(parts[1]), int(parts[2]))


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file of a table.

    Attributes:
        path: path relative to the table.
        size: size in bytes.
        modified_ms: when it was written, in milliseconds since 1970.
        row_count: rows of the file, including deleted ones.
        bounds: smallest and largest value by column, for some columns. Times are rounded to milliseconds, outwards.
        nulls: number of nulls by column, for all columns of the file.
        has_all_fields: whether every JSON field of the values that can be a column has one. If so, columns that
            the file lacks are null in all of its rows.
        deleted: rows that were deleted from the table; None if there are none.
    """

    path: str
    size: int
    modified_ms: int
    row_count: int
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    nulls: Mapping[str, int] = field(default_factory=dict)
    has_all_fields: bool = False
    deleted: DeletionVector | None = None

    @property
    def live_count(self) -> int:
        """Number of rows that are not deleted."""
        return self.row_count - (0 if self.deleted is None else self.deleted.count)

    @property
    def live_size(self) -> int:
        """Estimated size of the rows that are not deleted, in bytes."""
        return self.size * self.live_count // max(self.row_count, 1)

    def add(self, *, data_change: bool) -> Action:
        """Return the action that adds the file. Without ``data_change``, its rows were in the table before."""
        bounds = {name: at for name, found in self.bounds.items() if (at := stated(found)) is not None}
        stats = {
            "numRecords": self.row_count,
            "minValues": {name: at[0] for name, at in bounds.items()},
            "maxValues": {name: at[1] for name, at in bounds.items()},
            "nullCount": dict(self.nulls),
        }
        if self.deleted is not None:
            stats["tightBounds"] = False
        body: dict[str, Any] = {
            "path": self.path,
            "partitionValues": {},
            "size": self.size,
            "modificationTime": self.modified_ms,
            "dataChange": data_change,
            "stats": json.dumps(stats, separators=(",", ":")),
            **({"tags": {FIELDS: ALL}} if self.has_all_fields else {}),
        }
        return {"add": _with_vector(body, self.deleted)}

    def remove(self, removed_ms: int, *, data_change: bool) -> Action:
        """Return the action that removes the file. Without ``data_change``, its rows stay in the table."""
        action = remove_action(self.path, self.size, removed_ms, data_change=data_change)
        _with_vector(action["remove"], self.deleted)
        return action

    @classmethod
    def of(cls, add: Mapping[str, Any]) -> DataFile:
        """Return the file of an ``add`` action."""
        stats = json.loads(add.get("stats") or "{}")
        uppers = stats.get("maxValues", {})
        bounds = {
            name: bounds_of(lower, uppers[name]) for name, lower in stats.get("minValues", {}).items() if name in uppers
        }
        return cls(
            add["path"],
            add["size"],
            add["modificationTime"],
            stats.get("numRecords", 0),
            bounds,
            stats.get("nullCount", {}),
            (add.get("tags") or {}).get(FIELDS) == ALL,
            _vector_of(add),
        )


def _with_vector(body: dict[str, Any], deleted: DeletionVector | None) -> dict[str, Any]:
    if deleted is not None:
        body["deletionVector"] = deleted.descriptor()
    return body


def _vector_of(body: Mapping[str, Any]) -> DeletionVector | None:
    descriptor = body.get("deletionVector")
    return None if descriptor is None else DeletionVector.of(descriptor)


@dataclass(slots=True)
class TableState:
    """A version of a table.

    Attributes:
        version: number of the last commit; NEW before the first.
        files: the files of this version by path.
        removed: paths of files and deletion vectors that older versions have, with the time of their removal in
            milliseconds since 1970. Newer versions may have them too.
        offsets: next offset by partition: the table has the records below it.
        committed_ms: time of the last commit.
        checkpoint: version of the newest checkpoint that is known; NEW if there is none.
        columns: typed columns, ``_error`` first.
    """

    version: int = NEW
    table_id: str = ""
    created_ms: int = 0
    configuration: dict[str, str] = field(default_factory=dict)
    files: dict[str, DataFile] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)
    offsets: dict[PartitionKey, int] = field(default_factory=dict)
    committed_ms: int = 0
    checkpoint: int = NEW
    columns: tuple[TypedColumn, ...] = ()

    @property
    def topic_id(self) -> bytes:
        """The topic whose rows the table has; empty if it has none yet."""
        return bytes.fromhex(self.configuration.get(TOPIC_ID, ""))

    @property
    def is_latest(self) -> bool:
        """Whether the table has only the latest record of each key."""
        return LATEST in self.configuration

    @property
    def row_count(self) -> int:
        return sum(file.live_count for file in self.files.values())

    def used(self) -> set[str]:
        """Return the paths of the files and deletion vectors of this version."""
        return {*self.files, *(file.deleted.path for file in self.files.values() if file.deleted is not None)}

    @property
    def byte_count(self) -> int:
        return sum(file.size for file in self.files.values())

    def apply(self, actions: Iterable[Action]) -> None:
        """Apply the actions of the next commit, or of a checkpoint. Raises Corrupt for an unknown protocol version."""
        for action in actions:
            for kind, body in action.items():
                if body is not None and kind in _APPLY:
                    _APPLY[kind](self, body)

    def _add(self, body: Mapping[str, Any]) -> None:
        self.files[body["path"]] = DataFile.of(body)

    def _remove(self, body: Mapping[str, Any]) -> None:
        vector, removed_ms = _vector_of(body), body.get("deletionTimestamp") or 0
        known = self.files.get(body["path"])
        if known is not None and known.deleted == vector:  # if not equal, this commit has added the file again
            del self.files[body["path"]]
        self.removed[body["path"]] = removed_ms
        if vector is not None:
            self.removed[vector.path] = removed_ms

    def _set_offset(self, body: Mapping[str, Any]) -> None:
        key = PartitionKey.parse(body["appId"])
        if key is not None:
            self.offsets[key] = body["version"]

    def _set_metadata(self, body: Mapping[str, Any]) -> None:
        self.table_id = body["id"]
        self.created_ms = body.get("createdTime") or 0
        self.configuration = dict(body.get("configuration") or {})
        self.columns = typed_columns(body["schemaString"])

    def _check_protocol(self, body: Mapping[str, Any]) -> None:
        features = set(body.get("readerFeatures") or ())
        if body["minReaderVersion"] > READER_VERSION and features != {DELETION_VECTORS}:
            raise _corrupt("another program changed the table to a newer version of the Delta protocol")

    def _set_time(self, body: Mapping[str, Any]) -> None:
        self.committed_ms = body.get("timestamp") or 0

    def describe(self) -> list[Action]:
        """Return the actions that describe the table itself, for its first commit, a new topic and checkpoints."""
        return [
            {"protocol": _protocol(has_vectors=ENABLE_VECTORS in self.configuration)},
            {
                "metaData": {
                    "id": self.table_id,
                    "name": self.configuration.get(TOPIC, ""),
                    "format": {"provider": "parquet", "options": {}},
                    "schemaString": delta_schema(self.columns),
                    "partitionColumns": [],
                    "configuration": self.configuration,
                    "createdTime": self.created_ms,
                }
            },
        ]

    def actions(self) -> Iterator[Action]:
        """Yield the actions of a checkpoint of this version."""
        yield from self.describe()
        for key, offset in self.offsets.items():
            yield offset_action(key, offset)
        for file in self.files.values():
            yield file.add(data_change=False)
        used = self.used()
        for path, removed_ms in self.removed.items():
            if path not in used:
                yield remove_action(path, None, removed_ms, data_change=False)


_APPLY: Final[Mapping[str, Callable[[TableState, Mapping[str, Any]], None]]] = {
    "add": TableState._add,
    "remove": TableState._remove,
    "txn": TableState._set_offset,
    "metaData": TableState._set_metadata,
    "protocol": TableState._check_protocol,
    "commitInfo": TableState._set_time,
}


def _protocol(*, has_vectors: bool) -> dict[str, Any]:
    if not has_vectors:
        return {"minReaderVersion": READER_VERSION, "minWriterVersion": WRITER_VERSION}
    return {
        "minReaderVersion": FEATURES_READER_VERSION,
        "minWriterVersion": FEATURES_WRITER_VERSION,
        "readerFeatures": [DELETION_VECTORS],
        "writerFeatures": [DELETION_VECTORS, INVARIANTS],
    }


def now_ms() -> int:
    """Return the time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def remove_action(path: str, size: int | None, removed_ms: int, *, data_change: bool) -> Action:
    """Return the action that removes a file. Without ``data_change``, its rows stay in the table."""
    return {"remove": {"path": path, "deletionTimestamp": removed_ms, "dataChange": data_change, "size": size}}


def offset_action(key: PartitionKey, next_offset: int) -> Action:
    """Return the action that states the next offset of a partition."""
    return {"txn": {"appId": key.application, "version": next_offset}}


def commit_name(version: int) -> str:
    """Return the name of a commit."""
    return f"{LOG}{version:020}.json"


def checkpoint_name(version: int) -> str:
    """Return the name of a checkpoint."""
    return f"{LOG}{version:020}{CHECKPOINT}"


def create_once(objects: Objects, name: str, content: Buffer, pause: Callable[[float], object]) -> bool:
    """Create an object with content that no other writer has. Return False if another writer created it.

    Raises Unavailable if the storage failed, and the object may have been created or not.
    """
    for left in range(COMMIT_TRIES - 1, -1, -1):
        try:
            objects.create(name, [content])
        except BlobExists:
            # perhaps an earlier attempt succeeded, or the store is still deciding between two writers
            with suppress(BlobMissing):
                return objects.read(name).content == content
            if not left:
                return False
        except Unavailable:
            if not left:
                raise
        else:
            return True
        pause(COMMIT_PAUSE_S)
    raise AssertionError("the last attempt returns or raises")


def create_named(objects: Objects, name: str, content: Buffer, pause: Callable[[float], object]) -> None:
    """Create an object with a random name. Raises Unavailable if the storage fails."""
    if not create_once(objects, name, content, pause):
        raise Unavailable(
            ErrorCode.STORAGE_FAILED, f"object cannot be created, because it exists or is being created name={name!r}"
        )


def version_of(name: str) -> int:
    """Return the version in the name of a commit or checkpoint, or NEW."""
    digits = name.removeprefix(LOG)[:20]
    return int(digits) if len(digits) == 20 and digits.isdecimal() else NEW


class DeltaLog:
    """The Delta log of one table. All methods raise Unavailable if the storage fails.

    Args:
        objects: the files of the table.
        now_ms: returns the time in milliseconds since 1970.
        pause: waits for some seconds between attempts.
    """

    def __init__(
        self, objects: Objects, now_ms: Callable[[], int] = now_ms, *, pause: Callable[[float], object] = time.sleep
    ) -> None:
        self._objects: Final = objects
        self._now_ms: Final = now_ms
        self._pause: Final = pause

    def load(self) -> TableState:
        """Return the newest version, which is NEW if there is no table. Raises Corrupt."""
        state = TableState()
        if not self._load_checkpoint(state, self._last_checkpoint()):
            self._load_listed(state)
        while (actions := self._read_commit(state.version + 1)) is not None:
            state.apply(actions)
            state.version += 1
        return state

    def _load_listed(self, state: TableState) -> None:
        """Load the newest checkpoint that is listed. Raises Corrupt if neither it nor the first commit exists."""
        names = self._objects.list(LOG)
        checkpoints = sorted({version_of(name) for name in names if name.endswith(CHECKPOINT)}, reverse=True)
        if any(self._load_checkpoint(state, version) for version in checkpoints):
            return
        versions = [version_of(name) for name in names if version_of(name) != NEW]
        if versions and min(versions) > 0:  # do not begin a new table, which would repeat the rows
            raise _corrupt("the checkpoint before the oldest commit is missing", min(versions))

    def _last_checkpoint(self) -> int:
        try:
            return _pointed(self._objects.read(LAST_CHECKPOINT).content)
        except BlobMissing:
            return NEW

    def _load_checkpoint(self, state: TableState, version: int) -> bool:
        """Load a checkpoint. Return False if it does not exist. Raises Corrupt."""
        if version == NEW:
            return False
        try:
            content = self._objects.read(checkpoint_name(version)).content
        except BlobMissing:
            return False
        try:
            rows = pq.read_table(io.BytesIO(content)).to_pylist()
        except pa.ArrowInvalid as error:
            raise _corrupt(f"checkpoint cannot be read: {error}", version) from None
        state.apply([{kind: _plain(body) for kind, body in row.items() if body is not None} for row in rows])
        state.version = state.checkpoint = version
        return True

    def _read_commit(self, version: int) -> list[Action] | None:
        try:
            content = self._objects.read(commit_name(version)).content
        except BlobMissing:
            return None
        try:
            return [json.loads(line) for line in content.splitlines() if line]
        except ValueError as error:
            raise _corrupt(f"commit cannot be read: {error}", version) from None

    def commit(
        self,
        state: TableState,
        actions: Sequence[Action],
        *,
        operation: str,
        facts: Mapping[str, str] | None = None,
        is_append: bool = False,
    ) -> None:
        """Commit the next version, and apply it to ``state``.

        Args:
            state: the version that the actions change.
            actions: what to change.
            operation: name of the operation, in the table's history.
            facts: what else the history shows.
            is_append: whether the commit only adds rows.

        Raises:
            CommitConflict: another writer has committed this version.
            Unavailable: the storage failed, and the commit may have taken effect or not: load the state again.
        """
        version, now_ms = state.version + 1, self._now_ms()
        info: Action = {
            "commitInfo": {
                "timestamp": now_ms,
                "operation": operation,
                "operationParameters": dict(facts or {}),
                "isBlindAppend": is_append,
                "engineInfo": f"polywire/{VERSION}",
                "txnId": str(uuid4()),  # makes the content unique, so that a lost response can be resolved
            }
        }
        every = [info, *actions]
        lines = b"".join(json.dumps(action, separators=(",", ":")).encode() + b"\n" for action in every)
        if not create_once(self._objects, commit_name(version), lines, self._pause):
            raise CommitConflict(version)
        state.apply(every)
        state.version = version

    def checkpoint(self, state: TableState) -> None:
        """Write a checkpoint of this version, so that readers need not read the commits before it."""
        rows = [*state.actions()]
        table = pa.Table.from_pylist(rows, _CHECKPOINT_SCHEMA)
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd")
        name, content = checkpoint_name(state.version), sink.getvalue()
        try:
            self._objects.create(name, [content])
        except BlobExists:
            # also while an earlier request for this name is pending: then there may never be a checkpoint
            try:
                self._objects.size(name)
            except BlobMissing:
                return
        self._point_to(state.version, len(rows))
        state.checkpoint = state.version

    def _point_to(self, version: int, size: int) -> None:
        """Tell readers which checkpoint is the newest.

        A writer that was suspended never points to an older checkpoint, which may not exist any more.
        """
        content = json.dumps({"version": version, "size": size}).encode()
        with suppress(BlobExists, ObjectChanged):  # another writer has just set it
            try:
                found = self._objects.read(LAST_CHECKPOINT)
            except BlobMissing:
                self._objects.create(LAST_CHECKPOINT, [content])
                return
            if _pointed(found.content) < version:
                self._objects.replace(LAST_CHECKPOINT, content, found.tag)

    def expire(self, before_ms: int) -> int:
        """Delete commits and checkpoints that only versions before ``before_ms`` need, and return their number."""
        names, newest = self._objects.list(LOG), self._last_checkpoint()
        oldest = NEW
        for version in sorted(version_of(name) for name in names if name.endswith(CHECKPOINT)):
            if version >= newest or not self._is_before(version, before_ms):
                break
            oldest = version
        expired = [name for name in names if NEW < version_of(name) < oldest]
        for name in expired:
            self._objects.delete(name)
        return len(expired)

    def _is_before(self, version: int, before_ms: int) -> bool:
        times = [
            action["commitInfo"]["timestamp"] for action in self._read_commit(version) or () if "commitInfo" in action
        ]
        return bool(times) and times[0] < before_ms


def _pointed(content: bytes) -> int:
    """Return the version of the checkpoint that a pointer names; NEW if a crash left the pointer incomplete."""
    try:
        return int(json.loads(content)["version"])
    except (ValueError, KeyError, TypeError):
        return NEW


def _plain(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an action of a checkpoint to the form that it has in commits. Arrow stores maps as lists of pairs."""
    return {
        key: dict(value)
        if isinstance(value, list) and key in ("partitionValues", "configuration", "options", "tags")
        else value
        for key, value in body.items()
    }


def _corrupt(reason: str, version: int = NEW) -> Corrupt:
    where = "" if version == NEW else f" version={version}"
    return Corrupt(ErrorCode.CORRUPT, f"table is damaged: {reason}{where}")
