"""How tests run Java machines: as such that end before what they compile well has paid for itself.

Must not know: Spark, what the machines run.
"""

from __future__ import annotations

from typing import Final

SHORT_LIVED: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""The first compiler only, and no threads that collect: a third less of the processor for a session of some seconds or minutes."""
EVERY_JAVA: Final = "JAVA_TOOL_OPTIONS"
"""What an environment tells any Java that is started in it."""
