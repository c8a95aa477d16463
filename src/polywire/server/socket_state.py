"""The state of a transport's socket that only the kernel knows."""

from __future__ import annotations

import select
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


def was_reset(transport: Any) -> bool:
    """Return whether the peer has reset the connection, which an event loop does not report while reading is paused."""
    poll = select.poll()
    try:
        poll.register(transport.get_extra_info("socket").fileno(), 0)
    except (AttributeError, OSError, ValueError):  # a closed socket, or a simulated one
        return False
    return bool(poll.poll(0))
