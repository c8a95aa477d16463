"""The sending end of a link: one process of a broker sends Kafka requests to another (decision 0128).

A link opens with ``MAGIC``, the key of the broker's processes, and a frame that identifies the client::

    8 bytes magic · 16 bytes key · u32 size of the rest · JSON: ``Context``

Responses arrive in the order of their requests. If the other process ends, the callback of each pending request gets
None.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.messages import Api
from polywire.protocols.runtime.links import LinksOwner, WireLink
from polywire.protocols.runtime.shards import KEY_BYTES, Shards

MAGIC: Final = b"\xf3KAFKA\0\1"
OPENING_BYTES: Final = len(MAGIC) + KEY_BYTES
LENGTH_BYTES: Final = 4

Then = Callable[[Any], None]
"""Called with the body of a response, or with None if there will be none."""


class Context(NamedTuple):
    """The client's identity and addresses, sent when a link opens.

    * ``user``: the client's user, or None if authentication is off.
    * ``peer``: the client's address.
    * ``host``, ``listener``: the address and the listener that the client connected to.
    * ``shard``, ``start``: the shard that opened the link, and the number of its broker's start.
    """

    user: str | None
    peer: str
    host: str
    listener: str
    shard: int
    start: int

    def encode(self) -> bytes:
        body = json.dumps(self).encode()
        return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode_context(body: memoryview) -> Context:
    """Decode a context without its length. It is trusted, because a process of this broker has sent it."""
    return Context(*json.loads(bytes(body)))


class ContextOwner(LinksOwner, Protocol):
    @property
    def context(self) -> Context: ...


class KafkaLink(WireLink):
    """The sending end of a link.

    ``_asked`` has the pending requests in the order in which they were sent, each with its callback.
    """

    def __init__(self, shards: Shards, shard: int, owner: ContextOwner) -> None:
        super().__init__(shards, shard, owner)
        self._asked: deque[tuple[Api, int, Then]] = deque()
        self._received = bytearray()
        self._count = 0
        self.write(MAGIC + shards.key + owner.context.encode())

    def ask(self, api: Api, version: int, body: Any, then: Then, *, client_id: str | None) -> None:
        self._count = (self._count + 1) % (1 << 31)
        self._asked.append((api, version, then))
        self.write(encode_request(api, version, self._count, body, client_id=client_id))

    def received(self, data: bytes) -> None:
        self._received += data
        while self._asked and len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "big")
            if end > len(self._received):
                break
            frame = bytes(memoryview(self._received)[LENGTH_BYTES:end])
            del self._received[:end]
            api, version, then = self._asked.popleft()
            then(decode_response(api, version, frame)[1])

    def lost(self) -> None:
        """Pending requests get None, because the other process has ended."""
        asked, self._asked = self._asked, deque()
        super().lost()
        for _, _, then in asked:
            then(None)
