"""Documentation that can be followed: every link between our own pages leads somewhere.

Promises: a broken link is named with its page and line. Links out of the project are not fetched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pytest

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "src").rglob("*.md"),
        *(ROOT / "changes").glob("*.md"),
    ]
)
LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def words_of_heading(heading: str) -> str:
    """The anchor that Markdown renderers make of a heading."""
    kept = re.sub(r"[^\w\s-]", "", heading.strip().lower())
    return re.sub(r"\s", "-", kept)


def anchors(page: Path) -> set[str]:
    return {words_of_heading(match[1]) for match in re.finditer(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)}


def links(page: Path) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced:
            yield from ((number, match[1]) for match in LINK.finditer(re.sub(r"`[^`]*`", "", line)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for number, link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(f"{page.relative_to(ROOT)}:{number} {link}")
    assert not broken


def test_index_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if page != "index.md" and f"({page})" not in index]
