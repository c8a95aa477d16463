"""The chart of a comparison: a panel per workload, a bar with the spread of its rounds per broker and limit.

It is an SVG file next to the table, with the same figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.measure import console, spell
from benchmarks.peers.table import LIMIT, OURS, Row

OURS_COLOUR: Final = "#1f77b4"
OTHERS_COLOUR: Final = "#b0b0b0"
LIMIT_COLOUR: Final = "#e4d9b8"


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw all figures in the order of the table. Each panel says whether longer bars are better."""
    from matplotlib.figure import Figure as Drawing

    heights = [0.9 + 0.28 * len(row.rounds) for row in rows]
    drawing = Drawing(figsize=(8, sum(heights)), layout="constrained")
    panels = drawing.subplots(len(rows), squeeze=False, height_ratios=heights)[:, 0]
    for panel, row in zip(panels, rows, strict=True):
        peers = list(reversed(row.rounds))
        medians = [row.median(peer) for peer in peers]
        values = [[one.value for one in row.rounds[peer]] for peer in peers]
        below = [median - min(found) for median, found in zip(medians, values, strict=True)]
        above = [max(found) - median for median, found in zip(medians, values, strict=True)]
        colours = [_colour(peer) for peer in peers]
        bars = panel.barh(peers, medians, xerr=(below, above), color=colours, error_kw={"lw": 0.8, "alpha": 0.6})
        panel.bar_label(bars, [spell(median) for median in medians], padding=4, fontsize=7)
        panel.set_title(f"{row.name} ({row.unit}, {'more' if row.more_is_better else 'less'} is better)", fontsize=9)
        panel.tick_params(labelsize=7)
        panel.set_xticks([])  # every bar shows its figure
        panel.margins(x=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    drawing.savefig(file)
    console.print(f"drawn: {file}")


def _colour(peer: str) -> str:
    if peer.startswith(LIMIT):
        return LIMIT_COLOUR
    return OURS_COLOUR if peer.startswith(OURS) else OTHERS_COLOUR
