"""Options for short-lived Java processes in tests, which end before heavy compilation pays off."""

from __future__ import annotations

from typing import Final

SHORT_LIVED: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Use the first compiler only, and no collector threads: short sessions use a third less processor time."""
EVERY_JAVA: Final = "JAVA_TOOL_OPTIONS"
"""Environment variable with options for every Java process."""
