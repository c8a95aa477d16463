"""The event loop's time: heavy requests wait for a later pass, light ones wait few, and polling before sleeping ends by itself."""

from __future__ import annotations

from functools import partial

import pytest

from polywire.server.scheduling import PASS_S, PAUSES_AVERAGED, IdlePoll
from polywire.testing.loop import ManualLoop
from tests.unit.server.peers import Frames, Place, Wire, send

OFFER_S = 0.003


class Crowd:
    """Connections whose every frame takes this long.

    ``order``: the connections whose frames were handled, grouped by pass.
    """

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
        """Run one pass of the loop: each connection is read unless it is paused."""
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
        raise AssertionError("a connection waits for ever")


def test_ten_heavy_connections_do_not_block_one_pass() -> None:
    crowd = Crowd(10)
    crowd.ask(*range(10))
    crowd.run_all()
    assert sorted(number for held in crowd.passes for number in held) == list(range(10)), "each once"
    assert max(len(held) for held in crowd.passes) * OFFER_S <= 2 * (PASS_S + OFFER_S)
    assert all(peer.reading for peer in crowd.peers)


def test_known_heavy_connections_take_less_of_a_pass() -> None:
    crowd = Crowd(10)
    crowd.ask(*range(10))
    crowd.run_all()
    del crowd.passes[:]
    for _ in range(10):
        crowd.run_pass(*range(10))
    assert all(len(held) * OFFER_S <= PASS_S + OFFER_S for held in crowd.passes)


def test_waiting_connections_continue_in_order() -> None:
    crowd = Crowd(10)
    crowd.ask(*range(10))
    crowd.run_all()
    del crowd.passes[:]
    for _ in range(50):
        crowd.run_pass(*range(10))
    handled = [number for held in crowd.passes for number in held]
    assert len(handled) > 50
    counts = [handled.count(number) for number in range(10)]
    assert max(counts) - min(counts) <= 1, "no connection has more turns than the others"


@pytest.mark.parametrize("offer_s", [OFFER_S, 4 * PASS_S])
@pytest.mark.parametrize("many", [3, 10, 100])
def test_light_requests_are_answered_in_the_pass_that_reads_them(many: int, offer_s: float) -> None:
    crowd = Crowd(many, offer_s)
    light = crowd.join(0.0)
    crowd.ask(*range(many))
    crowd.run_all()
    for _ in range(20):
        crowd.run_pass(*range(many), light)
        assert light in crowd.passes[-1]


def test_later_connections_do_not_wait_for_unexpectedly_heavy_ones() -> None:
    crowd = Crowd(10, 4 * PASS_S)
    light = crowd.join(0.0)
    crowd.ask(*range(10))
    for _ in range(5):
        crowd.run_pass(light)
        assert len(crowd.passes[-1]) == 2
        assert light in crowd.passes[-1]


def test_light_connections_that_waited_continue() -> None:
    crowd = Crowd(4)
    little = [crowd.join(0.0004) for _ in range(50)]
    crowd.ask(*range(4), *little)
    assert len(crowd.passes[0]) < 4
    crowd.run_all()
    assert sorted(number for held in crowd.passes for number in held) == [*range(4), *little]
    assert max(len(held) for held in crowd.passes) < 20


def test_many_light_connections_are_read_in_one_pass() -> None:
    crowd = Crowd(1000, offer_s=0.0001)
    crowd.ask(*range(1000))
    assert crowd.passes == [list(range(1000))]
    assert not crowd.place.soon


def test_a_single_heavy_connection_does_not_wait() -> None:
    crowd = Crowd(1)
    crowd.ask(0)
    for _ in range(20):
        crowd.run_pass(0)
        assert crowd.peers[0].reading
    assert crowd.passes == [[0]] * 21


def test_a_resumed_session_waits_for_its_turn() -> None:
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


