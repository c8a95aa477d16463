"""What Spark's workers say when their driver has gone."""

from __future__ import annotations

import sys
import traceback
from importlib.machinery import ModuleSpec

import pytest

from polywire.spark import worker_exit


@pytest.mark.parametrize("error", [BrokenPipeError(), ConnectionResetError()])
def test_a_driver_that_has_gone_is_no_news(error: OSError, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_only_workers_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traceback, "print_exc", worker_exit.print_exception)
    worker_exit.depart_quietly()
    assert traceback.print_exc is worker_exit.print_exception
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec("pyspark.daemon", None))
    worker_exit.depart_quietly()
    assert traceback.print_exc is not worker_exit.print_exception
