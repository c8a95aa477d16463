"""A Cursus connection without a socket: request bodies in, response bodies out."""

from __future__ import annotations

from polywire.broker.settings import BrokerSettings
from polywire.protocols.cursus.context import CursusSettings
from polywire.protocols.cursus.factory import CursusFactory
from polywire.protocols.cursus.messages import enveloped, frame
from tests.unit.protocols import dialogue


class World(dialogue.World[CursusFactory]):
    """The Cursus protocol over a broker in memory."""

    def __init__(self, *, broker: BrokerSettings | None = None, cursus: CursusSettings | None = None) -> None:
        super().__init__(lambda opened: CursusFactory(opened, cursus), broker)

    def connect(self) -> Dialogue:
        """Open a new connection."""
        return Dialogue(self)


class Dialogue(dialogue.Dialogue):
    """One connection."""

    local = ("127.0.0.1", 9000)

    def take_bodies(self) -> list[bytes]:
        """Return the bodies of the frames sent since the last call."""
        sent, bodies, at = self.take(), [], 0
        while at < len(sent):
            end = at + 4 + int.from_bytes(sent[at : at + 4], "big")
            assert end <= len(sent), "a frame was sent in part"
            bodies.append(sent[at + 4 : end])
            at = end
        return bodies

    def say(self, body: bytes) -> list[bytes]:
        """Send one request body and return the response bodies."""
        self.feed(frame(body))
        self.pass_by()
        return self.take_bodies()

    def ask(self, text: str | bytes, topic: str | None = None) -> str:
        """Send a command, raw or in an envelope, and return its only response."""
        body = text.encode() if isinstance(text, str) else text
        answers = self.say(body if topic is None else enveloped(topic, body))
        assert len(answers) == 1, answers
        return answers[0].decode()
