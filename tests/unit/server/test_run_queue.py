"""Fair passes: however many peers ask for much at once, a pass of the loop offers bytes for some milliseconds, and who asks for little waits
for few of them."""

from __future__ import annotations

from functools import partial

import pytest

from polywire.server.run_queue import PASS_S
from tests.unit.server.peers import Frames, Place, Wire, send

OFFER_S = 0.003


class Crowd:
    """Connections whose every offer takes so long. ``order``: whose frames were handled, by number, those of one pass together."""

    def __init__(self, count: int, offer_s: float = OFFER_S) -> None:
        self.place = Place()
        self.peers: list[Wire] = []
        self.passes: list[list[int]] = [[]]
        for _ in range(count):
            self.join(offer_s)

    def join(self, offer_s: float) -> int:
        number = len(self.peers)
        self.peers.append(self.place.connect())
        self.session(number).on_receive = partial(self._took, number, offer_s)
        return number

    def session(self, number: int) -> Frames:
        return self.place.wires[0].opened[number]

    def _took(self, number: int, offer_s: float) -> None:
        self.place.clock.advance(offer_s)
        self.passes[-1].append(number)

    def ask(self, *numbers: int) -> None:
        """One pass of the loop reads of each of them, as far as they are read."""
        for number in numbers:
            if self.peers[number].reading:
                send(self.peers[number], b"x")

    def run_pass(self, *numbers: int) -> None:
        self.passes.append([])
        self.place.run_pass()
        self.ask(*numbers)

    def run_all(self) -> None:
        for _ in range(1000):
            if not self.place.soon:
                return
            self.run_pass()
        raise AssertionError("somebody waits for ever")


def test_ten_that_ask_for_much_at_once_do_not_hold_one_pass() -> None:
    crowd = Crowd(10)
    crowd.ask(*range(10))
    crowd.run_all()
    assert sorted(number for held in crowd.passes for number in held) == list(range(10)), "each once"
    assert max(len(held) for held in crowd.passes) * OFFER_S <= 2 * (PASS_S + OFFER_S)
    assert all(peer.reading for peer in crowd.peers)


def test_known_to_ask_for_much_they_take_less_of_it() -> None:
    crowd = Crowd(10)
    crowd.ask(*range(10))
    crowd.run_all()
    del crowd.passes[:]
    for _ in range(10):
        crowd.run_pass(*range(10))
    assert all(len(held) * OFFER_S <= PASS_S + OFFER_S for held in crowd.passes)


def test_who_waits_goes_on_in_the_order_of_waiting() -> None:
    crowd = Crowd(10)
    crowd.ask(*range(10))
    crowd.run_all()
    del crowd.passes[:]
    for _ in range(50):
        crowd.run_pass(*range(10))
    handled = [number for held in crowd.passes for number in held]
    assert len(handled) > 50
    counts = [handled.count(number) for number in range(10)]
    assert max(counts) - min(counts) <= 1, "nobody has more turns than others"


@pytest.mark.parametrize("offer_s", [OFFER_S, 4 * PASS_S])
@pytest.mark.parametrize("many", [3, 10, 100])
def test_who_asks_for_little_is_answered_in_the_pass_that_reads_it(many: int, offer_s: float) -> None:
    crowd = Crowd(many, offer_s)
    light = crowd.join(0.0)
    crowd.ask(*range(many))
    crowd.run_all()
    for _ in range(20):
        crowd.run_pass(*range(many), light)
        assert light in crowd.passes[-1]


def test_who_comes_later_does_not_wait_for_those_that_ask_for_much_for_the_first_time() -> None:
    crowd = Crowd(10, 4 * PASS_S)
    light = crowd.join(0.0)
    crowd.ask(*range(10))
    for _ in range(5):
        crowd.run_pass(light)
        assert len(crowd.passes[-1]) == 2
        assert light in crowd.passes[-1]


def test_many_that_ask_for_little_and_had_to_wait_go_on_as_well() -> None:
    crowd = Crowd(4)
    little = [crowd.join(0.0004) for _ in range(50)]
    crowd.ask(*range(4), *little)
    assert len(crowd.passes[0]) < 4
    crowd.run_all()
    assert sorted(number for held in crowd.passes for number in held) == [*range(4), *little]
    assert max(len(held) for held in crowd.passes) < 20


def test_many_that_ask_for_little_are_all_read_in_one_pass() -> None:
    crowd = Crowd(1000, offer_s=0.0001)
    crowd.ask(*range(1000))
    assert crowd.passes == [list(range(1000))]
    assert not crowd.place.soon


def test_one_that_asks_for_much_alone_waits_for_nobody() -> None:
    crowd = Crowd(1)
    crowd.ask(0)
    for _ in range(20):
        crowd.run_pass(0)
        assert crowd.peers[0].reading
    assert crowd.passes == [[0]] * 21


def test_what_a_session_takes_up_again_waits_for_its_turn_as_well() -> None:
    crowd = Crowd(10)
    for number in range(10):
        send(crowd.peers[number], b"!x")
    crowd.run_all()
    del crowd.passes[:]
    crowd.passes.append([])
    for number in range(10):
        crowd.session(number).blocked = False
        crowd.session(number).resume()
    crowd.run_all()
    assert sorted(number for held in crowd.passes for number in held) == list(range(10))
    assert max(len(held) for held in crowd.passes) * OFFER_S <= PASS_S + OFFER_S
    assert all(crowd.session(number).frames == [b"!", b"x"] for number in range(10))


def test_who_waits_for_its_turn_is_owed_an_answer() -> None:
    crowd = Crowd(10)
    crowd.ask(*range(10))
    waiting = [peer.connection.is_waiting for peer in crowd.peers]
    assert any(waiting)
    crowd.run_all()
    assert not any(peer.connection.is_waiting for peer in crowd.peers)


@pytest.mark.parametrize("ending", ["abort", "lost", "end"])
def test_who_is_gone_when_its_turn_comes_is_left_out(ending: str) -> None:
    crowd = Crowd(10)
    crowd.ask(*range(10))
    for peer in crowd.peers[5:]:
        assert not peer.reading
        endings = {"abort": peer.connection.abort, "end": peer.connection.end}
        if ending == "lost":
            peer.connection.connection_lost(None)
        else:
            endings[ending]("for a test")
    crowd.run_all()
    assert sorted(number for held in crowd.passes for number in held) == list(range(5))


def test_requests_that_wait_for_their_turn_are_carried_out_while_the_broker_drains() -> None:
    crowd = Crowd(10)
    crowd.ask(*range(10))
    for peer in crowd.peers:
        peer.connection.stop_reading()
    crowd.run_all()
    assert sorted(number for held in crowd.passes for number in held) == list(range(10))
    assert not any(peer.reading for peer in crowd.peers)


def test_a_failure_leaves_nobody_waiting() -> None:
    crowd = Crowd(10)
    crowd.ask(*range(10))
    crowd.session(5).fails = RuntimeError("a bug")
    crowd.run_all()
    assert crowd.peers[5].closing
    assert all(crowd.session(number).frames for number in range(10) if number != 5)
