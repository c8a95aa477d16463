"""Links with responses in request order: split responses, unrequested responses, and lost links."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from polywire.protocols.runtime.links import AnsweredLink
from polywire.protocols.runtime.shards import Link, LinkPeer, Shards


class _Wire:
    """Implements the parts of ``Shards`` and ``Link`` that a link uses."""

    def connect(self, shard: int, peer: LinkPeer) -> Link:
        del shard, peer
        return cast(Link, self)


class _Owner:
    """Implements ``LinksOwner``."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def link_lost(self, shard: int) -> None:
        self._seen.append(f"lost {shard}")

    def relieved(self) -> None:
        self._seen.append("relieved")


class _Lines(AnsweredLink[Callable[[str], None]]):
    """Responses are lines."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__(cast(Shards, _Wire()), 7, _Owner(seen))
        self._seen = seen

    def ask(self, word: str) -> None:
        self._asked.append(lambda answer: self._seen.append(f"{word}={answer}"))

    def _take_answer(self, received: bytearray, at: int) -> int:
        end = received.find(b"\n", at) + 1
        if end:
            self._asked.popleft()(received[at : end - 1].decode())
        return end

    def _not_answered(self, asked: Callable[[str], None]) -> None:
        asked("never")

    def _handed_on(self) -> None:
        self._seen.append("handed on")


@pytest.mark.parametrize("size", range(1, 8))
def test_responses_are_delivered_in_order_however_they_are_split(size: int) -> None:
    seen: list[str] = []
    link = _Lines(seen)
    for word in "ab":
        link.ask(word)
    data = b"1\n22\n"
    for at in range(0, len(data), size):
        link.received(data[at : at + size])
    assert [line for line in seen if line != "handed on"] == ["a=1", "b=22"]
    assert seen[-1] == "handed on"
    assert seen.count("handed on") == (1 if size >= len(data) else 2)


def test_a_response_without_a_request_is_held() -> None:
    seen: list[str] = []
    link = _Lines(seen)
    link.received(b"1\n")
    assert seen == []
    link.ask("a")
    link.received(b"2\n")
    assert seen == ["a=1", "handed on"]


def test_the_owner_is_notified_of_a_lost_link_before_pending_requests() -> None:
    seen: list[str] = []
    link = _Lines(seen)
    for word in "ab":
        link.ask(word)
    link.received(b"1\n2")
    link.lost()
    assert seen == ["a=1", "handed on", "lost 7", "b=never"]
