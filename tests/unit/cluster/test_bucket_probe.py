"""The bucket probe accepts sound buckets and reports what is wrong with others."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from polywire.cli.cluster import EXIT_UNFIT
from polywire.cli.main import run
from polywire.cluster.bucket_probe import UNDECIDED_ROUNDS_MAX, WRITERS, check, probe
from polywire.errors import Invalid, Unavailable
from polywire.store.file_objects import FileObjects
from polywire.testing.memory_objects import Defect, MemoryObjects, ObjectFault


def test_a_sound_bucket_passes_and_is_left_empty() -> None:
    objects = MemoryObjects()
    check(objects)
    assert objects.list("") == []


def test_a_directory_passes(tmp_path: Path) -> None:
    check(FileObjects(tmp_path))


@pytest.mark.parametrize("defect", list(Defect))
def test_a_store_without_atomic_conditional_writes_is_refused(defect: Defect) -> None:
    findings = probe(MemoryObjects(defect=defect))
    assert [bool(finding.defect) for finding in findings] == [True] * 5 + [False]
    with pytest.raises(Invalid, match="winners"):
        check(MemoryObjects(defect=defect))


def test_inconclusive_responses_are_not_reported_as_defects() -> None:
    objects = MemoryObjects()
    for fault in (ObjectFault.LOST_REPLY, ObjectFault.BUSY, ObjectFault.REFUSED):
        objects.fail("create", fault)
    for fault in (ObjectFault.BUSY, ObjectFault.LOST_REPLY):
        objects.fail("replace", fault)
    check(objects)


def test_an_unreachable_bucket_is_reported_as_unreachable() -> None:
    objects = MemoryObjects()
    for _ in range(WRITERS * UNDECIDED_ROUNDS_MAX):
        objects.fail("create", ObjectFault.REFUSED)
    with pytest.raises(Unavailable):
        check(objects)


def test_the_command_lists_each_check(tmp_path: Path) -> None:
    out = io.StringIO()
    with redirect_stdout(out):
        assert run(["cluster", "check", f"file://{tmp_path}", "--output", "jsonl"]) == 0
    assert out.getvalue().count('"result":"ok"') + out.getvalue().count('"result": "ok"') == 6


def test_the_command_fails_if_the_store_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polywire.cli.cluster.open_bucket", lambda _: MemoryObjects(defect=Defect.CHECKS_FIRST))
    with redirect_stdout(io.StringIO()):
        assert run(["cluster", "check", "file:///anywhere"]) == EXIT_UNFIT
