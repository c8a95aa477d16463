"""The receiving end of a link: a FLUX session whose client is another process of this broker (decision 0127).

A partial line is discarded.
"""

from __future__ import annotations

from polywire.protocols.flux.session import FluxSession


class LinkedFluxSession(FluxSession):
    """One link."""

    def finish(self, data: memoryview) -> None:
        """Drop an incomplete line at the end. The other process sends only complete lines, so it has exited and the
        line was cut off.
        """
        super().finish(data[: bytes(data).rfind(b"\n") + 1])
