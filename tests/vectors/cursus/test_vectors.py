"""The exchanges of the specification, replayed: one by one, pipelined, split at every byte."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

import pytest

from polywire.protocols.cursus.messages import enveloped, frame
from tests.unit.protocols.cursus.dialogue import Dialogue, World

HERE: Final = Path(__file__).parent
FILES: Final = sorted(path.name for path in HERE.glob("*.txt"))
_STEP: Final = re.compile(
    r"(?P<peer>\w)(?P<hex>x?)(?::(?P<topic>[\w.=-]*))?(?P<kind>[<>!])(?: (?P<text>.*))?", re.DOTALL
)
_ESCAPE: Final = re.compile(rb"\\(r|n|t|x[0-9a-f]{2})")
_PLAIN: Final = {b"r": b"\r", b"n": b"\n", b"t": b"\t"}


@dataclass(frozen=True)
class Step:
    """One line of a vector file: the action, the connection, and the body."""

    line: int
    kind: str
    peer: str = ""
    body: bytes = b""
    seconds: float = 0.0


def unescape(text: str) -> bytes:
    return _ESCAPE.sub(lambda m: _PLAIN.get(m[1]) or bytes.fromhex(m[1][1:].decode()), text.encode())


def read_step(number: int, line: str) -> Step:
    if line.startswith("~"):
        return Step(number, "~", seconds=float(line[1:]))
    match = _STEP.fullmatch(line)
    assert match is not None, f"line {number} is no step: {line!r}"
    text = match["text"] or ""
    body = bytes.fromhex(text) if match["hex"] else unescape(text)
    topic = match["topic"]
    return Step(number, match["kind"], match["peer"], body if topic is None else enveloped(topic, body))


def read_steps(name: str) -> list[Step]:
    lines = (HERE / name).read_text(encoding="utf-8").split("\n")
    return [read_step(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]


@pytest.fixture(autouse=True)
def members_are_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make member ids predictable: ``A-6410``, ``A-6411``; normally the digits are random."""
    monkeypatch.setattr("polywire.protocols.cursus.groups.secrets.randbelow", lambda _: 6410)


class Stage:
    """The connections of one file and their responses."""

    def __init__(self, feed: Callable[[Dialogue, bytes], None]) -> None:
        self.world = World()
        self.feed = feed
        self.peers: dict[str, Dialogue] = {}
        self.heard: defaultdict[str, list[bytes]] = defaultdict(list)

    def send(self, peer: str, bodies: Iterable[bytes]) -> None:
        """Send everything at once, as far as the way of feeding permits."""
        dialogue = self.peers.setdefault(peer, self.world.connect())
        self.feed(dialogue, b"".join(map(frame, bodies)))
        self.world.memory.run()

    def listen(self) -> None:
        for name, peer in self.peers.items():
            self.heard[name] += peer.take_bodies()

    def check(self, name: str, step: Step) -> None:
        self.listen()
        if step.kind == "!":
            assert self.peers[step.peer].closed, f"{name}:{step.line}"
            return
        assert self.heard[step.peer], f"{name}:{step.line} got no response"
        assert self.heard[step.peer].pop(0) == step.body, f"{name}:{step.line}"

    def end(self) -> None:
        self.listen()
        assert not any(self.heard.values()), dict(self.heard)


def at_once(peer: Dialogue, data: bytes) -> None:
    peer.feed(data)


def byte_by_byte(peer: Dialogue, data: bytes) -> None:
    for byte in data:
        peer.feed(bytes((byte,)))


@pytest.mark.parametrize("feed", [at_once, byte_by_byte])
@pytest.mark.parametrize("name", FILES)
def test_one_by_one(name: str, feed: Callable[[Dialogue, bytes], None]) -> None:
    stage = Stage(feed)
    for step in read_steps(name):
        match step.kind:
            case "~":
                stage.world.memory.advance(step.seconds)
            case ">":
                stage.listen()
                assert not stage.heard[step.peer], f"{name}:{step.line} earlier responses are left"
                stage.send(step.peer, [step.body])
            case _:
                stage.check(name, step)
    stage.end()


@pytest.mark.parametrize("name", FILES)
def test_pipelined(name: str) -> None:
    """Consecutive requests of one connection are sent together; their responses and their order do not change."""
    stage = Stage(at_once)
    for (peer, rest), group in groupby(read_steps(name), key=lambda step: (step.peer, step.kind in "~!")):
        steps = list(group)
        if not rest:
            stage.send(peer, [step.body for step in steps if step.kind == ">"])
            stage.world.memory.advance(0.001)
        for step in steps:
            if step.kind == "~":
                stage.world.memory.advance(step.seconds)
        for step in steps:
            if step.kind in "<!" and not _waits(name, steps):
                stage.check(name, step)
    stage.listen()


def _waits(name: str, steps: list[Step]) -> bool:
    """Files with pauses are compared one by one only."""
    return any(step.kind == "~" for step in read_steps(name)) and bool(steps)
