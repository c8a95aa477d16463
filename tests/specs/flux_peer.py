"""What the tests of the FLUX pages share: a connection to a broker process, and dialogues written as lines."""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import ExitStack
from itertools import count
from typing import Final

from tests.broker_process import BrokerProcess

WAIT_S: Final = 60.0
PORTS: Final = ("flux", "any")  # the wire's own port, and that of all wires
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
        """The next line; what there is of it when the connection ends."""
        return self._file.readline().decode()

    def ask(self, request: str) -> str:
        """The answer to a line."""
        self.send(request + "\n")
        return self.line().removesuffix("\n")

    def begin(self, request: str) -> None:
        """Send a command and its arguments, in an envelope with the next number."""
        self._asked.append(next(self._numbers))
        self.send(f"V1|{self._asked[-1]}|{request}\n")

    def end(self) -> str:
        """The answer to what was begun first, without its envelope, whose number must be the request's."""
        head = f"V1|{self._asked.popleft()}|"
        line = self.line()
        assert line.startswith(head), line
        assert line.endswith("\n"), line
        return line[len(head) : -1]

    def say(self, request: str) -> str:
        """The answer to a command and its arguments, without envelopes."""
        self.begin(request)
        return self.end()


def new_topic(port: str) -> str:
    """A topic that no other test uses."""
    return f"t{next(TOPICS)}-{port}"


def talk(broker: BrokerProcess, port: str, *lines: str) -> None:
    """Hold a dialogue. A line is who speaks, ``>`` or ``<`` for what is asked and what must be answered, and the text: that of one
    envelope, or after ``>>`` and ``<<`` of a whole line. ``~`` asks what is before ``->`` until what is behind it is answered. ``$`` stands
    for a topic that no other dialogue has; an answer that ends in ``…`` begins so.
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
    """Ask again until this is the answer, for what happens beside this connection."""
    end = time.monotonic() + WAIT_S
    while (answer := peer.say(request)) != wanted:
        assert time.monotonic() < end, answer
        time.sleep(0.01)


def field(payload: str, name: str) -> str:
    """A field of an answer, found as the wire's clients find it: behind its name, up to the next space; ``messages`` up to ``hw``."""
    _, found, rest = f" {payload.removeprefix('OK|')}".partition(f" {name}=")
    assert found, payload
    if rest.startswith("["):
        return rest.partition("]")[0] + "]"
    return rest.rpartition(" hw=")[0] if name == "messages" else rest.partition(" ")[0]


def consumed(line: str) -> tuple[list[tuple[int, str]], int]:
    """Records and hw of a CONSUME reply with values that hold no comma."""
    head, found, rest = line.removesuffix("\n").partition("|OK|messages=")
    assert found, line[:200]
    assert head.startswith("V1|"), line[:200]
    values, _, hw = rest.rpartition(" hw=")
    records = [entry.partition(":") for entry in values.split(",") if entry]
    return [(int(offset), value) for offset, _, value in records], int(hw)
