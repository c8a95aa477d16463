"""Signals of a process that runs one event loop after another: none is lost between them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import uvloop

from polywire.server.signals import Signals

WAIT_S = 20.0


@pytest.fixture
def signals() -> Iterator[Signals]:
    found = Signals()
    yield found
    found.end()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loops(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    found: Callable[[], asyncio.AbstractEventLoop] = request.param
    return found


def test_a_signal_between_two_loops_is_handled_on_the_second(
    signals: Signals, loops: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    reported: list[str] = []

    async def turn(number: int, *, wakes: bool) -> None:
        came = asyncio.Event()

        def stop(found: signal.Signals) -> None:
            reported.append(f"{found.name} {number}")
            came.set()

        signals.listen(stop, lambda: reported.append("reload"))
        if wakes:
            loop = asyncio.get_running_loop()
            loop.call_later(0.01, os.kill, os.getpid(), signal.SIGHUP)
            loop.call_later(0.02, os.kill, os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(came.wait(), WAIT_S)
        signals.keep()

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(turn(1, wakes=True))
    os.kill(os.getpid(), signal.SIGHUP)  # no handler runs for it: files are read again anyway
    os.kill(os.getpid(), signal.SIGINT)
    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(turn(2, wakes=False))
    assert reported == ["reload", "SIGTERM 1", "SIGINT 2"]


def test_a_closed_loop_gets_no_signals(signals: Signals, loops: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def turn() -> None:
        signals.listen(lambda _: pytest.fail("the loop is closed"))

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(turn())
    os.kill(os.getpid(), signal.SIGTERM)


def test_end_restores_the_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    Signals().end()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
