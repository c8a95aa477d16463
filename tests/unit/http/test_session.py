"""Tests of one connection: complete requests, executed one at a time and in order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from polywire.errors import PeerError
from polywire.http import session
from polywire.http.exchange import AsgiExchange, Receive, Scope, Send
from polywire.http.session import CONTINUE, HttpSession
from polywire.protocols.runtime.session import Output
from tests.unit.http.site import Peer, request


class Held:
    """An application that responds with the path, once it is released."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.held = asyncio.Event()
        self.held.set()
        self.ended: list[str] = []

    async def application(self) -> Held:
        return self

    def exchange(self, output: Output, drained: asyncio.Event) -> AsgiExchange:
        return AsgiExchange(self.answer, output, drained)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.held.wait()
            if scope["path"] == "/broken":
                raise RuntimeError("broken")
            body = scope["path"].encode() + (await receive())["body"]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for byte in body:
                await send({"type": "http.response.body", "body": bytes([byte]), "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            self.ended.append(scope["path"])


class Conversation:
    """A session with its peer."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.app = Held(self.loop)
        self.peer = Peer()
        self.resumed = 0
        self.session = HttpSession(self.app, self.peer, self._resume)

    def _resume(self) -> None:
        self.resumed += 1

    def run(self, passes: int = 30) -> None:
        for _ in range(passes):
            self.loop.run_until_complete(asyncio.sleep(0))

    def receive(self, data: bytes) -> int:
        return self.session.receive(memoryview(data))


@pytest.fixture
def talk() -> Iterator[Conversation]:
    talk = Conversation()
    yield talk
    talk.session.close()
    talk.run()
    talk.loop.close()


def test_pipelined_requests_are_executed_in_order(talk: Conversation) -> None:
    first, second = request("POST", "/a", body=b"xyz"), request("GET", "/b")
    assert talk.receive(first + second) == len(first)
    assert talk.session.paused()
    assert talk.receive(second) == 0
    talk.run()
    assert not talk.session.paused()
    assert talk.resumed == 1
    assert talk.receive(second) == len(second)
    talk.run()
    assert talk.app.ended == ["/a", "/b"]
    assert talk.peer.sent.count(b"HTTP/1.1 200") == 2
    assert not talk.peer.closed


def test_a_request_may_arrive_in_any_pieces(talk: Conversation) -> None:
    whole = request("POST", "/a", body=b"xyz")
    for end in range(len(whole)):
        assert talk.receive(whole[:end]) == 0
    assert talk.session.wanted() == len(whole)
    assert talk.receive(whole) == len(whole)


TWO_LENGTHS = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: %d\r\n\r\nxy"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"x" * 20_000,
        b"\x16\x03\x01" * 9_000,
        TWO_LENGTHS % 1,
        TWO_LENGTHS % 2,
    ],
)
def test_a_request_without_a_length_is_rejected_and_closed(talk: Conversation, data: bytes) -> None:
    with pytest.raises(PeerError) as refused:
        talk.receive(data)
    assert refused.value.fatal
    assert talk.peer.sent.startswith(b"HTTP/1.1 4")


def test_a_client_that_waits_for_permission_to_send_the_body_gets_it_once(talk: Conversation) -> None:
    whole = request("POST", "/a", {"Expect": "100-continue"}, body=b"xyz")
    for end in range(len(whole)):
        assert talk.receive(whole[:end]) == 0
    assert talk.peer.sent == CONTINUE
    assert talk.receive(whole) == len(whole)
    talk.run()
    assert talk.peer.sent.startswith(CONTINUE + b"HTTP/1.1 200")
    talk.receive(whole)
    talk.run()
    assert talk.peer.sent.count(CONTINUE) == 1, "the body was there"


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # without a host
    ],
)
def test_malformed_http_is_rejected_and_closed(talk: Conversation, data: bytes) -> None:
    assert talk.receive(data) == len(data)
    talk.run()
    assert not talk.app.ended
    assert talk.peer.sent.startswith(b"HTTP/1.1 400")
    assert talk.peer.closed


def test_connection_close_closes_after_the_response(talk: Conversation) -> None:
    talk.receive(request("GET", "/a", {"Connection": "close"}))
    talk.run()
    assert talk.peer.closed


def test_a_half_closed_client_gets_its_response(talk: Conversation) -> None:
    talk.app.held.clear()
    talk.receive(request("GET", "/a"))
    talk.run()
    talk.session.finish(memoryview(b""))
    assert not talk.peer.closed
    talk.app.held.set()
    talk.run()
    assert talk.peer.sent.startswith(b"HTTP/1.1 200")
    assert talk.peer.closed


def test_pipelined_requests_of_a_half_closed_client_are_executed(talk: Conversation) -> None:
    first, rest = request("GET", "/a"), request("POST", "/b", body=b"x") + request("GET", "/c")
    talk.receive(first + rest)
    talk.session.finish(memoryview(rest + b"GET /half"))
    talk.run(100)
    assert talk.app.ended == ["/a", "/b", "/c"]
    assert talk.peer.closed


def test_a_disconnect_cancels_the_request(talk: Conversation) -> None:
    talk.app.held.clear()
    talk.receive(request("GET", "/a"))
    talk.run()
    talk.session.close()
    talk.run()
    assert talk.app.ended == ["/a"]
    assert not talk.peer.sent


def test_a_response_waits_for_a_client_that_does_not_read(talk: Conversation) -> None:
    talk.peer.backlog = talk.peer.backlog_max + 1
    talk.receive(request("GET", "/abc"))
    talk.run(200)
    assert not talk.app.ended
    sent = len(talk.peer.sent)
    talk.run(200)
    assert len(talk.peer.sent) == sent
    talk.peer.backlog = 0
    talk.session.drained()
    talk.run(200)
    assert talk.app.ended == ["/abc"]


def test_an_internal_error_closes_the_connection(talk: Conversation) -> None:
    talk.receive(request("GET", "/broken"))
    talk.run()
    assert talk.peer.closed


def test_a_connection_without_a_complete_request_is_closed(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "IDLE_S", 0.0)
    slow = HttpSession(talk.app, talk.peer, talk._resume)
    slow.receive(memoryview(b"GET / HTTP/1.1\r\n"))
    talk.run()
    assert talk.peer.closed
    slow.close()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, ""),
        ({"User-Agent": "curl/8"}, ""),
        ({"X-Polywire": "1"}, ""),
        ({"X-Polywire": "console"}, session.CONSOLE),
        ({"Sec-Fetch-Site": "same-origin"}, session.CONSOLE),
    ],
)
def test_connections_of_browsers_are_those_of_the_console(
    talk: Conversation, headers: dict[str, str], expected: str
) -> None:
    talk.receive(request("GET", "/a", headers))
    assert talk.session.spoken_dialect == expected
    talk.receive(request("POST", "/b", {}, b"\r\nSec-Fetch-Site: none\r\n"))
    assert talk.session.spoken_dialect == expected, "a connection stays what it is"
