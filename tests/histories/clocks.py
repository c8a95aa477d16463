"""System clocks of brokers that jump and drift, by libfaketime (Debian: ``faketime``).

Each broker has its own clock. The monotonic clock is the machine's: a real clock that is set does not change it either.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

LIBRARIES: Final = tuple(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
JUMPS: Final = ("+5m", "-5m", "+7h", "-7h", "+30d", "-30d", "+0 x3", "+0 x0.3")
"""Offsets from the machine's clock, and rates at which the clock advances."""
TRUE: Final = "+0"
JUMP: Final = "clock jump"
JUMPED_S: Final = 1.5  # until a broker surely has the new time


def has_clocks() -> bool:
    """Whether libfaketime is installed."""
    return bool(LIBRARIES)


class SkewedClock:
    """The system clock of one broker, which begins with the machine's time."""

    def __init__(self, file: Path) -> None:
        """Use a file for the offset, which the library reads again every second."""
        self._file: Final = file
        self.set(TRUE)

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the environment of a broker with this clock."""
        return {
            "LD_PRELOAD": str(LIBRARIES[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }

    def set(self, offset: str) -> None:
        """Set the clock."""
        new = self._file.with_suffix(".new")
        new.write_text(offset + "\n")
        new.replace(self._file)
