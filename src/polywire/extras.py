"""Packages that only some features need, which an extra of the distribution installs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from polywire.errors import ErrorCode, Invalid


def required(module: str, need: str, extra: str) -> Any:
    """Return a module. Raises Invalid, which says what needs it and how to install it, if it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"{need} (pip install 'polywire[{extra}]')") from error
