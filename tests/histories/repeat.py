"""Make and judge histories of consecutive seeds, for the tests that ``python -m tests.histories`` and its siblings run."""

from __future__ import annotations

import argparse
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from tests.histories.history import History, save
from tests.histories.outside import judge_everything
from tests.ledger import Command, recorded, summary

KEPT: Final = Path("build/histories")
SHOWN_MAX: Final = 20


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all these tests have."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("--seed", type=int, default=1, help="order of the faults")
    parser.add_argument("--ledger", action="store_true", help="begin with the next seed of the ledger, and add to it")
    return parser


class Histories(NamedTuple):
    """A test that makes histories.

    command: repeats one. make: makes the history of a seed in an empty folder; what it enters on the stack ends after the
    folder was copied. judge: returns what is wrong with a history.
    """

    command: Command
    make: Callable[[Path, int, ExitStack], History]
    judge: Callable[[History], list[str]] = judge_everything


def repeat(
    histories: Histories,
    *,
    seed: int,
    is_enough: Callable[[Counter[str]], bool],
    is_recorded: bool = False,
    stored: Path | None = None,
) -> int:
    """Make and judge histories of consecutive seeds until there were enough events; print and return whether one is wrong.

    Args:
        seed: the first seed.
        is_enough: whether these counts of events are enough.
        is_recorded: begin with the next seed of the ledger, and add each history to it.
        stored: directory for all histories.
    """
    totals: Counter[str] = Counter()
    begun, wrong = time.monotonic(), list[str]()
    while not wrong and not is_enough(totals):
        with recorded(histories.command, seed, is_recorded=is_recorded) as run:
            run.counts, wrong = _judged(histories, run.seed, stored)
            run.find = "\n".join(wrong)
        totals.update(run.counts)
        print(f"{time.monotonic() - begun:.0f} s, seed {run.seed}: {summary(totals)}", flush=True)
        if wrong:
            print("\n".join(wrong[:SHOWN_MAX]), f"{len(wrong)} broken promises: seed={run.seed}", sep="\n")
        seed = run.seed + 1
    for name, number in sorted(totals.items()):
        print(f"{name:28} {number}")
    return 1 if wrong else 0


def _judged(histories: Histories, seed: int, stored: Path | None) -> tuple[Counter[str], list[str]]:
    """Make and judge one history. If it is wrong, its folder is copied: data, bucket, and logs of brokers."""
    with TemporaryDirectory() as folder, ExitStack() as running:
        try:
            history = histories.make(Path(folder), seed, running)
            if stored is not None:
                save(history, stored / f"seed-{seed}.jsonl.gz")
            wrong = histories.judge(history)
        except BaseException:
            _keep(histories.command, Path(folder), seed)
            raise
        if wrong:
            save(history, Path(folder) / "history.jsonl.gz")
            _keep(histories.command, Path(folder), seed)
        return history.counts(), wrong


def _keep(command: Command, folder: Path, seed: int) -> None:
    target = KEPT / f"{command.words.partition(' ')[0]}-{command.place.replace(' ', '-')}-{seed}"
    shutil.copytree(folder, target, dirs_exist_ok=True)
    print(f"kept in {target}: data, and logs of brokers", flush=True)
