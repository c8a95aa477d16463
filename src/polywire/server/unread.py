"""The number of unread bytes in a socket."""

from __future__ import annotations

from fcntl import ioctl
from sys import byteorder
from termios import FIONREAD
from typing import Any


def unread_bytes(transport: Any) -> int:
    """Return how many bytes the socket has received that the event loop has not read yet; 0 if it is closed."""
    try:
        return int.from_bytes(ioctl(transport.get_extra_info("socket").fileno(), FIONREAD, bytes(4)), byteorder)
    except (AttributeError, OSError, ValueError):
        return 0
