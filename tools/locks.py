"""Read the locks: names, versions and hashes, for the bill of materials and the audit.

A lock with an unreadable requirement is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "requirements"
_PIN: Final = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;\\]+)\s*(?:;\s*(?P<marker>[^\\]+?))?\s*\\?"
)
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})\s*\\?")


@dataclass(frozen=True, slots=True)
class Pin:
    """One requirement. marker: its environments, empty for all; hashes: SHA-256 of its files."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]


def read_lock(path: Path) -> list[Pin]:
    """Return the requirements of a lock in order. Raises ValueError for a line that is not a requirement."""
    found: list[tuple[str, str, str, list[str]]] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        line = line.strip()
        pin, digest = _PIN.fullmatch(line), _HASH.fullmatch(line)
        if pin is not None:
            found.append((pin["name"], pin["version"], (pin["marker"] or "").strip(), []))
        elif digest is not None and found:
            found[-1][3].append(digest[1])
        elif line and not line.startswith("#"):
            raise ValueError(f"no requirement with a version and hashes lock={path.name} line={number}")
    return [Pin(name, version, marker, tuple(hashes)) for name, version, marker, hashes in found]
