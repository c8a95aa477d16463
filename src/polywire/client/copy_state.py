"""How far a copy is: places of both sides and where offsets went, in memory and in a file.

Promises: the file is replaced whole, so that whoever is killed finds the latest or the one before; a file of another copy is refused.
Must not know: connections, records.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from polywire.errors import ErrorCode, Invalid

VERSION: Final = 1
RUNS_MAX: Final = 10_000  # of one partition; a topic without gaps has one


@dataclass(slots=True)
class Run:
    """Offsets of the source that went to as many offsets of the target, one behind the other."""

    source: int
    target: int
    count: int


@dataclass(slots=True)
class PartitionProgress:
    """One partition of the source. place: where to read on; None before anything was read. runs: where its offsets went."""

    place: int | None = None
    runs: list[Run] = field(default_factory=list)

    def note(self, source: int, target: int) -> None:
        """Remember where an offset went; above the last one that was noted."""
        last = self.runs[-1] if self.runs else None
        if last is not None and (source, target) == (last.source + last.count, last.target + last.count):
            last.count += 1
            return
        self.runs.append(Run(source, target, 1))
        if len(self.runs) > RUNS_MAX:
            # Positions in what is forgotten are led in front of it: records come twice to their group, none is left out.
            del self.runs[1::2]

    def target_of(self, offset: int) -> int:
        """Where a group goes on that would have gone on at this offset: at the first record copied from there on, or its end."""
        at = bisect_right(self.runs, offset, key=lambda run: run.source) - 1
        if at < 0:
            return self.runs[0].target if self.runs else 0
        run = self.runs[at]
        return run.target + min(offset - run.source, run.count)


@dataclass(slots=True)
class CopyState:
    """Progress of one copy. ends: by partition of the target, the place behind what is known to be there, before anything was written."""

    source: str
    target: str
    partitions: dict[int, PartitionProgress] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    records: int = 0
    path: Path | None = None

    @classmethod
    def load(cls, path: Path | None, source: str, target: str) -> Self:
        """What the file tells, or nothing yet. Raises Invalid(INVALID_REQUEST) for a file of another copy, or none."""
        fresh = cls(source, target, path=path)
        if path is None or not path.exists():
            return fresh
        try:
            told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            ours = (told["version"], told["source"], told["target"]) == (VERSION, source, target)
            fresh.records = int(told["records"])
            fresh.ends = {int(number): int(end) for number, end in told["ends"].items()}
            for number, part in told["partitions"].items():
                runs = [Run(*map(int, run)) for run in part["runs"]]
                fresh.partitions[int(number)] = PartitionProgress(part["place"], runs)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"file is not the state of a copy file={path} reason={error!r}"
            ) from error
        if not ours:
            facts = f"file={path} source={told['source']} target={told['target']}"
            raise Invalid(ErrorCode.INVALID_REQUEST, f"the state file belongs to another copy {facts}")
        return fresh

    def partition(self, number: int) -> PartitionProgress:
        """Progress of one partition of the source."""
        return self.partitions.setdefault(number, PartitionProgress())

    def save(self) -> None:
        """Write the file anew, if there is one."""
        if self.path is None:
            return
        partitions = {
            number: {"place": part.place, "runs": [(run.source, run.target, run.count) for run in part.runs]}
            for number, part in self.partitions.items()
        }
        told = {"version": VERSION, "source": self.source, "target": self.target, "records": self.records}
        text = json.dumps(told | {"ends": self.ends, "partitions": partitions})
        made = self.path.with_name(self.path.name + ".new")
        made.write_text(text, encoding="utf-8")
        made.replace(self.path)
