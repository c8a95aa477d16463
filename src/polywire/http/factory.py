"""Create the sessions of an HTTP listener.

The application is imported at the first request, in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from polywire.broker.broker import Broker
from polywire.http.process import Process
from polywire.http.session import WIRE, Application, HttpSession
from polywire.log.base import Completion
from polywire.protocols.runtime.forwarded import ForwardedRequests, Forwarding, Sender
from polywire.protocols.runtime.session import Output


class HttpFactory:
    """Creates HTTP sessions. Implements ``SessionFactory`` and ``Site``.

    A listener that detects protocols never detects HTTP, because a web page could then send requests to its port.
    """

    def __init__(
        self,
        broker: Broker,
        process: Process,
        *,
        names: Sequence[str] = (),
        router: Forwarding | None = None,
        is_linked: bool = False,
    ) -> None:
        """Create the factory.

        Args:
            broker: the broker of this process.
            process: statistics of this process.
            names: host names that browsers may use while there are no users, besides IP addresses and localhost.
            router: reaches the other processes of this broker, if there are several.
            is_linked: whether requests come from other processes of this broker, so that they must not be forwarded
                again.
        """
        loop = broker.loop
        assert isinstance(loop, asyncio.AbstractEventLoop), "HTTP needs an asyncio loop"
        self.loop: Final = loop
        self._broker: Final = broker
        self._process: Final = process
        self._names: Final = names
        self._router: Final = router
        self._is_linked: Final = is_linked
        self._application: Application | None = None

    @property
    def wire(self) -> str:
        return WIRE

    def recognise(self, prefix: bytes) -> bool:
        return False

    def open(self, output: Output, resume: Callable[[], None]) -> HttpSession:
        return HttpSession(self, output, resume)

    def execute(self, sender: Sender, requests: memoryview, then: Completion[bytes]) -> ForwardedRequests:
        """Execute requests that another process forwards. Implements ``Executor``."""
        return ForwardedRequests(self._broker.loop, requests, sender.peer, None, then).run(
            partial(ForwardedHttpSession, self)
        )

    async def application(self) -> Application:
        """Return the application, which the first call imports."""
        if self._application is None:
            make = await asyncio.to_thread(_load)
            if self._application is None:
                self._application = make(
                    self._broker,
                    self._process,
                    names=self._names,
                    router=self._router,
                    is_linked=self._is_linked,
                )
        return self._application


class ForwardedHttpSession(HttpSession):
    """A session for one request that another process forwards."""

    body_bytes_max = 20 * 1024 * 1024  # a redrive sends dead letters, up to the size of the largest batch


class MakeApplication(Protocol):
    def __call__(
        self, broker: Broker, process: Process, *, names: Sequence[str], router: Forwarding | None, is_linked: bool
    ) -> Application: ...


def _load() -> MakeApplication:
    """Import the application. A broker that receives no HTTP requests never imports it."""
    from polywire.http.application import HttpApplication

    return HttpApplication
