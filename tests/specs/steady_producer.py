"""A producer that continues through any fate of the broker, for tests that kill it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SteadyProducer(threading.Thread):
    """Produces one message after the other until it is stopped. ``acknowledged``: how many were."""

    def __init__(self, produce: Callable[[int], None], patience_s: float) -> None:
        """produce: stores the message of this number, starting at 1. patience_s: longest wait for progress."""
        super().__init__(daemon=True)
        self.ending = threading.Event()
        self.acknowledged = 0
        self._produce = produce
        self._patience_s = patience_s
        self._changed = threading.Condition()

    def run(self) -> None:
        while not self.ending.is_set():
            self._produce(self.acknowledged + 1)
            with self._changed:
                self.acknowledged += 1
                self._changed.notify_all()

    def reach(self, count: int) -> None:
        """Wait until that many messages are acknowledged."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.acknowledged >= count, self._patience_s), (
                "the producer has stopped"
            )
