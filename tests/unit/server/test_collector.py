"""Garbage collection: objects that survive a full collection are visited once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from polywire.server.resources import ALONE_S, Collector

STAYS = 300_000
LOOKED_AT_MAX = 60_000


class Circle:
    """Objects that reference counting does not free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    made.start()
    yield made
    made.stop()


def circle_that_stayed() -> tuple[Circle, weakref.ref[Circle]]:
    made = Circle()
    gc.collect()
    return made, weakref.ref(made)


def leave_alone(collector: Collector) -> None:
    for _ in range(ALONE_S):
        collector.sweep(alone=True)


@pytest.mark.usefixtures("collector")
def test_a_full_collection_visits_only_new_objects() -> None:
    looked_at: list[int] = []

    def note(phase: str, info: Mapping[str, Any]) -> None:
        if phase == "start" and info["generation"] == 2:
            looked_at.append(len(gc.get_objects()))

    gc.callbacks.append(note)
    try:
        stays: list[list[object]] = [[] for _ in range(STAYS)]
    finally:
        gc.callbacks.remove(note)
    assert len(stays) == STAYS
    assert len(looked_at) > STAYS // LOOKED_AT_MAX
    assert max(looked_at) < LOOKED_AT_MAX


def test_a_start_visits_no_objects_and_its_garbage_is_freed_later() -> None:
    circle = Circle()
    seen = weakref.ref(circle)
    collector = Collector()
    gc.disable()
    del circle
    try:
        collector.start()
        assert seen() is not None
        leave_alone(collector)
        assert seen() is None
    finally:
        gc.enable()
        collector.stop()


def test_old_garbage_is_freed_without_connections(collector: Collector) -> None:
    circle, seen = circle_that_stayed()
    del circle
    gc.collect()
    assert seen() is not None, "it was frozen"
    collector.sweep(alone=False)
    assert seen() is not None
    for _ in range(2):
        for _ in range(ALONE_S - 1):
            collector.sweep(alone=True)
        assert seen() is not None, "short-lived connections must not cause a full collection each time"
        collector.sweep(alone=False)
    leave_alone(collector)
    assert seen() is None


def test_everything_is_collected_only_if_objects_were_frozen(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_alone(collector)
    monkeypatch.setattr(gc, "unfreeze", lambda: pytest.fail("nothing has come since"))
    leave_alone(collector)
    monkeypatch.undo()


def test_stop_restores_the_settings_of_python() -> None:
    before = gc.get_threshold(), list(gc.callbacks)
    collector = Collector()
    collector.start()
    collector.stop()
    assert (gc.get_threshold(), list(gc.callbacks)) == before
    assert gc.get_freeze_count() == 0
