"""``python -m tests.eager_broker``: the command line of a broker that uploads every object without delay.

The delay is not what the suite tests, and would occur thousands of times.
"""

from __future__ import annotations

import sys

from polywire.cli.main import run
from polywire.cluster import uploader

if __name__ == "__main__":
    uploader.PUT_INTERVAL_S = 0.0  # type: ignore[misc]
    sys.exit(run(sys.argv[1:]))
