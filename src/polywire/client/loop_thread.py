"""An event loop in a thread, for clients with blocking calls.

Calls may come from any thread and run concurrently. An interrupted call is cancelled completely.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from polywire.errors import ErrorCode, Unavailable

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread. Calls fail after the loop has ended."""

    __slots__ = ("_loop", "_thread")

    def __init__(self) -> None:
        self._loop: Final = asyncio.new_event_loop()
        self._thread: Final = threading.Thread(target=self._loop.run_forever, name="polywire-client", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the loop has ended."""
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and return its result or raise its exception.

        Raises Unavailable(STOPPING) after the loop has ended.
        """
        if self.ended:
            work.close()
            raise Unavailable(ErrorCode.STOPPING, "client was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # the caller was interrupted; cancelling a finished call does nothing

    def end(self) -> None:
        """Stop the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        with suppress(RuntimeError):
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
