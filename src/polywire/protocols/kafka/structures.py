"""Types for the table of Kafka messages: kinds of values, structures, and encoding programs.

A program describes how one version of a structure is encoded. It is made once and never changes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar, TypeVar

import cython


class Kind(IntEnum):
    """The type of a field. The value of the numeric kinds up to I64 is their size in bytes."""

    BOOL = 0
    I8 = 1
    I16 = 2
    I32 = 4
    I64 = 8
    F64 = 9
    ID = 16
    TEXT = 17
    BYTES = 18
    RECORDS = 19
    STRUCTURE = 20


class Record:
    """Base class of the record types. Fields are set by keyword and have defaults."""

    __slots__ = ()
    DEFAULTS: ClassVar[dict[str, object]] = {}

    def __init__(self, **values: object) -> None:
        defaults: dict[str, object] = self.DEFAULTS
        for name, default in defaults.items():
            setattr(self, name, default)
        for name, value in values.items():
            if name not in defaults:
                unknown = sorted(values.keys() - defaults.keys())
                raise TypeError(f"no such field type={type(self).__name__} names={unknown}")
            setattr(self, name, value)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return _values(self) == _values(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = [f"{name}={getattr(self, name)!r}" for name in self.DEFAULTS]
        return f"{type(self).__name__}({', '.join(fields)})"


_Record = TypeVar("_Record", bound=Record)


def changed(record: _Record, **fields: Any) -> _Record:
    """Return a copy of a record in which these fields have other values."""
    return type(record)(**{name: getattr(record, name) for name in record.DEFAULTS} | fields)


def _values(record: Record) -> list[object]:
    """Return the values of a record. Tuples are returned as lists, so that a tuple and a list compare equal."""
    values = [getattr(record, name) for name in record.DEFAULTS]
    return [list(value) if isinstance(value, tuple) else value for value in values]


@cython.final
@cython.cclass
class Program:
    """How one version of a structure is encoded.

    Attributes:
        record: the record type.
        steps: the fields in the order of encoding, without tagged ones.
        tagged: the tagged fields.
        defaults: names and values of fields that may be absent.
        bytes_min: minimum size of the structure.
    """

    if not cython.compiled:  # structures.pxd declares these for compiled code
        __slots__ = ("bytes_min", "defaults", "flexible", "record", "steps", "tagged")

    def __init__(
        self,
        record: Any,
        steps: tuple[Step, ...],
        tagged: tuple[Step, ...],
        defaults: tuple[tuple[str, object], ...],
        flexible: bool,
    ) -> None:
        self.record = record
        self.steps = steps
        self.tagged = tagged
        self.defaults = defaults
        self.flexible = flexible
        self.bytes_min = 1 if flexible else 0
        step: Step
        for step in steps:
            self.bytes_min += step.bytes_min


@cython.final
@cython.cclass
class Step:
    """How one field of a structure is encoded.

    Attributes:
        tag: number of a tagged field, otherwise -1.
        program: the program of a nested structure; None for plain values.
        bytes_min: minimum size of the field.
        element_bytes_min: minimum size of an element if the field is an array, at least 1.
    """

    if not cython.compiled:  # structures.pxd declares these for compiled code
        __slots__ = (
            "bytes_min",
            "default",
            "element_bytes_min",
            "is_array",
            "kind",
            "name",
            "nullable",
            "program",
            "tag",
        )
        program: Any  # None for plain values

    def __init__(
        self,
        name: str,
        kind: int,
        is_array: bool,
        nullable: bool,
        tag: int,
        default: object,
        program: Program | None,
        flexible: bool,
    ) -> None:
        self.name = name
        self.kind = kind
        self.is_array = is_array
        self.nullable = nullable
        self.tag = tag
        self.default = default
        self.program = program
        single = _bytes_min(kind, flexible)
        if program is not None:
            single = 1 if nullable and not is_array else program.bytes_min
        self.element_bytes_min = max(single, 1)
        self.bytes_min = _bytes_min(Kind.BYTES, flexible) if is_array else single


def _bytes_min(kind: int, flexible: bool) -> int:
    """Return the minimum size of a value that is not a structure."""
    if kind <= Kind.I64:
        return max(kind, 1)
    if kind == Kind.F64:
        return 8
    if kind == Kind.ID:
        return 16
    if flexible:
        return 1
    return 2 if kind == Kind.TEXT else 4
