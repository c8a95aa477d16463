"""``python -m polywire.tables DESCRIPTOR``: the process that writes tables; the broker starts it."""

import sys

if __name__ == "__main__":
    try:
        from polywire.tables.worker import main
    except ImportError as error:
        sys.exit(f"cannot write tables: {error} (pip install 'polywire[tables]')")
    sys.exit(main(sys.argv[1:]))
