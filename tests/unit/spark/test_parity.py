"""The comparison in docs/reference/spark.md is complete, and an existing test shows every row."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest

from polywire.spark import options
from tests.unit.spark.parity import SHOWN_BY

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = (ROOT / "docs" / "reference" / "spark.md").read_text("utf-8")
TESTS: Final = sorted({test for rows in SHOWN_BY.values() for test in rows.values()})


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("test", TESTS)
def test_tests_of_rows_exist(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("title", SHOWN_BY)
def test_every_row_is_shown_by_a_test(title: str) -> None:
    rows = re.findall(r"^\| ([^|]+) \|", section(title), re.MULTILINE)
    assert [row.partition(",")[0] for row in rows[1:]] == list(SHOWN_BY[title])


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Source: options", options.SOURCE_OPTIONS),
        ("Sink: options", [name for name in options.SINK_OPTIONS if name not in options.OF_SPARK]),
    ],
)
def test_every_option_has_a_row(title: str, names: list[str]) -> None:
    assert [name for name in names if f"`{name}`" not in section(title)] == []
