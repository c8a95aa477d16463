"""The loop over frames, without any protocol."""

from __future__ import annotations

from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.framed import FramedSession
from polywire.protocols.runtime.sequential import GROWTH_BYTES_MIN, Phase, Wait
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.testing.loop import ManualLoop, SimulatedClock
from polywire.testing.memory_broker import MemoryBroker
from tests.unit.protocols.polywire.peer import CapturedOutput


class Words(FramedSession[WireBroker]):
    """Frames of a four-byte length and a word. ``slow`` uses up a quantum, ``later`` waits once, ``last`` ends."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.memory = MemoryBroker(loop=ManualLoop(self.clock), clock=self.clock)
        self.captured = CapturedOutput()
        self.handled: list[str] = []
        self.offered = 0
        super().__init__(self.memory.broker, self.captured, lambda: None)

    def _frame_bytes(self, data: memoryview, at: int) -> int:
        return 0 if len(data) - at < 4 else 4 + int.from_bytes(data[at : at + 4], "big")

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        word = str(data[at + 4 : end], "ascii")
        if word == "later":
            self.offered += 1
            if self.offered == 1:
                self._reasons |= Wait.HOLDING
                return False
        self.handled.append(word)
        if word == "slow":
            self.clock.advance(QUANTUM_S)
        if word == "last":
            self._stop_receiving()
        return True

    def owes(self) -> bool:
        return False

    def wake(self) -> None:
        self._reasons &= ~Wait.HOLDING

    @property
    def phase(self) -> Phase:
        return self._phase

    def offer(self, *words: str, cut: int = 0) -> int:
        """Offer frames without their last ``cut`` bytes; return how many bytes were consumed."""
        data = framed(*words)
        return self.receive(memoryview(bytearray(data[: len(data) - cut])))


def framed(*words: str) -> bytes:
    return b"".join(len(word).to_bytes(4, "big") + word.encode() for word in words)


def test_complete_frames_are_executed_in_order() -> None:
    session = Words()
    assert session.offer("one", "two", "") == len(framed("one", "two", ""))
    assert (session.handled, session.wanted()) == (["one", "two", ""], 0)


def test_an_incomplete_frame_stays_and_reports_its_length() -> None:
    session = Words()
    assert session.offer("one", "three", cut=2) == len(framed("one"))
    assert (session.handled, session.wanted()) == (["one"], len(framed("three")))
    assert session.offer("three", cut=6) == 0
    assert session.wanted() == 0, "its length has not arrived"


def test_a_length_is_not_trusted_before_some_of_its_bytes_arrive() -> None:
    session = Words()
    assert session.receive(memoryview(b"\x7f\xff\xff\xff...")) == 0
    assert session.wanted() == GROWTH_BYTES_MIN


def test_frames_split_at_every_byte_are_all_executed() -> None:
    data = framed("one", "", "three", "four")
    for at in range(len(data) + 1):
        session = Words()
        taken = session.receive(memoryview(data[:at]))
        assert session.receive(memoryview(data[taken:])) == len(data) - taken
        assert session.handled == ["one", "", "three", "four"]


def test_others_get_their_turn_after_a_quantum() -> None:
    session = Words()
    assert session.offer("one", "slow", "two") == len(framed("one", "slow"))
    assert session.paused()
    session.memory.run()
    assert not session.paused()
    assert session.offer("two") == len(framed("two"))


def test_a_session_without_more_frames_does_not_yield() -> None:
    session = Words()
    session.offer("one", "slow")
    assert not session.paused()


def test_a_frame_that_must_wait_is_offered_again() -> None:
    session = Words()
    assert session.offer("one", "later", "two") == len(framed("one"))
    assert session.offer("later", "two") == 0
    assert (session.offered, session.paused()) == (1, True), "a paused session handles no frame"
    session.wake()
    assert session.offer("later", "two") == len(framed("later", "two"))
    assert session.handled == ["one", "later", "two"]


def test_nothing_is_executed_while_responses_are_unread() -> None:
    session = Words()
    session.captured.backlog = session.captured.backlog_max + 1
    assert session.offer("one") == 0
    session.captured.backlog = 0
    assert session.offer("one") == len(framed("one"))


def test_bytes_after_the_last_request_are_dropped_and_the_connection_ends() -> None:
    session = Words()
    assert session.offer("one", "last", "two", cut=1) == len(framed("one", "last", "two")) - 1
    assert (session.handled, session.phase, session.captured.closed) == (["one", "last"], Phase.ENDING, True)
