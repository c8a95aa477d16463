"""The entry point of the command ``polywire`` and of ``python -m polywire``."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line; never returns."""
    try:  # the import takes a moment; Ctrl-C during it must not print a traceback
        from polywire.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
