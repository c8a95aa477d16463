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

# responses of one shard that are buffered until earlier ones of other shards have arrived
HELD_BYTES_MAX: Final = 1024 * 1024
_TOPICS: Final = b"|OK|topics=["


class RepliesOwner(LinksOwner, Protocol):
    def came(self) -> None: ...


class Replies:
    """Responses received from one shard. ``held`` has the bytes that were not sent to the client yet."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = bytearray()

    def take(self, count: int) -> tuple[bytes, int]:
        """Remove and return up to ``count`` lines, including a part of the last.

        Also return how many lines are complete.
        """
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
    """The responses of this shard, which its session writes here as its ``Output``.

    They are buffered until they are next in the order of the client's responses.
    """

    __slots__ = ("_output", "_replied", "_room", "_was_full", "is_ended")

    def __init__(self, output: Output, replied: Callable[[], None]) -> None:
        super().__init__()
        self._output: Final = output
        self._replied: Final = replied
        self._was_full = False
        self.is_ended = False
        self._room: Callable[[], object] = replied

    def on_room(self, callback: Callable[[], object]) -> None:
        """``regulate`` calls ``callback`` when the output was full and has space again."""
        self._room = callback

    @property
    def backlog(self) -> int:
        size = self._output.backlog + len(self.held)
        self._was_full |= size >= self.backlog_max
        return size

    @property
    def backlog_max(self) -> int:
        return self._output.backlog_max

    @property
    def peer(self) -> str:
        return self._output.peer

    @property
    def certified(self) -> Principal | None:
        return self._output.certified

    @property
    def local(self) -> tuple[str, int]:
        return self._output.local

    @property
    def on_loopback(self) -> bool:
        return self._output.on_loopback

    def write(self, data: Buffer) -> None:
        self.held += data
        self._replied()

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        for part in parts:
            self.held += part
        if released is not None:
            released()
        self._replied()

    def close(self) -> None:
        self.is_ended = True
        self._replied()

    def fail(self, error: PeerError) -> None:
        self._output.fail(error)

    def identified(self, principal: Principal | None) -> None:
        self._output.identified(principal)

    def pin(self) -> Callable[[], None]:
        return self._output.pin()

    def regulate(self) -> None:
        """Notify the session of this shard if its output was full and has space again."""
        if self._was_full and self._output.backlog + len(self.held) < self.backlog_max:
            self._was_full = False
            self._room()


class ShardReplies(Replies, WireLink):
    __slots__ = ("_is_paused", "_replied")

    def __init__(self, shards: Shards, shard: int, owner: RepliesOwner) -> None:
        Replies.__init__(self)
        self._replied: Final = owner.came
        self._is_paused = False
        WireLink.__init__(self, shards, shard, owner)

    def regulate(self, *, is_full: bool) -> None:
        """Stop reading from the shard while the client does not read, or too much is buffered."""
        pauses = is_full or len(self.held) > HELD_BYTES_MAX
        if pauses != self._is_paused:
            self._is_paused = pauses
            if pauses:
                self.pause()
            else:
                self.resume()

    def received(self, data: bytes) -> None:
        self.held += data
        self._replied()


class Part(ABC):
    """Responses that are sent to the client one after the other, with no others in between."""

    @abstractmethod
    def advance(self, written: list[bytes]) -> bool:
        """Add the responses that have arrived to ``written``. Return whether the part is complete."""

    def rests_on(self, replies: Replies) -> bool:
        """Return whether the part still needs responses from this shard."""
        return False


class Lines(Part):
    """The next responses of one shard. ``count`` is how many have not been sent."""

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
    __slots__ = ("_answer",)

    def __init__(self, answer: bytes) -> None:
        self._answer: Final = answer

    def advance(self, written: list[bytes]) -> bool:
        written.append(self._answer)
        return True


class Merged(Part):
    """One response to a metadata request: the topics of all shards, and all other fields from the first shard."""

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
    """Merge one line of each shard to a single line. If any is an error, return the first error."""
    topics: list[bytes] = []
    for answer in answers:
        head, separator, behind = answer.partition(_TOPICS)
        if not separator:
            return answer
        topics += behind.partition(b"]")[0].split()
    head, _, behind = answers[0].partition(_TOPICS)
    return head + _TOPICS + b" ".join(sorted(topics)) + b"]" + behind.partition(b"]")[2]
