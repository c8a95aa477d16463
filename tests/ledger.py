"""The ledger: which seeds of which test were judged, on which commit, with how many faults and records.

With ``--ledger``, a test continues with the next seed and adds each run to ``benchmarks/results/reliability-ledger.json``.
``python -m tests.ledger`` writes the table of the ledger to the page of reliability results. Each line has the
command that repeats one of its seeds.

* A line is a range of seeds of one command, on one commit. A find ends its line.
* Several processes may run one command at the same time: each claims its seed.
* A run that ends with an error is a find, too: it was not judged.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
LEDGER: Final = RESULTS / "reliability-ledger.json"
PAGE: Final = RESULTS / "reliability-2026-11.md"
BEGIN: Final = "<!-- made by `python -m tests.ledger` -->"
END: Final = "<!-- end of ledger -->"
FIRST_SEED: Final = 1_000_000  # smaller seeds ran before the ledger began
FIND_CHARACTERS_MAX: Final = 300
CLAIMS: Final = ".claims"  # suffix of the file whose locks are seeds that run now
COLUMNS: Final[Mapping[str, Sequence[str]]] = {
    "takeovers": ("takeover",),
    "kills": (
        *("kill -9", "kill who tries", "killed"),
        *("kill_leader", "kill_machine", "kill_parent"),
        *("kill writer", "kill broker", "kill both", "writer outlives broker"),
    ),
    "of them in transactions": ("kill in a transaction",),
    "power losses": ("power loss",),
    "pauses": ("pause", "stop", "race"),
    "partitions": ("leader cut off", "network"),
    "clock jumps": ("clock jump",),
    "events": ("events",),
    "records": ("records stored",),
}
"""The columns of the table, and the events that they count."""


class Command(NamedTuple):
    """A test: the command that repeats it with ``--seed N``, and the environment in which it runs."""

    words: str
    place: str = "one broker"


class Find(msgspec.Struct):
    """A violation, or an error that ended a run. ``cause`` is added by hand once it is known."""

    seed: int
    text: str
    cause: str = ""


class Line(msgspec.Struct):
    """Consecutive seeds of a command on one commit, and the sum of their events."""

    words: str
    place: str
    commit: str
    first: int
    seeds: int
    counts: dict[str, int]
    finds: list[Find] = []

    @property
    def command(self) -> Command:
        """The command of all its seeds."""
        return Command(self.words, self.place)

    def add(self, seeds: int, counts: Mapping[str, int]) -> None:
        """Add the next seeds and their events."""
        self.seeds += seeds
        self.counts = dict(sorted((Counter(self.counts) + Counter(counts)).items()))


class Ledger:
    """The lines of a file. Several processes may add to it at the same time."""

    def __init__(self, path: Path = LEDGER, commit: str | None = None) -> None:
        """Open a ledger, which may not exist yet. ``commit`` is the judged one; the default is that of this checkout."""
        self._path: Final = path
        self._commit: Final = judged_commit() if commit is None else commit

    def lines(self) -> list[Line]:
        """Return all lines, oldest first."""
        if not self._path.exists():
            return []
        return msgspec.json.decode(self._path.read_bytes(), type=list[Line])

    def next_seed(self, command: Command, first: int = FIRST_SEED) -> int:
        """Return the first seed after those of a command."""
        return max((line.first + line.seeds for line in self.lines() if line.command == command), default=first)

    @contextmanager
    def claimed(self, command: Command) -> Iterator[int]:
        """Yield the next seed of a command that no other process runs. It is claimed until the block or the process ends."""
        with self._path.with_suffix(CLAIMS).open("ab") as claims:
            seed = self.next_seed(command)
            while not _claim(claims.fileno(), command, seed):
                seed += 1
            yield seed

    def add(self, command: Command, seed: int, counts: Mapping[str, int], find: str = "") -> None:
        """Add one run: to the line that it continues, otherwise to a new one. A line that begins after it is merged."""
        with self._locked():
            lines = self.lines()
            open_lines = [line for line in lines if self._is_open(line, command)]
            line = next((line for line in open_lines if line.first + line.seeds == seed), None)
            if line is None:
                line = Line(*command, self._commit, seed, 0, {})
                lines.append(line)
            line.add(1, counts)
            after = next((other for other in open_lines if other.first == seed + 1), None)
            if find:
                line.finds.append(Find(seed, find[:FIND_CHARACTERS_MAX]))
            elif after is not None:
                line.add(after.seeds, after.counts)
                lines.remove(after)
            temporary = self._path.with_suffix(".new")
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(lines), indent=1) + b"\n")
            temporary.replace(self._path)

    def _is_open(self, line: Line, command: Command) -> bool:
        return line.command == command and line.commit == self._commit and not line.finds

    @contextmanager
    def _locked(self) -> Iterator[None]:
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)


class Run:
    """A run that is judged: its seed, its events, and what is wrong."""

    def __init__(self, seed: int) -> None:
        self.seed: Final = seed
        self.counts: Mapping[str, int] = {}
        self.find = ""


@contextmanager
def recorded(command: Command, seed: int, *, is_recorded: bool) -> Iterator[Run]:
    """Yield the run of a seed. If ``is_recorded``, it has the next seed of the ledger, and is added at the end of the block.

    An error in the block is a find.
    """
    if not is_recorded:
        yield Run(seed)
        return
    ledger = Ledger()
    with ledger.claimed(command) as claimed:
        run = Run(claimed)
        try:
            yield run
        except Exception as error:
            ledger.add(command, run.seed, run.counts, f"not judged: {_described(error)}")
            raise
        ledger.add(command, run.seed, run.counts, run.find)


def _claim(claims: int, command: Command, seed: int) -> bool:
    """Lock a byte that stands for a seed of a command; return whether no other process had locked it."""
    at = (zlib.crc32(repr(tuple(command)).encode()) >> 1 << 32) + seed
    try:
        fcntl.lockf(claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
    except OSError:
        return False
    return True


def _described(error: BaseException) -> str:
    """Return the innermost errors of a group, as a line."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_described(inner) for inner in error.exceptions)
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def judged_commit() -> str:
    """Return the last commit that changed the broker. Raises SystemExit if its sources have uncommitted changes."""
    if _git("status", "--porcelain", "--", "src"):
        raise SystemExit("src has uncommitted changes: commit them, so that the ledger can name the code")
    return _git("log", "-1", "--format=%h", "--", "src")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def summary(counts: Mapping[str, int]) -> str:
    """Return the sums of the table's columns as words."""
    sums = {name: _sum(counts, events) for name, events in COLUMNS.items()}
    return ", ".join(f"{number:,} {name}" for name, number in sums.items() if number)


