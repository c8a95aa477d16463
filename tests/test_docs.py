"""Check the documentation's links: each one between our own pages has a target, and every page is linked from an index.

Links to other sites are not fetched.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pytest

from tests.test_house import anchors_of

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


CODE_LINK: Final = re.compile(r"\[`([\w.]+)`\]\(([^)\s#]+\.py)\)")


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
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            broken.append(f"{page.relative_to(ROOT)}:{number} {link}")
    assert not broken


def linked_pages(index: Path) -> set[Path]:
    """Return the pages that an index links to, and those of the indexes of sections among them."""
    found: set[Path] = set()
    waiting = [index]
    while waiting:
        page = waiting.pop()
        for _, link in links(page):
            target = (page.parent / unquote(link).partition("#")[0]).resolve()
            if target.name == "index.md" and target not in found and target.exists():
                waiting.append(target)
            found.add(target)
    return found


def test_index_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").resolve()
    linked = linked_pages(index) | {index}
    assert not [page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md") if page.resolve() not in linked]


def definitions(body: list[ast.stmt], within: str = "") -> Iterator[str]:
    """Yield the dotted names that a module, and the classes in it, define."""
    for node in body:
        match node:
            case ast.ClassDef(name=name):
                yield within + name
                yield from definitions(node.body, f"{within}{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield within + name
            case ast.Assign(targets=targets):
                yield from (within + target.id for target in targets if isinstance(target, ast.Name))
            case _:
                pass


def test_definitions_have_their_class_before_them() -> None:
    tree = ast.parse("A: int = 1\nclass B:\n    c = 2\n    def d(self): pass\nasync def e(): pass")
    assert list(definitions(tree.body)) == ["A", "B", "B.c", "B.d", "e"]


def test_functions_are_where_the_pages_say() -> None:
    lost = []
    for page in PAGES:
        for name, path in CODE_LINK.findall(page.read_text("utf-8")):
            target = (page.parent / path).resolve()
            if not target.exists() or name not in definitions(ast.parse(target.read_text("utf-8")).body):
                lost.append(f"{page.relative_to(ROOT)} {name} {path}")
    assert not lost
