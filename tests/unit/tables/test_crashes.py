"""Tables whose writers die at any request, race each other, and meet a store with faults."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

from polywire.errors import BrokerError
from polywire.store.base import BlobMissing
from polywire.tables import writer
from polywire.tables.delta_log import CommitConflict
from polywire.tables.writer import TopicTable
from polywire.testing.memory_objects import MemoryObjects, ObjectFault
from tests.unit.tables.rig import (
    Clock,
    Died,
    FakeTopic,
    MortalObjects,
    check,
    check_no_garbage,
    load,
    merge,
    save,
    table_of,
)

SEEDS = 40
STEPS = 60
FAULTS = (ObjectFault.LOST_REPLY, ObjectFault.REFUSED, ObjectFault.LATE, ObjectFault.BUSY)
FAILURES = (BrokerError, BlobMissing, CommitConflict)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge and write checkpoints after few commits."""
    monkeypatch.setattr(writer, "MERGE_COUNT", 3)
    monkeypatch.setattr(writer, "CHECKPOINT_COMMITS", 4)


def maintain(table: TopicTable) -> None:
    merge(table)
    table.vacuum(0)


def live(topic: FakeTopic, objects: MemoryObjects, clock: Clock) -> None:
    table = table_of(topic, objects, clock)
    for number in range(12):
        topic.produce(number % 2, *([b"%d" % number] * 2 if number % 5 else [None]), key=b"%d" % (number % 4))
        topic.produce(number % 2, b"%d" % number, key=b"only %d" % number)
        table.append()
        if number % 3 == 2:
            maintain(table)


def recover(topic: FakeTopic, objects: MemoryObjects, clock: Clock) -> None:
    """Let a new writer finish, and check rows and files."""
    table = table_of(topic, objects, clock)
    table.append()
    maintain(table)
    maintain(table)
    state = check(topic, objects)
    assert [state.offsets.get(topic.key(number), 0) for number in range(2)] == [len(part) for part in topic.values]
    table.vacuum(0)
    check_no_garbage(objects, state)


@pytest.mark.parametrize("is_latest", [False, True])
@pytest.mark.parametrize("dies_after", [False, True])
def test_a_writer_may_die_at_any_write(dies_after: bool, is_latest: bool) -> None:
    whole = MortalObjects()
    live(FakeTopic(is_latest=is_latest), whole, Clock())
    assert whole.writes > 40
    for number in range(whole.writes):
        topic, objects, clock = FakeTopic(is_latest=is_latest), MortalObjects(), Clock()
        objects.dies_at, objects.dies_after = number, dies_after
        with pytest.raises(Died):
            live(topic, objects, clock)
        objects.dies_at = -1
        check(topic, objects)
        recover(topic, objects, clock)


def step(chance: random.Random, tables: list[TopicTable], topic: FakeTopic, objects: MemoryObjects) -> None:
    number = chance.randrange(len(tables))
    for _ in range(chance.choice((0, 0, 0, 1, 2))):
        verb = chance.choice(("create", "replace", "delete", "read"))
        objects.fail(
            verb, chance.choice(FAULTS if verb in ("create", "replace") else FAULTS[:3]), after=chance.randrange(6)
        )
    try:
        action = chance.randrange(4)
        if action == 0:
            value = chance.choice((None, b"%d" % chance.randrange(1000)))
            key = chance.choice((None, b"%d" % chance.randrange(6)))
            topic.produce(chance.randrange(2), *[value] * chance.randrange(1, 9), key=key)
        elif action == 1:
            maintain(tables[number])
        else:
            tables[number].append()
    except FAILURES:
        tables[number] = table_of(topic, objects, Clock())
    if chance.random() < 0.1:
        objects.deliver()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_writers_race_over_a_store_with_faults(seed: int, tmp_path: Path) -> None:
    chance, objects, clock = random.Random(seed), MemoryObjects(), Clock()
    topic = FakeTopic(is_latest=seed % 2 == 1)
    tables = [table_of(topic, objects, clock) for _ in range(3)]
    for _ in range(STEPS):
        step(chance, tables, topic, objects)
    objects.deliver()
    for _ in range(10):
        with suppress(*FAILURES):
            tables[0] = table_of(topic, objects, clock)
            maintain(tables[0])
    objects.heal()
    check(topic, objects)
    recover(topic, objects, clock)
    if seed % 10 < 2:
        query = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(str(save(objects, tmp_path))))
        found = pa.table(query.execute('select partition, "offset", value from t order by 1, 2'))
        rows = list(zip(*(column.to_pylist() for column in found.columns), strict=True))
        assert rows == topic.rows(load(objects))
