"""The process that writes tables: its orders, its reports, and what it does after errors."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from polywire.errors import ErrorCode, Unavailable
from polywire.store.url import open_bucket
from polywire.table_orders import Orders, TableOrder, TableReport
from polywire.tables import worker, writer
from polywire.tables.sealed import SegmentReader
from polywire.tables.worker import EXIT_LOST, Job, OrderReader, work
from tests.unit.tables.rig import TOPIC, TOPIC_ID, FakeTopic, check


class FakeBroker(FakeTopic):
    """A topic whose broker can be gone."""

    is_gone = False

    def ping(self) -> None:
        if self.is_gone:
            raise Unavailable(ErrorCode.UNREACHABLE, "connection lost")

    def bounds(self, topics: Any) -> Any:
        self.ping()
        return super().bounds(topics)


def order(folder: Path, **changes: Any) -> TableOrder:
    made = TableOrder(
        TOPIC, TOPIC_ID, folder.as_uri(), is_iceberg=False, is_latest=False, freshness_s=5, history_hours=1
    )
    return msgspec.structs.replace(made, **changes)


def job_of(topic: FakeTopic, folder: Path, **changes: Any) -> Job:
    return Job(order(folder, **changes), cast(SegmentReader, topic), ThreadPoolExecutor(1))


def test_a_step_writes_what_is_missing(tmp_path: Path) -> None:
    topic = FakeBroker()
    job = job_of(topic, tmp_path)
    topic.produce(0, b"a", b"b")
    report = job.step()
    assert (report.rows, report.files, report.behind, report.error) == (2, 1, 0, "")
    assert report.complete_ms > 0
    assert 3 < job.due - time.monotonic() <= 5
    check(topic, open_bucket(tmp_path.as_uri()))


def test_a_backlog_is_written_without_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RAW_BYTES_MAX", 1)
    topic = FakeBroker()
    topic.produce(0, *[b"x"] * 20)
    job = job_of(topic, tmp_path)
    report = job.step()
    assert (report.rows, report.behind, report.complete_ms) == (7, 13, 0)
    assert job.due <= time.monotonic()


def test_an_error_is_reported_with_the_last_state_and_repaired(tmp_path: Path) -> None:
    topic, folder = FakeBroker(), tmp_path / "table"
    job = job_of(topic, folder)
    topic.produce(0, b"a")
    first = job.step()
    shutil.move(folder, tmp_path / "moved")
    folder.write_text("not a directory")
    topic.produce(0, b"b")
    pauses = []
    for _ in range(3):
        report = job.step()
        assert report.error
        assert (report.rows, report.version, report.complete_ms) == (first.rows, first.version, first.complete_ms)
        pauses.append(job.due - time.monotonic())
    assert pauses == sorted(pauses)
    folder.unlink()
    shutil.move(tmp_path / "moved", folder)
    report = job.step()
    assert (report.rows, report.error) == (2, "")
    check(topic, open_bucket(folder.as_uri()))


def test_small_files_are_merged_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MERGE_COUNT", 3)
    topic = FakeBroker()
    job = job_of(topic, tmp_path)
    end, before, after = time.monotonic() + 60, 0, 0
    while before <= after:
        assert time.monotonic() < end, "no files were merged"
        topic.produce(0, b"x")
        before, after = after, job.step().files
    check(topic, open_bucket(tmp_path.as_uri()))


def test_values_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    topic = FakeBroker()
    job = job_of(topic, tmp_path, columns="id long")
    topic.produce(0, b'{"id":1}', b"no JSON")
    topic.produce(1, b'{"id":"x"}')
    report = job.step()
    sample = 'id: expected long, found string "x" partition=1 offset=0'
    assert (report.rejected, report.rejected_sample, report.columns, report.notes) == (2, sample, 1, "")
    report = job.step()
    assert (report.rejected, report.rejected_sample) == (2, sample)


def test_merges_are_committed_between_updates(tmp_path: Path) -> None:
    topic = FakeBroker()
    topic.produce(0, b'{"id":1}')
    job_of(topic, tmp_path).step()
    job = job_of(topic, tmp_path, columns="id long", freshness_s=3600)
    job.step()
    end = time.monotonic() + 60
    while job.due < time.monotonic() + 10:
        assert time.monotonic() < end
        assert job.is_early
        topic.produce(0, b'{"id":2}')
        report = job.step(appends=False)
    assert report.rows == 1
    state = check(topic, open_bucket(tmp_path.as_uri()))
    assert all("id" in file.nulls for file in state.files.values())


def run(topic: FakeBroker, *lines: bytes) -> tuple[int, list[TableReport]]:
    reports: list[TableReport] = []
    orders = OrderReader(io.BytesIO(b"".join(lines)))
    return work(cast(SegmentReader, topic), orders, reports.append), reports


def test_the_process_ends_with_its_input(tmp_path: Path) -> None:
    code, _ = run(FakeBroker(), msgspec.json.encode(Orders([order(tmp_path)])) + b"\n")
    assert code == 0


def test_the_process_ends_if_the_broker_is_gone(tmp_path: Path) -> None:
    topic = FakeBroker()
    topic.is_gone = True
    reports: list[TableReport] = []
    reading, writing = os.pipe()
    with open(reading, "rb") as source, open(writing, "wb") as sink:
        sink.write(msgspec.json.encode(Orders([order(tmp_path)])) + b"\n")
        sink.flush()
        assert work(cast(SegmentReader, topic), OrderReader(source), reports.append) == EXIT_LOST
        sink.close()
    assert reports[0].error == "connection lost"


def test_a_new_topic_of_the_same_name_is_another_table(tmp_path: Path) -> None:
    jobs: dict[str, Job] = {}
    first, second = order(tmp_path), order(tmp_path, topic_id=b"second topic 012")
    with ThreadPoolExecutor(1) as merger:
        source = cast(SegmentReader, FakeBroker())
        worker.follow(jobs, Orders([first]), source, merger)
        known = jobs[TOPIC]
        worker.follow(jobs, Orders([first]), source, merger)
        assert jobs[TOPIC] is known
        worker.follow(jobs, Orders([second]), source, merger)
        assert jobs[TOPIC] is not known
        worker.follow(jobs, Orders([]), source, merger)
        assert jobs == {}


def test_a_missing_library_is_named() -> None:
    code = "import sys, runpy; sys.modules['pyarrow'] = None; runpy.run_module('polywire.tables', run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert "pip install 'polywire[tables]'" in ended.stderr
