"""Polling before sleeping starts only for quick requests, and ends by itself."""

from __future__ import annotations

import pytest

from polywire.server.scheduling import PAUSES_AVERAGED, IdlePoll
from polywire.testing.loop import ManualLoop

LIMIT_US = 100


def awake(loop: ManualLoop) -> bool:
    """Return whether a callback is scheduled for the next pass."""
    return loop.run_pass() > 0


def after_quick_requests(loop: ManualLoop, idle: IdlePoll, count: int = 4 * PAUSES_AVERAGED) -> None:
    for _ in range(count):
        loop.clock.advance(20e-6)
        idle.came()


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
        idle.came()
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
    idle.look = lambda: looks.append(loop.clock.monotonic())
    idle.came()
    awake(loop)
    assert not looks
    after_quick_requests(loop, idle)
    awake(loop)
    awake(loop)
    assert len(looks) == 2
