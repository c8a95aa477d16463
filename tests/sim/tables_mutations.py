"""Mechanisms of tables, with a switch that disables one in the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from polywire.store.file_objects import FileObjects
from polywire.tables import writer
from polywire.tables.delta_log import CommitConflict, DeltaLog, TableState, offset_action
from polywire.tables.iceberg import IcebergMetadata
from polywire.tables.writer import TopicTable
from tests.sim.files import SimulatedFile, SimulatedFiles
from tests.sim.mutation import Mutation, nothing, replaced, wrapped

TablesMutation: Final = partial(Mutation, world="tables")


def _files_unsynced(old: Callable[..., None], file: SimulatedFile, **named: bool) -> None:
    if ".parquet" not in file.name:
        old(file, **named)


def _commits_unsynced(old: Callable[..., None], file: SimulatedFile, **named: bool) -> None:
    if ".json" not in file.name:
        old(file, **named)


def _directories_unsynced(old: Callable[..., None], files: SimulatedFiles, path: Path) -> None:
    if path.name not in ("data", "_delta_log"):
        old(files, path)


def _overwritten(objects: FileObjects, name: str, parts: Iterable[bytes]) -> None:
    """Create an object whether or not it exists."""
    objects.put(name, b"".join(bytes(part) for part in parts))


def _early_offsets(key: Any, next_offset: int) -> Mapping[str, Any]:
    """State an offset that is one too low."""
    return offset_action(key, max(0, next_offset - 1))


def _forgotten_removals(old: Callable[..., None], state: TableState, body: Mapping[str, Any]) -> None:
    """Forget when files were removed, so that older versions lose them early or files stay."""
    old(state, body)
    state.removed.clear()


def _known_files(patch: pytest.MonkeyPatch) -> None:
    """Delete files of other writers that are not committed yet."""
    patch.setattr(TopicTable, "_is_garbage", lambda _table, _name, _before_ms: True)


def _ignored(old: Callable[..., None], log: DeltaLog, state: TableState, actions: Any, **named: Any) -> None:
    """Go on after another writer has committed the same version."""
    try:
        old(log, state, actions, **named)
    except CommitConflict:
        state.apply(actions)
        state.version += 1


TABLES_MUTATIONS: Final = (
    TablesMutation(
        "table-file-sync", "a data file is synced before its commit", wrapped(SimulatedFile, "sync", _files_unsynced)
    ),
    TablesMutation(
        "table-commit-sync", "a commit is synced before it counts", wrapped(SimulatedFile, "sync", _commits_unsynced)
    ),
    TablesMutation(
        "table-directory-sync",
        "the names of files and commits are synced",
        wrapped(SimulatedFiles, "sync_directory", _directories_unsynced),
    ),
    TablesMutation(
        "table-create",
        "a commit is created only if it is absent",
        replaced(FileObjects, "create", _overwritten),
        first=6,
    ),
    TablesMutation(
        "table-offsets", "a commit states the offsets of its rows", replaced(writer, "offset_action", _early_offsets)
    ),
    TablesMutation(
        "table-adopt", "a topic that was created again replaces the rows", replaced(TopicTable, "_adopt", nothing)
    ),
    TablesMutation("table-vacuum", "only files that no commit can add are garbage", _known_files),
    TablesMutation(
        "table-removed", "the time of a removal is stored", wrapped(TableState, "_remove", _forgotten_removals)
    ),
    TablesMutation(
        "table-merge",
        "rows that are deleted during a merge are deleted in its result",
        replaced(TopicTable, "_deleted_since", lambda _table, _plan: []),
    ),
    TablesMutation("table-latest", "older rows of a key are deleted", replaced(writer, "replaced", lambda *_: {})),
    TablesMutation(
        "table-used",
        "deletion vectors of the newest version are retained",
        replaced(TableState, "used", lambda state: set(state.files)),
    ),
    TablesMutation(
        "table-iceberg", "the Iceberg metadata follows the Delta log", replaced(IcebergMetadata, "project", nothing)
    ),
    TablesMutation(
        "table-checkpoint", "a checkpoint has the whole version", replaced(TableState, "actions", TableState.describe)
    ),
    TablesMutation("table-conflict", "a lost race is detected", wrapped(DeltaLog, "commit", _ignored)),
)
