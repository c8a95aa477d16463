"""Encode and decode the files of Iceberg metadata: position deletes, manifests, which list files, and lists of manifests.

The format follows the Iceberg specification, version 2, without partitions. A position delete file has the deleted rows
of one data file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from struct import Struct
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from polywire.extras import required
from polywire.tables.columns import FIELD_IDS, HEADERS, OFFSET, PARTITION, TIMESTAMP
from polywire.tables.delta_log import DataFile
from polywire.tables.parquet import Bounds, Measure

EXISTING: Final = 0
ADDED: Final = 1
DELETED: Final = 2
_CODEC: Final = "deflate"
_DATA: Final = 0  # content of a manifest and of a file: rows
_DELETES: Final = 1  # content of a manifest and of a file: position deletes
_BOUND: Final[Mapping[str, Struct]] = {
    "int": Struct("<i"),
    "long": Struct("<q"),
    "timestamptz": Struct("<q"),
    "date": Struct("<i"),
}
_MEASURED: Final = {PARTITION: "int", OFFSET: "long", TIMESTAMP: "timestamptz"}


def _field(field_id: int, name: str, kind: object) -> dict[str, object]:
    return {"name": name, "type": kind, "field-id": field_id}


def _optional(field_id: int, name: str, kind: object) -> dict[str, object]:
    return {"name": name, "type": ["null", kind], "default": None, "field-id": field_id}


def _by_column(field_id: int, name: str, key_id: int, value_id: int, kind: str) -> dict[str, object]:
    """Return a field with a value for each column. Avro's maps have text keys only, so Iceberg stores pairs."""
    pair = {
        "type": "record",
        "name": f"k{key_id}_v{value_id}",
        "fields": [_field(key_id, "key", "int"), _field(value_id, "value", kind)],
    }
    return _optional(field_id, name, {"type": "array", "logicalType": "map", "items": pair})


