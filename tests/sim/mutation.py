"""A switch that disables one mechanism, in simulations only, until its patch is undone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

from polywire.routing.broker import METHODS

_CAN_CHANGE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE


@dataclass(frozen=True, slots=True)
class Mutation:
    """One switch and the mechanism that it disables.

    ``test``: a test that fails then, for mechanisms that few runs need.

    ``world``: the simulation whose runs fail. rests: remainders of the seeds modulo sixteen that are tried; by default
    all. first: the first seed. reason: why no run fails, if that is known.
    """

    name: str
    mechanism: str
    take_out: Callable[[pytest.MonkeyPatch], None]
    test: Callable[[], None] | None = None
    world: str = "log"
    reason: str = ""
    rests: Collection[int] = range(16)
    first: int = 0


def prepared(test: Callable[..., None], **makers: Callable[[], object]) -> Callable[[], None]:
    """Call a test with its fixtures: a directory, a patch, and new objects of ``makers``."""
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
    """Do nothing instead."""


class Compiled(Exception):
    """A method of a compiled class cannot be replaced: ``POLYWIRE_PURE=1`` runs all of them from source."""


def current(owner: object, name: str) -> Any:
    """Return a function that can be replaced. Raises Compiled."""
    if isinstance(owner, type) and not owner.__flags__ & _CAN_CHANGE:
        raise Compiled(f"{owner.__name__}.{name}")
    return getattr(owner, name)


def put(patch: pytest.MonkeyPatch, owner: object, name: str, instead: object) -> None:
    """Replace a function. Raises Compiled."""
    current(owner, name)
    patch.setattr(owner, name, instead)


def replaced(owner: object, name: str, instead: object) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a switch that replaces a function, also for calls from other processes. The switch raises Compiled.

    Raises AttributeError at once if no such function exists, for example because it is in another module now.
    """
    with suppress(Compiled):
        current(owner, name)

    def take_out(patch: pytest.MonkeyPatch) -> None:
        old = current(owner, name)
        put(patch, owner, name, instead)
        for method in METHODS.values():
            if method._function is old:
                assert method._hints, "the types of the old function are kept"
                patch.setattr(method, "_function", instead)

    return take_out


def wrapped(owner: object, name: str, around: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a switch that passes the old function to a new one. Raises as ``replaced``."""
    with suppress(Compiled):
        current(owner, name)

    def take_out(patch: pytest.MonkeyPatch) -> None:
        old = current(owner, name)
        replaced(owner, name, lambda *args, **named: around(old, *args, **named))(patch)

    return take_out
