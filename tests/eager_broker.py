"""``python -m tests.eager_broker``: the command line of a broker that puts every object at once.

What is waited for is not the suite's matter, and it waits some thousand times.
"""

from __future__ import annotations

import sys

from polywire.cli.main import run
from polywire.cluster import uploader

if __name__ == "__main__":
    uploader.PUT_INTERVAL_S = 0.0  # type: ignore[misc]
    sys.exit(run(sys.argv[1:]))