_FILE_SCHEMA: Final = {
    "type": "record",
    "name": "r2",
    "fields": [
        _field(134, "content", "int"),
        _field(100, "file_path", "string"),
        _field(101, "file_format", "string"),
        _field(102, "partition", {"type": "record", "name": "r102", "fields": []}),
        _field(103, "record_count", "long"),
        _field(104, "file_size_in_bytes", "long"),
        _by_column(109, "value_counts", 119, 120, "long"),
        _by_column(110, "null_value_counts", 121, 122, "long"),
        _by_column(125, "lower_bounds", 126, 127, "bytes"),
        _by_column(128, "upper_bounds", 129, 130, "bytes"),
        _optional(143, "referenced_data_file", "string"),
    ],
}
_ENTRY_SCHEMA: Final = {
    "type": "record",
    "name": "manifest_entry",
    "fields": [
        _field(0, "status", "int"),
        _optional(1, "snapshot_id", "long"),
        _optional(3, "sequence_number", "long"),
        _optional(4, "file_sequence_number", "long"),
        _field(2, "data_file", _FILE_SCHEMA),
    ],
}
_LIST_SCHEMA: Final = {
    "type": "record",
    "name": "manifest_file",
    "fields": [
        _field(500, "manifest_path", "string"),
        _field(501, "manifest_length", "long"),
        _field(502, "partition_spec_id", "int"),
        _field(517, "content", "int"),
        _field(515, "sequence_number", "long"),
        _field(516, "min_sequence_number", "long"),
        _field(503, "added_snapshot_id", "long"),
        _field(504, "added_files_count", "int"),
        _field(505, "existing_files_count", "int"),
        _field(506, "deleted_files_count", "int"),
        _field(512, "added_rows_count", "long"),
        _field(513, "existing_rows_count", "long"),
        _field(514, "deleted_rows_count", "long"),
    ],
}
_MANIFEST_FACTS: Final = {
    "partition-spec": "[]",
    "partition-spec-id": "0",
    "format-version": "2",
}
_PATH_ID: Final = 2147483546
_POSITION_ID: Final = 2147483545
_PATH_FIELD: Final[pa.Field[Any]] = pa.field("file_path", pa.string(), False, {"PARQUET:field_id": str(_PATH_ID)})
_POSITION_FIELD: Final[pa.Field[Any]] = pa.field("pos", pa.int64(), False, {"PARQUET:field_id": str(_POSITION_ID)})
_POSITIONS: Final[pa.Schema] = pa.schema([_PATH_FIELD, _POSITION_FIELD])


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a manifest.

    Attributes:
        snapshot_id: the snapshot that added the file.
        sequence: sequence number of that snapshot.
        target: path of the data file whose deleted rows the file has; empty if it is a data file itself.
    """

    file: DataFile
    snapshot_id: int
    sequence: int
    target: str = ""


@dataclass(slots=True, eq=False)
class Manifest:
    """A manifest, written by one snapshot.

    Attributes:
        name: relative to the table.
        size: in bytes.
        snapshot_id: the snapshot that wrote it.
        sequence: sequence number of that snapshot.
        first_sequence: smallest sequence number of its entries.
        counts: number of files by status.
        rows: number of their rows by status.
        entries: the files that the table has, by path.
        has_deletes: whether its files are position deletes. All of them are, or none.
    """

    name: str
    size: int
    snapshot_id: int
    sequence: int
    first_sequence: int
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])
    rows: list[int] = field(default_factory=lambda: [0, 0, 0])
    entries: dict[str, Entry] = field(default_factory=dict)
    has_deletes: bool = False


class Paths:
    """Converts paths relative to a table to the absolute locations in Iceberg metadata, and back.

    Args:
        location: of the table, as a URL that is not percent-encoded.
    """

    def __init__(self, location: str) -> None:
        self._root: Final = f"{location.rstrip('/')}/"

    @property
    def location(self) -> str:
        return self._root[:-1]

    def absolute(self, name: str) -> str:
        """Return the location of a file of the table."""
        return self._root + name

    def relative(self, location: str) -> str:
        """Return the path of a file. Raises ValueError if it is not below the table."""
        if not location.startswith(self._root):
            raise ValueError(f"file is not below the table location={location!r}")
        return location.removeprefix(self._root)


def encode_manifest(
    manifest: Manifest,
    paths: Paths,
    schema: Mapping[str, Any],
    *,
    added: Iterable[Entry],
    existing: Iterable[Entry],
    deleted: Iterable[Entry],
) -> bytes:
    """Return the content of a new manifest, and set what ``manifest`` says about it.

    Args:
        manifest: with its name, snapshot and sequence number.
        paths: converts paths of the table.
        schema: schema of the table.
        added: files that the snapshot adds.
        existing: files of rewritten manifests.
        deleted: files of rewritten manifests that the snapshot removes.
    """
    records: list[dict[str, object]] = []
    # no statistics for headers: Iceberg would count the elements of the lists, not the lists
    fields = {item["name"]: item for item in schema["fields"] if item["name"] != HEADERS}

    def append(status: int, entry: Entry) -> None:
        manifest.counts[status] += 1
        manifest.rows[status] += entry.file.row_count
        if status != DELETED:
            manifest.entries[entry.file.path] = entry
            manifest.first_sequence = min(manifest.first_sequence, entry.sequence)
        records.append(
            {
                "status": status,
                "snapshot_id": entry.snapshot_id if status != DELETED else manifest.snapshot_id,
                # for an added file, readers use the sequence number in the list of manifests
                "sequence_number": entry.sequence if status != ADDED else None,
                "file_sequence_number": entry.sequence if status != ADDED else None,
                "data_file": _file_record(entry, paths, fields),
            }
        )

    for entry in added:
        append(ADDED, entry)
    for entry in existing:
        append(EXISTING, entry)
    for entry in deleted:
        append(DELETED, entry)
    facts = {
        "schema": json.dumps(schema),
        "schema-id": str(schema["schema-id"]),
        "content": "deletes" if manifest.has_deletes else "data",
        **_MANIFEST_FACTS,
    }
    content = _encoded("manifest_entry", records, facts)
    manifest.size = len(content)
    return content


def encode_deletes(location: str, rows: Sequence[int]) -> bytes:
    """Return a file with the deleted rows of a data file, in ascending order, counted from 0."""
    sink = io.BytesIO()
    columns = [pa.repeat(location, len(rows)), pa.array(rows, pa.int64())]
    pq.write_table(pa.table(columns, schema=_POSITIONS), sink, compression="zstd")
    return sink.getvalue()


def _file_record(entry: Entry, paths: Paths, fields: Mapping[str, Any]) -> dict[str, object]:
    file = entry.file
    if entry.target:
        location = paths.absolute(entry.target)
        bound = [{"key": _PATH_ID, "value": location.encode()}]
        return {
            "content": _DELETES,
            "file_path": paths.absolute(file.path),
            "file_format": "PARQUET",
            "partition": {},
            "record_count": file.row_count,
            "file_size_in_bytes": file.size,
            "lower_bounds": bound,
            "upper_bounds": bound,
            "referenced_data_file": location,
        }
    bounds = {name: found for name, found in file.bounds.items() if name in fields}
    present = {fields[name]["id"]: count for name, count in file.nulls.items() if name in fields}
    counts = [{"key": field_id, "value": file.row_count} for field_id in present]
    nulls = [{"key": field_id, "value": count} for field_id, count in present.items()]
    return {
        "content": _DATA,
        "file_path": paths.absolute(file.path),
        "file_format": "PARQUET",
        "partition": {},
        "record_count": file.row_count,
        "file_size_in_bytes": file.size,
        "value_counts": counts,
        "null_value_counts": nulls,
        "lower_bounds": [_pair(fields[name], at.lower) for name, at in bounds.items()],
        "upper_bounds": [_pair(fields[name], at.upper) for name, at in bounds.items()],
    }


def _pair(field: Mapping[str, Any], value: int) -> dict[str, object]:
    return {"key": field["id"], "value": _BOUND[field["type"]].pack(value)}


def decode_manifest(manifest: Manifest, content: bytes, paths: Paths, files: Mapping[str, DataFile]) -> None:
    """Set the entries of a manifest.

    Args:
        manifest: the manifest, as the list of manifests describes it.
        content: bytes of the manifest.
        paths: converts paths of the table.
        files: known files by path. Entries refer to these objects, and not to copies.

    Raises ValueError if a file is not below the table.
    """
    for record in _decoded(content):
        if record["status"] == DELETED:
            continue
        found = record["data_file"]
        path = paths.relative(found["file_path"])
        is_deletes = found["content"] == _DELETES
        file = DataFile(path, found["file_size_in_bytes"], 0, found["record_count"]) if is_deletes else None
        sequence = record["sequence_number"]
        snapshot_id = record["snapshot_id"]
        manifest.entries[path] = Entry(
            file or files.get(path) or _file_of(path, found),
            manifest.snapshot_id if snapshot_id is None else snapshot_id,
            manifest.sequence if sequence is None else sequence,
            paths.relative(found["referenced_data_file"] or "") if is_deletes else "",
        )


def _file_of(path: str, record: Mapping[str, Any]) -> DataFile:
    lowers, uppers, nulls = (
        {pair["key"]: pair["value"] for pair in record[name] or ()}
        for name in ("lower_bounds", "upper_bounds", "null_value_counts")
    )
    bounds = {}
    for name, kind in _MEASURED.items():
        if FIELD_IDS[name] in lowers and FIELD_IDS[name] in uppers:
            lower, upper = (_BOUND[kind].unpack(side[FIELD_IDS[name]])[0] for side in (lowers, uppers))
            bounds[name] = Bounds(lower, upper, Measure.TIME if name == TIMESTAMP else Measure.NUMBER)
    known = {name: nulls[field_id] for name, field_id in FIELD_IDS.items() if field_id in nulls}
    return DataFile(path, record["file_size_in_bytes"], 0, record["record_count"], bounds, known)


def encode_list(
    manifests: Iterable[Manifest], paths: Paths, *, snapshot_id: int, parent_id: int | None, sequence: int
) -> bytes:
    """Return the content of a snapshot's list of manifests."""
    records: list[dict[str, object]] = [
        {
            "manifest_path": paths.absolute(manifest.name),
            "manifest_length": manifest.size,
            "partition_spec_id": 0,
            "content": _DELETES if manifest.has_deletes else _DATA,
            "sequence_number": manifest.sequence,
            "min_sequence_number": manifest.first_sequence,
            "added_snapshot_id": manifest.snapshot_id,
            "added_files_count": manifest.counts[ADDED],
            "existing_files_count": manifest.counts[EXISTING],
            "deleted_files_count": manifest.counts[DELETED],
            "added_rows_count": manifest.rows[ADDED],
            "existing_rows_count": manifest.rows[EXISTING],
            "deleted_rows_count": manifest.rows[DELETED],
        }
        for manifest in manifests
    ]
    facts = {
        "snapshot-id": str(snapshot_id),
        "parent-snapshot-id": "null" if parent_id is None else str(parent_id),
        "sequence-number": str(sequence),
        "format-version": "2",
    }
    return _encoded("manifest_file", records, facts)


