"""Packages that only some features need, which an extra of the distribution installs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from polywire.errors import ErrorCode, Invalid


def required(module: str, need: str, extra: str) -> Any:
    """Import a module and return it.

    Raises Invalid if it is not installed. The message has ``need``, and how to install the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"{need} (pip install 'polywire[{extra}]')") from error
