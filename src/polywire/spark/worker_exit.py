"""Spark's idle Python workers, silent about a driver that has gone.

Over Unix sockets an idle worker that loses its driver (the session stops, or the worker was idle for a minute) fails to say goodbye and
prints a traceback that means nothing. Promises: it changes Spark's forked workers only, and there only this one message. Must not know:
what the worker does.
"""

from __future__ import annotations

import sys
import traceback
from typing import Final

DAEMON: Final = "pyspark.daemon"  # the main module of every forked worker

print_exception: Final = traceback.print_exc


def depart_quietly() -> None:
    """To be called by what runs in a worker; anywhere else it does nothing."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if main is not None and main.name == DAEMON:
        traceback.print_exc = print_unless_gone  # type: ignore[assignment]


def print_unless_gone() -> None:
    """Print the exception being handled, unless it says that the other end has gone."""
    if not isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionResetError):
        print_exception()
