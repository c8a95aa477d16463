"""The messages, error codes and metrics that docs/operate/troubleshoot.md quotes exist in the program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from polywire.errors import ErrorCode

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "operate" / "troubleshoot.md").read_text("utf-8")
METRICS: Final = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
ROW: Final = re.compile(r"^\| (?!---)([^|]+) \|", re.MULTILINE)
SPAN: Final = re.compile(r"`([^`]+)`")
CODE: Final = "code="
METRIC: Final = "polywire_"


def quoted() -> Iterator[str]:
    """Yield the code spans in the first column of each table."""
    for row in ROW.finditer(PAGE):
        yield from SPAN.findall(row[1])


@cache
def strings() -> str:
    """Return every string of the package; adjacent strings are joined, and values in messages are dropped."""
    found = []
    for path in (ROOT / "src" / "polywire").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize("text", sorted(set(quoted())))
def test_a_quoted_message_exists(text: str) -> None:
    if text.startswith(CODE):
        assert text.removeprefix(CODE) in {code.value for code in ErrorCode}
    elif text.startswith(METRIC):
        assert text.partition("{")[0] in METRICS
    else:
        assert text in strings()
