"""Calls of the system's C library that Python has no name for.

Promises: a call that is missing on this system is None, which its caller has an answer to. Must not know: what the calls are for.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any


def find_call(name: str, *arguments: Any, brief: bool = False) -> Callable[..., int] | None:
    """A function of the C library that takes these ctypes and returns an ``int``; its errors are in ``ctypes.get_errno()``.

    brief: it is too short to be worth giving the interpreter lock away.
    """
    if sys.platform == "win32":
        return None
    library = ctypes.PyDLL(None) if brief else ctypes.CDLL(None, use_errno=True)
    function = getattr(library, name, None)
    if function is not None:
        function.argtypes = arguments
        function.restype = ctypes.c_int
    return function
