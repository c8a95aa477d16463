"""The recorded exchanges, replayed: one by one, pipelined, split at every byte."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.unit.protocols.flux.dialogue import Dialogue, World

HERE: Final = Path(__file__).parent
_ESCAPE: Final = re.compile(r"\\(r|n|t|x[0-9a-f]{2})")
_PLAIN: Final = {"r": b"\r", "n": b"\n", "t": b"\t"}


@dataclass(frozen=True)
class Step:
    """One line of a vector file: the action, the connection, and the bytes."""

    line: int
    kind: str
    peer: str
    data: bytes
    seconds: float = 0.0


def unescape(text: str) -> bytes:
    parts = _ESCAPE.split(text)
    plain = [part.encode() for part in parts[::2]]
    odd = [_PLAIN.get(part) or bytes([int(part[1:], 16)]) for part in parts[1::2]]
    return b"".join(a + b for a, b in zip(plain, [*odd, b""], strict=True))


def read_steps(name: str) -> list[Step]:
    steps = []
    for number, line in enumerate((HERE / name).read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("~"):
            steps.append(Step(number, "~", "", b"", float(line[1:])))
        elif line[1:2] in (">", "<"):
            steps.append(Step(number, line[1], line[0], unescape(line[3:]) + b"\n"))
        else:
            assert line.startswith("#"), f"{name}:{number} is no step: {line!r}"
    return steps


class Stage:
    """Two connections and their responses."""

    def __init__(self) -> None:
        self.world = World()
        self.peers: dict[str, Dialogue] = {}
        self.index = 0

    def peer(self, name: str) -> Dialogue:
        return self.peers.setdefault(name, self.world.connect())

    def expect(self, got: bytes, step: Step) -> None:
        """Compare, with a growing number for ``<index>``."""
        head, placeholder, tail = step.data.partition(b"<index>")
        if not placeholder:
            assert got == step.data, f"line {step.line}"
            return
        assert got.startswith(head), f"line {step.line}"
        assert got.endswith(tail), f"line {step.line}"
        index = int(got[len(head) : len(got) - len(tail)])
        assert index > self.index, f"line {step.line}: the index did not grow"
        self.index = index


@pytest.mark.parametrize("name", ["worked.txt", "rules.txt"])
def test_one_by_one(name: str) -> None:
    stage = Stage()
    for step in read_steps(name):
        if step.kind == "~":
            stage.world.memory.advance(step.seconds)
        elif step.kind == ">":
            peer = stage.peer(step.peer)
            peer.feed(step.data)
            peer.pass_by()
        else:
            peer = stage.peer(step.peer)
            got = bytes(peer.sent)
            end = got.index(b"\n") + 1
            del peer.sent[:end]
            stage.expect(got[:end], step)
    assert all(not peer.sent for peer in stage.peers.values()), "an unexpected response"


def conversation(name: str) -> tuple[bytes, list[Step]]:
    """Return the first connection's steps until time passes or the other one gets a response: they can be pipelined."""
    sent, answers = b"", []
    for step in read_steps(name):
        if step.kind == "~" or step.peer != "a":
            break
        if step.kind == ">":
            sent += step.data
        else:
            answers.append(step)
    return sent, answers


@pytest.mark.parametrize("name", ["worked.txt", "rules.txt"])
def test_pipelined(name: str) -> None:
    sent, answers = conversation(name)
    stage = Stage()
    peer = stage.peer("a")
    peer.feed(sent)
    peer.pass_by()
    for got, step in zip(peer.take().splitlines(keepends=True), answers, strict=True):
        stage.expect(got, step)


@pytest.mark.parametrize("name", ["worked.txt", "rules.txt"])
def test_split_at_every_byte(name: str) -> None:
    sent, answers = conversation(name)
    expected = [step.data for step in answers]
    for cut in range(1, len(sent)):
        peer = World().connect()
        peer.feed(sent[:cut])
        if cut % 2:
            peer.pass_by()
        peer.feed(sent[cut:])
        peer.pass_by()
        assert peer.take().splitlines(keepends=True) == expected, f"split at {cut}"


@pytest.mark.parametrize("name", ["worked.txt", "rules.txt"])
def test_byte_by_byte(name: str) -> None:
    sent, answers = conversation(name)
    peer = World().connect()
    for at in range(len(sent)):
        peer.feed(sent[at : at + 1])
    peer.pass_by()
    assert peer.take() == b"".join(step.data for step in answers)
