"""Functions of the C library that Python does not expose.

If the system lacks a function, it is None, and callers do without it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any


def find_call(name: str, *arguments: Any, brief: bool = False) -> Callable[..., int] | None:
    """Return a C function with these ctypes as arguments and an ``int`` result; errors are in ``ctypes.get_errno()``.

    brief: the function is so short that releasing the GIL would cost more.
    """
    if sys.platform == "win32":
        return None
    library = ctypes.PyDLL(None) if brief else ctypes.CDLL(None, use_errno=True)
    function = getattr(library, name, None)
    if function is not None:
        function.argtypes = arguments
        function.restype = ctypes.c_int
    return function
