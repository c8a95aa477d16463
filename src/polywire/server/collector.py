"""When Python looks for garbage that reference counting does not free, so that it never holds the loop for long (decision 0033).

A full collection looks at every object there is: 120 ms with half a million of them, each time their number has grown by a quarter. Most of
these are the broker's state, which stays. So what a full collection leaves is set aside, and the next one looks at what came since.

Promises: an object is looked at by one full collection while anybody is connected, and none looks at many. Must not know: what the objects
are.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, Final

YOUNG_MAX: Final = 700  # objects made and not freed before the youngest are looked at, as Python has it
YOUNGER_RUNS: Final = 5  # of these before those that stayed are, as well
ALONE_S: Final = (
    60  # without anybody connected before everything is looked at: whoever comes in that moment waits for it
)
MIDDLE_RUNS: Final = 1  # of those before a full collection: of some 10,000 objects, and of what they hold


class Collector:
    """Guards: after every full collection what is left is set aside; ``_set_aside``: since everything was looked at. ``_alone``: for how many
    seconds nobody has been connected."""

    __slots__ = ("_alone", "_before", "_set_aside")

    def __init__(self) -> None:
        self._before = gc.get_threshold()
        self._set_aside = False
        self._alone = 0

    def start(self) -> None:
        """Set aside what start-up made; to be called before anybody is served."""
        self._look_at_everything()
        gc.set_threshold(YOUNG_MAX, YOUNGER_RUNS, MIDDLE_RUNS)
        gc.callbacks.append(self._collected)

    def stop(self) -> None:
        """Leave everything as it was."""
        gc.callbacks.remove(self._collected)
        gc.set_threshold(*self._before)
        gc.unfreeze()

    def _collected(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "stop" and info["generation"] == 2:
            gc.freeze()
            self._set_aside = True

    def sweep(self, *, alone: bool) -> None:
        """A second has passed. Look at everything, if nobody has been connected for long, and something was set aside since the last time:
        objects that became garbage in a circle afterwards. Of what a peer makes and unmakes there is none."""
        self._alone = self._alone + 1 if alone else 0
        if self._alone >= ALONE_S and self._set_aside:
            self._look_at_everything()

    def _look_at_everything(self) -> None:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        gc.collect()  # leaves nothing: the next one comes when there is a quarter more than what the last one has left
        self._set_aside = False
