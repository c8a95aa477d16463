"""Functions of the C library that Python does not expose.

A function that the system lacks is None, and callers handle that.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any


def find_call(name: str, *arguments: Any, brief: bool = False) -> Callable[..., int] | None:
    """Return a C function that takes these ctypes and returns an ``int``; its errors are in ``ctypes.get_errno()``.

    brief: so short that releasing the interpreter lock would cost more.
    """
    if sys.platform == "win32":
        return None
    library = ctypes.PyDLL(None) if brief else ctypes.CDLL(None, use_errno=True)
    function = getattr(library, name, None)
    if function is not None:
        function.argtypes = arguments
        function.restype = ctypes.c_int
    return function
