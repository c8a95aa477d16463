"""Blocking sockets to a broker, or to the first of several that answers: one for each call under way, and some kept for the next.

Promises: a socket whose answer was not read to its end is never used again; calls may come from any thread. Must not know: what a verb means.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from polywire.client.blocking import FramedSocket
from polywire.client.login import Login
from polywire.client.unreachable import nobody_answers
from polywire.errors import Unavailable

SPARE_MAX: Final = 4  # idle sockets kept


@dataclass(frozen=True, slots=True)
class Place:
    """Where one broker listens. tls: how to verify it; None: without TLS."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


class Sockets:
    """Guards: each is lent to one caller at a time."""

    __slots__ = ("_answered", "_lock", "_login", "_places", "_spares", "_timeout_s")

    def __init__(self, places: Sequence[Place], *, timeout_s: float, login: Login | None) -> None:
        """places: brokers of which one will do, one at least. timeout_s, login: as for ``FramedSocket``."""
        self._places: Final = tuple(places)
        self._timeout_s: Final = timeout_s
        self._login: Final = login
        self._lock: Final = threading.Lock()
        self._spares: list[FramedSocket] = []
        self._answered = 0
        """Which place did the last time."""

    def take(self) -> FramedSocket:
        """Lend a socket, which comes back with ``give``. Raises Unavailable."""
        while True:
            with self._lock:
                found = self._spares.pop() if self._spares else None
            if found is None:
                return self._open()
            if found.usable():
                return found

    def give(self, socket: FramedSocket) -> None:
        """Take a socket back: kept for others when every answer was read, closed otherwise."""
        with self._lock:
            if socket.open and not socket.owed and len(self._spares) < SPARE_MAX:
                self._spares.append(socket)
                return
        socket.close()

    def close(self) -> None:
        """Close idle ones; who has one keeps it."""
        with self._lock:
            spares, self._spares = self._spares, []
        for spare in spares:
            spare.close()

    def _open(self) -> FramedSocket:
        count, first, reasons = len(self._places), self._answered, []
        for turn in range(count):
            number = (first + turn) % count
            try:
                found = self._connect(self._places[number])
            except Unavailable as error:
                if count == 1:
                    raise
                reasons.append(error.message)
                continue
            self._answered = number
            return found
        raise nobody_answers(reasons)

    def _connect(self, place: Place) -> FramedSocket:
        return FramedSocket(place.host, place.port, timeout_s=self._timeout_s, tls=place.tls, login=self._login)
