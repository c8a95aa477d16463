"""A broker that measures from inside how long its loop is blocked, in processor time and by the clock.

Run as ``python -m benchmarks.watched serve …``, with the environment variable ``POLYWIRE_WATCH`` naming a socket (a path). A client that
connects to it and sends a byte gets one line of JSON: the longest stall since the last line, and how long ago one above ``BUSY_S`` ended.

A callback each millisecond measures the processor time of the loop's thread since the previous one. A stall between two of them is one pass
of the loop. Other load of the machine does not change processor time.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polywire.cli.main import main
from polywire.server import lifecycle

BEAT_S = 0.001
BUSY_S = 0.003
LONG_S = 0.015  # of a stall whose stack is sampled every LOOK_S
LOOK_S = 0.005
PLACES = 4  # of the innermost calls
WATCH = "POLYWIRE_WATCH"


class Watch:
    """Measures a loop.

    Invariant: ``processor`` and ``clock`` are the longest stalls since the last report, ``collecting`` the longest
    garbage collection.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.processor = 0.0
        self.clock = 0.0
        self.collecting = 0.0
        self.places: Counter[str] = Counter()
        self.busy_at = 0.0
        self._clock_id = 0
        self._collecting_at = 0.0
        self._used = 0.0
        self._beat_at = 0.0
        loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._clock_id = time.pthread_getcpuclockid(threading.get_ident())
        threading.Thread(target=self._look, args=(threading.get_ident(),), daemon=True).start()
        gc.callbacks.append(self._collected)
        self._used, self._beat_at = time.thread_time(), time.monotonic()
        self._loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        used, now = time.thread_time(), time.monotonic()
        held = used - self._used
        self.processor = max(self.processor, held)
        self.clock = max(self.clock, now - self._beat_at - BEAT_S)
        if held > BUSY_S:
            self.busy_at = now
        self._used, self._beat_at = used, now
        self._loop.call_later(BEAT_S, self._beat)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_at = time.thread_time()
        else:
            self.collecting = max(self.collecting, time.thread_time() - self._collecting_at)

    def _look(self, thread: int) -> None:
        """Sample the stack whenever the loop has been blocked for long."""
        while True:
            time.sleep(LOOK_S)
            if time.clock_gettime(self._clock_id) - self._used < LONG_S:
                continue
            frame = sys._current_frames().get(thread)
            names: list[str] = []
            while frame is not None and len(names) < PLACES:
                if "polywire" in frame.f_code.co_filename:
                    names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}")
                frame = frame.f_back
            self.places[" < ".join(names)] += 1

    def reported(self) -> dict[str, Any]:
        """Return the figures since the last call, including the current stall; called from another thread."""
        now = time.monotonic()
        held = time.clock_gettime(self._clock_id) - self._used
        if held > BUSY_S:
            self.busy_at = now
        seen = {
            "processor_s": max(self.processor, held),
            "clock_s": max(self.clock, now - self._beat_at - BEAT_S),
            "collecting_s": self.collecting,
            "quiet_s": now - self.busy_at,
            "places": self.places.most_common(1),
        }
        self.places = Counter()
        self.processor = self.clock = self.collecting = 0.0
        return seen


def _tell(watch: Watch, path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        peer, _ = listener.accept()
        with peer:
            while peer.recv(1):
                peer.sendall(json.dumps(watch.reported()).encode() + b"\n")


def watched(make: Callable[[], asyncio.AbstractEventLoop], path: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Wrap the loop factory so that each loop is measured."""

    def made() -> asyncio.AbstractEventLoop:
        loop = make()
        threading.Thread(target=_tell, args=(Watch(loop), path), daemon=True).start()
        return loop

    return made


if __name__ == "__main__":
    _make = lifecycle._new_loop()
    lifecycle._new_loop = lambda: watched(_make, os.environ[WATCH])
    main()
