"""A progress line on the terminal while records are produced or copied."""

from __future__ import annotations

import time

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from polywire.cli.output import notes


class Speed:
    """Shows the number of records and their rate on standard error, and removes the line at the end.

    Nothing is shown if standard error is not a terminal.

    Args:
        verb: what happens to the records, such as "produced".
    """

    def __init__(self, verb: str) -> None:
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
        self._task = self._progress.add_task(verb, total=None, rate="")

    def __enter__(self) -> Speed:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, count: int) -> None:
        rate = count / max(time.monotonic() - self._begun, 1e-9)
        self._progress.update(self._task, completed=count, rate=f"{count:,} records, {rate:,.0f}/s")
