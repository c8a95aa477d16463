"""The port for work beside the loop, and a thread that does it: one job after another, and the loop is notified of what became of each.

Promises: jobs run in order; every job is answered on the loop exactly once, with its result or its error. Must not know: what a job does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from polywire.errors import BrokerError, ErrorCode, Missing, Unavailable
from polywire.log.base import Completion, Loop
from polywire.store.base import BlobMissing, no_descriptor

Job = Callable[[], Any]
_Result = TypeVar("_Result")


class Worker(Protocol):
    """Does one job after another, in the order they were given. A job must not touch what the loop changes."""

    def run(self, job: Callable[[], _Result], completed: Completion[_Result]) -> None:
        """Do ``job`` some time soon, then complete with what it returned or raised, on the loop."""

    def stop(self) -> None:
        """Finish the jobs given, and do no more. Their answers may still be waiting on the loop."""


MakeWorker = Callable[[str, Loop], Worker]
"""Makes a worker of this name that notifies this loop."""


class ThreadWorker:
    """One daemon thread, begun with its first job. Guards: after ``stop`` returned no job runs."""

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
            finally:  # also when the job broke a promise of ours: whoever waits must not wait for ever
                del job
                if result is broken:
                    self._thread = None  # this one ends; the next job gets another
                with suppress(RuntimeError):  # the loop was closed under us: nobody is left to be notified
                    self._loop.call_soon_threadsafe(completed, result)


def attempt(job: Callable[[], _Result]) -> _Result | BrokerError:
    """What a job returns or raises; the system's errors become Unavailable(STORAGE_FAILED)."""
    try:
        return job()
    except BrokerError as error:
        return error
    except OSError as error:
        return storage_failed(error)
    except BlobMissing as error:  # removed between the look-up and the job
        return Missing(ErrorCode.OFFSET_OUT_OF_RANGE, f"blob was removed name={error}")


def storage_failed(error: OSError) -> BrokerError:
    """A failed write or sync of the journal, in our words; Busy where nothing failed and only too many files are open."""
    return no_descriptor(error) or Unavailable(
        ErrorCode.STORAGE_FAILED, f"storage failed: {error.strerror or error} path={error.filename!r}"
    )
