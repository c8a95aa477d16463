"""The entry point of the command ``polywire`` and of ``python -m polywire``."""

from __future__ import annotations

import gc
import sys
from typing import Final

INTERRUPTED: Final = 130
YOUNG_MAX: Final = 150_000
"""New objects before a garbage collection. Imports create some 100,000, and visiting them took a fifth of a start."""


def main() -> None:
    """Run the command line; never returns."""
    gc.set_threshold(YOUNG_MAX)
    try:  # the import takes a moment; Ctrl-C during it must not print a traceback
        from polywire.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
