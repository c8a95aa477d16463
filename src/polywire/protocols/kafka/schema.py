"""Compile the table of Kafka messages into Python types and encoding programs.

A program describes how one version of a structure is encoded (see ``structures``). It is compiled on first use. A
record type has the fields of all versions of its message, so handlers need not check the version.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from polywire.protocols.kafka.definitions import DEFINITIONS
from polywire.protocols.kafka.messages import Api
from polywire.protocols.kafka.structures import Kind, Program, Record, Step

VERSION_MAX: Final = 32767

_KINDS: Final = {
    "b": Kind.BOOL,
    "i8": Kind.I8,
    "i16": Kind.I16,
    "i32": Kind.I32,
    "i64": Kind.I64,
    "f64": Kind.F64,
    "id": Kind.ID,
    "s": Kind.TEXT,
    "bytes": Kind.BYTES,
    "recs": Kind.RECORDS,
}
_ZEROS: Final[dict[Kind, object]] = {
    Kind.BOOL: False,
    Kind.F64: 0.0,
    Kind.ID: bytes(16),
    Kind.TEXT: "",
    Kind.BYTES: b"",
    Kind.RECORDS: b"",
}


class Versions(NamedTuple):
    """A range of versions, including both ends."""

    first: int
    last: int

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.first <= version <= self.last


ALWAYS: Final = Versions(0, VERSION_MAX)


class Field(msgspec.Struct, frozen=True):
    """A field of a structure.

    Attributes:
        versions: the versions that have the field.
        nullable_from: first version in which the value may be null; None if it never may.
        tag: number of a tagged field, otherwise None.
        structure: the structure of the value, or of the elements of an array; None for plain values.
    """

    name: str
    kind: Kind
    is_array: bool
    versions: Versions
    nullable_from: int | None
    tag: int | None
    default: object
    structure: Structure | None

    @property
    def type_name(self) -> str:
        """Name of the record type of ``structure`` within the enclosing one."""
        return _type_name(self.name)


class Structure(msgspec.Struct, frozen=True):
    """The fields of a structure in the order in which they are encoded, and its record type."""

    fields: tuple[Field, ...]
    record: type[Record]


@dataclass(frozen=True, slots=True)
class Message:
    """A request and its response.

    Attributes:
        flexible_from: first version with tags and compact lengths.
    """

    api: Api
    versions: Versions
    flexible_from: int
    request: Structure
    response: Structure


def message(api: Api) -> Message:
    return _messages()[api]


if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import request as request
    from polywire.protocols.kafka.message_types import response as response
else:

    @cache
    def request(api: Api) -> type[Record]:
        """Return the record type of a request.

        Its fields are attributes, and so are the types of its nested structures (``topics`` → ``Topics``).
        """
        return message(api).request.record

    @cache
    def response(api: Api) -> type[Record]:
        """Return the record type of a response."""
        return message(api).response.record


@cache
def is_flexible(api: Api, version: int) -> bool:
    return version >= message(api).flexible_from


@cache
def request_program(api: Api, version: int) -> Program:
    """Return the codec program of a version of a request."""
    found = message(api)
    return _program(found.request, version, flexible=version >= found.flexible_from)


@cache
def response_program(api: Api, version: int) -> Program:
    """Return the codec program of a version of a response."""
    found = message(api)
    return _program(found.response, version, flexible=version >= found.flexible_from)


def _program(structure: Structure, version: int, *, flexible: bool) -> Program:
    steps: list[Step] = []
    tagged: list[Step] = []
    for field in structure.fields:
        if version in field.versions:
            (steps if field.tag is None else tagged).append(_step(field, version, flexible=flexible))
    defaults = tuple((field.name, field.default) for field in structure.fields if not _always_read(field, version))
    return Program(structure.record, tuple(steps), tuple(tagged), defaults, flexible)


def _always_read(field: Field, version: int) -> bool:
    return version in field.versions and field.tag is None


def _step(field: Field, version: int, *, flexible: bool) -> Step:
    nullable = field.nullable_from is not None and version >= field.nullable_from
    program = None if field.structure is None else _program(field.structure, version, flexible=flexible)
    tag = -1 if field.tag is None else field.tag
    return Step(field.name, int(field.kind), field.is_array, nullable, tag, field.default, program, flexible)


# The table


@cache
def _messages() -> Mapping[Api, Message]:
    return {found.api: found for found in map(_message, _texts())}


def _texts() -> Iterator[list[str]]:
    lines: list[str] = []
    for line in DEFINITIONS.strip().splitlines():
        if lines and not line.startswith(" "):
            yield lines
            lines = []
        lines.append(line)
    yield lines


def _message(lines: list[str]) -> Message:
    number, name, versions, *flexible = lines[0].split()
    request_text, response_text = " ".join(lines[1:]).split("<")
    return Message(
        api=Api(int(number)),
        versions=_versions(versions, ALWAYS),
        flexible_from=int(flexible[1]) if flexible else VERSION_MAX + 1,
        request=_structure(_Tokens(request_text.replace(">", " ", 1)), f"{name}Request"),
        response=_structure(_Tokens(response_text), f"{name}Response"),
    )


def _versions(text: str, within: Versions) -> Versions:
    """Parse ``5+``, ``2-4`` or ``3``."""
    if text.endswith("+"):
        return Versions(int(text[:-1]), within.last)
    first, _, last = text.partition("-")
    return Versions(int(first), int(last or first))


class _Tokens:
    """The tokens of a definition. ``[]`` before a type is part of the type's token."""

    def __init__(self, text: str) -> None:
        text = text.replace("[]", "*")
        for mark in "[]{},":
            text = text.replace(mark, f" {mark} ")
        self._words = [word.replace("*", "[]") for word in text.split()]
        self._at = 0

    def peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def take(self) -> str:
        self._at += 1
        return self._words[self._at - 1]


