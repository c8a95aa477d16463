"""What the processor is used for, which a busy machine makes no longer; what a clock on the wall says, it does.

Promises: what is measured does not hold the collection of garbage that others left. Must not know: what is measured.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.broker_process import BrokerProcess


@dataclass
class Used:
    """Seconds that were used, once that is known."""

    seconds: float = 0.0


@contextmanager
def processor_used() -> Iterator[Used]:
    """How long this process keeps processors busy, in all its threads, while the block runs."""
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
    """Processor time that the thread of a broker's loop has used (Linux; 0 elsewhere)."""
    reported = Path(f"/proc/{broker.pid}/task/{broker.pid}/schedstat")
    return int(reported.read_text().split()[0]) / 1e9 if reported.exists() else 0.0
