"""A pool of blocking sockets to a broker, or to the first of several brokers that responds.

A socket is reused only if its last response was read completely. Calls may come from any thread.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from polywire.client.blocking import FramedSocket
from polywire.client.failures import no_broker_answers
from polywire.client.login import Login
from polywire.errors import Unavailable

SPARE_MAX: Final = 4  # idle sockets in the pool


@dataclass(frozen=True, slots=True)
class Place:
    """The address of one broker, and how to verify its certificate. If ``tls`` is None, TLS is not used."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


class Sockets:
    """A pool of sockets. A socket is lent to one caller at a time."""

    __slots__ = ("_answered", "_lock", "_login", "_places", "_spares", "_timeout_s")

    def __init__(self, places: Sequence[Place], *, timeout_s: float, login: Login | None) -> None:
        """Create a pool for one or more brokers. Other arguments are the same as in ``FramedSocket``."""
        self._places: Final = tuple(places)
        self._timeout_s: Final = timeout_s
        self._login: Final = login
        self._lock: Final = threading.Lock()
        self._spares: list[FramedSocket] = []
        self._answered = 0
        """Index of the broker that responded last."""

    def take(self) -> FramedSocket:
        """Return a socket. The caller returns it with ``give``. Raises Unavailable."""
        while True:
            with self._lock:
                found = self._spares.pop() if self._spares else None
            if found is None:
                return self._open()
            if found.usable():
                return found

    def give(self, socket: FramedSocket) -> None:
        """Return a socket to the pool. It is reused if every response was read, and closed otherwise."""
        with self._lock:
            if socket.open and not socket.owed and len(self._spares) < SPARE_MAX:
                self._spares.append(socket)
                return
        socket.close()

    def close(self) -> None:
        """Close idle sockets. Sockets in use stay open."""
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
        raise no_broker_answers(reasons)

    def _connect(self, place: Place) -> FramedSocket:
        return FramedSocket(place.host, place.port, timeout_s=self._timeout_s, tls=place.tls, login=self._login)
