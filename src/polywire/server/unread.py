"""What lies unread in a socket.

Promises: asking reads nothing, and never fails. Must not know: connections, whose the socket is.
"""

from __future__ import annotations

from fcntl import ioctl
from sys import byteorder
from termios import FIONREAD
from typing import Any


def unread_bytes(transport: Any) -> int:
    """How much has arrived that the loop has not read yet; 0 when the socket is gone."""
    try:
        return int.from_bytes(ioctl(transport.get_extra_info("socket").fileno(), FIONREAD, bytes(4)), byteorder)
    except (AttributeError, OSError, ValueError):
        return 0
