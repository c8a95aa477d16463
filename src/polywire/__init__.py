"""Polywire: one durable streaming log that speaks many wires.

Promises: ``__version__``; with ``POLYWIRE_PURE=1`` in the environment every module runs from its Python source. Must not
know: anything else.
"""

import os

from polywire.build_info import VERSION as __version__
from polywire.build_info import compiled_modules, prefer_sources

if os.environ.get("POLYWIRE_PURE") == "1":
    prefer_sources()

__all__ = ["__version__", "compiled_modules"]
