"""A FLUX connection without a socket: request lines in, response lines out."""

from __future__ import annotations

from polywire.broker.settings import BrokerSettings
from polywire.protocols.flux.context import FluxSettings
from polywire.protocols.flux.factory import FluxFactory
from tests.unit.protocols import dialogue


class World(dialogue.World[FluxFactory]):
    """The FLUX protocol over a broker in memory."""

    def __init__(self, *, broker: BrokerSettings | None = None, flux: FluxSettings | None = None) -> None:
        super().__init__(lambda opened: FluxFactory(opened, flux), broker)

    def connect(self) -> Dialogue:
        """Open a new connection."""
        return Dialogue(self)


class Dialogue(dialogue.Dialogue):
    """One connection."""

    def ask(self, line: str | bytes) -> str:
        """Send one request and return its response, without line endings."""
        answer = self.exchange((line if isinstance(line, bytes) else line.encode()) + b"\n")
        return answer.decode("utf-8", "surrogateescape").removesuffix("\n")
