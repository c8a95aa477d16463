"""Progress of a copy: positions at the source and the target, and the mapping of offsets, in memory and in a file.

* The file is replaced atomically: after a crash, it has the latest or the previous state.
* A state file that belongs to another copy is rejected.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from polywire.errors import ErrorCode, Invalid

VERSION: Final = 1
RUNS_MAX: Final = 10_000  # per partition; a topic without gaps has one run


@dataclass(slots=True)
class Run:
    """Consecutive offsets of the source that were copied to consecutive offsets of the target."""

    source: int
    target: int
    count: int


@dataclass(slots=True)
class PartitionProgress:
    """Progress in one partition of the source.

    ``place`` is the position to continue at, None before the first read. ``runs`` maps offsets of the source to the
    target.
    """

    place: int | None = None
    runs: list[Run] = field(default_factory=list)

    def note(self, source: int, target: int) -> None:
        """Record that the offset ``source`` was copied to ``target``. Sources must be passed in ascending order."""
        last = self.runs[-1] if self.runs else None
        if last is not None and (source, target) == (last.source + last.count, last.target + last.count):
            last.count += 1
            return
        self.runs.append(Run(source, target, 1))
        if len(self.runs) > RUNS_MAX:
            # Offsets of a removed run map to an earlier run, so a group reads some records again and skips none.
            del self.runs[1::2]

    def target_of(self, offset: int) -> int:
        """Return the target offset of the first record copied from this source offset on, or the end."""
        at = bisect_right(self.runs, offset, key=lambda run: run.source) - 1
        if at < 0:
            return self.runs[0].target if self.runs else 0
        run = self.runs[at]
        return run.target + min(offset - run.source, run.count)


@dataclass(slots=True)
class CopyState:
    """Progress of one copy.

    ``ends`` has, for each partition of the target, the offset after the last record that is known to be stored there.
    """

    source: str
    target: str
    partitions: dict[int, PartitionProgress] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    records: int = 0
    path: Path | None = None

    @classmethod
    def load(cls, path: Path | None, source: str, target: str) -> Self:
        """Load the state from the file. Return an empty state if ``path`` is None or the file does not exist.

        Raises Invalid(INVALID_REQUEST) if the file is not a state file, or belongs to another copy.
        """
        fresh = cls(source, target, path=path)
        if path is None or not path.exists():
            return fresh
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            ours = (content["version"], content["source"], content["target"]) == (VERSION, source, target)
            fresh.records = int(content["records"])
            fresh.ends = {int(number): int(end) for number, end in content["ends"].items()}
            for number, part in content["partitions"].items():
                runs = [Run(*map(int, run)) for run in part["runs"]]
                fresh.partitions[int(number)] = PartitionProgress(part["place"], runs)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"file is not the state of a copy file={path} reason={error!r}"
            ) from error
        if not ours:
            facts = f"file={path} source={content['source']} target={content['target']}"
            raise Invalid(ErrorCode.INVALID_REQUEST, f"the state file belongs to another copy {facts}")
        return fresh

    def partition(self, number: int) -> PartitionProgress:
        """Return the progress in one partition of the source."""
        return self.partitions.setdefault(number, PartitionProgress())

    def save(self) -> None:
        """Replace the state file, if the copy has one."""
        if self.path is None:
            return
        partitions = {
            number: {"place": part.place, "runs": [(run.source, run.target, run.count) for run in part.runs]}
            for number, part in self.partitions.items()
        }
        header = {"version": VERSION, "source": self.source, "target": self.target, "records": self.records}
        text = json.dumps(header | {"ends": self.ends, "partitions": partitions})
        made = self.path.with_name(self.path.name + ".new")
        made.write_text(text, encoding="utf-8")
        made.replace(self.path)
