"""Options for short-lived Java processes in tests, which end before heavy compilation pays off, and a home of Spark."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

from polywire.spark.java import cache_directory, find_java
from tests.broker_process import child_environment

ONE_COMPILER: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Use the first compiler only, and no collector threads: short sessions use a third less processor time."""
EVERY_JAVA: Final = "JAVA_TOOL_OPTIONS"
"""Environment variable with options for every Java process."""
ROOT: Final = Path(__file__).parents[2]


@cache
def short_lived() -> str:
    """Return options for short sessions, which load Spark's classes from an archive: 4 s of processor time, not 7.

    Java ignores an archive of another version or other jars, and would report that on standard output.
    """
    return f"{ONE_COMPILER} -XX:SharedArchiveFile={_class_archive()} -Xlog:disable"


def _class_archive() -> Path:
    """Return the archive of this environment. The first process makes it, and others wait.

    It is empty if this Java cannot write archives, and then ignored.
    """
    made_for = f"{find_java().home} {version('pyspark')} {home_without_zip()}"
    archive = Path(sys.prefix) / f"spark-classes-{hashlib.sha256(made_for.encode()).hexdigest()[:16]}.jsa"
    with archive.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            made = archive.with_suffix(".new")
            # The output ends when Java does, which has inherited it.
            subprocess.run(
                [sys.executable, "-m", "tests.e2e.spark_classes", str(made)], cwd=ROOT, env=child_environment(),
                capture_output=True, check=True,
            )  # fmt: skip
            made.touch()
            made.rename(archive)
    return archive


@cache
def home_without_zip() -> Path:
    """Return the home of Spark that sessions on this machine use. The archive is only for its paths."""
    from polywire.spark.sessions import make_home

    home = make_home(cache_directory())
    assert home is not None, "pyspark is not among this Python's packages"
    return home
