"""Responses in the order of requests, without any protocol."""

from __future__ import annotations

from typing import Any

from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.pipelined import BarePipelined, PipelinedSession, ReplySlot
from polywire.protocols.runtime.sequential import CLOSED
from polywire.testing.loop import ManualLoop, SimulatedClock
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Buffer
from tests.unit.protocols.polywire.peer import CapturedOutput


class Slot(ReplySlot[Any]):
    def __init__(self, session: BarePipelined) -> None:
        self.session = session
        self.blocking = False
        self.parts = self.released = self.cancel = None


class Writes(CapturedOutput):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: Buffer) -> None:
        self.writes.append(bytes(data))


class Answers(PipelinedSession[WireBroker, Slot]):
    def __init__(self) -> None:
        clock = SimulatedClock()
        self.loop = ManualLoop(clock)
        self.written = Writes()
        super().__init__(MemoryBroker(loop=self.loop, clock=clock).broker, self.written, lambda: None)

    def _receive(self, data: memoryview) -> int:
        return len(data)

    def close(self) -> None:
        self._enter(CLOSED)
        self._drop_slots()

    def slots(self, count: int) -> list[Slot]:
        return [self.append(Slot(self)) for _ in range(count)]


def test_responses_are_written_in_the_order_of_requests() -> None:
    session = Answers()
    first, second, third = session.slots(3)
    second.fill([b"2"])
    third.fill([b"3"])
    session.loop.run_due()
    assert session.written.writes == []
    first.fill([b"1"])
    assert session.written.writes == [b"123"]
    assert not session.owes()


def test_responses_of_one_pass_are_written_together() -> None:
    session = Answers()
    for number, slot in enumerate(session.slots(4)):
        slot.fill([b"%d" % number])
    assert session.written.writes == [b"0123"]
    session.loop.run_due()
    assert session.written.writes == [b"0123"]


def test_responses_do_not_wait_for_a_later_request_longer_than_one_pass() -> None:
    session = Answers()
    *slots, last = session.slots(3)
    for slot in slots:
        slot.fill([b"-"])
    assert session.written.writes == []
    assert session.owes()
    session.loop.run_due()
    assert session.written.writes == [b"--"]
    last.fill([b"!"])
    assert session.written.writes == [b"--", b"!"]


def test_a_closed_session_writes_nothing_later() -> None:
    session = Answers()
    slot, _ = session.slots(2)
    slot.fill([b"-"])
    session.close()
    session.loop.run_due()
    assert session.written.writes == []
