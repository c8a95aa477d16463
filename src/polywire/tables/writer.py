"""Write one topic as a table: append its records, merge small files, and delete files that no version needs.

* Only records that are synced to disk are written, so the table never has a record that the log can lose.
* Every commit moves the offsets together with the rows. After a crash, the next writer continues at these offsets.
* The name of a file contains the version that adds it. If that version exists and does not have the file, no later
  commit can add it, so it is garbage. This makes garbage collection safe while another writer runs.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from polywire.client.arrow import ROWS_MAX, chunk_to_arrow
from polywire.client.bulk import PartitionRange, StoredChunk
from polywire.errors import Corrupt, ErrorCode
from polywire.store.objects import Objects
from polywire.table_columns import ERROR_COLUMN, ColumnPlan, TypedColumn, plan_columns
from polywire.tables import deletion_vectors
from polywire.tables.columns import ARROW_SCHEMA, KEY, OFFSET, READ_NAMES, arrow_schema, conformed
from polywire.tables.deletion_vectors import DeletionVector
from polywire.tables.delta_log import (
    CHECKPOINT_COMMITS,
    ENABLE_VECTORS,
    LAST_COLUMN_ID,
    LATEST,
    NEW,
    TOPIC,
    TOPIC_ID,
    Action,
    DataFile,
    DeltaLog,
    PartitionKey,
    TableState,
    create_named,
    now_ms,
    offset_action,
)
from polywire.tables.iceberg import IcebergMetadata, remove_metadata
from polywire.tables.latest import by_partition, has_row, newest, outdated, replaced
from polywire.tables.parquet import ParquetWriter, Written
from polywire.tables.typed import ColumnMaker, TypedRows

if TYPE_CHECKING:
    from pyroaring import BitMap

DATA: Final = "data/"
FILE_BYTES_MAX: Final = 64 << 20  # bytes of compressed rows; a file of this size is not merged any more
RAW_BYTES_MAX: Final = 512 << 20  # bytes of uncompressed rows in one file
HELD_BYTES_MAX: Final = 128 << 20  # bytes of rows in memory until it is known which are the latest of their keys
MERGE_COUNT: Final = 16  # number of files of one size class that are merged; each row is rewritten about three times
MERGE_CLASS: Final = 8  # ratio between size classes
SMALLEST_CLASS_BYTES: Final = 1 << 20
LASTING: Final = (LAST_COLUMN_ID, ENABLE_VECTORS)  # settings that remain when a table is replaced
LIVE_MIN: Final = 0.5  # share of a file's rows that are not deleted; below it, the file is rewritten
TYPED_BATCH_ROWS: Final = 10_000  # few enough that the decoded values of a batch stay in the processor's cache
_SOURCE_COLUMNS: Final = tuple(READ_NAMES.get(name, name) for name in ARROW_SCHEMA.names)


class Source(Protocol):
    """The methods of ``BulkConnection`` that the writer uses."""

    def bounds(self, topics: Sequence[str]) -> list[PartitionRange]: ...

    def fetch_range(
        self, topic: str, partition: int, incarnation: int, offset: int, offset_end: int, *, epoch: int
    ) -> Iterator[StoredChunk]: ...


@dataclass(slots=True)
class Progress:
    """The result of one step.

    Attributes:
        rows: rows committed.
        behind: records of the log that the table does not have yet.
        skipped: records that retention removed before they were written.
        rejected: rows with values that do not fit their columns.
        rejected_sample: the error of the last of them.
    """

    rows: int = 0
    behind: int = 0
    skipped: int = 0
    rejected: int = 0
    rejected_sample: str = ""


class _Rows:
    """The rows of a commit, with the offsets that it states.

    They are in one file. Another file begins whenever new columns are found after rows were written.

    Args:
        typed: makes typed columns; None if there are none.
        is_latest: whether later rows of the commit replace earlier ones, so that all are in memory until
            ``take_latest``.
    """

    def __init__(self, typed: TypedRows | None, *, is_latest: bool) -> None:
        self.offsets: Final[dict[PartitionKey, int]] = {}
        self._typed: Final = typed
        self._files: Final[list[Written]] = []
        self._writer = ParquetWriter() if typed is None else ParquetWriter(typed.schema)
        self._held: list[pa.RecordBatch] | None = [] if is_latest else None
        self._held_bytes = 0

    @property
    def is_full(self) -> bool:
        if self._held is not None:
            return self._held_bytes >= HELD_BYTES_MAX
        return self._writer.file_bytes >= FILE_BYTES_MAX or self._writer.byte_count >= RAW_BYTES_MAX

    def add(self, batches: Sequence[pa.RecordBatch]) -> None:
        if self._held is not None:
            self._held += batches
            self._held_bytes += sum(batch.nbytes for batch in batches)
            return
        if self._typed is None:
            self._writer.add(batches)
            return
        for batch in batches:
            if self._writer.is_fixed:
                self._typed.freeze()
            made = self._typed.typed(batch)
            if self._typed.schema is not self._writer.schema:
                self._change(self._typed.schema)
            self._writer.add([made])

    def _change(self, schema: pa.Schema) -> None:
        if not self._writer.is_fixed:
            self._writer.widen(schema)
            return
        self._files.append(self._writer.finish())
        self._writer = ParquetWriter(schema)

    def take_latest(self) -> pa.Table:
        """Write the latest row of each key, and return ``newest`` of all rows."""
        held, self._held = self._held or (), None
        found = newest(held)
        offsets = by_partition(found, OFFSET)
        self.add([batch.filter(has_row(batch, offsets)) for batch in held])
        return found

    def finish(self) -> list[Written]:
        """Return the files that have rows. Nothing may be added afterwards."""
        if self._typed is not None:
            self._typed.freeze()
        return [file for file in (*self._files, self._writer.finish()) if file.row_count]


@dataclass(frozen=True, slots=True)
class MergePlan:
    """Files to merge, and to add columns to.

    Attributes:
        columns: typed columns of the result.
        made: typed columns that are made from values.
        lacking: paths of the files to which these columns must be added.
    """

    objects: Objects
    files: Sequence[DataFile]
    columns: tuple[TypedColumn, ...] = ()
    made: tuple[TypedColumn, ...] = ()
    lacking: frozenset[str] = frozenset()


def merged(plan: MergePlan) -> Written:
    """Return the rows of all files as one. Call it in any thread. Raises BlobMissing, Unavailable."""
    writer = ParquetWriter(arrow_schema(plan.columns))
    maker = ColumnMaker(plan.made, writer.schema.names)
    for file in plan.files:
        source = pq.ParquetFile(io.BytesIO(plan.objects.read(file.path).content))
        deleted = None if file.deleted is None else deletion_vectors.read(plan.objects, file.deleted)
        first = 0
        for batch in source.iter_batches():
            rest = deletion_vectors.remaining(batch, first, deleted)
            first += batch.num_rows
            made = maker.added(rest) if file.path in plan.lacking else rest
            writer.add([conformed(made, writer.schema)])
    return writer.finish()


class TopicTable:
    """The table of one topic.

    Args:
        topic: full name.
        objects: the files of the table.
        source: the broker.
        now_ms: returns the time in milliseconds since 1970.
        pause: waits for some seconds between attempts.
        iceberg: the Iceberg metadata of the table. Without it, ``vacuum`` removes such metadata.
        columns: typed columns, in the form of the setting ``table_columns``.
        is_latest: whether to write only the latest record of each key.
    """

    def __init__(
        self,
        topic: str,
        objects: Objects,
        source: Source,
        *,
        now_ms: Callable[[], int] = now_ms,
        pause: Callable[[float], object] = time.sleep,
        iceberg: IcebergMetadata | None = None,
        columns: str = "",
        is_latest: bool = False,
    ) -> None:
        self._topic: Final = topic
        self._objects: Final = objects
        self._source: Final = source
        self._now_ms: Final = now_ms
        self._pause: Final = pause
        self._iceberg: Final = iceberg
        self._is_latest: Final = is_latest
        self._log: Final = DeltaLog(objects, now_ms, pause=pause)
        self._state: TableState | None = None
        self._setting: Final = columns
        self._typed: TypedRows | None = None

    @property
    def typed(self) -> TypedRows | None:
        """The typed columns; None before the first step, and if there are none."""
        return self._typed

    @property
    def state(self) -> TableState:
        """The newest version that this writer knows. Raises Unavailable, Corrupt."""
        if self._state is None:
            self._state = self._log.load()
        return self._state

    @property
    def known(self) -> TableState | None:
        """The version that was loaded or committed last; None before the first."""
        return self._state

    # Rows

    def append(self) -> Progress:
        """Write records that the table does not have, up to one full file, and commit them.

        Raises Missing(TOPIC_MISSING), Unavailable, CommitConflict and the other errors of reading. After an error, the
        state is outdated: create another object.
        """
        partitions = self._source.bounds([self._topic])
        if not partitions:
            return Progress()
        self._adopt(partitions[0].topic_id)
        self._convert()
        if self._typed is None and self._setting:
            self._typed = TypedRows(self._plan())
        rows, progress = _Rows(self._typed, is_latest=self._is_latest), Progress()
        for partition in partitions:
            self._read(partition, rows, progress)
        if rows.offsets or self._has_new_columns():
            progress.rows = self._commit(rows)
        if self._typed is not None:
            progress.rejected, progress.rejected_sample = self._typed.take_rejected()
        self._project()
        return progress

    def _plan(self) -> ColumnPlan:
        state = self.state
        return plan_columns(state.columns, self._setting, int(state.configuration.get(LAST_COLUMN_ID, 0)))

    def _has_new_columns(self) -> bool:
        return self._typed is not None and self._typed.plan.columns != self.state.columns

    def _adopt(self, topic_id: bytes) -> None:
        """Make this the table of the topic: create it, or remove the rows of a deleted topic with the same name."""
        state = self.state
        if state.topic_id == topic_id:
            return
        now_ms = self._now_ms()
        made = TableState(
            table_id=state.table_id or str(uuid4()),
            created_ms=state.created_ms or now_ms,
            configuration={
                TOPIC: self._topic,
                TOPIC_ID: topic_id.hex(),
                # column ids must not be reused, and the protocol version must not decrease
                **{name: state.configuration[name] for name in LASTING if name in state.configuration},
            },
        )
        self._typed = None
        removed = [file.remove(now_ms, data_change=True) for file in state.files.values()]
        operation = "CREATE TABLE" if state.version == NEW else "REPLACE TABLE"
        self._log.commit(state, [*made.describe(), *removed], operation=operation, facts={"topic": self._topic})
        for key in [key for key in state.offsets if key.topic_id != topic_id]:
            del state.offsets[key]

    def _convert(self) -> None:
        """Start or stop having only the latest record of each key, as the setting requires."""
        state = self.state
        if state.is_latest == self._is_latest:
            return
        configuration = {name: text for name, text in state.configuration.items() if name != LATEST}
        deletions: list[Action] = []
        if self._is_latest:
            configuration |= {LATEST: "true", ENABLE_VECTORS: "true"}
            deletions = self._delete(outdated(self._objects, list(state.files.values())))
        changed = replace(state, configuration=configuration)
        self._log.commit(state, [*changed.describe(), *deletions], operation="CONVERT", facts={"topic": self._topic})

    def _read(self, partition: PartitionRange, rows: _Rows, progress: Progress) -> None:
        key = PartitionKey(partition.topic_id, partition.partition, partition.incarnation)
        known = self.state.offsets.get(key, 0)
        if known > partition.next_offset:
            raise Corrupt(
                ErrorCode.CORRUPT,
                "table has records that the log does not have (was the log restored from a backup? delete the directory of"
                f" the table, and it is written again) partition={partition.partition} table_offset={known}"
                f" log_offset={partition.next_offset}",
            )
        start = max(known, partition.first_offset)
        if start >= partition.next_offset:
            return
        if rows.is_full:
            progress.behind += partition.next_offset - start
            return
        progress.skipped += start - known
        rows_max = ROWS_MAX if self._typed is None else TYPED_BATCH_ROWS
        at = start
        chunks = self._source.fetch_range(
            self._topic,
            partition.partition,
            partition.incarnation,
            start,
            partition.next_offset,
            epoch=partition.epoch,
        )
        for chunk in chunks:
            rows.add(chunk_to_arrow(chunk, _SOURCE_COLUMNS, ARROW_SCHEMA, rows_max=rows_max))
            at = chunk.offset_end
            if rows.is_full:
                break
        else:
            at = partition.next_offset  # the last records may have been removed by compaction
        rows.offsets[key] = at
        progress.behind += partition.next_offset - at

    def _commit(self, rows: _Rows) -> int:
        """Commit rows, and the columns that they need. Return the number of rows."""
        state, deletions = self.state, list[Action]()
        if self._is_latest:
            keys = by_partition(rows.take_latest(), KEY)
            deletions = self._delete(replaced(self._objects, state.files.values(), keys))
        files = rows.finish()
        actions: list[Action] = [offset_action(key, offset) for key, offset in rows.offsets.items()]
        if self._typed is not None and self._has_new_columns():
            plan = self._typed.plan
            configuration = {**state.configuration, LAST_COLUMN_ID: str(plan.last_id)}
            actions += replace(state, columns=plan.columns, configuration=configuration).describe()[1:]
        has_all_fields = self._typed is not None and self._typed.plan.is_inferred
        actions += [self._put(file, has_all_fields=has_all_fields).add(data_change=True) for file in files]
        self._log.commit(state, [*actions, *deletions], operation="STREAMING UPDATE", is_append=not deletions)
        self._checkpoint()
        return sum(file.row_count for file in files)

    def _delete(self, rows: Mapping[str, BitMap]) -> list[Action]:
        """Return actions after which files do not have these rows. A file without any other row is removed."""
        now_ms, files = self._now_ms(), self.state.files
        actions = [files[path].remove(now_ms, data_change=True) for path in rows]
        partly = {path: deleted for path, deleted in rows.items() if len(deleted) < files[path].row_count}
        if partly:
            vectors = self._put_vectors(partly)
            actions += [replace(files[path], deleted=vectors[path]).add(data_change=True) for path in partly]
        return actions

    def _put_vectors(self, deleted: Mapping[str, BitMap]) -> dict[str, DeletionVector]:
        """Store the deleted rows of data files for the next version."""
        content, vectors = deletion_vectors.encode(DATA.rstrip("/"), self.state.version + 1, deleted)
        create_named(self._objects, next(iter(vectors.values())).path, content, self._pause)
        return vectors

    def _put(self, written: Written, *, has_all_fields: bool) -> DataFile:
        """Store a file for the next version."""
        name = f"{DATA}{self.state.version + 1:020}-{uuid4().hex}.parquet"
        create_named(self._objects, name, written.content, self._pause)
        size = len(written.content)
        return DataFile(name, size, self._now_ms(), written.row_count, written.bounds, written.nulls, has_all_fields)

    def _checkpoint(self) -> None:
        state = self.state
        if state.version >= max(state.checkpoint, 0) + CHECKPOINT_COMMITS:
            self._log.checkpoint(state)

    def _project(self) -> None:
        """Add the table's newest version to the Iceberg metadata, even if earlier versions were not added."""
        if self._iceberg is not None:
            self._iceberg.project(self.state)

    # Maintenance

    def plan_merge(self) -> MergePlan | None:
        """Return small files to merge, or files that lack columns, or None. Raises Unavailable, Corrupt."""
        state, active = self.state, self._plan().active
        made = (ERROR_COLUMN, *active) if active else ()
        inactive = {column.name for column in state.columns} - {column.name for column in made}
        # a column that is not derived any more must not be added to a file that lacks it
        groups: dict[frozenset[str], list[DataFile]] = {}
        for file in state.files.values():
            groups.setdefault(frozenset(inactive & file.nulls.keys()), []).append(file)
        lacking = {
            path
            for path, file in state.files.items()
            if not file.has_all_fields and any(column.name not in file.nulls for column in made)
        }
        chosen = [_mergeable(files) for files in groups.values()]
        chosen += [_limited(file for file in files if file.path in lacking) for files in groups.values()]
        group = next((files for files in chosen if files), None)
        if group is None:
            return None
        present = {name for file in group for name in file.nulls} | {column.name for column in made}
        columns = tuple([column for column in state.columns if column.name in present])
        paths = lacking.intersection([file.path for file in group])
        return MergePlan(self._objects, tuple(group), columns, active, frozenset(paths))

    def replace(self, plan: MergePlan, content: Written) -> bool:
        """Commit a merged file in place of its sources. Return False if these are not in the table any more.

        Raises Unavailable, CommitConflict. After an error, the state is outdated: create another object.
        """
        files = self.state.files
        if any(file.path not in files for file in plan.files):
            return False
        now_ms = self._now_ms()
        actions = [files[file.path].remove(now_ms, data_change=False) for file in plan.files]
        deleted = self._deleted_since(plan)
        if content.row_count > len(deleted):
            made = self._put(content, has_all_fields=all(file.has_all_fields for file in plan.files))
            if deleted:
                vectors = self._put_vectors({made.path: deletion_vectors.bitmap(deleted)})
                made = replace(made, deleted=vectors[made.path])
            actions.append(made.add(data_change=False))
        self._log.commit(self.state, actions, operation="OPTIMIZE", facts={"files": str(len(plan.files))})
        self._checkpoint()
        self._project()
        return True

    def _deleted_since(self, plan: MergePlan) -> list[int]:
        """Return the rows of a merged file that were deleted while it was made."""
        found, first = [], 0
        for file in plan.files:
            now = self.state.files[file.path].deleted
            if now != file.deleted:
                before = deletion_vectors.read(self._objects, file.deleted)
                later = deletion_vectors.read(self._objects, now) - before
                found += [first + row - before.rank(row) for row in later]
            first += file.live_count
        return found

    def vacuum(self, history_ms: int) -> int:
        """Delete files and commits that no version of the last ``history_ms`` needs, and return their number.

        Raises Unavailable, CommitConflict. Deleting may stop in the middle, and is repeated by the next call.
        """
        state, before_ms = self.state, self._now_ms() - history_ms
        if self._iceberg is None:
            count = remove_metadata(self._objects)
        else:
            count = self._iceberg.expire(state, before_ms)  # before the data files, because snapshots refer to them
        used = state.used()
        for name in self._objects.list(DATA):
            if name not in used and self._is_garbage(name, before_ms):
                self._objects.delete(name)
                state.removed.pop(name, None)
                count += 1
        # files that the listing did not contain
        for path in [path for path, removed_ms in state.removed.items() if removed_ms < before_ms]:
            if path not in used:
                self._objects.delete(path)
            del state.removed[path]
        return count + self._log.expire(before_ms)

    def _is_garbage(self, name: str, before_ms: int) -> bool:
        state = self.state
        removed_ms = state.removed.get(name)
        if removed_ms is not None:
            return removed_ms < before_ms
        version = _version_of(name)
        return version is not None and version <= state.version


