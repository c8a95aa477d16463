"""What peers of Kafka's wire share that ask for one thing at a time.

Promises: as ``LonePeer``; an answer is given to whoever waits for it, decoded. Must not know: what is right.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.messages import Api, WireError
from polywire.testing.sim.chance import Chance
from polywire.testing.sim.promises import require
from polywire.testing.sim.story import Story
from polywire.testing.sim.wires.lone_peer import LonePeer
from polywire.testing.sim.wires.ordered_speech import framed_end

Then = Callable[[Any], None]
"""What is done with an answer."""


class LoneKafkaPeer(LonePeer):
    """Implements ``Caller``. Guards: ``_asked`` is the request that is not answered."""

    wire = "kafka"

    def __init__(self, name: str, versions: Mapping[Api, int], chance: Chance, story: Story) -> None:
        """name: its client id. versions: of what it asks for."""
        super().__init__(chance, story)
        self.name: Final = name
        self._versions: Final = versions
        self._asked: tuple[Api, Then] | None = None

    def disconnected(self) -> None:
        """The connection is gone, and with it what was asked for."""
        super().disconnected()
        self._asked = None

    def _ask(self, api: Api, then: Then, /, **fields: Any) -> None:
        self._count += 1
        self._story.tell("ask", f"{self.name} {self._count} {api.name}")
        self._asked = api, then
        body = schema.request(api)(**fields)
        self._send(encode_request(api, self._versions[api], self._count, body, client_id=self.name))

    @abstractmethod
    def _step(self) -> None:
        """Ask for the next thing."""

    def received(self, data: bytes) -> None:
        self._buffer += data
        while end := framed_end(self._buffer):
            frame = bytes(self._buffer[4:end])
            del self._buffer[:end]
            asked, self._asked, self._is_waiting = self._asked, None, False
            require(asked is not None, "an answer is to a request", peer=self.name)
            assert asked is not None, "it was looked at"
            _, body = decode_response(asked[0], self._versions[asked[0]], frame)
            self._story.tell("answered", f"{self.name} {self._count} {asked[0].name} {error_of(body).name}")
            asked[1](body)


def error_of(body: Any) -> WireError:
    """What an answer says first that is wrong, as a whole or of what it was asked about first."""
    topics = getattr(body, "responses", None) or getattr(body, "topics", None)
    return WireError(topics[0].partitions[0].error if topics else body.error)
