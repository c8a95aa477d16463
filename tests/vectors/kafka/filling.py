"""Messages with a different value in every field, made by a rule, so that a stored message need not list them.

The n-th value of a message, counted over its untagged fields in order, is n: as a number, as text ``name-n``, as 16
bytes n. An array has two elements. Every fifth nullable value is null. Tagged fields come after the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from polywire.protocols.kafka.schema import Field, Structure
from polywire.protocols.kafka.structures import Kind


def filled(structure: Structure, version: int, numbers: Iterator[int] | None = None) -> Any:
    """Return a record of the structure with a value in every field that the version has."""
    numbers = count(1) if numbers is None else numbers
    there = [field for field in structure.fields if version in field.versions]
    ordered = [field for field in there if field.tag is None] + [field for field in there if field.tag is not None]
    return structure.record(**{field.name: _value(field, version, numbers) for field in ordered})


def _value(field: Field, version: int, numbers: Iterator[int]) -> Any:
    nullable = field.nullable_from is not None and version >= field.nullable_from
    if nullable and next(numbers) % 5 == 0:
        return None
    if field.is_array:
        return [_single(field, version, numbers) for _ in range(2)]
    return _single(field, version, numbers)


def _single(field: Field, version: int, numbers: Iterator[int]) -> Any:
    if field.structure is not None:
        return filled(field.structure, version, numbers)
    number = next(numbers)
    match field.kind:
        case Kind.BOOL:
            return number % 2 == 0
        case Kind.TEXT:
            return f"{field.name}-{number}"
        case Kind.BYTES | Kind.RECORDS:
            return bytes([number % 256]) * (number % 7)
        case Kind.ID:
            return number.to_bytes(16, "big")
        case Kind.I8:
            return number % 128
        case Kind.F64:
            return number / 4
        case _:
            return number
