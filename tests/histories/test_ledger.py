"""The ledger adds runs up, and starts to count again after a find."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE
from typing import Final

import pytest

from tests import ledger as ledgers
from tests.histories import repeat as repeating
from tests.histories.history import Fault, History
from tests.histories.repeat import Histories, repeat
from tests.histories.test_checkers import history, produce
from tests.ledger import FIRST_SEED, Command, Ledger, finds, table
from tests.sim.__main__ import LEDGER_FIRST, count

KILLS = Command("tests.histories --seconds 60")
TAKEOVERS = Command("tests.histories.takeovers --count 25", "directory")
GOOD = History([Fault("kill -9", 1, 2)])
CLAIM: Final = """
import sys
from pathlib import Path
from tests.ledger import Command, Ledger
with Ledger(Path(sys.argv[1]), "abc").claimed(Command(*sys.argv[2:])) as seed:
    print(seed, flush=True)
    sys.stdin.read()
"""
BAD = history([Fault("kill -9", 1, 2), produce(1, "a", at=0)], "")


def cells(rows: Sequence[str], command: Command) -> list[str]:
    [row] = [row for row in rows if f"`{command.words}`" in row]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_runs_of_one_command_are_one_line(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json", "abc")
    assert ledger.next_seed(KILLS, 7) == 7
    for seed in (7, 8):
        ledger.add(KILLS, seed, {"kill -9": 3, "records stored": 1000})
        ledger.add(TAKEOVERS, seed, {"takeover": 25})
    assert ledger.next_seed(KILLS) == ledger.next_seed(TAKEOVERS) == 9
    first, second = ledger.lines()
    assert (first.first, first.seeds, first.counts) == (7, 2, {"kill -9": 6, "records stored": 2000})
    assert (second.place, second.counts) == ("directory", {"takeover": 50})


def test_another_commit_begins_another_line(tmp_path: Path) -> None:
    for commit in ("abc", "def"):
        ledger = Ledger(tmp_path / "ledger.json", commit)
        ledger.add(KILLS, ledger.next_seed(KILLS, 7), {"kill -9": 3})
    assert [(line.commit, line.first) for line in ledger.lines()] == [("abc", 7), ("def", 8)]
    assert cells(table(ledger.lines()), KILLS)[2:4] == ["abc to def", "7 to 8"]


def test_a_find_resets_what_ran_since_and_not_the_total(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json", "abc")
    ledger.add(KILLS, 1, {"kill -9": 3})
    assert cells(table(ledger.lines()), KILLS)[-2:] == ["0", "all"]
    ledger.add(KILLS, 2, {"kill -9": 3}, "a record is lost")
    assert cells(table(ledger.lines()), KILLS)[-2:] == ["1", ""]
    ledger.add(KILLS, 3, {"kill -9": 5})
    row = cells(table(ledger.lines()), KILLS)
    assert row[-2:] == ["1", "5 kills"]
    assert "11" in row
    assert finds(ledger.lines()) == [f"* `{KILLS.words}`, one broker, seed 2, commit abc: a record is lost"]


def _repeat(make: History | Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[int, Ledger]:
    """Repeat until there were two kills, with a ledger."""
    ledger = Ledger(tmp_path / "ledger.json", "abc")
    monkeypatch.setattr(ledgers, "Ledger", lambda: ledger)
    monkeypatch.setattr(repeating, "KEPT", tmp_path / "kept")

    def made(folder: Path, seed: int, running: ExitStack) -> History:
        if isinstance(make, Exception):
            raise make
        return make

    def is_enough(totals: Counter[str]) -> bool:
        return totals["kill -9"] >= 2

    return repeat(Histories(KILLS, made), seed=1, is_enough=is_enough, is_recorded=True), ledger


def test_good_histories_are_added_until_there_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, ledger = _repeat(GOOD, monkeypatch, tmp_path)
    [line] = ledger.lines()
    assert (code, line.seeds, line.finds) == (0, 2, [])


def test_a_broken_promise_is_a_find_and_its_history_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, ledger = _repeat(BAD, monkeypatch, tmp_path)
    [line] = ledger.lines()
    [find] = line.finds
    assert (code, line.seeds) == (1, 1)
    assert "acknowledged_is_there" in find.text
    assert [path.name for path in (tmp_path / "kept").rglob("*.gz")] == ["history.jsonl.gz"]


def test_a_run_that_ends_with_an_error_is_a_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        _repeat(AssertionError("the broker has ended by itself\nits log"), monkeypatch, tmp_path)
    [line] = Ledger(tmp_path / "ledger.json", "abc").lines()
    assert [find.text for find in line.finds] == ["not judged: AssertionError: the broker has ended by itself"]


def test_simulations_continue_with_the_next_seed(tmp_path: Path) -> None:
    for _ in range(2):
        assert count(["log"], first=0, runs=1, steps=20, ledger=Ledger(tmp_path / "ledger.json", "abc")) == 0
    [line] = Ledger(tmp_path / "ledger.json", "abc").lines()
    assert (line.words, line.first, line.seeds) == ("tests.sim --world log", LEDGER_FIRST, 2)
    assert line.counts["events"] > 0


def test_processes_of_one_command_have_different_seeds(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    Ledger(path, "abc").add(KILLS, 7, {})
    command = [sys.executable, "-c", CLAIM, str(path), *KILLS]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, cwd=ledgers.ROOT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"8\n"
        with Ledger(path, "abc").claimed(KILLS) as seed, Ledger(path, "abc").claimed(TAKEOVERS) as first:
            assert (seed, first) == (9, FIRST_SEED)
        other.kill()
    with Ledger(path, "abc").claimed(KILLS) as seed:
        assert seed == 8


def test_seeds_that_end_in_another_order_are_one_line(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json", "abc")
    for seed in (7, 9, 10, 8):
        ledger.add(KILLS, seed, {"kill -9": seed})
    [line] = ledger.lines()
    assert (line.first, line.seeds, line.counts) == (7, 4, {"kill -9": 34})


def test_a_line_with_a_find_is_not_merged(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json", "abc")
    ledger.add(KILLS, 9, {})
    ledger.add(KILLS, 8, {}, "a record is lost")
    ledger.add(KILLS, 7, {})
    assert [(line.first, line.seeds, len(line.finds)) for line in ledger.lines()] == [(9, 1, 0), (8, 1, 1), (7, 1, 0)]
