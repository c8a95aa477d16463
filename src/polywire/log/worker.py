"""Run jobs off the event loop: the interface, an implementation with a thread, and completions that can be cancelled.

* Jobs run in order. Each job reports to the event loop exactly once, with its result or its error.
* A completion is called exactly once, or never if it is cancelled first. If the result of a cancelled read keeps memory
  in use (a pin), this memory is released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from polywire.errors import BrokerError, ErrorCode, Missing, Unavailable
from polywire.log.base import Completion, Loop, Read
from polywire.store.base import BlobMissing, no_descriptor

Job = Callable[[], Any]
_Result = TypeVar("_Result")


class Worker(Protocol):
    """Runs jobs in the order they were submitted. A job must not access state that the event loop changes."""

    def run(self, job: Callable[[], _Result], completed: Completion[_Result]) -> None:
        """Submit ``job``. Its result or error is passed to ``completed`` on the event loop."""

    def stop(self) -> None:
        """Finish the submitted jobs and accept no more. Some results may still be queued on the event loop afterwards."""


MakeWorker = Callable[[str, Loop], Worker]
"""Creates a worker with this name, which reports results on this loop."""


class ThreadWorker:
    """One daemon thread, started by its first job. No job runs after ``stop`` has returned."""

    def __init__(self, name: str, loop: Loop) -> None:
        self._name = name
        self._loop = loop
        self._jobs: SimpleQueue[tuple[Job, Completion[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, job: Callable[[], _Result], completed: Completion[_Result]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"polywire-{self._name}", daemon=True)
            self._thread.start()
        self._jobs.put((job, completed))

    def stop(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        result: Any
        broken = Unavailable(ErrorCode.STORAGE_FAILED, f"a thread of the log failed thread={self._name}")
        while (item := self._jobs.get()) is not None:
            job, completed = item
            del item
            result = broken
            try:
                result = attempt(job)
            finally:  # also if the job raised an unexpected error: its caller must not wait forever
                del job
                if result is broken:
                    self._thread = None  # this thread ends; the next job starts a new one
                with suppress(RuntimeError):  # the loop was closed meanwhile, so no caller is left
                    self._loop.call_soon_threadsafe(completed, result)


def attempt(job: Callable[[], _Result]) -> _Result | BrokerError:
    """Run a job and return its result or error. An OSError becomes the error of ``storage_failed``."""
    try:
        return job()
    except BrokerError as error:
        return error
    except OSError as error:
        return storage_failed(error)
    except BlobMissing as error:  # the segment was deleted between lookup and job
        return Missing(ErrorCode.OFFSET_OUT_OF_RANGE, f"blob was removed name={error}")


def storage_failed(error: OSError) -> BrokerError:
    """Return the BrokerError for a failed read or write of the log's files. It is Busy if too many files are open."""
    return no_descriptor(error) or Unavailable(
        ErrorCode.STORAGE_FAILED, f"storage failed: {error.strerror or error} path={error.filename!r}"
    )


class LoopWorker:
    """Runs jobs on the event loop, for a broker in memory."""

    def __init__(self, name: str, loop: Loop) -> None:
        del name
        self._loop = loop

    def run(self, job: Callable[[], _Result], completed: Completion[_Result]) -> None:
        self._loop.call_soon(completed, attempt(job))

    def stop(self) -> None:
        """Do nothing, because every job has finished."""


class Pending(Generic[_Result]):
    """A completion callback that can be cancelled. It passes the result to another completion."""

    __slots__ = ("_then",)

    def __init__(self, then: Completion[_Result]) -> None:
        # None once it was called or cancelled
        self._then: Completion[_Result] | None = then

    @property
    def is_over(self) -> bool:
        return self._then is None

    def __call__(self, result: _Result | BrokerError) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(result)
        elif isinstance(result, Read):
            result.pin.release()

    def cancel(self) -> None:
        """Do not call the completion."""
        self._then = None


def pending(then: Completion[_Result]) -> Pending[_Result]:
    """Return a cancellable callback for ``then``. If ``then`` already is one, return it unchanged."""
    return then if isinstance(then, Pending) else Pending(then)
