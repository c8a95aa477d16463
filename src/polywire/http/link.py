"""HTTP between the processes of one broker: a request each, behind an opening that no page can send (decision 0076).

Promises: nothing is read before the key has come. Must not know: what requests mean.
"""

from __future__ import annotations

from collections.abc import Callable
from hmac import compare_digest
from typing import Final

from polywire.errors import PeerError
from polywire.http.session import HttpSession, Site
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import KEY_BYTES

MAGIC: Final = b"\xf5HTTP\1"
OPENING_BYTES: Final = len(MAGIC) + KEY_BYTES
BODY_BYTES_MAX: Final = 20 * 1024 * 1024  # letters of a redrive, which may be one of the largest batches


class HttpLinkSession(HttpSession):
    """A request of another process."""

    body_bytes_max = BODY_BYTES_MAX

    def __init__(self, key: bytes, site: Site, output: Output, resume: Callable[[], None]) -> None:
        super().__init__(site, output, resume)
        self._key: Final = key
        self._is_open = False

    def receive(self, data: memoryview) -> int:
        """Take the opening, then one whole request. Raises PeerError."""
        if self._is_open:
            return super().receive(data)
        if len(data) < OPENING_BYTES:
            return 0
        if not compare_digest(bytes(data[:OPENING_BYTES]), MAGIC + self._key):
            raise PeerError("only processes of this broker can connect here", fatal=True)
        self._is_open = True
        return OPENING_BYTES + super().receive(data[OPENING_BYTES:])


class HttpLinkFactory:
    """Implements ``SessionFactory`` for what other processes of this broker carry here."""

    def __init__(self, site: Site, key: bytes) -> None:
        """site: answers for this process alone. key: see ``Shards``."""
        self._site: Final = site
        self._key: Final = key

    @property
    def wire(self) -> str:
        """Name of the wire."""
        return "http"

    def recognise(self, prefix: bytes) -> bool | None:
        """Whether the opening of a link stands there."""
        if prefix[: len(MAGIC)] != MAGIC[: len(prefix)]:
            return False
        return True if len(prefix) >= len(MAGIC) else None

    def open(self, output: Output, resume: Callable[[], None]) -> HttpLinkSession:
        """A session for a link."""
        return HttpLinkSession(self._key, self._site, output, resume)
