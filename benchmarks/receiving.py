"""Receiving for load generators: poll a few times before sleeping.

A generator that sleeps in every ``recv`` measures how long its processor takes to wake, and makes the broker pay for
waking it. After some tens of microseconds without bytes it sleeps like every client.
"""

from __future__ import annotations

import socket
from typing import Final

LOOKS: Final = 60  # before sleeping: about 40 us, less than a round trip with two wake-ups


def receive(peer: socket.socket, buffer: memoryview) -> int:
    """Read at least one byte into ``buffer``; return how many, 0 at the end."""
    for _ in range(LOOKS):
        try:
            return peer.recv_into(buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
    return peer.recv_into(buffer)
