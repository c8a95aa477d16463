"""What the daemon of Spark's workers says of exceptions."""

from __future__ import annotations

import subprocess
import sys

import pytest

from polywire.spark import daemon


@pytest.mark.parametrize("error", [BrokenPipeError(), ConnectionResetError()])
def test_a_driver_that_has_gone_is_no_news(error: OSError, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        raise error
    except OSError:
        daemon.print_unless_gone()
    assert capfd.readouterr().err == ""


def test_everything_else_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        raise OSError("disk on fire")
    except OSError:
        daemon.print_unless_gone()
    assert "disk on fire" in capfd.readouterr().err


def test_it_is_light_enough_to_be_forked() -> None:
    told = "import sys, polywire.spark.daemon; print([name for name in ('pyarrow', 'pandas', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout == "[]\n"
