"""The common part of Kafka clients with one request at a time; responses are decoded for the waiting code."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.messages import Api, WireError
from tests.sim.chance import Chance
from tests.sim.promises import require
from tests.sim.story import Story
from tests.sim.wires.lone_peer import LonePeer
from tests.sim.wires.ordered_speech import framed_end

Then = Callable[[Any], None]
"""Handles a response."""


class LoneKafkaPeer(LonePeer):
    """Implements ``Caller``. Guards: ``_asked`` is the outstanding request."""

    wire = "kafka"

    def __init__(self, name: str, versions: Mapping[Api, int], chance: Chance, story: Story) -> None:
        """name: its client id. versions: of its requests."""
        super().__init__(chance, story)
        self.name: Final = name
        self._versions: Final = versions
        self._asked: tuple[Api, Then] | None = None

    def disconnected(self) -> None:
        """Note the loss of the connection and of the request."""
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
        """Make the next request."""

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
    """Return the first error of a response, of the whole or of its first item."""
    topics = getattr(body, "responses", None) or getattr(body, "topics", None)
    return WireError(topics[0].partitions[0].error if topics else body.error)
