"""The command ``polywire``, and ``python -m polywire``: one may be interrupted while it is loaded, too."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line; never returns."""
    try:
        from polywire.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
