"""``python -m polywire.links DESCRIPTOR [check]``: the process that runs links; the broker starts it."""

import sys

from polywire.links.worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
