"""Schedule Python's garbage collections so that none blocks the event loop for long (decision 0106).

A full collection visits every object, which takes 120 ms for half a million objects. Python starts one each time the
number of objects has grown by a quarter.

Most objects belong to the broker's state and are never freed. So the objects that survive a full collection are frozen
(``gc.freeze``), and later collections visit only newer objects. While clients are connected, at most one full
collection visits an object.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, Final

YOUNG_MAX: Final = 700  # new objects before a collection of the youngest generation; Python's own default
YOUNGER_RUNS: Final = 5  # collections of the youngest generation before one of the middle generation
# Seconds without a connection before all objects are collected. A client that connects at that moment has to wait.
ALONE_S: Final = 60
MIDDLE_RUNS: Final = 1  # collections of the middle generation before a full one, which then visits some 10,000 objects


class Collector:
    """Freezes the objects that survive a full collection.

    ``_has_frozen`` is set if objects were frozen since all objects were last collected. ``_alone`` counts seconds
    without any connection.
    """

    __slots__ = ("_alone", "_before", "_has_frozen")

    def __init__(self) -> None:
        self._before = gc.get_threshold()
        self._has_frozen = False
        self._alone = 0

    def start(self) -> None:
        """Freeze the objects created at start-up. Call it before the first client is served."""
        self._collect_everything()
        gc.set_threshold(YOUNG_MAX, YOUNGER_RUNS, MIDDLE_RUNS)
        gc.callbacks.append(self._collected)

    def stop(self) -> None:
        """Restore Python's settings."""
        gc.callbacks.remove(self._collected)
        gc.set_threshold(*self._before)
        gc.unfreeze()

    def _collected(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "stop" and info["generation"] == 2:
            gc.freeze()
            self._has_frozen = True

    def sweep(self, *, alone: bool) -> None:
        """Collect all objects if no client has been connected for long. Call it once a second.

        This frees frozen objects that later became unreachable in a cycle. Objects that clients create and delete, such
        as topics, are not in cycles.
        """
        self._alone = self._alone + 1 if alone else 0
        if self._alone >= ALONE_S and self._has_frozen:
            self._collect_everything()

    def _collect_everything(self) -> None:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        # There is nothing left to collect. The call resets Python's count of surviving objects, which triggers full
        # collections.
        gc.collect()
        self._has_frozen = False
