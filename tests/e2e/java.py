"""Options for short-lived Java processes in tests, which end before heavy compilation pays off, and a home of Spark."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

SHORT_LIVED: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Use the first compiler only, and no collector threads: short sessions use a third less processor time."""
EVERY_JAVA: Final = "JAVA_TOOL_OPTIONS"
"""Environment variable with options for every Java process."""


def without_zip(home: Path) -> Path:
    """Make ``home`` a home of Spark whose Python processes import the installed pyspark, and return it.

    Spark's own home has pyspark as a zip file without byte code, which every Python process of a query compiles again:
    1.0 s of processor time instead of 0.3 s.
    """
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    home.mkdir(exist_ok=True)
    for name in ("bin", "jars"):
        (home / name).symlink_to(Path(found.origin).with_name(name))
    return home
