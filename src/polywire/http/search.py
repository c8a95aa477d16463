"""Select records by their key, by text in their key, value and headers, and by a field of JSON values.

Filters run in a thread. They decode one record at a time, and only the parts that they compare.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec

from polywire.errors import ErrorCode, Invalid
from polywire.records.columns import HeaderKind, text_of
from polywire.records.rows import Rows

FILTER_CHARS_MAX: Final = 1_000  # characters of a text or path to search for
JSON_BYTES_MAX: Final = 1024 * 1024  # largest value that a JSON filter decodes; larger ones do not match
HEADERS_SEARCHED_MAX: Final = 1_000  # headers of one record that a search compares
PATH_STEPS_MAX: Final = 32
ITEMS_MAX: Final = 10_000  # values of one record that a path with [*] may select
_EVERY: Final = "*"
_STEP: Final = re.compile(r"""\.?([^.\[\]=<>!~\s"']+)|\[(\d{1,9}|\*)\]|\["((?:[^"\\]|\\.)*)"\]""")
_COMPARISON: Final = re.compile(r"(=|!=|<=|>=|<|>|~)\s*")
_NUMBERS: Final = (int, float)
_ORDERS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Filter:
    """Which records to return. Without conditions, all match.

    Attributes:
        key: the exact key.
        text: text in the key, the value or a header, without regard to the case of ASCII letters.
        field: a condition for a JSON value.
    """

    key: bytes | None = None
    text: bytes = b""
    field: Field | None = None

    def matches(self, rows: Rows, index: int) -> bool:
        """Return whether a record meets all conditions."""
        if self.key is not None and ((key := rows.key(index)) is None or key != self.key):
            return False
        if self.text and not self._has_text(rows, index):
            return False
        return self.field is None or self.field.matches(rows.value(index))

    def _has_text(self, rows: Rows, index: int) -> bool:
        return any(self.text in part.lower() for part in _parts(rows, index))


def _parts(rows: Rows, index: int) -> Iterator[bytes]:
    yield bytes(rows.key(index) or b"")
    yield bytes(rows.value(index) or b"")
    for header in islice(rows.headers(index), HEADERS_SEARCHED_MAX):
        yield _shown(header.key, header.key_kind)
        yield _shown(header.value, header.value_kind)


def _shown(data: bytes | None, kind: HeaderKind) -> bytes:
    """Return a part of a header as it is shown: numbers as digits."""
    if kind in (HeaderKind.RAW, HeaderKind.STRING):
        return data or b""
    return text_of(data, kind).encode()


@dataclass(frozen=True, slots=True)
class Field:
    """A condition for a field of a JSON value.

    Attributes:
        path: names and indexes from the value's root to the field; ``*`` stands for every item of an array or object.
        compare: ``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=`` or ``~`` (contains); empty if the field must only exist.
        text: the value to compare with, as text.
        value: the same as JSON, or as text if it is not JSON.
    """

    path: Sequence[str | int]
    compare: str = ""
    text: str = ""
    value: Any = None

    def matches(self, data: memoryview[int] | bytes | None) -> bool:
        """Return whether a value is JSON and has a matching field."""
        if data is None or len(data) > JSON_BYTES_MAX:
            return False
        try:
            root = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return any(map(self._compares, islice(_select(root, self.path), ITEMS_MAX)))

    def _compares(self, found: Any) -> bool:
        match self.compare:
            case "":
                return True
            case "=":
                return self._equals(found)
            case "!=":
                return not self._equals(found)
            case "~":
                return isinstance(found, str) and self.text.lower() in found.lower()
        if _is_number(found) and _is_number(self.value):
            return _ORDERS[self.compare](found, self.value)
        return isinstance(found, str) and _ORDERS[self.compare](found, self.text)

    def _equals(self, found: Any) -> bool:
        if isinstance(found, bool) or isinstance(self.value, bool):
            return found is self.value
        return bool(found == self.value) or (isinstance(found, str) and found == self.text)


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def _select(value: Any, path: Sequence[str | int]) -> Iterator[Any]:
    """Yield the values at a path. They may be many if it has ``*``."""
    if not path:
        yield value
        return
    step, rest = path[0], path[1:]
    if step == _EVERY and isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _select(item, rest)
    elif isinstance(value, dict) and str(step) in value:
        yield from _select(value[str(step)], rest)
    elif isinstance(value, list) and isinstance(step, int) and step < len(value):
        yield from _select(value[step], rest)


def filter_of(query: Mapping[str, str]) -> Filter:
    """Return the filter in the parameters ``key``, ``search`` and ``json``. Raises Invalid(INVALID_REQUEST)."""
    key, text, field = query.get("key"), query.get("search", ""), query.get("json", "").strip()
    for name, given in (("search", text), ("json", field)):
        if len(given) > FILTER_CHARS_MAX:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"{name} is too long limit={FILTER_CHARS_MAX} characters={len(given)}"
            )
    return Filter(
        key=None if key is None else key.encode(errors="replace"),
        text=text.encode(errors="replace").lower(),
        field=parse_field(field) if field else None,
    )


def parse_field(text: str) -> Field:
    """Parse a condition such as ``items[*].price >= 10``. Raises Invalid(INVALID_REQUEST)."""
    path, rest = _path(text.strip().removeprefix("$"))
    if not rest:
        return Field(path)
    found = _COMPARISON.match(rest)
    if found is None or not path:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"JSON filter is invalid (use a path and a comparison, such as items[0].price >= 10) got={text[:80]!r}",
        )
    literal = rest[found.end() :]
    try:
        value = msgspec.json.decode(literal.encode(errors="replace"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = literal
    return Field(path, found[1], value if isinstance(value, str) else literal, value)


def _path(text: str) -> tuple[Sequence[str | int], str]:
    """Return the steps at the beginning of a condition, and what follows them."""
    steps: list[str | int] = []
    at = 0
    while len(steps) < PATH_STEPS_MAX and (step := _STEP.match(text, at)) is not None:
        name, index, quoted = step.groups()
        if index is not None and index != _EVERY:
            steps.append(int(index))
        else:
            steps.append(name or index or re.sub(r"\\(.)", r"\1", quoted or ""))
        at = step.end()
    return steps, text[at:].strip()
