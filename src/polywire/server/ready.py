"""The file that says that listeners accept, and where.

Promises: it is whole or not there. Must not know: what listens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from polywire.server.config import Address

READY_MODE: Final = 0o644  # where a broker listens is no secret


def write_ready(path: Path | None, addresses: Mapping[str, Address]) -> None:
    """Say where every listener accepts, if anybody wants to know; nobody ever sees half of it."""
    if path is None:
        return
    ready = {name: {"host": address.host, "port": address.port} for name, address in addresses.items()}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(ready) + "\n", encoding="utf-8")
    temporary.chmod(READY_MODE)
    os.replace(temporary, path)


def withdraw_ready(path: Path | None) -> None:
    """The file promises that listeners accept, which they do no longer."""
    if path is not None:
        path.unlink(missing_ok=True)
