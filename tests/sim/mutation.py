"""A switch that takes one mechanism out, in simulated worlds only.

Promises: what it changes is as before once its patch is over. Must not know: who notices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

_CAN_CHANGE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE


@dataclass(frozen=True, slots=True)
class Mutation:
    """One switch, and the mechanism that it takes out. ``test``: one that fails then, where few runs come by what it takes. ``world``: the
    one whose runs notice. reason: why no run notices, where that is known."""

    name: str
    mechanism: str
    take_out: Callable[[pytest.MonkeyPatch], None]
    test: Callable[[], None] | None = None
    world: str = "log"
    reason: str = ""


def prepared(test: Callable[..., None], **makers: Callable[[], object]) -> Callable[[], None]:
    """A test with what it asks for: a directory, what patches, and what one of ``makers`` makes anew each time."""
    wanted = signature(test).parameters

    @wraps(test)
    def run() -> None:
        with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
            given = {"tmp_path": Path(directory), "monkeypatch": patch} | {
                name: make() for name, make in makers.items()
            }
            test(**{name: given[name] for name in wanted})

    return run


def nothing(*_: object, **__: object) -> None:
    """What is done instead."""


class Compiled(Exception):
    """Methods of a compiled class cannot be replaced: ``POLYWIRE_PURE=1`` runs all of them from their sources."""


def replaced(owner: object, name: str, instead: object) -> Callable[[pytest.MonkeyPatch], None]:
    """A switch that puts another function in the place of one. Raises Compiled."""

    def take_out(patch: pytest.MonkeyPatch) -> None:
        if isinstance(owner, type) and not owner.__flags__ & _CAN_CHANGE:
            raise Compiled(f"{owner.__name__}.{name}")
        patch.setattr(owner, name, instead)

    return take_out


def wrapped(owner: object, name: str, around: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A switch that gives the old function to the new one. Raises Compiled."""

    def take_out(patch: pytest.MonkeyPatch) -> None:
        old = getattr(owner, name)
        replaced(owner, name, lambda *args, **named: around(old, *args, **named))(patch)

    return take_out
