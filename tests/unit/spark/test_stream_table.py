"""Where a stream over a table continues."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.errors import Conflict
from polywire.spark import tables
from polywire.tables.reading import LogRange, Snapshot


def snapshot_of(*incarnations: int) -> Snapshot:
    ranges = [LogRange(number, incarnation, 1, 10, 20) for number, incarnation in enumerate(incarnations)]
    return Snapshot("t", "", 0, (), is_latest=False, row_count=0, ranges=tuple(ranges))


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    content: dict[str, Any] = {}
    monkeypatch.setattr(tables, "_stored", lambda spark, place: content or None)
    monkeypatch.setattr(tables, "_store", lambda spark, place, made: content.update(made))
    return content


def offsets_of(found: Snapshot) -> dict[str, int]:
    return tables._begin(None, found, "place")[1]  # type: ignore[arg-type]  # only _stored and _store use the session


def test_partitions_that_were_added_before_the_first_micro_batch_are_read_from_their_beginning(
    stored: dict[str, Any],
) -> None:
    assert offsets_of(snapshot_of(7)) == {"0": 10}
    assert offsets_of(snapshot_of(7, 8)) == {"0": 10, "1": -2}


def test_a_topic_that_was_created_again_needs_another_checkpoint(stored: dict[str, Any]) -> None:
    offsets_of(snapshot_of(7))
    with pytest.raises(Conflict):
        offsets_of(snapshot_of(9))
