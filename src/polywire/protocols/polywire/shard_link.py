"""A connection's link to one shard: the opening, and whole frames of what comes (protocols: polywire#opening).

Promises: a frame is handed on when all of it is there; the peer is logged in there as it is here. Must not know: sockets, what frames ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from polywire.protocols.polywire.codec import MAGIC, PREFIX_BYTES, Prefix, decode_answer_prefix
from polywire.protocols.runtime.shards import Shards


class LinkOwner(Protocol):
    """What a link asks of its session."""

    @property
    def shards(self) -> Shards: ...

    def frames_came(self, shard: int, frames: Sequence[tuple[Prefix, bytes]]) -> None: ...

    def link_lost(self, shard: int) -> None: ...

    def relieved(self) -> None: ...


class ShardLink:
    """Implements ``LinkPeer``. Guards: ``_expected`` frames that nobody has asked for come first: the greeting, and what a login is
    answered."""

    __slots__ = ("_expected", "_is_open", "_link", "_owner", "_received", "_shard")

    def __init__(self, owner: LinkOwner, shard: int, login: bytes) -> None:
        """login: the frame by which the peer has logged in, empty where it has not."""
        self._owner: Final = owner
        self._shard: Final = shard
        self._received = bytearray()
        self._is_open = False
        self._expected = 2 if login else 1
        self._link: Final = owner.shards.connect(shard, self)
        self._link.write(MAGIC + login)

    @property
    def is_clogged(self) -> bool:
        """Whether the shard takes less than is sent."""
        return self._link.backlog > self._link.backlog_max

    def write(self, frame: bytes) -> None:
        """Send a request."""
        self._link.write(frame)

    def pause(self) -> None:
        """The peer takes nothing for now."""
        self._link.pause()

    def resume(self) -> None:
        """The peer takes answers again."""
        self._link.resume()

    def close(self) -> None:
        """Nobody waits for answers any more."""
        self._link.close()

    def relieved(self) -> None:
        """See ``LinkPeer``."""
        self._owner.relieved()

    def lost(self) -> None:
        """See ``LinkPeer``."""
        self._owner.link_lost(self._shard)

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
            self._owner.frames_came(self._shard, frames)

    def _opened(self) -> int:
        """Bytes of the opening, once all of them are there."""
        self._is_open = len(self._received) >= len(MAGIC)
        return len(MAGIC) if self._is_open else 0
