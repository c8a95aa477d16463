"""Helpers of the tests of the FLUX pages: a connection to a broker process, and dialogues written as lines."""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import ExitStack
from itertools import count
from typing import Final

from tests.broker_process import BrokerProcess

WAIT_S: Final = 60.0
PORTS: Final = ("flux", "any")  # the protocol's own port, and the one for all protocols
TOPICS: Final = count()  # each dialogue has its own
MALFORMED: Final = "V1|0|ERR|BAD_REQUEST|expected format V1|<correlation_id>|<command>|<args>"


class Peer:
    """A connection to a broker process."""

    def __init__(self, broker: BrokerProcess, port: str) -> None:
        self.socket = socket.create_connection(broker.addresses[port], WAIT_S)
        self._file = self.socket.makefile("rb")
        self._asked: deque[int] = deque()
        self._numbers = count(1)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: str) -> None:
        self.socket.sendall(data.encode())

    def line(self) -> str:
        """Return the next line, or its beginning when the connection ends."""
        return self._file.readline().decode()

    def ask(self, request: str) -> str:
        """Send a line and return the response."""
        self.send(request + "\n")
        return self.line().removesuffix("\n")

    def begin(self, request: str) -> None:
        """Send a command and its arguments in an envelope with the next number."""
        self._asked.append(next(self._numbers))
        self.send(f"V1|{self._asked[-1]}|{request}\n")

    def end(self) -> str:
        """Return the oldest pending request's response without its envelope, whose number must be the request's."""
        head = f"V1|{self._asked.popleft()}|"
        line = self.line()
        assert line.startswith(head), line
        assert line.endswith("\n"), line
        return line[len(head) : -1]

    def say(self, request: str) -> str:
        """Send a command and its arguments; return the response. Both are shown without envelopes."""
        self.begin(request)
        return self.end()


def new_topic(port: str) -> str:
    """Return a topic that no other test uses."""
    return f"t{next(TOPICS)}-{port}"


def talk(broker: BrokerProcess, port: str, *lines: str) -> None:
    """Run a dialogue, given as lines.

    A line has the client, ``>`` or ``<`` for a request or its expected response, and the text without envelope, or
    after ``>>`` and ``<<`` the whole line. ``~`` repeats the request before ``->`` until the response is the one after
    it. ``$`` is a topic of this dialogue only. An expected response that ends in ``…`` is a prefix.
    """
    topic = new_topic(port)
    with ExitStack() as stack:
        peers: dict[str, Peer] = {}
        for line in lines:
            who, text = line[0], line[1:].replace("$", topic)
            if who not in peers:
                peers[who] = stack.enter_context(Peer(broker, port))
            sign, _, text = text.partition(" ")
            if sign == ">":
                peers[who].begin(text)
            elif sign == ">>":
                peers[who].send(text + "\n")
            elif sign == "~":
                request, _, wanted = text.partition(" -> ")
                until_answered(peers[who], request, wanted)
            else:
                answer = peers[who].end() if sign == "<" else peers[who].line().removesuffix("\n")
                same = answer.startswith(text[:-1]) if text.endswith("…") else answer == text
                assert same, f"{line}\nanswered {answer}"


def until_answered(peer: Peer, request: str, wanted: str) -> None:
    """Repeat a request until this is the response, for effects outside this connection."""
    end = time.monotonic() + WAIT_S
    while (answer := peer.say(request)) != wanted:
        assert time.monotonic() < end, answer
        time.sleep(0.01)


def field(payload: str, name: str) -> str:
    """Return a field of a response as the clients find it: up to the next space; ``messages`` up to ``hw``."""
    _, found, rest = f" {payload.removeprefix('OK|')}".partition(f" {name}=")
    assert found, payload
    if rest.startswith("["):
        return rest.partition("]")[0] + "]"
    return rest.rpartition(" hw=")[0] if name == "messages" else rest.partition(" ")[0]


def consumed(line: str) -> tuple[list[tuple[int, str]], int]:
    """Return records and hw of a CONSUME reply whose values contain no comma."""
    head, found, rest = line.removesuffix("\n").partition("|OK|messages=")
    assert found, line[:200]
    assert head.startswith("V1|"), line[:200]
    values, _, hw = rest.rpartition(" hw=")
    records = [entry.partition(":") for entry in values.split(",") if entry]
    return [(int(offset), value) for offset, _, value in records], int(hw)
