"""Find a pipeline by its name, and parse its settings from text.

A pipeline is a function whose parameters are its settings. Their types define how text is parsed, and their annotations
are their descriptions. Listing pipelines does not require Spark. An unknown or invalid setting is rejected before Spark
starts, with a suggestion.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from polywire.choices import unknown
from polywire.errors import ErrorCode, Invalid

GIVEN: Final = ("spark", "on_progress", "clock")  # parameters that the caller of the pipeline provides


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline by name.

    Attributes:
        name: its name on the command line.
        target: its function, as ``module:function``.
        summary: what it does.
    """

    name: str
    target: str
    summary: str

    def load(self) -> Callable[..., Any]:
        """Return the function. Raises Invalid(INVALID_REQUEST) if Spark is not installed."""
        module, _, name = self.target.partition(":")
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"pipelines need Spark (pip install 'polywire[spark]') missing={error.name}"
            ) from error
        return function


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a pipeline.

    Attributes:
        default: its default value as text; None if there is none.
    """

    name: str
    kind: Any
    meaning: str
    required: bool
    default: str | None

    @property
    def kinds(self) -> list[Any]:
        """Types of the setting's value. The text is converted to the first one that accepts it."""
        return _alternatives(self.kind)


_HERE: Final = "polywire.spark.pipelines"
PIPELINES: Final = (
    Pipeline("land", f"{_HERE}.land:land", "write a topic to a partitioned table (Parquet, Delta, Iceberg)"),
    Pipeline(
        "refine",
        f"{_HERE}.refine:refine",
        "parse records, drop duplicates, write unreadable records to a dead-letter topic",
    ),
    Pipeline("windows", f"{_HERE}.windows:windows", "aggregate over windows of event time"),
    Pipeline("state", f"{_HERE}.state:state", "fold event-sourced records into the current state of each key"),
    Pipeline("bridge", f"{_HERE}.bridge:bridge", "copy a topic into another one, on the same broker or another"),
    Pipeline("replay", f"{_HERE}.replay:replay", "write a table back into a topic, at a chosen speed"),
    Pipeline("compact", f"{_HERE}.compact:compact", "copy the last value of each key into a new topic"),
    Pipeline("quality", f"{_HERE}.quality:quality", "report counts, gaps and duplicates of a topic or table"),
)


def pipeline(name: str) -> Pipeline:
    """Return a pipeline by name. Raises Invalid(INVALID_REQUEST)."""
    for known in PIPELINES:
        if known.name == name:
            return known
    raise unknown("pipeline", name, [known.name for known in PIPELINES])


def settings_of(function: Callable[..., Any]) -> list[Setting]:
    """Return the settings of a pipeline's function, in order."""
    hints = get_type_hints(function, include_extras=True)
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in GIVEN:
            continue
        kind, meaning = _described(hints[name])
        required = parameter.default is inspect.Parameter.empty
        default = None if required else _text(parameter.default)
        found.append(Setting(name, kind, meaning, required, default))
    return found


def read_settings(function: Callable[..., Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Parse settings for a function. Raises Invalid(INVALID_REQUEST)."""
    known = {setting.name: setting for setting in settings_of(function)}
    for name in given:
        if name not in known:
            raise unknown("setting", name, list(known))
    missing = [name for name, setting in known.items() if setting.required and name not in given]
    if missing:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"required settings are missing (use --set {'=… --set '.join(missing)}=…)"
        )
    return {name: _value(known[name], text) for name, text in given.items()}


def _described(hint: Any) -> tuple[Any, str]:
    if get_origin(hint) is Annotated:
        kind, meaning, *_ = get_args(hint)
        return kind, str(meaning)
    return hint, ""


def _value(setting: Setting, text: str) -> Any:
    for kind in setting.kinds:
        try:
            return _read(kind, text)
        except ValueError:
            continue
    kinds = " or ".join(kind_name(kind) for kind in setting.kinds)
    raise Invalid(ErrorCode.INVALID_REQUEST, f"setting needs {kinds} setting={setting.name} got={text!r}")


def _alternatives(kind: Any) -> list[Any]:
    """Return the types as which a setting's text can be parsed: the members of a union that have a text form."""
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    parts = tuple(inner for part in parts for inner in _unpacked(part))
    if any(isinstance(part, type) and issubclass(part, Enum) for part in parts):
        parts = tuple(part for part in parts if part is not str)  # str only represents the values of the enumeration
    return [part for part in parts if part is not type(None) and get_origin(part) is not Callable and _readable(part)]


def _unpacked(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _readable(kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is not None:
        return origin is Literal or (isinstance(origin, type) and issubclass(origin, Sequence))
    return isinstance(kind, type) and (kind in (str, int, float, bool) or issubclass(kind, Enum | Path))


def _read(kind: Any, text: str) -> Any:
    origin = get_origin(kind)
    if origin is Literal:
        if text not in get_args(kind):
            raise ValueError(text)
        return text
    if origin is not None:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is bool:
        return ("false", "true").index(text.lower()) == 1
    return kind(text)


def kind_name(kind: Any) -> str:
    """Return the name of a type for messages."""
    origin = get_origin(kind)
    if origin is Literal:
        return "|".join(map(str, get_args(kind)))
    if origin is not None:
        return "a,b,…"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(member.value) for member in kind)
    return {str: "text", int: "whole number", float: "number", bool: "true|false", Path: "path"}.get(kind, "text")


def _text(default: Any) -> str | None:
    match default:
        case None | ():
            return None
        case bool():
            return str(default).lower()
        case Enum():
            return str(default.value)
        case tuple() | list():
            return ",".join(map(str, default))
        case _:
            return str(default)