def _version_of(name: str) -> int | None:
    """Return the version that adds a file; None for files of other programs."""
    version = name.removeprefix(DATA)[:20]
    return int(version) if version.isdecimal() else deletion_vectors.version_of(name)


def _mergeable(files: Iterable[DataFile]) -> list[DataFile]:
    """Return the oldest files of one size class if there are enough of them, or a file with few rows, or nothing."""
    classes: dict[int, list[DataFile]] = {}
    for file in files:
        if file.live_count < file.row_count * LIVE_MIN:
            return [file]
        if file.live_size < FILE_BYTES_MAX:
            classes.setdefault(_size_class(file.live_size), []).append(file)
    full = [level for level in sorted(classes) if len(classes[level]) >= MERGE_COUNT]
    return _limited(classes[full[0]]) if full else []


def _limited(files: Iterable[DataFile]) -> list[DataFile]:
    """Return the first files, in the order of their commits, that together are a large file."""
    group: list[DataFile] = []
    size = 0
    for file in files:
        if size >= FILE_BYTES_MAX:
            break
        group.append(file)
        size += file.live_size
    return group


def _size_class(size: int) -> int:
    level, limit = 0, SMALLEST_CLASS_BYTES
    while size >= limit:
        level, limit = level + 1, limit * MERGE_CLASS
    return level