def _sum(counts: Mapping[str, int], events: Sequence[str]) -> int:
    return sum(counts.get(event, 0) for event in events)


# The table


def table(lines: Sequence[Line]) -> list[str]:
    """Return a Markdown table: the sum of each command, and what ran since its last find."""
    heads = ["command", "on", "commits", "seeds", *COLUMNS, "finds", "since the last find"]
    rows = ["| " + " | ".join(heads) + " |", "|---|---|---|" + "---:|" * (len(heads) - 4) + "---|"]
    for command in dict.fromkeys(line.command for line in lines):
        of = [line for line in lines if line.command == command]
        last_find = max((at for at, line in enumerate(of) if line.finds), default=-1)
        commits = list(dict.fromkeys(line.commit for line in of))
        counts, recent = _counts(of), _counts(of[last_find + 1 :])
        cells = [
            f"`{command.words}`",
            command.place,
            commits[0] if len(commits) == 1 else f"{commits[0]} to {commits[-1]}",
            f"{min(line.first for line in of):,} to {max(line.first + line.seeds for line in of) - 1:,}",
            *(f"{_sum(counts, events):,}" if _sum(counts, events) else "–" for events in COLUMNS.values()),
            str(sum(len(line.finds) for line in of)),
            "all" if last_find < 0 else summary(recent),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _counts(lines: Sequence[Line]) -> Counter[str]:
    return sum((Counter(line.counts) for line in lines), Counter[str]())


def finds(lines: Sequence[Line]) -> list[str]:
    """Return a list item for each find."""
    return [
        f"* `{line.words}`, {line.place}, seed {find.seed}, commit {line.commit}: {find.cause or find.text}"
        for line in lines
        for find in line.finds
    ]


def main() -> int:
    """Write the table to the page of results."""
    lines = Ledger(commit="").lines()
    head, _, rest = PAGE.read_text().partition(BEGIN)
    text = [head + BEGIN, *table(lines), "", *finds(lines), END + rest.partition(END)[2]]
    PAGE.write_text("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
