"""Deliver the replies of several shards to one client, in the order of its requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from polywire.broker.access import Principal
from polywire.errors import PeerError
from polywire.protocols.runtime.links import LinksOwner, WireLink
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import Shards
from polywire.types import Buffer

HELD_BYTES_MAX: Final = 1024 * 1024  # of one shard's answers, before their turn
_TOPICS: Final = b"|OK|topics=["


class RepliesOwner(LinksOwner, Protocol):
    """Purpose of a shard's answers."""

    def came(self) -> None: ...


class Replies:
    """Answers received from a shard. ``held`` begins where the last part's answers ended."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = bytearray()

    def take(self, count: int) -> tuple[bytes, int]:
        """Answers, so many lines at most and with what is there of the last; and how many of them are whole."""
        whole = self.held.count(b"\n")
        if whole < count:
            taken = bytes(self.held)
            self.held.clear()
            return taken, whole
        end = 0
        if whole == count:
            end = self.held.rindex(b"\n") + 1
        else:
            for _ in range(count):
                end = self.held.index(b"\n", end) + 1
        taken = bytes(self.held[:end])
        del self.held[:end]
        return taken, count


class OwnReplies(Replies):
    """Implements ``Output`` for a session of our own shard."""

    __slots__ = ("_output", "_replied", "_room", "_was_full", "is_ended")

    def __init__(self, output: Output, replied: Callable[[], None]) -> None:
        super().__init__()
        self._output: Final = output
        self._replied: Final = replied
        self._was_full = False
        self.is_ended = False
        self._room: Callable[[], object] = replied

    def on_room(self, callback: Callable[[], object]) -> None:
        """Call back when the output has space again, after it was full; never from inside a call."""
        self._room = callback

    @property
    def backlog(self) -> int:
        """See ``Output``."""
        size = self._output.backlog + len(self.held)
        self._was_full |= size >= self.backlog_max
        return size

    @property
    def backlog_max(self) -> int:
        """See ``Output``."""
        return self._output.backlog_max

    @property
    def peer(self) -> str:
        """See ``Output``."""
        return self._output.peer

    @property
    def certified(self) -> Principal | None:
        """See ``Output``."""
        return self._output.certified

    @property
    def local(self) -> tuple[str, int]:
        """See ``Output``."""
        return self._output.local

    @property
    def on_loopback(self) -> bool:
        """See ``Output``."""
        return self._output.on_loopback

    def write(self, data: Buffer) -> None:
        """See ``Output``."""
        self.held += data
        self._replied()

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        """See ``Output``."""
        for part in parts:
            self.held += part
        if released is not None:
            released()
        self._replied()

    def close(self) -> None:
        """See ``Output``."""
        self.is_ended = True
        self._replied()

    def fail(self, error: PeerError) -> None:
        """See ``Output``."""
        self._output.fail(error)

    def identified(self, principal: Principal | None) -> None:
        """See ``Output``."""
        self._output.identified(principal)

    def pin(self) -> Callable[[], None]:
        """See ``Output``."""
        return self._output.pin()

    def regulate(self) -> None:
        """Notify a session whose output was full."""
        if self._was_full and self._output.backlog + len(self.held) < self.backlog_max:
            self._was_full = False
            self._room()


class ShardReplies(Replies, WireLink):
    """Answers of another shard."""

    __slots__ = ("_is_paused", "_replied")

    def __init__(self, shards: Shards, shard: int, owner: RepliesOwner) -> None:
        Replies.__init__(self)
        self._replied: Final = owner.came
        self._is_paused = False
        WireLink.__init__(self, shards, shard, owner)

    def regulate(self, *, is_full: bool) -> None:
        """Let answers come, or not, while the peer takes no more or much is kept."""
        pauses = is_full or len(self.held) > HELD_BYTES_MAX
        if pauses != self._is_paused:
            self._is_paused = pauses
            if pauses:
                self.pause()
            else:
                self.resume()

    def received(self, data: bytes) -> None:
        """See ``LinkPeer``."""
        self.held += data
        self._replied()


class Part(ABC):
    """Answers that follow each other."""

    @abstractmethod
    def advance(self, written: list[bytes]) -> bool:
        """Add what is known; whether that is all."""

    def rests_on(self, replies: Replies) -> bool:
        """Whether these have more to say."""
        return False


class Lines(Part):
    """The next answers of one shard. count: how many are left."""

    __slots__ = ("_replies", "count")

    def __init__(self, replies: Replies, count: int) -> None:
        self._replies: Final = replies
        self.count = count

    def advance(self, written: list[bytes]) -> bool:
        if self.count:
            data, whole = self._replies.take(self.count)
            written.append(data)
            self.count -= whole
        return self.count == 0

    def rests_on(self, replies: Replies) -> bool:
        return self._replies is replies


class Said(Part):
    """An answer that is known."""

    __slots__ = ("_answer",)

    def __init__(self, answer: bytes) -> None:
        self._answer: Final = answer

    def advance(self, written: list[bytes]) -> bool:
        written.append(self._answer)
        return True


class Merged(Part):
    """One answer of the metadata of all shards: everybody's topics, and else what the first of them says."""

    __slots__ = ("_answers", "_waiting")

    def __init__(self, replies: Sequence[Replies]) -> None:
        self._waiting: Final = list(reversed(replies))
        self._answers: Final[list[bytes]] = []

    def advance(self, written: list[bytes]) -> bool:
        while self._waiting and b"\n" in self._waiting[-1].held:
            self._answers.append(self._waiting.pop().take(1)[0])
        if not self._waiting:
            written.append(merged(self._answers))
        return not self._waiting

    def rests_on(self, replies: Replies) -> bool:
        return replies in self._waiting


def merged(answers: Sequence[bytes]) -> bytes:
    """One line of several; the first that is an error, if any is."""
    topics: list[bytes] = []
    for answer in answers:
        head, separator, behind = answer.partition(_TOPICS)
        if not separator:
            return answer
        topics += behind.partition(b"]")[0].split()
    head, _, behind = answers[0].partition(_TOPICS)
    return head + _TOPICS + b" ".join(sorted(topics)) + b"]" + behind.partition(b"]")[2]
