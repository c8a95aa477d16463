"""How help reads: every command ends with examples, one per line, ready to be copied.

Promises: examples appear as they are written, never wrapped into each other. Must not know: any noun.
"""

from __future__ import annotations

from typing import Final

HELP_FORMAT: Final = "plaintext"  # what is written is what is shown, brackets and back-ticks included


def examples(*lines: str) -> str:
    """The end of a command's help."""
    title = "Example" if len(lines) == 1 else "Examples"
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])
