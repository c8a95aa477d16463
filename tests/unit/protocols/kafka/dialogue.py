"""A Kafka connection without a socket: requests encoded and responses decoded as a client does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polywire.broker.settings import BrokerSettings
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.context import KafkaSettings
from polywire.protocols.kafka.factory import KafkaFactory
from polywire.protocols.kafka.messages import SERVED, Api
from tests.unit.protocols import dialogue


class World(dialogue.World[KafkaFactory]):
    """The Kafka protocol over a broker in memory."""

    def __init__(
        self, *, broker: BrokerSettings | None = None, kafka: KafkaSettings | None = None, now_us: int | None = None
    ) -> None:
        super().__init__(lambda opened: KafkaFactory(opened, kafka), broker, now_us=now_us)

    def connect(self) -> Dialogue:
        """Open a new connection."""
        return Dialogue(self)


class Dialogue(dialogue.Dialogue):
    """One connection."""

    local = ("127.0.0.1", 9094)
    number = 0

    def tell(self, api: Api, version: int, body: Any) -> int:
        """Send a request without waiting; return its correlation id."""
        self.number += 1
        self.feed(encode_request(api, version, self.number, body, client_id="test"))
        return self.number

    def ask(self, api: Api, version: int | None = None, /, **fields: Any) -> Any:
        """Return the body of the response, by default in the highest version that is served."""
        version = SERVED[api].last if version is None else version
        number = self.tell(api, version, schema.request(api)(**fields))
        self.pass_by()
        correlation, body = decode_response(api, version, next(self.frames()))
        assert correlation == number
        return body

    def frames(self) -> Iterator[bytes]:
        """Return the responses sent since the last call, without their lengths."""
        sent = self.take()
        while sent:
            size = int.from_bytes(sent[:4], "big")
            yield sent[4 : 4 + size]
            sent = sent[4 + size :]
