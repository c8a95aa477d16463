"""Spark's own daemon of Python workers, silent about a driver that has gone.

Over Unix sockets an idle worker that loses its driver (the session stops, or the worker was idle for a minute) fails to say goodbye and
prints a traceback that means nothing. Promises: every other traceback is printed. Must not know: this source; it is imported before
workers are forked, so it must start no threads.
"""

from __future__ import annotations

import sys
import traceback
from typing import Final

from pyspark import daemon

print_exception: Final = traceback.print_exc


def print_unless_gone() -> None:
    """Print the exception being handled, unless it says that the other end has gone."""
    if not isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionResetError):
        print_exception()


def main() -> None:
    """Fork workers until Spark closes standard input."""
    traceback.print_exc = print_unless_gone  # type: ignore[assignment]
    daemon.manager()


if __name__ == "__main__":
    main()
