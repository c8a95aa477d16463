"""What makes the sessions of a listener for HTTP.

Promises: what answers is loaded beside the loop, for the first request. Must not know: sockets, pages.
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
    """Makes sessions; a ``SessionFactory`` and a ``Site``. On a listener of several wires it is never recognised: a request that a web page
    has sent to the port of a wire must reach nothing."""

    def __init__(
        self,
        broker: Broker,
        process: Process,
        *,
        names: Sequence[str] = (),
        shards: Shards | None = None,
        is_linked: bool = False,
    ) -> None:
        """names: hosts by which browsers may reach an open broker, beside addresses and localhost. shards: the processes of this broker,
        where there are several. is_linked: requests come from these and are forwarded no further."""
        loop = broker.loop
        assert isinstance(loop, asyncio.AbstractEventLoop), "HTTP is served on a real loop"
        self.loop: Final = loop
        self._broker: Final = broker
        self._process: Final = process
        self._names: Final = names
        self._shards: Final = shards
        self._is_linked: Final = is_linked
        self._application: Application | None = None

    @property
    def wire(self) -> str:
        """Name of the listener."""
        return WIRE

    def recognise(self, prefix: bytes) -> bool:
        """Never."""
        return False

    def open(self, output: Output, resume: Callable[[], None]) -> HttpSession:
        """A session for a new connection."""
        return HttpSession(self, output, resume)

    async def application(self) -> Application:
        """What requests are carried out by."""
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
    """How an application is made."""

    def __call__(
        self, broker: Broker, process: Process, *, names: Sequence[str], shards: Shards | None, is_linked: bool
    ) -> Application: ...


def _load() -> MakeApplication:
    """Import what answers: a broker that nobody asks over HTTP has not loaded it."""
    from polywire.http.application import HttpApplication

    return HttpApplication
