"""HTTP between the processes of one broker (decision 0127).

A connection is used for one request. It starts with a preamble that contains the key of the data directory, so a web
page cannot send requests here.
"""

from __future__ import annotations

from collections.abc import Callable
from hmac import compare_digest
from typing import Final

from polywire.errors import PeerError
from polywire.http.session import HttpSession, Site
from polywire.protocols.runtime.session import Output, begins_with
from polywire.protocols.runtime.shards import KEY_BYTES

MAGIC: Final = b"\xf5HTTP\1"
PREAMBLE_BYTES: Final = len(MAGIC) + KEY_BYTES
BODY_BYTES_MAX: Final = 20 * 1024 * 1024  # a redrive sends dead letters, up to the size of the largest batch


class HttpLinkSession(HttpSession):
    """A connection from another process."""

    body_bytes_max = BODY_BYTES_MAX

    def __init__(self, key: bytes, site: Site, output: Output, resume: Callable[[], None]) -> None:
        super().__init__(site, output, resume)
        self._key: Final = key
        self._is_open = False

    def receive(self, data: memoryview) -> int:
        """Check the preamble, then process one complete request. Raises PeerError if the preamble is wrong."""
        if self._is_open:
            return super().receive(data)
        if len(data) < PREAMBLE_BYTES:
            return 0
        if not compare_digest(bytes(data[:PREAMBLE_BYTES]), MAGIC + self._key):
            raise PeerError("only processes of this broker can connect here", fatal=True)
        self._is_open = True
        return PREAMBLE_BYTES + super().receive(data[PREAMBLE_BYTES:])


class HttpLinkFactory:
    """Implements ``SessionFactory`` for requests that other processes of this broker forward."""

    def __init__(self, site: Site, key: bytes) -> None:
        """``site`` executes requests in this process, without forwarding them. For ``key`` see ``Shards``."""
        self._site: Final = site
        self._key: Final = key

    @property
    def wire(self) -> str:
        return "http"

    def recognise(self, prefix: bytes) -> bool | None:
        """Return whether the bytes start with the preamble; None if more bytes are needed to decide."""
        return begins_with(prefix, MAGIC)

    def open(self, output: Output, resume: Callable[[], None]) -> HttpLinkSession:
        return HttpLinkSession(self._key, self._site, output, resume)
