"""A Kafka 0.7 connection without a socket: request frames in, responses out."""

from __future__ import annotations

from polywire.broker.settings import BrokerSettings
from polywire.protocols.kafka07.factory import Kafka07Factory
from tests.unit.protocols import dialogue


class World(dialogue.World[Kafka07Factory]):
    """The Kafka 0.7 protocol over a broker in memory."""

    def __init__(self, broker: BrokerSettings | None = None) -> None:
        super().__init__(Kafka07Factory, broker)

    def connect(self) -> Dialogue:
        """Open a new connection."""
        return Dialogue(self)


class Dialogue(dialogue.Dialogue):
    """One connection. ``patient``: whether ``feed`` waits for work off the event loop."""

    patient = True

    def feed(self, data: bytes) -> None:
        super().feed(data)
        if self.patient:
            self.settle()

    def settle(self) -> None:
        """Run until work off the event loop is done."""
        while self.pins:
            self.pass_by()

    def ask(self, frame: bytes) -> bytes:
        """Send one request; return its response with its length."""
        return self.exchange(frame)
