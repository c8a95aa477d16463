"""The transport of a closed connection.

An asyncio transport refers to its protocol forever, and the protocol to its transport. Replacing the transport with
this one breaks the cycle. Reference counting then frees the connection, without a garbage collection that blocks the
loop.
"""

from __future__ import annotations

from typing import Any, Final

RETAINED: Final = ("peername", "sockname")


class EndedTransport:
    """A closed transport that still knows the addresses of both ends, for log lines."""

    __slots__ = ("_extra",)

    def __init__(self, transport: Any) -> None:
        self._extra = {name: transport.get_extra_info(name) for name in RETAINED}

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return an address, or the default."""
        return self._extra.get(name, default)

    def is_closing(self) -> bool:
        """Return True."""
        return True

    def get_write_buffer_size(self) -> int:
        """Return 0."""
        return 0

    def close(self) -> None:
        """Do nothing."""

    abort = close
