"""The log's threads complete every job once, whatever it raises."""

from __future__ import annotations

import threading

import pytest

from polywire.errors import BrokerError, Missing, Unavailable
from polywire.log.worker import ThreadWorker
from polywire.store.base import BlobMissing
from tests.unit.log.rig import RigLoop


def run(worker: ThreadWorker, loop: RigLoop, error: BaseException | None) -> int | BrokerError:
    reported: list[int | BrokerError] = []

    def job() -> int:
        if error is not None:
            raise error
        return 7

    worker.run(job, reported.append)
    loop.run_until(lambda: reported)
    return reported[0]


def test_every_job_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    loop = RigLoop()
    worker = ThreadWorker("test", loop)
    assert run(worker, loop, None) == 7
    assert isinstance(run(worker, loop, OSError(5, "broken")), Unavailable)
    assert isinstance(run(worker, loop, BlobMissing("a/b")), Missing), "the callback was cancelled before the job ran"
    assert isinstance(run(worker, loop, IndexError(3)), Unavailable), "no caller waits for ever"
    assert run(worker, loop, None) == 7, "the next job still runs"
    assert len(ended) == 1
    worker.stop()