def decode_list(content: bytes, paths: Paths) -> list[Manifest]:
    """Return the manifests of a list, without their entries. Raises ValueError if they cannot belong to this table."""
    manifests = []
    for record in _decoded(content):
        manifest = Manifest(
            paths.relative(record["manifest_path"]),
            record["manifest_length"],
            record["added_snapshot_id"],
            record["sequence_number"],
            record["min_sequence_number"],
        )
        manifest.counts = [record[f"{status}_files_count"] for status in ("existing", "added", "deleted")]
        manifest.rows = [record[f"{status}_rows_count"] for status in ("existing", "added", "deleted")]
        manifest.has_deletes = record["content"] == _DELETES
        manifests.append(manifest)
    return manifests


def _fastavro() -> Any:
    return required("fastavro", "Iceberg metadata needs fastavro", "tables")


@cache
def _schema(name: str) -> Any:
    schemas = {"manifest_entry": _ENTRY_SCHEMA, "manifest_file": _LIST_SCHEMA}
    return _fastavro().parse_schema(schemas[name])


def _encoded(schema: str, records: list[dict[str, object]], facts: Mapping[str, str]) -> bytes:
    sink = io.BytesIO()
    _fastavro().writer(sink, _schema(schema), records, codec=_CODEC, metadata=facts, sync_marker=uuid4().bytes)
    return sink.getvalue()


def _decoded(content: bytes) -> Iterator[Any]:
    return iter(_fastavro().reader(io.BytesIO(content)))
