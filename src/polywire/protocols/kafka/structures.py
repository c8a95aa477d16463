"""What a structure of Kafka's wire is made of: the kinds of values, records that hold them, and programs that say how they are written.

Promises: values only; a program is made once for each version of a structure and never changed. Must not know: bytes, which message it is.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar

import cython


class Kind(IntEnum):
    """What a field's value is; numbers up to I64 are as many bytes."""

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
    """Base of the types made from the table: fields by keyword, the others have their defaults."""

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


def _values(record: Record) -> list[object]:
    """The values of a record; an array is the same as a list and as a tuple."""
    values = [getattr(record, name) for name in record.DEFAULTS]
    return [list(value) if isinstance(value, tuple) else value for value in values]


@cython.final
@cython.cclass
class Program:
    """How one version of a structure is written.

    record: the type of what is read. steps: its fields in order. tagged: those behind tags. defaults: names and values of the fields that
    are not always read. bytes_min: the fewest bytes it has.
    """

    if not cython.compiled:  # compiled, structures.pxd declares them
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
    """What is done for one field of a structure. tag: -1 for a field without. bytes_min: the fewest bytes of the field, element_bytes_min: of
    one element of its array, at least one."""

    if not cython.compiled:  # compiled, structures.pxd declares them
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
    """The fewest bytes of one value that is no structure."""
    if kind <= Kind.I64:
        return max(kind, 1)
    if kind == Kind.F64:
        return 8
    if kind == Kind.ID:
        return 16
    if flexible:
        return 1
    return 2 if kind == Kind.TEXT else 4
