"""Start the systems that a benchmark compares, and report those that cannot run here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from benchmarks.measure import console
from benchmarks.peers.peer import Absent, Server


class Runnable(Protocol):
    """A system that a benchmark starts."""

    @property
    def name(self) -> str: ...

    def running(self, place: Path) -> AbstractContextManager[Server]: ...


Kind = TypeVar("Kind", bound=Runnable)


def chosen(peers: Iterable[Kind], names: str) -> list[Kind]:
    """Return the peers whose names contain one of these words, separated by commas; all if there are none."""
    words = [word.strip().lower() for word in names.split(",") if word.strip()]
    return [peer for peer in peers if not words or any(word in peer.name.lower() for word in words)]


def start(stack: ExitStack, wanted: Sequence[Kind], absent: dict[str, str]) -> list[tuple[Kind, Server]]:
    """Start every available peer; ``absent`` gets the others."""
    running: list[tuple[Kind, Server]] = []
    for peer in wanted:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polywire-peer-")))
        try:
            running.append((peer, replace(stack.enter_context(peer.running(place)), place=place)))
        except Absent as reason:
            leave_out(peer.name, reason, absent)
    return running


@contextmanager
def busy_machine() -> Iterator[None]:
    """Keep every core busy with a process of this user, as on a machine that others use, too."""
    spinners = [multiprocessing.get_context("fork").Process(target=_spin, daemon=True) for _ in os.sched_getaffinity(0)]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()


def _spin() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        pass


def leave_out(name: str, reason: Absent, absent: dict[str, str]) -> None:
    absent[name] = str(reason)
    console.print(f"{name} is skipped: {reason}", style="bold red", highlight=False)
