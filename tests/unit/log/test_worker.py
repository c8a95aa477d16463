"""The log's threads: every job is answered once, whatever it raises."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from polywire.errors import BrokerError, Missing, Unavailable
from polywire.log.worker import ThreadWorker
from polywire.store.base import BlobMissing
from tests.unit.log.rig import RigLoop

Told = list[tuple[Any, BrokerError | None]]


def run(worker: ThreadWorker, loop: RigLoop, error: BaseException | None) -> tuple[Any, BrokerError | None]:
    told: Told = []

    def job() -> int:
        if error is not None:
            raise error
        return 7

    worker.run(job, lambda result, refused: told.append((result, refused)))
    loop.run_until(lambda: told)
    return told[0]


def test_every_job_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    loop = RigLoop()
    worker = ThreadWorker("test", loop)
    assert run(worker, loop, None) == (7, None)
    assert isinstance(run(worker, loop, OSError(5, "broken"))[1], Unavailable)
    assert isinstance(run(worker, loop, BlobMissing("a/b"))[1], Missing), "it was removed before the job ran"
    assert isinstance(run(worker, loop, IndexError(3))[1], Unavailable), "nobody waits for ever"
    assert run(worker, loop, None) == (7, None), "the next job is done all the same"
    assert len(ended) == 1
    worker.stop()
