"""The index of delayed records on disk: damage, limits, and what a group must read from the log again."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from polywire.broker.groups.delay_index import FILE, DelayIndex, DelayStore, Due, merged
from polywire.errors import BrokerError, ErrorCode
from polywire.log.worker import LoopWorker
from polywire.testing.loop import ManualLoop, SimulatedClock


class Index:
    """An index on a simulated loop."""

    def __init__(self, path: Path | None = None, live: set[int] | None = None) -> None:
        self.loop = ManualLoop(SimulatedClock())
        self.syncs = 0
        self.index = DelayIndex(
            path,
            loop=self.loop,
            worker=LoopWorker("delays", self.loop),
            live=lambda: live or {7},
            sync=self.sync,
        )

    def sync(self, done: object) -> None:
        self.syncs += 1
        self.loop.call_soon(done, 0)  # type: ignore[arg-type]

    def due(
        self,
        end: int,
        *,
        first: int = 0,
        after: tuple[int, int] = (0, -1),
        until_ms: int = 1000,
        limit: int = 100,
        incarnation: int = 7,
    ) -> Due | BrokerError:
        found: list[Due | BrokerError] = []
        self.index.due(incarnation, (first, end), after=after, until_ms=until_ms, limit=limit, then=found.append)
        self.loop.run_due()
        [result] = found
        return result


def test_entries_come_in_the_order_of_their_times() -> None:
    index = Index()
    index.index.add(7, 0, 4, [(300, 0), (100, 2), (2000, 1)])
    index.index.add(8, 0, 4, [(50, 3)])
    assert index.due(4) == Due([(100, 2), (300, 0)], 2000)
    assert index.syncs == 1
    assert index.due(4, after=(100, 2), limit=1, until_ms=9000) == Due([(300, 0)], 2000)
    assert index.due(4, after=(2000, 1)) == Due([], None)


def test_offsets_that_were_not_added_are_missing() -> None:
    index = Index()
    assert index.due(4) == Due(missing=(0, 4))
    index.index.add(7, 2, 4, [(100, 2)])
    index.index.add(7, 6, 9, [])
    assert index.due(9) == Due(missing=(0, 2))
    assert index.due(9, first=3) == Due(missing=(4, 6))
    index.index.add(7, 0, 6, [])
    assert index.due(9) == Due([(100, 2)], None)
    assert index.due(12) == Due(missing=(9, 12))


def test_what_was_forgotten_is_read_again_only_if_the_clock_was_set_back() -> None:
    index = Index()
    index.index.add(7, 0, 4, [(100, 0), (200, 1)])
    index.index.forget(7, 150)
    assert index.due(4, after=(149, 0)) == Due([(200, 1)], None)
    assert index.due(4, after=(50, 0)) == Due(missing=(0, 4))
    index.index.add(7, 0, 4, [(100, 0), (200, 1)])
    assert index.due(4, after=(50, 0)) == Due([(100, 0), (200, 1)], None)


def test_partitions_for_which_no_group_waits_are_forgotten_at_the_next_start(tmp_path: Path) -> None:
    index = Index(tmp_path / FILE)
    index.index.add(7, 0, 4, [(100, 0)])
    index.index.add(8, 0, 4, [(100, 0)])
    assert index.due(4, incarnation=8) == Due([(100, 0)], None)
    index.index.close()
    index.loop.run_due()
    index = Index(tmp_path / FILE)
    assert index.due(4, incarnation=8) == Due(missing=(0, 4))
    assert index.due(4) == Due([(100, 0)], None)


@pytest.mark.parametrize("damage", ["garbage", "truncated", "other version"])
def test_a_damaged_index_is_replaced(tmp_path: Path, damage: str) -> None:
    path = tmp_path / FILE
    index = Index(path)
    index.index.add(7, 0, 4000, [(100 + number, number) for number in range(4000)])
    assert isinstance(index.due(4000), Due)
    index.index.close()
    index.loop.run_due()
    if damage == "garbage":
        path.write_bytes(b"x" * 10_000)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:6_000])
    else:
        store = DelayStore(path)
        store.call(lambda database: database.execute("PRAGMA user_version = 99"))
        store.close()
    index = Index(path)
    results = [index.due(4000, until_ms=9000, limit=9000) for _ in range(3)]
    assert results[-1] == Due(missing=(0, 4000))
    index.index.add(7, 0, 4000, [(100, 5)])
    assert index.due(4000) == Due([(100, 5)], None)


def test_an_index_that_is_dropped_closes_its_database() -> None:
    """Python 3.13 and newer warn about databases that the garbage collector closes."""
    store = DelayStore(None)
    store.call(lambda _: None)
    database = store._opened
    assert database is not None
    del store
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        database.execute("SELECT 1")


def test_a_directory_that_cannot_be_written_is_an_error_and_not_a_loss(tmp_path: Path) -> None:
    index = Index(tmp_path / "missing" / FILE)
    index.index.add(7, 0, 4, [(100, 0)])
    failed = index.due(4)
    assert isinstance(failed, BrokerError)
    assert failed.code is ErrorCode.STORAGE_FAILED
    (tmp_path / "missing").mkdir()
    assert index.due(4) == Due(missing=(0, 4))


def test_spans_are_merged() -> None:
    assert merged([(5, 6), (0, 3), (3, 4), (2, 3)]) == [(0, 4), (5, 6)]
