"""One large request at a time off the event loop, whichever clients disconnect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from polywire.errors import PeerError
from polywire.protocols.runtime.off_loop import OffLoopQueue
from polywire.testing.loop import ManualLoop

WAIT_S = 60.0


class Rig:
    """A queue whose loop runs until a condition holds."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.off_loop = OffLoopQueue(self.loop)
        self.reported: list[object] = []

    def until(self, true: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < end, self.reported
            self.loop.run_due()
            time.sleep(0.001)


def test_work_runs_in_a_thread_and_completes_on_the_loop() -> None:
    rig = Rig()
    work = rig.off_loop.put(
        threading.current_thread().is_alive, rig.reported.append, lambda: rig.reported.append("released")
    )
    assert rig.reported == []
    rig.until(lambda: rig.reported)
    assert rig.reported == [True], "the received bytes are pinned until the request leaves"
    work.leave()
    work.leave()
    assert rig.reported == [True, "released"]


def test_requests_run_one_at_a_time_in_order() -> None:
    rig = Rig()
    first = rig.off_loop.put(lambda: 1, rig.reported.append, lambda: None)
    second = rig.off_loop.put(None, rig.reported.append, lambda: None)
    gone = rig.off_loop.put(lambda: 3, rig.reported.append, lambda: rig.reported.append("gone"))
    rig.off_loop.put(lambda: 4, rig.reported.append, lambda: None)
    rig.until(lambda: rig.reported)
    rig.loop.run_due()
    assert rig.reported == [1], "the second waits until the first has left"
    gone.leave()
    first.leave()
    rig.until(lambda: len(rig.reported) == 3)
    second.leave()
    rig.until(lambda: len(rig.reported) == 4)
    assert rig.reported == [1, "gone", None, 4]


def test_a_request_cancelled_during_its_work_is_released_afterwards_without_a_result() -> None:
    rig = Rig()
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        go_on.wait(WAIT_S)
        return "never delivered"

    work = rig.off_loop.put(slow, rig.reported.append, lambda: rig.reported.append("released"))
    rig.off_loop.put(lambda: "next", rig.reported.append, lambda: None)
    rig.until(begun.is_set)
    work.leave()
    rig.loop.run_due()
    assert rig.reported == [], "the thread still reads the received bytes"
    go_on.set()
    rig.until(lambda: len(rig.reported) == 2)
    assert rig.reported == ["released", "next"]


def test_an_exception_is_delivered_as_the_result() -> None:
    def refuse() -> None:
        raise PeerError("no sense", fatal=True)

    rig = Rig()
    rig.off_loop.put(refuse, rig.reported.append, lambda: None)
    rig.until(lambda: rig.reported)
    assert isinstance(rig.reported[0], PeerError)
