"""Responses that are built in slices of the loop's time."""

from __future__ import annotations

from collections.abc import Iterator

from polywire.broker.broker import Broker
from polywire.errors import BrokerError, ErrorCode, Missing
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.protocols.runtime.slices import Slices
from polywire.testing.loop import ManualLoop, SimulatedClock
from polywire.testing.memory_broker import MemoryBroker


class Made:
    """An iterator that takes half a slice for each part, and its recorded result."""

    def __init__(self, count: int, *, error: BrokerError | None = None) -> None:
        self.clock = SimulatedClock()
        self.loop = ManualLoop(self.clock)
        self.broker: Broker = MemoryBroker(loop=self.loop, clock=self.clock).broker
        self.loop.run_due()
        self.reported: list[list[bytes] | BrokerError] = []
        self.asked = 0
        self.slices = Slices(self.broker, self._parts(count, error), self.reported.append)

    def _parts(self, count: int, error: BrokerError | None) -> Iterator[bytes]:
        for number in range(count):
            self.asked += 1
            self.clock.advance(QUANTUM_S / 2)
            yield b"%d" % number
            yield b""
        if error is not None:
            raise error


def test_others_get_their_turn_between_two_slices() -> None:
    made = Made(5)
    assert made.asked == 0, "nothing is built inside the call"
    asked = []
    while not made.reported:
        made.loop.run_pass()
        asked.append(made.asked)
    assert asked == [2, 4, 5]
    assert made.reported == [[b"0", b"1", b"2", b"3", b"4"]]


def test_an_error_is_delivered_as_the_result() -> None:
    made = Made(1, error=Missing(ErrorCode.TOPIC_MISSING, "gone"))
    made.loop.run_due()
    assert [type(reported) for reported in made.reported] == [Missing]


def test_nothing_is_delivered_after_a_cancel() -> None:
    made = Made(5)
    made.loop.run_pass()
    made.slices.cancel()
    made.loop.run_due()
    assert (made.reported, made.asked) == ([], 2)


def test_a_pass_runs_one_slice_however_many_wait() -> None:
    first = Made(5)
    asked = [0, 0, 0]

    def parts(number: int) -> Iterator[bytes]:
        for _ in range(4):
            asked[number] += 1
            first.clock.advance(QUANTUM_S / 2)
            yield b"x"

    reported: list[list[bytes] | BrokerError] = []
    for number in range(3):
        Slices(first.broker, parts(number), reported.append)
    passes = 0
    while len(reported) < 3 or not first.reported:
        before = first.asked + sum(asked)
        first.loop.run_pass()
        passes += 1
        assert first.asked + sum(asked) - before <= 2
        if passes == 4:
            assert (first.asked, asked) == (2, [2, 2, 2]), "they take turns"
    assert (first.asked, asked) == (5, [4, 4, 4])
