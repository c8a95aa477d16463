"""Error output of Spark's workers whose driver has exited."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

import pytest

from polywire.errors import ErrorCode, Invalid
from polywire.spark import worker_exit


@pytest.mark.parametrize("error", [BrokenPipeError(), ConnectionResetError()])
def test_the_exit_of_a_driver_is_not_reported(error: OSError, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        raise error
    except OSError:
        worker_exit.print_unless_gone()
    assert capfd.readouterr().err == ""


def test_everything_else_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        raise OSError("disk on fire")
    except OSError:
        worker_exit.print_unless_gone()
    assert "disk on fire" in capfd.readouterr().err


def test_only_workers_are_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traceback, "print_exc", worker_exit.print_exception)
    worker_exit.depart_quietly()
    assert traceback.print_exc is worker_exit.print_exception
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec("pyspark.daemon", None))
    worker_exit.depart_quietly()
    assert traceback.print_exc is not worker_exit.print_exception


@worker_exit.one_line_errors
class Failing:
    """The function that a worker runs."""

    def call(self, error: Exception) -> None:
        """Fail."""
        raise error

    def read(self, error: Exception) -> Iterator[int]:
        """Fail after the first value."""
        yield 1
        raise error


@pytest.mark.parametrize("main", ["pyspark.daemon", "pyspark.sql.streaming.python_streaming_source_runner"])
def test_an_error_of_polywire_hides_its_traceback(main: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(main, None))
    monkeypatch.delenv(worker_exit.HIDE_TRACEBACK, raising=False)
    for work in (Failing().call, lambda error: list(Failing().read(error))):
        with pytest.raises(ValueError, match="of the user"):
            work(ValueError("of the user"))
        assert worker_exit.HIDE_TRACEBACK not in os.environ
        with pytest.raises(Invalid):
            work(Invalid(ErrorCode.INVALID_REQUEST, "unknown option"))
        assert os.environ.pop(worker_exit.HIDE_TRACEBACK) == "1"


def test_outside_a_worker_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(worker_exit.HIDE_TRACEBACK, raising=False)
    with pytest.raises(Invalid):
        Failing().call(Invalid(ErrorCode.INVALID_REQUEST, "unknown option"))
    assert worker_exit.HIDE_TRACEBACK not in os.environ
