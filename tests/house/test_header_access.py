"""Only ``records`` knows the layout of a stored batch's header: other packages use ``records.fields``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from struct import calcsize
from typing import Final

import pytest

from polywire.records.columns import HEADER_BYTES, BatchHeader, Record
from polywire.records.fields import PLACES, header_fields
from polywire.records.header import read_header
from polywire.records.rows import from_records

PACKAGE: Final = Path(__file__).parents[2] / "src" / "polywire"
SOURCES: Final = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "records")
FIELDS: Final = {(at, calcsize(f"<{code}")) for at, code in PLACES.values()}

# Look-alikes: rows and frames of other layouts.
OTHER_LAYOUTS: Final = {
    "log/journal/group.py": "the header and the directory of a group",
    "log/journal/snapshot.py": "the header of a snapshot",
    "log/partition/run_index.py": "rows of the index",
    "log/partition/tail_index.py": "rows of the index",
    "protocols/iggy/session.py": "the head of a request",
    "protocols/polywire/produce_runs.py": "the prefix of a frame",
}
FORMAT: Final = re.compile(r"(\d*)([xcbB?hHiIlLqQefds])")
LOADS: Final = {
    "load_u32": 4,
    "load_i32": 4,
    "load_u64": 8,
    "load_i64": 8,
    "store_u32": 4,
    "store_u64": 8,
    "store_i64": 8,
}


def places_of(form: str) -> list[tuple[int, int]]:
    """Return the position and size of each field of a struct's format."""
    at, found = 0, []
    for count, code in FORMAT.findall(form):
        size = calcsize(f"<{code}") if code != "s" else int(count or 1)
        for _ in range(1 if code == "s" else int(count or 1)):
            if code != "x":
                found.append((at, size))
            at += size
    return found


def is_header_format(form: str) -> bool:
    """Return whether a format skips to a header's field, or spells most of the header."""
    places = places_of(form)
    known = [place for place in places if place[0] < HEADER_BYTES]
    skips = "x" in form
    return (
        form.startswith("<")
        and bool(places)
        and known == places
        and set(places) <= FIELDS
        and (skips or len(places) > 5)
    )


def constant(node: ast.expr | None) -> int | None:
    """Return the added number, or the number itself."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        node = node.right
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int) else None


def readings(tree: ast.AST) -> Iterator[int]:
    """Return lines that read or write at a header's offsets by hand."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0] if node.args else None
        if name == "Struct" and isinstance(first, ast.Constant) and is_header_format(str(first.value)):
            yield node.lineno
        if name == "from_bytes" and isinstance(first, ast.Subscript) and isinstance(first.slice, ast.Slice):
            start, stop = constant(first.slice.lower), constant(first.slice.upper)
            if start and stop and (start, stop - start) in FIELDS and "little" in ast.unparse(node):
                yield node.lineno
        if name in LOADS and len(node.args) >= 2:
            at = constant(node.args[1])
            is_batch = re.fullmatch(
                r"(lent\.|source\.)?p, (at|batch|first|begin|place|0)( \+ \d+)?",
                ", ".join(map(ast.unparse, node.args[:2])),
            )
            if at and is_batch and (at, LOADS[name]) in FIELDS:
                yield node.lineno


def reads_headers(name: str) -> bool:
    """Return whether a module may read stored batches; decoders and Kafka's codec read received bytes."""
    return name not in OTHER_LAYOUTS and "decoder" not in name and not name.startswith("protocols/kafka/")


def test_headers_are_read_through_records() -> None:
    names = {path: path.relative_to(PACKAGE).as_posix() for path in SOURCES}
    assert set(OTHER_LAYOUTS) <= set(names.values())
    found = [
        f"{name}:{line}"
        for path, name in names.items()
        if reads_headers(name)
        for line in readings(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        'Struct("<4xI")',
        'Struct("<8xI16xIQQ32xII")',
        'int.from_bytes(header[4:8], "little")',
        'int.from_bytes(memoryview(base)[at + 32 : at + 40], "little")',
        "load_u32(p, at + 28)",
        "load_i64(source.p, batch + 32)",
    ],
)
def test_forbidden_accesses_are_found(line: str) -> None:
    assert list(readings(ast.parse(line))) == [1]


@pytest.mark.parametrize(
    "line",
    [
        'Struct("<II")',
        'Struct("<48xI8xB")',
        'int.from_bytes(view[2:4], "big")',
        "load_i64(run, 32)",
        "load_u32(p, places[0] + 4 * row)",
    ],
)
def test_look_alikes_are_ignored(line: str) -> None:
    assert not list(readings(ast.parse(line)))


def test_positions_match_the_header() -> None:
    assert list(PLACES) == ["magic", *BatchHeader.__struct_fields__]
    batch = b"--" + from_records([Record(b"value", key=b"key"), Record(b"more")])
    header = read_header(batch, 2)
    for name in BatchHeader.__struct_fields__:
        assert header_fields(name)(batch, 2) == (getattr(header, name),), name
    both = header_fields("length", "record_count", "offset_span")
    assert both(batch, 2) == (header.length, header.record_count, header.offset_span)
    with pytest.raises(AssertionError):
        header_fields("record_count", "length")
