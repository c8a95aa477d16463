"""How far and how fast: a line on the terminal while records are moved.

Promises: nothing is shown where standard error is no terminal, nothing stays when it is done. Must not know: what happens to records.
"""

from __future__ import annotations

import time

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from polywire.cli.output import notes


class Speed:
    """A line on the terminal that tells how far and how fast; nothing where standard error is no terminal."""

    def __init__(self, done: str) -> None:
        """done: what happens to records, such as "produced"."""
        self._begun = time.monotonic()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(pulse_style="cyan"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=notes,
            transient=True,
            disable=not notes.is_terminal,
        )
        self._task = self._progress.add_task(done, total=None, rate="")

    def __enter__(self) -> Speed:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, count: int) -> None:
        """Tell the number of records so far."""
        rate = count / max(time.monotonic() - self._begun, 1e-9)
        self._progress.update(self._task, completed=count, rate=f"{count:,} records, {rate:,.0f}/s")
