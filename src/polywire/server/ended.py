"""What a connection has for a transport once its socket is gone.

Transports keep their protocol for ever, and a protocol has its transport.

Promises: with this in its place, a closed connection is freed at once, and never waits for a collection of garbage, which holds the loop.
Must not know: what the connection was.
"""

from __future__ import annotations

from typing import Any, Final

KEPT: Final = ("peername", "sockname")


class EndedTransport:
    """Sends and reads nothing any more; still tells whose it was."""

    __slots__ = ("_extra",)

    def __init__(self, transport: Any) -> None:
        self._extra = {name: transport.get_extra_info(name) for name in KEPT}

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is still known."""
        return self._extra.get(name, default)

    def is_closing(self) -> bool:
        """It is closed."""
        return True

    def get_write_buffer_size(self) -> int:
        """Nothing waits."""
        return 0

    def close(self) -> None:
        """It is closed."""

    abort = close
