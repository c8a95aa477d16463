"""A session's link to one shard: opening, login and complete frames (spec: polywire#opening)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from polywire.protocols.polywire.codec import MAGIC, PREFIX_BYTES, Prefix, decode_answer_prefix
from polywire.protocols.runtime.links import LinksOwner, WireLink
from polywire.protocols.runtime.shards import Shards


class FramesOwner(LinksOwner, Protocol):
    """Receiver of a link's frames."""

    def frames_came(self, shard: int, frames: Sequence[tuple[Prefix, bytes]]) -> None: ...


class ShardLink(WireLink):
    """A link to one shard. ``_expected`` counts the frames at the start that answer no request of the client.

    They are the shard's limits, and the response to the login.
    """

    __slots__ = ("_expected", "_frames", "_is_open", "_received")

    def __init__(self, shards: Shards, shard: int, owner: FramesOwner, login: bytes) -> None:
        """Open the link. ``login`` is the client's login frame, or empty if it has not logged in."""
        super().__init__(shards, shard, owner)
        self._frames: Final = owner
        self._received = bytearray()
        self._is_open = False
        self._expected = 2 if login else 1
        self.write(MAGIC + login)

    def received(self, data: bytes) -> None:
        """Pass on complete frames."""
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
        """Return the bytes of the opening once it is complete."""
        self._is_open = len(self._received) >= len(MAGIC)
        return len(MAGIC) if self._is_open else 0
