"""Iggy connections to several shards in memory, and to one."""

from __future__ import annotations

import time
from itertools import count
from struct import pack, unpack_from

from polywire.errors import PeerError
from polywire.protocols.iggy.context import IggySettings
from polywire.protocols.iggy.factory import CarryingIggyFactory, IggyFactory, IggyLinkFactory
from polywire.protocols.runtime.shards import KEY_BYTES
from tests.unit.protocols.iggy.dialogue import classic, headered
from tests.unit.protocols.polywire.peer import CapturedOutput
from tests.unit.protocols.shards_in_memory import MemoryShards, ShardedConversation

KEY = bytes(range(KEY_BYTES))
WAIT_S = 10.0


class Output(CapturedOutput):
    """Records why a connection was closed."""

    failed: PeerError | None = None

    def fail(self, error: PeerError) -> None:
        self.failed = error


class Conversation(ShardedConversation):
    """One connection to the process of shard ``own``."""

    output: Output

    def __init__(self, shards: MemoryShards, own: int = 0, *, dialect: str = "auto") -> None:
        output = Output()
        output.peer = f"10.0.0.{own}:{id(self) % 60_000}"
        seen = MemoryShards.__new__(MemoryShards)  # the same shards, as this process sees them
        seen.__dict__.update(shards.__dict__, own=own)
        link = shards.factories[own]
        assert isinstance(link, IggyLinkFactory)
        self.factory = link._inside
        factory = self.factory if shards.count == 1 else CarryingIggyFactory(self.factory, seen)
        super().__init__(shards, factory, output)

    def say(self, *frames: bytes) -> None:
        self.feed(b"".join(frames))
        self.pass_by()

    def wait(self) -> bytes:
        """Return what arrives; a password may have to be hashed meanwhile."""
        end = time.monotonic() + WAIT_S
        while not self.output.written:
            assert time.monotonic() < end, "no response arrived"
            time.sleep(0.001)
            self.pass_by()
        return self.take()

    def ask(self, code: int, payload: bytes = b"") -> tuple[int, bytes]:
        """Return the status and payload of the response to a classic request."""
        self.say(classic(code, payload))
        answer = self.wait()
        status, size = unpack_from("<II", answer)
        assert size == len(answer) - 8
        return status, answer[8:]

    def headered(self, operation: int, body: bytes = b"", *, code: int = 0, number: int = 0) -> tuple[int, bytes]:
        """Return the status and body of the response to a request of the headered framing."""
        self.say(headered(operation, body, code=code, number=number))
        answer = self.wait()
        assert answer[60] == 8
        return unpack_from("<I", answer, 216)[0], answer[256:]

    def close(self) -> None:
        self.session.close()
        self.pass_by()


def make_shards(shard_count: int, *, dialect: str = "auto") -> MemoryShards:
    """Create shards that serve the Iggy protocol."""
    numbers, settings = count(), IggySettings(dialect=dialect)
    return MemoryShards(
        lambda broker: IggyLinkFactory(
            IggyFactory(broker, settings, shard=None if shard_count == 1 else next(numbers)), KEY
        ),
        shard_count,
    )


def log_in(conversation: Conversation) -> None:
    """Log in as the default user of an open broker."""
    assert conversation.ask(38, b"\4iggy\4iggy")[0] == 0


def ident(named: int | str) -> bytes:
    """Return the identifier of a stream, topic, group or consumer as requests encode it."""
    if isinstance(named, int):
        return pack("<BBI", 1, 4, named)
    encoded = named.encode()
    return bytes((2, len(encoded))) + encoded
