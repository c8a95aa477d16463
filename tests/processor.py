"""Measurement of processor time, which a busy machine does not prolong, unlike wall-clock time.

A measured block is not charged for the garbage collection of earlier objects.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polywire.testing.process import BrokerProcess


@dataclass
class Used:
    """Used seconds, once known."""

    seconds: float = 0.0


@contextmanager
def processor_used() -> Iterator[Used]:
    """Measure the processor time of this process, in all its threads, while the block runs."""
    used = Used()
    collected = gc.isenabled()
    gc.disable()
    begun = time.process_time()
    try:
        yield used
    finally:
        used.seconds = time.process_time() - begun
        if collected:
            gc.enable()


def loop_seconds(broker: BrokerProcess) -> float:
    """Return the processor time of a broker's loop thread (Linux; 0 elsewhere)."""
    reported = Path(f"/proc/{broker.pid}/task/{broker.pid}/schedstat")
    return int(reported.read_text().split()[0]) / 1e9 if reported.exists() else 0.0
