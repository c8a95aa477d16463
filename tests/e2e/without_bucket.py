"""``polywire`` with the library for buckets hidden from Python; at its end it records which modules were imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

from polywire.cli.main import run

LOADED: Final = "POLYWIRE_TEST_LOADED"  # the file for the names of modules


class Absent:
    """Finds no package of that name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise if the module is imported."""
        if name.partition(".")[0] == "obstore":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())
    code = run(sys.argv[1:])
    Path(os.environ[LOADED]).write_text("\n".join(sorted(sys.modules)))
    sys.exit(code)