def test_a_queued_connection_has_a_pending_response() -> None:
    crowd = Crowd(10)
    crowd.ask(*range(10))
    waiting = [peer.connection.is_waiting for peer in crowd.peers]
    assert any(waiting)
    crowd.run_all()
    assert not any(peer.connection.is_waiting for peer in crowd.peers)


@pytest.mark.parametrize("ending", ["abort", "lost", "end"])
def test_a_closed_connection_is_skipped_when_its_turn_comes(ending: str) -> None:
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


def test_queued_requests_are_executed_while_the_broker_drains() -> None:
    crowd = Crowd(10)
    crowd.ask(*range(10))
    for peer in crowd.peers:
        peer.connection.stop_reading()
    crowd.run_all()
    assert sorted(number for held in crowd.passes for number in held) == list(range(10))
    assert not any(peer.reading for peer in crowd.peers)


def test_a_failure_leaves_no_connection_waiting() -> None:
    crowd = Crowd(10)
    crowd.ask(*range(10))
    crowd.session(5).fails = RuntimeError("a bug")
    crowd.run_all()
    assert crowd.peers[5].closing
    assert all(crowd.session(number).frames for number in range(10) if number != 5)


LIMIT_US = 100


def awake(loop: ManualLoop) -> bool:
    """Return whether a callback is scheduled for the next pass."""
    return loop.run_pass() > 0


def after_quick_requests(loop: ManualLoop, idle: IdlePoll, count: int = 4 * PAUSES_AVERAGED) -> None:
    for _ in range(count):
        loop.clock.advance(20e-6)
        idle.bytes_arrived()


def test_quick_requests_keep_the_loop_awake_for_the_limit_only() -> None:
    loop = ManualLoop()
    idle = IdlePoll(loop, loop.clock, limit_us=LIMIT_US)
    after_quick_requests(loop, idle)
    assert awake(loop)
    loop.clock.advance(60e-6)
    assert awake(loop)
    loop.clock.advance(60e-6)
    awake(loop)
    assert not awake(loop)


def test_each_request_is_followed_by_one_polling_call_at_most() -> None:
    loop = ManualLoop()
    idle = IdlePoll(loop, loop.clock, limit_us=LIMIT_US)
    after_quick_requests(loop, idle)
    assert loop.run_pass() == 1


@pytest.mark.parametrize("pause_s", [350e-6, 0.01, 10.0])
def test_slow_requests_let_the_processor_sleep(pause_s: float) -> None:
    loop = ManualLoop()
    idle = IdlePoll(loop, loop.clock, limit_us=LIMIT_US)
    after_quick_requests(loop, idle)
    for _ in range(PAUSES_AVERAGED * PAUSES_AVERAGED):
        loop.clock.advance(pause_s)
        awake(loop)
        idle.bytes_arrived()
    assert not awake(loop)


def test_a_single_pause_does_not_end_polling() -> None:
    loop = ManualLoop()
    idle = IdlePoll(loop, loop.clock, limit_us=LIMIT_US)
    after_quick_requests(loop, idle)
    loop.clock.advance(10.0)
    awake(loop)
    assert not awake(loop)
    after_quick_requests(loop, idle, count=PAUSES_AVERAGED)
    assert awake(loop)


def test_a_limit_of_zero_disables_polling() -> None:
    loop = ManualLoop()
    idle = IdlePoll(loop, loop.clock, limit_us=0)
    after_quick_requests(loop, idle)
    assert not awake(loop)


def test_only_polling_looks_for_ready_sockets() -> None:
    loop = ManualLoop()
    idle = IdlePoll(loop, loop.clock, limit_us=LIMIT_US)
    looks: list[float] = []
    idle.poll = lambda: looks.append(loop.clock.monotonic())
    idle.bytes_arrived()
    awake(loop)
    assert not looks
    after_quick_requests(loop, idle)
    awake(loop)
    awake(loop)
    assert len(looks) == 2
