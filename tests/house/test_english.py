"""The ban list of the writing rules holds for every package and page that was rewritten, and commit subjects are short."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tools.english import ROOT, SUBJECT_CHARACTERS, findings, readable_files

NOT_REWRITTEN: Final = (
    "tests/sim/shards_mutations.py",
    "benchmarks/results",
)
"""Parts that still have the old wording. Remove a part from here when it is rewritten; never add one."""

SPECIFICATIONS: Final = (
    "docs/specs",
    "docs/internals/specs",
    "tests/specs",
    "tests/vectors",
    "tests/unit/records/test_checksum.py",
)
"""Published protocols and algorithms in their own words."""

RULES: Final = ("tools/english.py", "tests/house/test_english.py")
"""The ban list itself."""

FIRST_SHORT_SUBJECT: Final = "d51dc3b3"  # commits after this one are held to the limit


def rewritten() -> Iterator[Path]:
    """Yield the pages and modules that are held to the ban list."""
    roots = [ROOT / name for name in ("src", "docs", "tests", "benchmarks", "examples", "tools", "changes", "deploy")]
    for path in readable_files([*roots, *ROOT.glob("*.md")]):
        relative = path.relative_to(ROOT)
        if not any(relative.is_relative_to(part) for part in (*NOT_REWRITTEN, *SPECIFICATIONS, *RULES)):
            yield path


def test_no_banned_wording() -> None:
    found = [str(finding) for path in rewritten() for finding in findings(path)]
    assert not found, "\n".join(found[:50])


def test_every_exception_exists() -> None:
    assert [part for part in NOT_REWRITTEN if not (ROOT / part).exists()] == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.md", "What is sealed stays.\n", ["What is sealed stays."]),
        ("a.md", "What is sealed?\n", []),
        ("a.md", "It says `What it was told.` and\n\n> Whoever asks is told.\n", []),
        ("a.md", "The caller\nis told.\n", ["told"]),
        ("a.py", "kept_told = None\n", ["told"]),
        ("a.py", "if x is None:\n    pass\n", []),
        ("a.py", '"""Who asks waits.\n"""\nx = "it hung up"\n', ["Who asks waits.", "hung up"]),
    ],
)
def test_banned_wording_is_found(tmp_path: Path, name: str, text: str, expected: list[str]) -> None:
    path = tmp_path / name
    path.write_text(text, "utf-8")
    assert [finding.text for finding in findings(path)] == expected


def test_commit_subjects_are_short() -> None:
    log = subprocess.run(
        ["git", "log", "--format=%h %s", f"{FIRST_SHORT_SUBJECT}..HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if log.returncode:
        pytest.skip("no history here: this is not a full clone")
    subjects = [line.partition(" ")[2] for line in log.stdout.splitlines()]
    assert [subject for subject in subjects if len(subject) > SUBJECT_CHARACTERS] == []
