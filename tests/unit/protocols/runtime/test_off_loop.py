"""One large request at a time, beside the loop, whoever leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from polywire.errors import PeerError
from polywire.protocols.runtime.off_loop import OffLoopQueue
from polywire.testing.loop import ManualLoop

WAIT_S = 60.0


class Rig:
    """A queue whose loop runs until something is true."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.off_loop = OffLoopQueue(self.loop)
        self.told: list[object] = []

    def until(self, true: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < end, self.told
            self.loop.run_due()
            time.sleep(0.001)


def test_work_is_done_in_a_thread_and_told_on_the_loop() -> None:
    rig = Rig()
    work = rig.off_loop.put(threading.current_thread().is_alive, rig.told.append, lambda: rig.told.append("released"))
    assert rig.told == []
    rig.until(lambda: rig.told)
    assert rig.told == [True], "who has the turn keeps what was received until it leaves"
    work.leave()
    work.leave()
    assert rig.told == [True, "released"]


def test_one_at_a_time_in_their_order() -> None:
    rig = Rig()
    first = rig.off_loop.put(lambda: 1, rig.told.append, lambda: None)
    second = rig.off_loop.put(None, rig.told.append, lambda: None)
    gone = rig.off_loop.put(lambda: 3, rig.told.append, lambda: rig.told.append("gone"))
    rig.off_loop.put(lambda: 4, rig.told.append, lambda: None)
    rig.until(lambda: rig.told)
    rig.loop.run_due()
    assert rig.told == [1], "the second waits until the first has left"
    gone.leave()
    first.leave()
    rig.until(lambda: len(rig.told) == 3)
    second.leave()
    rig.until(lambda: len(rig.told) == 4)
    assert rig.told == [1, "gone", None, 4]


def test_who_leaves_while_the_thread_is_at_it_is_not_told_and_released_afterwards() -> None:
    rig = Rig()
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        go_on.wait(WAIT_S)
        return "never told"

    work = rig.off_loop.put(slow, rig.told.append, lambda: rig.told.append("released"))
    rig.off_loop.put(lambda: "next", rig.told.append, lambda: None)
    rig.until(begun.is_set)
    work.leave()
    rig.loop.run_due()
    assert rig.told == [], "the thread still looks at what was received"
    go_on.set()
    rig.until(lambda: len(rig.told) == 2)
    assert rig.told == ["released", "next"]


def test_what_makes_no_sense_is_told_as_an_error() -> None:
    def refuse() -> None:
        raise PeerError("no sense", fatal=True)

    rig = Rig()
    rig.off_loop.put(refuse, rig.told.append, lambda: None)
    rig.until(lambda: rig.told)
    assert isinstance(rig.told[0], PeerError)
