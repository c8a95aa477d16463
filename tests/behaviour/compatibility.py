"""What a scenario needs of a wire, and the table of which scenario ran on which wire.

The same table stands in docs/reference/compatibility.md; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from polywire.client.base import Ability

Scenario = TypeVar("Scenario", bound=Callable[..., Any])

_NODE = re.compile(r"::test_(?P<scenario>\w+)\[(?P<column>[\w-]+)")


def needs(*abilities: Ability) -> Callable[[Scenario], Scenario]:
    """Mark a scenario with the abilities a wire must declare to run it."""

    def mark(scenario: Scenario) -> Scenario:
        scenario.abilities_needed = frozenset(abilities)  # type: ignore[attr-defined]
        return scenario

    return mark


def abilities_needed(scenario: Callable[..., Any]) -> frozenset[Ability]:
    """Abilities a scenario was marked with."""
    needed: frozenset[Ability] = getattr(scenario, "abilities_needed", frozenset())
    return needed


class Table:
    """Rows are scenarios, columns wires or pairs of wires; a cell is whether the scenario passed there."""

    def __init__(self) -> None:
        self._cells: dict[str, dict[str, bool]] = {}

    def record(self, node: str, *, passed: bool) -> None:
        """Note how one test ended."""
        match = _NODE.search(node)
        if match is not None:
            row = self._cells.setdefault(match["scenario"].replace("_", " "), {})
            column = match["column"]
            row[column] = passed and row.get(column, True)

    def lines(self) -> list[str]:
        """Two Markdown tables: scenarios by wire, then writers by reader."""
        single = {name: row for name, row in self._cells.items() if not any("-to-" in column for column in row)}
        paired = {name: row for name, row in self._cells.items() if name not in single}
        return [*_markdown(single), *_markdown(paired)]


def _markdown(cells: dict[str, dict[str, bool]]) -> list[str]:
    if not cells:
        return []
    columns = sorted({column for row in cells.values() for column in row})
    lines = ["", "| scenario | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name, row in cells.items():
        marks = ["–" if column not in row else "yes" if row[column] else "FAILED" for column in columns]
        lines.append(f"| {name} | " + " | ".join(marks) + " |")
    return lines
