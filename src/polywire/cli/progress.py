"""Report on standard error that a command is still working, so that no command is silent for long.

Reports become rare: after 1, 11, 31, 71 seconds and so on. Scripts that run for hours get few lines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from polywire.cli.output import note, notes

QUIET_S: Final = 1.0  # seconds after which an activity is reported
REPORTS_S: Final = 10.0  # seconds until the second report; the time between two reports doubles


@contextmanager
def reported(activity: str, more: Callable[[], str] = str) -> Iterator[None]:
    """Report an activity while the ``with`` block runs. Short ones are not reported.

    Args:
        activity: what the command does, such as "copying records".
        more: returns details for each report.
    """
    ended = threading.Event()
    begun = time.monotonic()

    def report() -> None:
        wait_s, next_s = QUIET_S, REPORTS_S
        while not ended.wait(wait_s):
            details = more()
            note(f"{activity} … seconds={time.monotonic() - begun:.0f}{f' {details}' if details else ''}")
            wait_s, next_s = next_s, 2 * next_s

    reporter = threading.Thread(target=report, name="polywire-progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()


@contextmanager
def counted(activity: str) -> Iterator[Callable[..., None]]:
    """Yield a function that shows a number of records and further details. Their rate is shown, too.

    They are shown as a progress bar on a terminal, and as reports otherwise.
    """
    begun, shown = time.monotonic(), ""

    def text_of(count: int, more: str) -> str:
        return f"{count:,} records, {count / max(time.monotonic() - begun, 1e-9):,.0f}/s{more}"

    def remember(count: int, more: str = "") -> None:
        nonlocal shown
        shown = text_of(count, more)

    if not notes().is_terminal:
        with reported(activity, lambda: shown):
            yield remember
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(pulse_style="cyan"),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=notes(), transient=True) as progress:
        task = progress.add_task(activity, total=None, shown="")
        yield lambda count, more="": progress.update(task, completed=count, shown=text_of(count, more))
