"""The simulation of a table: two writers, which may be killed at any call, and a disk that may lose its power.

* The table has exactly the records of its topic below its offsets, or the latest of each key.
* What a commit has returned survives a power loss.
* After maintenance, there are no other files than those of the newest version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar, Final
from unittest.mock import patch
from uuid import UUID

from polywire.client.bulk import PartitionRange, StoredChunk
from polywire.errors import BrokerError
from polywire.store.base import BlobMissing
from polywire.store.file_objects import FileObjects
from polywire.table_orders import ICEBERG_HINT, iceberg_metadata_name
from polywire.tables import deletion_vectors, delta_log, iceberg, manifests, writer
from polywire.tables.delta_log import NEW, CommitConflict, DeltaLog, TableState
from polywire.tables.iceberg import DELTA_VERSION, IcebergMetadata
from polywire.tables.manifests import Paths, decode_list, decode_manifest
from polywire.tables.parquet import Written
from polywire.tables.writer import DATA, MergePlan, TopicTable, merged
from tests.sim.disk import SimulatedDisk
from tests.sim.files import ERRORS, SimulatedFiles
from tests.sim.promises import require
from tests.sim.world import MOOD_STEPS, World
from tests.unit.tables.rig import START_MS, TOPIC, FakeTopic, rows_of

ROOT: Final = Path("/polywire-simulated/tables")
URL: Final = f"file://{ROOT}"
CAPACITY_BYTES: Final = 64 << 20
ACTS: Final = {
    "produce": 4.0,
    "append": 4.0,
    "plan": 1.0,
    "replace": 1.0,
    "vacuum": 0.5,
    "recreate": 0.1,
    "forget": 0.2,
}
SMALL: Final = {(writer, "MERGE_COUNT"): 3, (writer, "CHECKPOINT_COMMITS"): 4, (writer, "HELD_BYTES_MAX"): 2000}
"""Settings that are small so that merges and checkpoints happen often."""
BUSY: Final = 0.25  # share of the steps in which a writer does something, because each takes milliseconds
KEYS: Final = 6
HISTORY_MS: Final = 40
TRIES: Final = 20
FAILURES: Final = (BrokerError, BlobMissing, CommitConflict)


class Writer:
    """A process that writes the table.

    Attributes:
        table: None after an error, because what it knows is then outdated.
        merge: files that are merged, and the result.
    """

    def __init__(self, files: SimulatedFiles) -> None:
        self.files: Final = files
        self.objects: Final = FileObjects(ROOT, files)
        self.table: TopicTable | None = None
        self.merge: tuple[MergePlan, Written] | None = None


class TablesWorld(World):
    """Guards: ``_topics`` has every topic that ever had the name; the table is of one of them."""

    NAME = "tables"
    ACTS = tuple(ACTS)
    TROUBLES: ClassVar = {"fault": 0.1, "full": 0.1, "kill": 0.35, "rival": 0.3, "short": 0, "haste": 0}

    _topic: FakeTopic

    def _small(self) -> AbstractContextManager[None]:
        return self._changed()

    @contextmanager
    def _changed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for (module, name), value in SMALL.items():
                stack.enter_context(patch.object(module, name, value))
            for module in (writer, delta_log, iceberg, manifests):
                stack.enter_context(patch.object(module, "uuid4", lambda: UUID(bytes=self._chance.token(16))))
            stack.enter_context(patch.object(deletion_vectors, "token_bytes", self._chance.token))
            yield

    def _description(self) -> str:
        return f"seed={self.seed} latest={self._is_latest} iceberg={self._is_iceberg}"

    @property
    def _is_latest(self) -> bool:
        return self.rest % 2 == 1

    @property
    def _is_iceberg(self) -> bool:
        return self.rest % 4 >= 2

    # Steps

    def _start(self) -> None:
        self._disk = SimulatedDisk(CAPACITY_BYTES, reads_past=self._chance.happens(0.7))
        self._topics: dict[bytes, FakeTopic] = {}
        self._acknowledged = NEW
        self._ms = START_MS
        self._rival_acts = 0.0
        self._recreate()
        self._writers = [self._made(), self._made()]
        self._weights = list(ACTS.values())

    def _made(self) -> Writer:
        return Writer(SimulatedFiles(self._disk, self._chance, self.story))

    def _now_ms(self) -> int:
        self._ms += 1
        return self._ms

    def _step(self) -> None:
        chance = self._chance
        if chance.happens(1 / MOOD_STEPS):
            self._change_mood()
        if not chance.happens(BUSY):
            self._clock.advance(chance.below(1000) / 1000)
            return
        number = int(chance.happens(self._rival_acts))
        act = chance.weighted(list(ACTS), self._weights)
        if act in self._without:
            return
        self.story.actor = f"writer {number}"
        if number:
            self.story.tell("rival", act)
        self._act(self._writers[number], act)

    def _act(self, one: Writer, act: str) -> None:
        acts: dict[str, Callable[[], None]] = {
            "produce": self._produce,
            "recreate": self._recreate,
            "append": partial(self._append, one),
            "plan": partial(self._plan, one),
            "replace": partial(self._replace, one),
            "vacuum": partial(self._vacuum, one),
            "forget": partial(setattr, one, "table", None),
        }
        try:
            acts[act]()
        except FAILURES as error:
            self.story.tell("refused", f"{act} {type(error).__name__}")
            one.table = one.merge = None

    def _change_mood(self) -> None:
        chance = self._chance
        self._weights = [weight * chance.share() for weight in ACTS.values()]
        self._rival_acts = 0.0
        self._disk.capacity_bytes = CAPACITY_BYTES
        files = chance.one_of(self._writers).files
        for one in self._writers:
            one.files.faults.rates = {}
            one.files.short = chance.one_of((0.0, 0.0, 0.2)) * ("short" not in self._without)
            one.files.haste = chance.one_of((0.0, 0.05)) * ("haste" not in self._without)
        self.story.actor = "world"
        trouble = next((name for name, share in self.TROUBLES.items() if share and chance.happens(share)), "")
        if not trouble or trouble in self._without:
            return
        if trouble == "fault":
            kind = chance.one_of((*ERRORS, "sync"))
            files.faults.rates[kind] = chance.one_of((0.05, 0.5))
            self.story.tell("mood", f"{kind} fails")
        elif trouble == "full":
            self._disk.capacity_bytes = self._disk.used_bytes + chance.below(20_000)
            self.story.tell("mood", "little space")
        elif trouble == "kill":
            files.faults.calls_left = 1 + chance.below(80)
        else:
            self._rival_acts = 0.5

    # What clients and writers do

    def _produce(self) -> None:
        chance, topic = self._chance, self._topic
        for _ in range(1 + chance.below(5)):
            key = chance.one_of((None, *(b"%d" % number for number in range(KEYS))))
            value = None if chance.happens(0.2) else b"%d" % chance.below(1000)
            topic.produce(chance.below(2), *[value] * (1 + chance.below(3)), key=key)
        self.story.tell("produce", str([len(values) for values in topic.values]))

    def _recreate(self) -> None:
        """Delete the topic and create it again."""
        self._topic = FakeTopic(topic_id=self._chance.token(16), is_latest=self._is_latest)
        self._topics[self._topic.topic_id] = self._topic
        self.story.tell("recreate")

    def _table(self, one: Writer) -> TopicTable:
        if one.table is None:
            metadata = (
                IcebergMetadata(one.objects, URL, now_ms=self._now_ms, pause=_pause) if self._is_iceberg else None
            )
            one.table = TopicTable(
                TOPIC,
                one.objects,
                _Current(lambda: self._topic),
                now_ms=self._now_ms,
                pause=_pause,
                iceberg=metadata,
                is_latest=self._is_latest,
            )
        return one.table

    def _append(self, one: Writer) -> None:
        table = self._table(one)
        progress = table.append()
        self._acknowledged = max(self._acknowledged, table.state.version)
        self.story.tell("append", f"version={table.state.version} rows={progress.rows} behind={progress.behind}")

    def _plan(self, one: Writer) -> None:
        plan = self._table(one).plan_merge()
        if plan is not None:
            one.merge = plan, merged(plan)
            self.story.tell("merge", f"files={len(plan.files)}")

    def _replace(self, one: Writer) -> None:
        if one.merge is None:
            return
        table, (plan, content), one.merge = self._table(one), one.merge, None
        if table.replace(plan, content):
            self._acknowledged = max(self._acknowledged, table.state.version)
            self.story.tell("merged", f"version={table.state.version}")

    def _vacuum(self, one: Writer) -> None:
        count = self._table(one).vacuum(self._chance.one_of((0, HISTORY_MS)))
        self.story.tell("vacuum", str(count))

    # Kills

    def _restart(self) -> None:
        """Replace writers that were killed; a power loss ends all of them."""
        self.story.actor = "world"
        is_powerless = self._chance.happens(0.4)
        if is_powerless:
            self._lose_power()
        for number, one in enumerate(self._writers):
            if one.files.faults.dead or is_powerless:
                self._writers[number] = self._made()
        self._check()

    def _lose_power(self) -> None:
        self._disk.close_all()
        sectors, changes = self._disk.lose_power(self._chance, self._chance.one_of((0.0, 0.2, 0.5, 1.0)))
        self.story.tell("power loss", f"sectors={sectors} names={changes}")

    # Checks

    def _check(self) -> TableState:
        """Check the newest version of the table with a reader that has no faults."""
        capacity, self._disk.capacity_bytes = self._disk.capacity_bytes, CAPACITY_BYTES
        objects = self._made().objects
        state = DeltaLog(objects, self._now_ms).load()
        require(state.version >= self._acknowledged, "a commit survives", version=state.version, of=self._acknowledged)
        if state.topic_id:
            topic = self._topics[state.topic_id]
            found, expected = rows_of(objects, state), topic.rows(state)
            require(
                found == expected,
                "the table has the rows of the log",
                missing=_less(expected, found),
                extra=_less(found, expected),
            )
        self._disk.capacity_bytes = capacity
        self.story.tell("checked", f"version={state.version} rows={state.row_count}")
        return state

    def _end(self) -> None:
        self.story.actor = "world"
        self._disk.capacity_bytes = CAPACITY_BYTES
        one = self._made()
        self._writers = [one]
        for _ in range(TRIES):
            if not self._table(one).append().behind:
                break
        self._lose_power()
        state = self._check()
        ends = [state.offsets.get(self._topic.key(number), 0) for number in range(2)]
        require(ends == [len(values) for values in self._topic.values], "the table has all records", offsets=ends)
        one = self._made()
        self._table(one).append()
        for _ in range(2):
            self._table(one).vacuum(0)
        state = self._check()
        files = one.objects.list(DATA)
        require(files == sorted(state.used()), "there are no other files", files=_less(files, sorted(state.used())))
        if self._is_iceberg:
            self._check_iceberg(one.objects, state)
        self.story.tell("end", f"version={state.version}")

    def _check_iceberg(self, objects: FileObjects, state: TableState) -> None:
        version = int(objects.read(ICEBERG_HINT).content)
        metadata = json.loads(objects.read(iceberg_metadata_name(version)).content)
        snapshot, paths, found, deleted = metadata["snapshots"][-1], Paths(URL), {}, {}
        for manifest in decode_list(objects.read(paths.relative(snapshot["manifest-list"])).content, paths):
            decode_manifest(manifest, objects.read(manifest.name).content, paths, {})
            for path, entry in manifest.entries.items():
                if entry.target:
                    objects.size(path)
                    deleted[entry.target] = entry.file.row_count
                else:
                    found[path] = entry.file.row_count
        require(int(snapshot["summary"][DELTA_VERSION]) == state.version, "the metadata follows the Delta log")
        require(
            found == {path: file.row_count for path, file in state.files.items()}, "both formats have the same files"
        )
        vectors = {path: file.deleted.count for path, file in state.files.items() if file.deleted is not None}
        require(deleted == vectors, "both formats delete the same rows", iceberg=deleted, delta=vectors)


class _Current:
    """The topic that has the name now. Implements ``Source``."""

    def __init__(self, topic: Callable[[], FakeTopic]) -> None:
        self._topic: Final = topic

    def bounds(self, topics: Sequence[str]) -> list[PartitionRange]:
        return self._topic().bounds(topics)

    def fetch_range(
        self, topic: str, partition: int, incarnation: int, offset: int, offset_end: int, *, epoch: int
    ) -> Iterator[StoredChunk]:
        return self._topic().fetch_range(topic, partition, incarnation, offset, offset_end, epoch=epoch)


def _pause(_seconds: float) -> None:
    """Do not wait."""


def _less(rows: Sequence[object], others: Sequence[object]) -> list[object]:
    return [row for row in rows if row not in others][:5]
