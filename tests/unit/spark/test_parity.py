"""The table of docs/spark/options.md: complete, and every row backed by a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest

from polywire.spark import options, sink_options

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = (ROOT / "docs" / "spark" / "options.md").read_text("utf-8")
TESTS: Final = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize(("file", "name"), TESTS)
def test_tests_that_rows_name_exist(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_names_a_test() -> None:
    rows = [
        line
        for line in PAGE.splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| option", "| | |"))
    ]
    assert len(rows) > 40
    assert [row for row in rows if "::test_" not in row] == []


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Source: options", options.OPTIONS),
        ("Sink: options", [name for name in sink_options.OPTIONS if name not in sink_options.OF_SPARK]),
    ],
)
def test_every_option_has_a_row(title: str, names: list[str]) -> None:
    assert [name for name in names if f"`{name}`" not in section(title)] == []
