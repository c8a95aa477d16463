"""The receiving end of a link: a FLUX session whose client is another process of this broker (decision 0127).

A partial line is discarded.
"""

from __future__ import annotations

from polywire.protocols.flux.session import FluxSession


class LinkedFluxSession(FluxSession):
    """One link."""

    def finish(self, data: memoryview) -> None:
        """The process at the other end has gone: it ends every line that it carries, so what is left was cut off, maybe in the midst of a
        record."""
        super().finish(data[: bytes(data).rfind(b"\n") + 1])
