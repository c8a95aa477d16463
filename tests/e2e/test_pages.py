"""Follow the pages from an installed wheel, and compare the output of their commands."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.e2e.conftest import Followed
from tests.e2e.followed_page import ROOT, differences, follow, matches, path_of, read_page
from tests.e2e.test_first_paths import FIRST_PAGES, FIRST_SPARK_PAGES

PAGES: Final = (
    "operate/back-up",
    "develop/testing",
    "develop/tracing",
    "develop/recipes/backfill",
    "develop/recipes/dead-letters",
    "develop/recipes/exactly-once",
    "develop/recipes/replay",
    "develop/recipes/schema-change",
    "develop/queues",
    "migrate/others",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_followed(name: str, followed: Followed) -> None:
    assert differences(path_of(name), followed[name].result()) == []


@pytest.mark.parametrize(("wire", "old", "new"), [("cursus", "19000", "9000"), ("flux", "19092", "9092")])
def test_the_page_for_other_systems_can_be_followed_with_each(
    wire: str, old: str, new: str, python: Path, tmp_path: Path
) -> None:
    text = path_of("migrate/others").read_text("utf-8")
    for before, after in (
        (f"--{wire} off", "--iggy off"),
        ("--iggy 127.0.0.1:18090", f"--{wire} 127.0.0.1:{old}"),
        ("iggy://iggy:iggy@127.0.0.1:18090", f"{wire}://127.0.0.1:{old}"),
        ("iggy://iggy:iggy@127.0.0.1:8090", f"{wire}://127.0.0.1:{new}"),
        ("old iggy://", f"old {wire}://"),
        ("--topics orders\n", "--topics orders --groups billing\n"),
        ("--topics orders --dry-run", "--topics orders --groups billing --dry-run"),
    ):
        assert before in text
        text = text.replace(before, after)
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert differences(page, list(follow(page, python, folder))) == []


def test_every_page_for_newcomers_is_followed() -> None:
    docs = ROOT / "docs"
    with_commands = {
        page.relative_to(docs).with_suffix("").as_posix()
        for folder in ("get-started", "develop", "migrate", "spark")
        for page in (docs / folder).rglob("*.md")
        if read_page(page.read_text("utf-8")).steps
    }
    assert with_commands == {*PAGES, *FIRST_PAGES, *FIRST_SPARK_PAGES} - {"operate/back-up"}


def test_files_and_commands_of_a_page_are_parsed() -> None:
    page = read_page(
        '# A\n```sh\nls\n```\n\nsome\n\n```text\nb\n```\n```python title="a.py"\nx = 1\n```\n```text\nno output\n```\n```sh\npwd\n```\n'
    )
    assert page.files == {"a.py": "x = 1\n"}
    assert [(step.commands, step.printed, step.line) for step in page.steps] == [
        ("ls\n", "b\n", 2),
        ("pwd\n", None, 17),
    ]


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("a  b\n", "a b\n", True),
        ("a c b\n", "a … b\n", True),
        ("a\nb\nc\n", "…\nc\n", True),
        ("c\n", "…\nc\n", True),
        ("a\n", "b\n", False),
        ("a\nb\n", "a\n", False),
        ("", "a\n", False),
    ],
)
def test_output_is_compared(printed: str, expected: str, same: bool) -> None:
    assert matches(printed, expected) is same
