"""The receiving end of a link: a FLUX session whose client is another process of this broker (decision 0127).

If the other process exits while it sends a line, the partial line is discarded.
"""

from __future__ import annotations

from polywire.protocols.flux.session import FluxSession


class LinkedFluxSession(FluxSession):
    """One link."""

    def finish(self, data: memoryview) -> None:
        """Drop an incomplete line at the end.

        The other process sends only complete lines. It has therefore exited while it sent this line.
        """
        super().finish(data[: bytes(data).rfind(b"\n") + 1])
