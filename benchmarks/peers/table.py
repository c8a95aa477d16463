"""The table of a comparison: figures by row and peer, our best next to the others' best, and noise.

A figure whose rounds differ by more than ``NOISE`` is marked.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from rich.table import Table

from benchmarks.measure import console, machine, spell
from benchmarks.peers.workloads import Round

OURS: Final = "Polywire"
LIMIT: Final = "limit: "
NOISE: Final = 0.25  # of the median: the spread of a noisy figure
COLUMNS: Final = (
    "workload",
    "peer",
    "median",
    "min",
    "max",
    "unit",
    "server s/million",
    "generator",
    "ours to the best peer",
    "to the limit",
    "noise",
)


@dataclass(slots=True)
class Row:
    """One workload's rounds by peer; those of ``limits`` are not brokers."""

    name: str
    unit: str
    more_is_better: bool
    rounds: dict[str, list[Round]] = field(default_factory=dict)

    def median(self, peer: str) -> float:
        """Return the figure of a peer."""
        return statistics.median(one.value for one in self.rounds[peer])

    def noise(self, peer: str) -> float:
        """Return the spread of its rounds, as a share of the figure."""
        values = [one.value for one in self.rounds[peer]]
        return (max(values) - min(values)) / statistics.median(values) if any(values) else 0.0

    def ratio(self) -> float | None:
        """Return how many times better our best protocol is than the best of the others; None if one is missing."""
        ours = [peer for peer in self.rounds if peer.startswith(OURS)]
        others = [peer for peer in self.rounds if not peer.startswith((OURS, LIMIT))]
        return self._ratio(ours, others)

    def to_limit(self, peer: str) -> float | None:
        """Return a broker's share of the best limit; None without a limit."""
        limits = [name for name in self.rounds if name.startswith(LIMIT)]
        return None if peer in limits else self._ratio([peer], limits)

    def _ratio(self, these: Sequence[str], others: Sequence[str]) -> float | None:
        if not these or not others:
            return None
        pick = max if self.more_is_better else min
        this, other = pick(map(self.median, these)), pick(map(self.median, others))
        return this / other if self.more_is_better else other / this


def cells(row: Row, peer: str) -> tuple[str, ...]:
    """Return a line of the table."""
    found = row.rounds[peer]
    values = [one.value for one in found]
    noise = row.noise(peer)
    return (
        row.name,
        peer,
        spell(row.median(peer)),
        spell(min(values)),
        spell(max(values)),
        row.unit,
        spell(statistics.median(one.server_us for one in found)),  # microseconds per record
        f"{statistics.median(one.generator for one in found):.0%}",
        _ratio(row.ratio()) if peer.startswith(OURS) else "",
        _ratio(row.to_limit(peer)),
        f"{noise:.0%}" if noise > NOISE else "",
    )


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def report(
    rows: Sequence[Row],
    absent: Mapping[str, str],
    limits: Mapping[str, str],
    keep: Path | None,
    *,
    command: str = "make bench-peers",
) -> None:
    """Print the table, and store it on request. limits: of the machine, as text."""
    facts = {**machine(), **limits}
    lines = [
        f"# {keep.stem}" if keep else "# Peers",
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()),
        "",
        f"`{command}`",
        "",
        *(f"* {name} was skipped: {reason}" for name, reason in absent.items()),
        *[""] * bool(absent),
        "| " + " | ".join(COLUMNS) + " |",
        "|---|---|---:|---:|---:|---" + "|---:" * 5 + "|",
    ]
    table = Table(title="Polywire and its peers on " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    for column in COLUMNS[1:]:
        table.add_column(column, justify="left" if column in ("peer", "unit") else "right")
    for row in rows:
        table.add_row(f"[bold]{row.name}", end_section=False)
        for peer in row.rounds:
            line = cells(row, peer)
            table.add_row(*line[1:])
            lines.append("| " + " | ".join(line) + " |")
        table.add_section()
    console.print(table)
    if keep is None:
        return
    keep.parent.mkdir(parents=True, exist_ok=True)
    keep.with_suffix(".md").write_text("\n".join(lines) + "\n")
    kept = {"machine": facts, "command": command, "absent": absent, "rows": [asdict(row) for row in rows]}
    keep.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")
