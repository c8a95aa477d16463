"""Create the sessions of an HTTP listener.

The application is imported at the first request, in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from polywire.broker.broker import Broker
from polywire.http.process import Process
from polywire.http.session import Application, HttpSession
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import Shards

WIRE: Final = "http"


class HttpFactory:
    """Implements ``SessionFactory`` and ``Site``.

    HTTP is never detected on a listener shared with other protocols, because a web page could then send requests to
    their port.
    """

    def __init__(
        self,
        broker: Broker,
        process: Process,
        *,
        names: Sequence[str] = (),
        shards: Shards | None = None,
        is_linked: bool = False,
    ) -> None:
        """``names`` are host names that browsers may use while there are no users, besides IP addresses and localhost.

        ``shards`` are the processes of this broker if there are several. If ``is_linked``, requests come from other
        processes of this broker, and must not be forwarded again.
        """
        loop = broker.loop
        assert isinstance(loop, asyncio.AbstractEventLoop), "HTTP needs an asyncio loop"
        self.loop: Final = loop
        self._broker: Final = broker
        self._process: Final = process
        self._names: Final = names
        self._shards: Final = shards
        self._is_linked: Final = is_linked
        self._application: Application | None = None

    @property
    def wire(self) -> str:
        return WIRE

    def recognise(self, prefix: bytes) -> bool:
        return False

    def open(self, output: Output, resume: Callable[[], None]) -> HttpSession:
        return HttpSession(self, output, resume)

    async def application(self) -> Application:
        """Return the application, which the first call imports."""
        if self._application is None:
            make = await asyncio.to_thread(_load)
            if self._application is None:
                self._application = make(
                    self._broker,
                    self._process,
                    names=self._names,
                    shards=self._shards,
                    is_linked=self._is_linked,
                )
        return self._application


class MakeApplication(Protocol):
    def __call__(
        self, broker: Broker, process: Process, *, names: Sequence[str], shards: Shards | None, is_linked: bool
    ) -> Application: ...


def _load() -> MakeApplication:
    """Import the application. A broker that receives no HTTP requests never imports it."""
    from polywire.http.application import HttpApplication

    return HttpApplication
