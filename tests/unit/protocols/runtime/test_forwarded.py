"""Requests that another process forwards, executed by a session without a connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polywire.errors import BrokerError, PeerError, Unavailable
from polywire.protocols.runtime import forwarded
from polywire.protocols.runtime.forwarded import ForwardedRequests
from polywire.protocols.runtime.session import Output
from polywire.testing.loop import ManualLoop


class Lines:
    """A session whose requests are lines. A line is answered by the test, or at once with itself if it is ``!``."""

    def __init__(self, output: Output, resume: Callable[[], None]) -> None:
        self.output, self.resume = output, resume
        self.taken: list[bytes] = []
        self.owed = 0
        self.is_paused = self.is_closed = False

    def receive(self, data: memoryview) -> int:
        line, end, _ = bytes(data).partition(b"\n")
        if line == b"bad":
            raise PeerError("bad", fatal=True)
        if not end:
            return 0
        self.taken.append(line)
        if line == b"!":
            self.output.write(b"!")
        else:
            self.owed += 1
            self.is_paused = True
        return len(line) + 1

    def answer(self, data: bytes) -> None:
        self.owed -= 1
        self.output.write(data)
        self.is_paused = False
        self.resume()

    def paused(self) -> bool:
        return self.is_paused

    def owes(self) -> bool:
        return self.owed > 0

    def close(self) -> None:
        self.is_closed = True


class Run:
    """One forwarded run of requests."""

    def __init__(self, data: bytes) -> None:
        self.loop = ManualLoop()
        self.answers: list[bytes | BrokerError] = []
        self.requests = ForwardedRequests(self.loop, data, "10.0.0.1:5", None, self.answers.append)
        self.session: Any = None
        self.requests.run(self._open)

    def _open(self, output: Output, resume: Callable[[], None]) -> Any:
        self.session = Lines(output, resume)
        return self.session

    def go(self) -> None:
        for _ in range(10):
            self.loop.run_due()


def test_responses_are_joined_and_the_session_ends() -> None:
    run = Run(b"a\n!\nb\n")
    run.go()
    assert (run.session.taken, run.answers) == ([b"a"], [])
    run.session.answer(b"1")
    run.go()
    assert run.session.taken == [b"a", b"!", b"b"]
    run.session.answer(b"2")
    run.go()
    assert run.answers == [b"1!2"]
    assert run.session.is_closed
    run.session.output.write(b"late")
    run.go()
    assert run.answers == [b"1!2"]


def test_cancelled_requests_report_nothing() -> None:
    run = Run(b"a\n")
    run.go()
    run.requests.cancel()
    assert run.session.is_closed
    run.session.answer(b"1")
    run.go()
    assert run.answers == []


def test_a_malformed_request_has_no_response() -> None:
    run = Run(b"!\nbad\n")
    run.go()
    [error] = run.answers
    assert isinstance(error, Unavailable)
    assert run.session.is_closed


def test_a_session_that_closes_its_connection_ends_the_requests() -> None:
    run = Run(b"a\nb\n")
    run.go()
    run.session.output.write(b"bye")
    run.session.output.close()
    assert run.answers == [b"bye"]


def test_a_session_that_does_not_open_has_no_response() -> None:
    loop, answers = ManualLoop(), []  # type: ignore[var-annotated]

    def refuse(output: Output, resume: Callable[[], None]) -> Any:
        raise PeerError("unknown user", fatal=True)

    ForwardedRequests(loop, b"a\n", "", None, answers.append).run(refuse)
    assert answers == []
    loop.run_due()
    assert [type(answer) for answer in answers] == [Unavailable]


def test_responses_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarded, "RESPONSE_BYTES_MAX", 10)
    run = Run(b"a\n")
    run.go()
    run.session.output.write_many([b"12345", b"67890"])
    run.session.answer(b"1")
    run.go()
    assert [type(answer) for answer in run.answers] == [Unavailable]
