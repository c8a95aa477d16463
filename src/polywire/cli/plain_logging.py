"""Import structlog without rich, which would take a tenth of a broker's start.

structlog uses rich to print tracebacks in color, which a broker's log lines never contain. Import this module before any
module that imports structlog.
"""

from __future__ import annotations

import sys
from typing import Any

modules: dict[str, Any] = sys.modules
if "rich" not in modules:
    modules["rich"] = None  # structlog then does without it
    import structlog  # noqa: F401

    del modules["rich"]
