"""How Spark's Python workers end: silent about a driver that has gone, and with one line for an error of ours.

Over Unix sockets an idle worker that loses its driver (the session stops, or the worker was idle for a minute) fails to say goodbye and
prints a traceback that means nothing. A worker that fails reports its whole traceback, which Spark puts into the message of its exception:
for a misspelt option that is thirty lines around the one that helps.

Guarantees: only Spark's workers are changed, and tracebacks of other errors, such as those of a user's function, stay as they are.
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

HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"  # what a worker looks at when it reports the error that ends it
WORKERS: Final = (
    "pyspark."  # begins the name of the main module of every worker: the daemon that forks them, the runner of a stream
)

print_exception: Final = traceback.print_exc


def is_worker() -> bool:
    """Return whether this process is one of Spark's workers."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return main is not None and main.name.startswith(WORKERS)


def depart_quietly() -> None:
    """To be called by what runs in a worker; anywhere else it does nothing."""
    if is_worker():
        traceback.print_exc = print_unless_gone  # type: ignore[assignment]


def print_unless_gone() -> None:
    """Print the exception being handled, unless it says that the other end has gone."""
    if not isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionResetError):
        print_exception()


def one_line_errors(kind: type[T]) -> type[T]:
    """Have a worker report a ``BrokerError`` that leaves a method of this class as one line, without its traceback. A class decorator."""
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
    """A worker ends with the first error it reports, so the setting does not outlive it."""
    try:
        yield
    except BrokerError:
        if is_worker():
            os.environ[HIDE_TRACEBACK] = "1"
        raise
