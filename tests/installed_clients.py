"""Where ``make dev`` installs programs and clients of other projects, each in a folder of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def folder_of(client: str) -> Path:
    """Return the folder of a client, which may be missing."""
    return Path(os.environ.get("POLYWIRE_INTEROP") or ROOT / ".venv" / "interop") / client


def installed(client: str) -> str:
    """Return the folder of a client. Skips the test if it is not there."""
    folder = folder_of(client)
    if not folder.is_dir() or not any(folder.iterdir()):
        pytest.skip(f"{folder} is missing or empty: {client} was NOT tried (make dev)")
    return str(folder)
