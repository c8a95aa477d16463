"""The features that a scenario needs, the protocols it runs over, and the table that a run of the suite prints."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any, TypeVar

from polywire.client.base import Ability
from tests.behaviour.wires import WIRES, Wire

Scenario = TypeVar("Scenario", bound=Callable[..., Any])

_NODE = re.compile(r"::test_(?P<scenario>\w+)\[(?P<column>[\w-]+)")


def needs(*abilities: Ability) -> Callable[[Scenario], Scenario]:
    """Mark a scenario with the abilities that a protocol must declare; of a pair of protocols, both."""

    def mark(scenario: Scenario) -> Scenario:
        scenario.abilities_needed = frozenset(abilities)  # type: ignore[attr-defined]
        return scenario

    return mark


def able_wires(scenario: Callable[..., Any]) -> list[Wire]:
    """Return the protocols with every ability that a scenario needs."""
    needed: frozenset[Ability] = getattr(scenario, "abilities_needed", frozenset())
    return [wire for wire in WIRES if needed <= wire.abilities]


def able_pairs(scenario: Callable[..., Any]) -> dict[str, tuple[Wire, Wire]]:
    """Return every writer with every reader, by the name of their column."""
    able = able_wires(scenario)
    return {f"{writer.name}-to-{reader.name}": (writer, reader) for writer, reader in product(able, able)}


def is_paired(scenario: Callable[..., Any]) -> bool:
    """Return whether a scenario takes a writing and a reading protocol."""
    return "writers" in scenario.__annotations__


class Table:
    """Rows are scenarios, columns protocols or pairs of them; a cell says whether the scenario passed there."""

    def __init__(self) -> None:
        self._cells: dict[str, dict[str, bool]] = {}

    def record(self, node: str, *, passed: bool) -> None:
        """Record the result of one test."""
        match = _NODE.search(node)
        if match is not None:
            self.mark(match["scenario"], match["column"], passed=passed)

    def mark(self, scenario: str, column: str, *, passed: bool) -> None:
        """Record the result of a scenario in a column; a failure is final."""
        row = self._cells.setdefault(scenario.replace("_", " "), {})
        row[column] = passed and row.get(column, True)

    def lines(self) -> list[str]:
        """Return two Markdown tables: scenarios by protocol, and by writer and reader."""
        single = {name: row for name, row in self._cells.items() if not any("-to-" in column for column in row)}
        paired = {name: row for name, row in self._cells.items() if name not in single}
        return [*_markdown(single), "", *_markdown(paired)]


def _markdown(cells: dict[str, dict[str, bool]]) -> list[str]:
    columns = sorted({column for row in cells.values() for column in row})
    lines = ["| scenario | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name, row in cells.items():
        marks = ["–" if column not in row else "yes" if row[column] else "FAILED" for column in columns]
        lines.append(f"| {name} | " + " | ".join(marks) + " |")
    return lines if cells else []
