"""The ready file: it exists while all listeners accept connections, and contains their addresses.

It is renamed into place, so readers never see a partial file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from polywire.server.config import Address

READY_MODE: Final = 0o644  # listener addresses are not secret


def write_ready(path: Path | None, addresses: Mapping[str, Address]) -> None:
    """Write the addresses of all listeners to the ready file, if one is configured."""
    if path is None:
        return
    ready = {name: {"host": address.host, "port": address.port} for name, address in addresses.items()}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(ready) + "\n", encoding="utf-8")
    temporary.chmod(READY_MODE)
    os.replace(temporary, path)


def withdraw_ready(path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)
