"""The other end of a link: a FLUX session whose peer is another process of this broker (decision 0127).

Promises: a line counts once all of it has come. Must not know: sockets, which process it is.
"""

from __future__ import annotations

from polywire.protocols.flux.session import FluxSession


class LinkedFluxSession(FluxSession):
    """One link."""

    def finish(self, data: memoryview) -> None:
        """The process at the other end has gone: it ends every line that it carries, so what is left was cut off, maybe in the midst of a
        record."""
        super().finish(data[: bytes(data).rfind(b"\n") + 1])