def _structure(tokens: _Tokens, name: str) -> Structure:
    fields: list[Field] = []
    while tokens.peek() not in ("", "]", "}"):
        fields.append(_field(tokens, name))
        if tokens.peek() == ",":
            tokens.take()
    assert len({field.name for field in fields}) == len(fields), f"structure has a duplicate field name={name}"
    body: dict[str, object] = {
        "__slots__": tuple(field.name for field in fields),
        "__doc__": f"A {name}, made from the table of definitions.",
        "DEFAULTS": {field.name: field.default for field in fields},
        **{field.type_name: field.structure.record for field in fields if field.structure is not None},
    }
    return Structure(tuple(fields), type(name, (Record,), body))


def _type_name(field: str) -> str:
    return "".join(part.capitalize() for part in field.split("_"))


def _field(tokens: _Tokens, parent: str) -> Field:
    name, _, tag = tokens.take().partition("#")
    structure: Structure | None = None
    word = tokens.take()
    null, default = "", ""
    if word in ("[", "{"):
        kind, is_array = Kind.STRUCTURE, word == "["
        structure = _structure(tokens, f"{parent}{_type_name(name)}")
        tokens.take()
        null = tokens.take() if tokens.peek().startswith("?") else ""
    else:
        word, _, default = word.partition("=")
        word, mark, since = word.partition("?")
        null, is_array = mark + since, word.startswith("[]")
        kind = _KINDS[word.removeprefix("[]")]
    versions = _versions(tokens.take()[1:], ALWAYS) if tokens.peek().startswith("@") else ALWAYS
    nullable_from = int(null.strip("?+") or 0) if null else None
    return Field(
        name=sys.intern(name),  # the codec reads and sets fields by name, which is slow if the name is not interned
        kind=kind,
        is_array=is_array,
        versions=versions,
        nullable_from=nullable_from,
        tag=int(tag) if tag else None,
        default=_default(kind, default, is_array=is_array, nullable=nullable_from is not None),
        structure=structure,
    )


def _default(kind: Kind, text: str, *, is_array: bool, nullable: bool) -> object:
    """Return the default of a field. It is None for a tagged structure, and empty for an array."""
    if is_array:
        return None if nullable else ()
    if kind is Kind.STRUCTURE:
        return None
    if text:
        return bool(int(text)) if kind is Kind.BOOL else int(text)
    return None if nullable else _ZEROS.get(kind, 0)
