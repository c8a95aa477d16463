"""``python -m polywire.tables DESCRIPTOR``: the process that writes tables; the broker starts it."""

import sys

from polywire.tables.worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
