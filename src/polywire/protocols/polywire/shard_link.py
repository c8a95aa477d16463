"""A connection's link to one shard: the opening, and whole frames of what comes (spec: polywire#opening).

Promises: a frame is handed on when all of it is there; the peer is logged in there as it is here. Must not know: sockets, what frames ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from polywire.protocols.polywire.codec import MAGIC, PREFIX_BYTES, Prefix, decode_answer_prefix
from polywire.protocols.runtime.links import LinksOwner, WireLink
from polywire.protocols.runtime.shards import Shards


class FramesOwner(LinksOwner, Protocol):
    """What a link tells its session."""

    def frames_came(self, shard: int, frames: Sequence[tuple[Prefix, bytes]]) -> None: ...


class ShardLink(WireLink):
    """Guards: ``_expected`` frames that nobody has asked for come first: the greeting, and what a login is answered."""

    __slots__ = ("_expected", "_frames", "_is_open", "_received")

    def __init__(self, shards: Shards, shard: int, owner: FramesOwner, login: bytes) -> None:
        """login: the frame by which the peer has logged in, empty where it has not."""
        super().__init__(shards, shard, owner)
        self._frames: Final = owner
        self._received = bytearray()
        self._is_open = False
        self._expected = 2 if login else 1
        self.write(MAGIC + login)

    def received(self, data: bytes) -> None:
        """Hand on whole frames."""
        self._received += data
        frames: list[tuple[Prefix, bytes]] = []
        at = 0 if self._is_open else self._opened()
        with memoryview(self._received) as view:
            while self._is_open and len(view) - at >= PREFIX_BYTES:
                prefix = decode_answer_prefix(view, at)
                end = at + PREFIX_BYTES + prefix.length
                if end > len(view):
                    break
                if self._expected:
                    self._expected -= 1
                else:
                    frames.append((prefix, bytes(view[at:end])))
                at = end
        del self._received[:at]
        if frames:
            self._frames.frames_came(self.shard, frames)

    def _opened(self) -> int:
        """Bytes of the opening, once all of them are there."""
        self._is_open = len(self._received) >= len(MAGIC)
        return len(MAGIC) if self._is_open else 0
