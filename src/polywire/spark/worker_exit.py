"""Shorten the output of Spark's Python workers: none if the driver has exited, and one line for Polywire's errors.

When a session stops, or a worker was idle for a minute, its connection to the driver is closed. With Unix sockets the
worker then fails on exit and prints a useless traceback.

A failing worker reports its whole traceback, which Spark puts into the message of its exception. The useful line is
then hidden among thirty others.

Only Spark's workers are affected. Tracebacks of other errors, such as those of a user's function, are unchanged.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from polywire.errors import BrokerError

T = TypeVar("T")

HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"  # read by a worker when it reports its final error
WORKERS: Final = (
    "pyspark."  # prefix of the main module of every worker: the daemon that forks workers, and the runner of a stream
)

print_exception: Final = traceback.print_exc


def is_worker() -> bool:
    """Return whether this process is one of Spark's workers."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return main is not None and main.name.startswith(WORKERS)


def depart_quietly() -> None:
    """Make a Spark worker exit without a traceback. Do nothing in any other process."""
    if is_worker():
        traceback.print_exc = print_unless_gone  # type: ignore[assignment]


def print_unless_gone() -> None:
    """Print the current exception, unless the reason is that the driver has closed the connection."""
    if not isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionResetError):
        print_exception()


def one_line_errors(kind: type[T]) -> type[T]:
    """Class decorator: if a method raises a ``BrokerError`` in a worker, the worker reports it as one line."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(kind, name, _brief_generator(method) if inspect.isgeneratorfunction(method) else _brief(method))
    return kind


def _brief(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*arguments: Any, **named: Any) -> Any:
        with _briefly():
            return method(*arguments, **named)

    return called


def _brief_generator(method: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(method)
    def called(*arguments: Any, **named: Any) -> Iterator[Any]:
        with _briefly():
            yield from method(*arguments, **named)

    return called


@contextmanager
def _briefly() -> Iterator[None]:
    """If a BrokerError is raised in a Spark worker, make the worker report it as one line.

    The environment variable for this is never reset, because a worker ends with the first error it reports.
    """
    try:
        yield
    except BrokerError:
        if is_worker():
            os.environ[HIDE_TRACEBACK] = "1"
        raise
