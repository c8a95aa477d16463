"""Phases of a session, and the reasons for which the next request waits, without any protocol."""

from __future__ import annotations

from itertools import product

import pytest

from polywire.errors import PeerError
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.sequential import TRANSITIONS, Phase, SequentialSession, Wait
from polywire.testing.loop import ManualLoop
from polywire.testing.memory_broker import MemoryBroker
from tests.unit.protocols.polywire.peer import CapturedOutput


class Letters(SequentialSession[WireBroker]):
    """Each byte is a request.

    ``y`` ends the quantum, ``e`` is the last, ``!`` is invalid, ``o`` is pending until ``pay``.
    """

    def __init__(self) -> None:
        self.memory = MemoryBroker(loop=ManualLoop())
        self.captured = CapturedOutput()
        self.handled = ""
        self.owed = 0
        self.resumed = 0
        super().__init__(self.memory.broker, self.captured, self._resumed)

    def _resumed(self) -> None:
        self.resumed += 1

    def _receive(self, data: memoryview) -> int:
        for at, letter in enumerate(bytes(data).decode()):
            if letter == ".":
                return at  # an incomplete request
            self.handled += letter
            if letter == "!":
                raise PeerError("no letter", fatal=True)
            if letter == "e":
                self._stop_receiving()
                return len(data)
            self.owed += letter == "o"
            if letter == "y":
                self._end_quantum()
                return at + 1
        return len(data)

    def owes(self) -> bool:
        return self.owed > 0

    def pay(self) -> None:
        self.owed -= 1
        self._continue()

    def sleep(self) -> None:
        self._reasons |= Wait.HOLDING

    def wake(self) -> None:
        self._reasons &= ~Wait.HOLDING
        self._continue()

    @property
    def phase(self) -> Phase:
        return self._phase

    def enter(self, phase: Phase) -> None:
        self._enter(phase)

    def close(self) -> None:
        self._enter(Phase.CLOSED)

    def run(self) -> None:
        self.memory.run()


WAYS: dict[Phase, tuple[Phase, ...]] = {
    Phase.OPEN: (),
    Phase.FINISHING: (Phase.FINISHING,),
    Phase.ENDING: (Phase.ENDING,),
    Phase.CLOSED: (Phase.CLOSED,),
}


@pytest.mark.parametrize(("old", "new"), list(product(Phase, Phase)))
def test_phases_change_only_as_in_the_table(old: Phase, new: Phase) -> None:
    session = Letters()
    for phase in WAYS[old]:
        session.enter(phase)
    if new in TRANSITIONS[old]:
        session.enter(new)
        assert session.phase is new
    else:
        with pytest.raises(AssertionError):
            session.enter(new)


def test_no_phase_returns_to_an_earlier_one() -> None:
    assert all(new > old for old, news in TRANSITIONS.items() for new in news)
    assert not TRANSITIONS[Phase.CLOSED]


def test_a_half_closed_session_without_requests_ends() -> None:
    session = Letters()
    session.receive(memoryview(b"ab"))
    session.finish(memoryview(b""))
    assert (session.phase, session.captured.closed) == (Phase.ENDING, True)


def test_incomplete_requests_are_dropped_and_complete_ones_executed() -> None:
    session = Letters()
    session.finish(memoryview(b"ab."))
    assert (session.handled, session.phase, session.captured.closed) == ("ab", Phase.ENDING, True)


def test_waiting_requests_get_a_quantum_each_before_the_connection_ends() -> None:
    session = Letters()
    session.finish(memoryview(b"yyab"))
    assert (session.handled, session.phase, session.captured.closed) == ("y", Phase.FINISHING, False)
    session.run()
    assert (session.handled, session.phase, session.captured.closed) == ("yyab", Phase.ENDING, True)


def test_all_reasons_to_wait_must_end_before_the_next_request() -> None:
    session = Letters()
    session.receive(memoryview(b"y"))
    session.sleep()
    assert session.paused()
    session.run()
    assert (session.resumed, session.paused()) == (0, True), "it still sleeps"
    session.wake()
    assert (session.resumed, session.paused()) == (1, False)


def test_pending_responses_are_sent_before_the_end() -> None:
    session = Letters()
    session.finish(memoryview(b"oa"))
    assert (session.handled, session.phase, session.captured.closed) == ("oa", Phase.ENDING, False)
    session.pay()
    assert session.captured.closed


@pytest.mark.parametrize("last", [b"ae", b"a!"])
def test_nothing_after_the_last_request_is_executed(last: bytes) -> None:
    session = Letters()
    session.sleep()
    session.finish(memoryview(last + b"bc"))
    assert session.phase is Phase.FINISHING
    session.wake()
    assert (session.handled, session.phase, session.captured.closed) == (last.decode(), Phase.ENDING, True)
    assert session.receive(memoryview(b"more")) == 4
    assert session.handled == last.decode()


def test_a_closed_session_executes_no_more_requests() -> None:
    session = Letters()
    session.finish(memoryview(b"yab"))
    session.close()
    session.run()
    assert (session.handled, session.phase) == ("y", Phase.CLOSED)
    assert not session.captured.closed, "the connection is closed already"
